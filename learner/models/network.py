"""Loads networks, freezes weights, and computes last hidden states; the base of policy, critic and reward model.

    open_model     the model with meta tensors: names, shapes and types, but no weights
    shard          learner/models/policy.py; FSDP2 splits meta tensors like any others
    read_weights   allocates this rank's shards, and fills them from the files tensor by tensor

A rank reads only the parts of weight files that it keeps. It needs at most the memory of its shards and of one tensor.
Where transformers joins several tensors in one weight, such as the experts of a layer, it needs all these tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.attention.flex_attention import BlockMask

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import weight_files
from async_rl.base.weights.checkpoint_names import Source, sources_of
from learner.loop.optimizer import check_finite
from learner.packing import PackedTokens, attention_mask, block_mask

if TYPE_CHECKING:
    from async_rl.base.models_and_data.routing import Routing

_SHOWN = 5


def freeze(lm: Any, patterns: Sequence[str]) -> None:
    """Freeze the weights of a model whose names match a pattern, such as `model.layers.0.*`: they are not trained.

    Tied weights have only the name of the embeddings.

    Raises:
        ConfigError: no weight matches a pattern, or no weight is left to train.
    """
    weights = dict(lm.named_parameters())
    for pattern in patterns:
        fitting = [name for name in weights if fnmatchcase(name, pattern)]
        if not fitting:
            some = ", ".join([*weights][:_SHOWN])
            raise ConfigError(f"model.frozen: no weight has a name like {pattern!r}. The model has {some}, ...")
        for name in fitting:
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError(f"model.frozen must leave weights to train, got {list(patterns)}, which fit all of them")


def blocks_of(lm: Any) -> list[nn.Module]:
    """Return the transformer blocks of a model of transformers."""
    names = set(lm._no_split_modules or ())
    return [module for module in lm.modules() if type(module).__name__ in names]


Start = Callable[[torch.Size], Tensor]
"""A function that returns the initial value of a weight that is in no file, from the weight's shape: the whole tensor
in CPU memory.
"""


def open_model(model_class: Any, path: str, dtype: torch.dtype, **settings: Any) -> Any:
    """Return the Hugging Face model in the folder `path` without weights: they are meta tensors until `read_weights`.

    Buffers that are in no file, such as the frequencies of rotary embeddings, are computed here.

    Args:
        model_class: one of transformers' auto classes, whose `from_pretrained` gets the `settings`.
    """
    lm, loaded = model_class.from_pretrained(
        path, dtype=dtype, device_map="meta", output_loading_info=True, **settings
    )
    for module in lm.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                empty = torch.empty_like(buffer, device="cpu")
                # NaN in what nothing computes is found by read_weights
                module._buffers[name] = empty.fill_(math.nan) if buffer.is_floating_point() else empty
        if next(module.buffers(), None) is not None:  # a module around its own may compute it
            module._is_hf_initialized = False
    lm.initialize_weights()  # skips what is marked as initialised, which are all weights
    lm.stored_weights = StoredWeights(lm, path, sorted(loaded["missing_keys"]))
    return lm.eval()


class StoredWeights:
    """Knows for `read_weights` which file has each weight of a model, and how the other weights are initialised.

    Args:
        missing: names of the weights that no file has.
    """

    def __init__(self, lm: Any, path: str, missing: Sequence[str]) -> None:
        self.path = path
        self._file_of: dict[str, Path] = {}
        for file in weight_files(Path(path)):
            with safe_open(file, framework="pt") as opened:
                self._file_of |= dict.fromkeys(opened.keys(), file)
        modules = dict(lm.named_modules())
        # Adapters change the names of modules, but not the modules; sharding changes parameters, but not their modules.
        self._owner_of = {
            name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in lm.state_dict()
        }
        self._sources = sources_of(lm, list(self._file_of))
        self._missing = missing
        self._starts: list[tuple[nn.Module, str, Start]] = []

    def start(self, module: nn.Module, start: Start) -> None:
        """Initialise the weights of `module` that are in no file with the result of `start`."""
        self._starts += [(module, name, start) for name, _ in module.named_parameters(recurse=False)]

    def fill(self, lm: Any) -> None:
        """Read the weights of `lm` from the files. If `lm` is sharded, read only this rank's shards.

        Raises:
            ConfigError: the files lack weights that nothing initialises, or torch can't tell this rank's rows.
        """
        started = {module for module, _, _ in self._starts}
        if lacking := [name for name in self._missing if self._owner_of[name][0] not in started]:
            raise ConfigError(
                f"the weight files in {self.path} lack {len(lacking)} weights of the model: {', '.join(lacking[:3])}. "
                "Take config.json and weights of one model"
            )
        for module, attribute, start in self._starts:
            weight = getattr(module, attribute)
            _fill(weight, start(weight.shape).__getitem__)
        for source in self._sources:
            for name, read in self._readers(lm, source):
                owner, attribute = self._owner_of[name]
                _fill(getattr(owner, attribute), read)

    def _readers(self, lm: Any, source: Source) -> Iterator[tuple[str, Callable[[slice], Tensor]]]:
        """Yield (name, function that returns a range of rows) of each weight made from the tensors of `source`.

        The files stay open only until the next weight is asked for, so that their pages do not add up to the whole
        model.
        """
        with ExitStack() as stack:
            opened = {
                file: stack.enter_context(safe_open(file, framework="pt"))
                for file in {self._file_of[name] for name in source.tensors}
            }
            if source.converter is None:
                (name,) = source.tensors
                piece = opened[self._file_of[name]].get_slice(name)
                yield source.weight, lambda rows: piece[rows] if piece.get_shape() else piece[...]
                return
            tensors = {name: opened[self._file_of[name]].get_tensor(name) for name in source.tensors}
            for name, whole in source.convert(lm, tensors).items():
                yield name, whole.__getitem__


def read_weights(module: nn.Module, lm: Any, device: torch.device | str) -> None:
    """Allocate this rank's part of the weights of `lm` on `device`, and read it from the model's files.

    Args:
        module: the module that contains `lm`, or `lm` itself.

    Raises:
        ConfigError: the files lack weights, one of this rank's is NaN or infinite, or nothing has computed a buffer.
    """
    stored: StoredWeights = lm.stored_weights
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if not any(isinstance(parameter, DTensor) for parameter in lm.parameters()):
        lm.tie_weights()  # what was one meta tensor has become two
    with torch.no_grad():
        stored.fill(lm)
    del lm.stored_weights
    check_finite(lm, stored.path)
    if lacking := [name for name, buffer in lm.named_buffers() if buffer.isnan().any()]:
        raise ConfigError(
            f"the model in {stored.path}, of type {lm.config.model_type}, must have numbers in all its buffers, got "
            f"NaN in {len(lacking)}: {', '.join(lacking[:3])}. No file holds them, and transformers does not compute "
            "them. Take another model, e.g. of the Llama or Qwen3 family"
        )


def _fill(weight: Tensor, read: Callable[[slice], Tensor]) -> None:
    """Fill this rank's rows of a weight; `read` returns a range of rows."""
    if not isinstance(weight, DTensor):
        weight.copy_(read(slice(None)))
        return
    mesh, own = weight.device_mesh, weight.to_local()
    shape, (first, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    if shape != own.shape:  # checkpoints find their rows by the same function
        raise ConfigError(
            f"learner.sequence_parallel must be 1 with {len(weight)} rows of embeddings on {mesh.size()} learner "
            f"ranks: torch's checkpoints would take the {len(own)} rows of a rank for {shape[0]}. Or take another "
            "number of ranks, or a model whose vocabulary they divide"
        )
    if own.numel():  # the last ranks may have no rows
        own.copy_(read(slice(first, first + own.shape[0])))


def gathered(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole parameter on every rank, converted to `dtype` if that is given. Collective."""
    data: Any = parameter.detach()
    if not isinstance(data, DTensor):
        return data.to(dtype or data.dtype)
    mesh = data.device_mesh
    own = data.to_local().to(mesh.device_type, dtype or data.dtype)  # offloaded shards are in CPU memory
    data = DTensor.from_local(own, mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride())
    placements = list(data.placements)
    for dim in range(len(placements)):  # one dimension at a time: torch warns where it gathers two in one go
        placements[dim] = Replicate()
        data = data.redistribute(placements=placements)
    return data.to_local()


def has_adapters(lm: nn.Module) -> bool:
    """Return whether the model has LoRA adapters (lora.py)."""
    return any(".lora_" in name for name, _ in lm.named_parameters())


MASKED = ("sdpa", "eager")
"""The attention implementations of transformers that take a mask of numbers."""


class Network(nn.Module):
    """A Hugging Face model, `lm`, whose activations have the type `compute_dtype`."""

    def __init__(self, lm: Any, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.lm = lm
        self.compute_dtype = compute_dtype
        self.sequence: DeviceMesh | None = None
        """The ranks that have slices of the same rows; None: this rank has whole rows. `shard` sets it."""
        self.routing: Routing | None = None
        """Makes the routers use the recorded experts of `inputs.routing` in a forward pass; None: routers always
        choose.
        """

    def hidden_states(self, inputs: PackedTokens) -> Tensor:
        """Return the last hidden states that predict the N response tokens, [N, hidden].

        With `sequence` only the m states that `owners` assigns to this rank, [m, hidden].
        """
        if self.routing is None or inputs.routing is None:
            return self._hidden_states(inputs)
        with self.routing.replaying(self.own_tokens(inputs.routing, -1)):
            return self._hidden_states(inputs)

    def own_tokens(self, values: Tensor, padding: int) -> Tensor:
        """Return the values of the tokens that this rank computes. [B, S, ...] of all tokens -> [tokens, ...]

        Args:
            padding: the value of padding in the last rank's slice.
        """
        if self.sequence is not None:
            from learner.models.sequence import own_slice

            values = own_slice(values, padding, self.sequence)
        return values.flatten(0, 1)

    def _hidden_states(self, inputs: PackedTokens) -> Tensor:
        if self.sequence is not None:
            from learner.models.sequence import split_states

            return split_states(self.lm, inputs, self.compute_dtype, self.sequence)
        mask: Tensor | BlockMask | None = None
        attention = self.lm.config._attn_implementation
        if inputs.segments is not None and attention == "flex_attention":
            mask = block_mask(inputs.segments)
        elif inputs.segments is not None and attention in MASKED:
            mask = attention_mask(inputs.segments, self.compute_dtype)
        output = self.lm.base_model(inputs.tokens, attention_mask=mask, position_ids=inputs.positions, use_cache=False)
        states: Tensor = output.last_hidden_state.flatten(0, 1)[inputs.where]
        return states
