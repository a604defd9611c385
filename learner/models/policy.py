"""The policy, a Hugging Face causal LM: opens it, shards it with FSDP2, scores tokens and saves it as a folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.base.config import Config, LearnerConfig, ModelConfig
from async_rl.base.models_and_data.model_folder import MARKERS, check_trainable
from async_rl.base.run_dir.checkpoints import model_folder
from async_rl.base.weights.checkpoint_names import to_checkpoint, write_weights
from learner.loop.ranks import Ranks
from learner.models.network import (
    MASKED,
    Network,
    blocks_of,
    freeze,
    gathered,
    has_adapters,
    open_model,
    read_weights,
)
from learner.models.token_scores import score_supports, score_tokens
from learner.packing import RECURRENT, WINDOWS, ForwardInputs, Layout, kernel_of

if TYPE_CHECKING:
    from learner.models.lora import AdapterParcels

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")
SHARD_BYTES = 4 * 2**30
"""Size of the largest weight file of a saved model."""


class Policy(Network):
    """A Hugging Face causal LM, the policy or the reference. Computes logprobs and entropies of response tokens."""

    def __init__(self, lm: Any, compute_dtype: torch.dtype) -> None:
        super().__init__(lm, compute_dtype)
        self._dropouts: list[nn.Module] = []
        if has_adapters(lm):
            from learner.models.lora import dropouts

            self._dropouts = dropouts(lm)
        self.forbidden: tuple[int, ...] = ()
        """Ids of tokens that the engine never samples. The distributions leave them out."""

    @contextmanager
    def over_all_tokens(self) -> Iterator[None]:
        """Return a context: inside, no token is forbidden."""
        forbidden, self.forbidden = self.forbidden, ()
        try:
            yield
        finally:
            self.forbidden = forbidden

    def forward(self, inputs: ForwardInputs) -> tuple[Tensor, ...]:
        """Return (logprobs [N], entropies [N]) of the N response tokens at their sampling temperature, float32.

        If `inputs.supports` has the ids that each token was drawn from, both are over these ids, and two more tensors
        follow: `masses` and `of_ids` of `score_supports`. Ranks that split the head return only `masses`.

        Dropout in adapters is on only if gradients are recorded.
        """
        for dropout in self._dropouts:
            dropout.train(torch.is_grad_enabled())
        states, head = self.hidden_states(inputs), self.lm.get_output_embeddings()
        if self.sequence is None:
            forbidden = torch.tensor(self.forbidden, device=states.device) if self.forbidden else None
            given = states, head.weight, inputs.targets, inputs.temperature, forbidden
            if inputs.supports is not None:
                return score_supports(*given, inputs.supports)
            return score_tokens(*given)
        from learner.models.sequence import owners

        scores: tuple[Tensor, ...] = head(
            states, inputs.targets, inputs.temperature, owners(inputs, self.sequence), inputs.supports
        )
        return scores


def choose_trained(lm: Any, config: ModelConfig) -> None:
    """Freeze the weights of a policy that model.frozen names, and add the adapters of model.lora.

    Raises:
        ConfigError: model.frozen fits no weight or all of them, or the model can't have these adapters.
    """
    if config.frozen:
        freeze(lm, config.frozen)
    if config.lora.rank:
        from learner.models.lora import add_adapters

        add_adapters(lm, config.lora)


def open_policy(config: ModelConfig, compute_dtype: torch.dtype) -> Policy:
    """Return the policy of the folder model.path without its weights, with adapters if model.lora.rank is set.

    `shard` or `read_weights` reads the weights, as float32.

    Raises:
        ConfigError: the learner does not support the model, or model.frozen fits no weight.
    """
    check_trainable(config.path)
    lm = open_model(AutoModelForCausalLM, config.path, torch.float32, attn_implementation=config.attn_implementation)
    choose_trained(lm, config)
    if config.lora.rank:
        from learner.models.lora import adapter_starts

        for linear, start in adapter_starts(lm):
            lm.stored_weights.start(linear, start)
    return Policy(lm.eval(), compute_dtype)


def shard(
    network: Network, ranks: Ranks, config: LearnerConfig, offload: bool = False, checkpoints: bool = False
) -> None:
    """Shard a network in place with FSDP2: one unit for each transformer block, one for the rest. Collective.

    With sequence parallelism, embeddings and head are units of their own, split over the ranks of a sequence group.

    If `lm` is from `open_model`, each rank then reads its shards of the weights from the model folder. Parameters and
    optimizer state keep their type. With another compute type each unit is cast when it is gathered, and gradients are
    reduced in float32. Blocks cast their inputs too; the temperatures of other units stay float32.

    Args:
        offload: keep the shards in CPU memory, and copy them to the device when they are gathered.
        checkpoints: compute each block's activations again in the backward pass, to save memory.

    Raises:
        ConfigError: the model folder lacks weights, or one of this rank's is not finite.
    """
    lm, mesh = network.lm, ranks.mesh
    precision = MixedPrecisionPolicy()
    if network.compute_dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=network.compute_dtype, reduce_dtype=torch.float32)
    exact = replace(precision, cast_forward_inputs=False)  # in bfloat16 a temperature of 0.6 is 0.6016
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    is_frozen = not any(parameter.requires_grad for parameter in network.parameters())
    if ranks.sequence is not None:
        from learner.models.sequence import split_attention
        from learner.models.split_vocabulary import split_vocabulary

        network.sequence = ranks.sequence
        split_attention(lm)
        for unit in split_vocabulary(lm, ranks.sequence):
            fully_shard(unit, mesh=ranks.vocabulary, mp_policy=exact, offload_policy=place)
    for block in blocks_of(lm):
        if config.compile:
            block.forward = torch.compile(block.forward, dynamic=True)
        if checkpoints:
            contexts = network.routing.checkpoint_contexts if network.routing else noop_context_fn
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=place)
    # FSDP2 keeps the root gathered for the backward pass; a frozen model has no such pass
    fully_shard(
        network, mesh=mesh, mp_policy=exact, offload_policy=place, reshard_after_forward=is_frozen or None
    )
    if hasattr(lm, "stored_weights"):
        read_weights(network, lm, "cpu" if offload else mesh.device_type)


def layout_of(lms: Sequence[Any]) -> Layout:
    """Return the kinds of packs that the attention of all these models can compute."""
    names = {kernel_of(lm) for lm in lms}
    keys = {key for lm in lms for key, value in lm.config.to_dict().items() if value}
    flash = {name for name in names if "flash" in name}  # also a kernel that transformers has fetched in its place
    restarts = not any(key.startswith(RECURRENT) for key in keys) and all(_reads_positions(lm.config) for lm in lms)
    is_whole = restarts and keys.isdisjoint(WINDOWS)
    packs = (flash == names and restarts) or (names <= {*flash, "flex_attention"} and is_whole)
    return Layout(
        masked=names <= {*MASKED, "flex_attention"} and is_whole,
        sparse=packs and _get_positions([lm.config for lm in lms if kernel_of(lm) in flash]),
        pair_cost=max(1 / (6 * lm.config.hidden_size) for lm in lms),
    )


def _get_positions(configs: Sequence[Any]) -> bool:
    """Return whether the attention of each of these models gets position ids."""
    if not configs:
        return True
    from learner.models.attention_probe import attention_gets_positions

    return all(map(attention_gets_positions, configs))


def _reads_positions(config: Any) -> bool:
    """Return whether a model takes position ids. A model with ALiBi does not: it counts the tokens of the pack."""
    return not getattr(config, "alibi", False) and getattr(config, "max_position_embeddings", None) is not None


def full_parameters(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of all weights, named as in model folders, with adapters merged. Collective."""
    assert isinstance(policy, FSDPModule)
    policy.reshard()  # a forward pass without a backward leaves the root's parameters gathered
    return to_checkpoint(policy.lm, whole_parameters(policy.lm, dtype))


