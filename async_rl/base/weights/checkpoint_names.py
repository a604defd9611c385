"""Converts weights between transformers' names and the names in model folders, which servers load; writes their files.

Transformers stores some weights in another form than model folders: for example, all experts of a mixture-of-experts
layer are one tensor `mlp.experts.gate_up_proj`, while folders have `mlp.experts.0.gate_proj.weight` and so on. Servers
know only the names of folders. SGLang skips other names without an error.

Transformers is imported only where it is needed, because its modules for this take seconds to import. A process that
receives weights without conversion never imports them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from async_rl.base.errors import ConfigError

_LAYER = re.compile(r".*?\.\d+\.")
_SHOWN = 3


def to_checkpoint(lm: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Convert weights of `lm`, a transformers model, to the names and shapes of its model folder, and yield them.

    They are converted as `save_pretrained` does it, one by one, or layer by layer if a folder's tensor consists of
    several of the model's. The results may be views of the given tensors.
    """
    loaded_by = getattr(lm, "_weight_conversions", None)  # None: the model was not loaded from a folder
    if loaded_by is not None and not loaded_by:
        yield from named_tensors
        return
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    joins = loaded_by is None or any(len(c.target_patterns) > 1 for c in loaded_by if isinstance(c, WeightConverter))
    if not joins:
        for name, tensor in named_tensors:
            yield from revert_weight_conversion(lm, {name: tensor}).items()
        return
    for _, tensors in groupby(named_tensors, lambda item: _layer_of(item[0])):
        yield from revert_weight_conversion(lm, dict(tensors)).items()


def _layer_of(name: str) -> str:
    layer = _LAYER.match(name)
    return layer[0] if layer else name


def from_checkpoint(lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a model folder to the names and shapes of `lm`, a transformers model."""
    conversions: Sequence[Any] | None = getattr(lm, "_weight_conversions", None)
    if conversions is not None and not conversions:
        return dict(tensors)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    if conversions is None:
        conversions = get_model_conversion_mapping(lm, add_legacy=False)
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    renamings: list[Any] = [c for c in conversions if not isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    result: dict[str, Tensor] = {}
    joined: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):  # experts are stacked in the order of their numbers
        new_name, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            result[new_name] = tensors[name]
        else:
            joined.setdefault(new_name, deepcopy(by_pattern[pattern])).add_tensor(
                new_name, name, pattern, tensors[name]
            )
    for new_name, converter in joined.items():
        for full_name, value in converter.convert(new_name, model=lm, config=lm.config).items():
            result[full_name] = value[0] if isinstance(value, list) else value
    return result


@dataclass(slots=True)
class Source:
    """The tensors of a model folder from which one weight of a transformers model, or several together, are made."""

    weight: str
    """The model's name of the weight; if there are several, of the first."""
    converter: Any = None
    """Makes the weights from the tensors. None: the only tensor is the weight."""
    tensors: dict[str, str] = field(default_factory=dict)
    """By the tensor's name in the folder: the pattern of `converter` that it matches. In the order of joining."""

    def convert(self, lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of `lm` by name, made from the tensors of the folder."""
        converter = deepcopy(self.converter)
        for name, pattern in self.tensors.items():
            converter.add_tensor(self.weight, name, pattern, tensors[name])
        weights = converter.convert(self.weight, model=lm, config=lm.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in weights.items()}


def sources_of(lm: Any, names: Sequence[str]) -> list[Source]:
    """Return the sources of the weights of `lm`, which `from_pretrained` created.

    Args:
        names: the names of the tensors in its folder. Those that the model does not use are left out.
    """
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    conversions: list[Any] = lm._weight_conversions
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    renamings = [c for c in conversions if not isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    weights, prefix = lm.state_dict(), lm.base_model_prefix
    sources: dict[str, Source] = {}
    for name in sorted(names, key=dot_natural_key):  # experts are stacked in the order of their numbers
        weight, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if weight not in weights and name in weights:
            weight, pattern = name, None
        if weight in weights:
            converter = None if pattern is None else by_pattern[pattern]
            sources.setdefault(weight, Source(weight, converter)).tensors[name] = pattern or ""
    return list(sources.values())


def check_names(lm: Any, checkpoint: Mapping[str, list[int]], path: str) -> None:
    """Check that pushed weights of `lm` have the names and shapes in the folder that servers start from.

    Args:
        lm: the model in the folder `path`, loaded without its weights.
        checkpoint: {name: shape} of the tensors in the folder. It may have a tied output layer, which is not sent, and
            tensors that transformers knows to be unused by the model.

    Raises:
        ConfigError: they differ, so some weights of the servers would never be updated.
    """
    sent = {name: list(tensor.shape) for name, tensor in to_checkpoint(lm, lm.named_parameters())}
    tied = {name for name, _ in lm.named_parameters(remove_duplicate=False)} - dict(lm.named_parameters()).keys()
    unused = [re.compile(pattern) for pattern in lm._keys_to_ignore_on_load_unexpected or ()]
    kept = {
        name for name in checkpoint.keys() - sent.keys()
        if name in tied or any(pattern.search(name) for pattern in unused)
    }
    wrong = sorted(
        name for name in sent.keys() | (checkpoint.keys() - kept) if sent.get(name) != checkpoint.get(name)
    )
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"model.path {path}: weight pushes would not fit the checkpoint that servers start from in {len(wrong)} "
            f"tensors ({', '.join(wrong[:_SHOWN])}): of {name} the checkpoint has {_shape(checkpoint, name)}, a push "
            f"{_shape(sent, name)}. Servers would keep old weights: take another model"
        )


def _shape(shapes: Mapping[str, list[int]], name: str) -> str:
    return f"the shape {shapes[name]}" if name in shapes else "nothing"


def write_weights(
    named_tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, shard_bytes: int
) -> int:
    """Write `model.safetensors` or, if that would exceed `shard_bytes`, shards and Hugging Face's index of them.

    A tensor larger than `shard_bytes` gets its own shard. Only one shard of gathered tensors is in memory at a time.

    Returns:
        The number of bytes of all tensors in `dtype`.
    """
    files: dict[str, list[str]] = {}
    num_bytes = 0
    for number, shard in enumerate(_shards(named_tensors, dtype, shard_bytes), 1):
        files[f"model-{number:05d}.safetensors"] = list(shard)
        save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return num_bytes


def _shards(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * dtype.itemsize
        if shard and size + num_bytes > shard_bytes:
            yield shard
            shard.clear()  # the caller has written the shard when it requests the next one
            size = 0
        shard[name] = tensor.detach().to("cpu", dtype).contiguous()
        size += num_bytes
    yield shard