def whole_parameters(lm: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in transformers, whole tensor) of each parameter in `dtype`, with adapters merged. Collective.

    Tied parameters are yielded once, under their first name.
    """
    if has_adapters(lm):
        from learner.models.lora import merged_parameters

        yield from merged_parameters(lm, dtype)
    else:
        yield from ((name, gathered(parameter, dtype)) for name, parameter in lm.named_parameters())


def due_folders(config: Config, version: int, *, is_last: bool) -> list[Path]:
    """Return where to save the policy of `version` now: run_dir/models/step_N if due, run_dir/model if `is_last`."""
    every_steps = config.checkpoint.models_every_steps
    due = [model_folder(config.run_dir, version)] if every_steps and version % every_steps == 0 else []
    return [*due, config.run_dir / "model"] if is_last else due


def adapter_parcels(policy: Policy, parcels: AdapterParcels) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parcel) of all weights, for a push of adapters only (AdapterParcels). Collective."""
    assert isinstance(policy, FSDPModule)
    policy.reshard()  # as in full_parameters
    return parcels.parcels()


def save_policy(policy: Policy, source: Path, target: Path, is_writer: bool) -> None:
    """Save the policy as the Hugging Face folder `target`. Collective.

    All ranks gather the weights, and the rank with `is_writer` writes them.

    Args:
        source: the folder that the policy was loaded from.
    """
    weights = full_parameters(policy, _stored_dtype(source))
    try:
        if is_writer:
            write_folder(weights, source, target)
    finally:
        for _ in weights:  # gathering is collective, so every rank must reach the end
            pass


def write_folder(named_tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path) -> None:
    """Write a Hugging Face folder: the tensors, in the number type of `source`, and copies of its other files.

    `target` appears only when it is complete. The files MARKERS are not copied, because a command may overwrite a
    folder that has them.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_weights(named_tensors, partial, _stored_dtype(source), SHARD_BYTES)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((*_WEIGHT_FILES, *MARKERS)):
            shutil.copy(file, partial / file.name)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _stored_dtype(source: Path) -> torch.dtype:
    return getattr(AutoConfig.from_pretrained(source), "dtype", None) or torch.float32
