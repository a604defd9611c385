"""The weights of a compact push (weight_sync.lora adapter, weight_sync.delta), made whole before SGLang loads them.

They come by SGLang's own requests, as buckets that are broadcast or as files, in the names of parcels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from torch import Tensor

from async_rl.base.models_and_data.model_folder import weight_files
from async_rl.base.weights.parcels import Rebuilder, is_parcel
from rollout_server.engines.sglang.staging_admin import BASE_VARIABLE

_load: Callable[..., tuple[bool, str]] = WeightUpdater.load_weights_from_distributed
_load_folder: Callable[..., tuple[bool, str]] = WeightUpdater.update_weights_from_disk
_rebuilders: dict[int, Rebuilder] = {}
"""The one Rebuilder of this process, by the id of its model."""


def install() -> None:
    """Make SGLang load what parcels stand for. Call this in the scheduler's process before the scheduler starts."""
    WeightUpdater.load_weights_from_distributed = _load_rebuilt
    WeightUpdater.update_weights_from_disk = _load_folder_rebuilt


def _load_rebuilt(updater: WeightUpdater, named_tensors: list[tuple[str, Tensor]]) -> tuple[bool, str]:
    if not any(is_parcel(name) for name, _ in named_tensors):
        return _load(updater, named_tensors)
    try:
        weights = list(_rebuilder(updater).rebuild(named_tensors))
    except ValueError as error:
        return False, str(error)
    return _load(updater, weights)


def _load_folder_rebuilt(updater: WeightUpdater, model_path: str, *args: Any, **options: Any) -> tuple[bool, str]:
    files = weight_files(Path(model_path))
    with safe_open(files[0], framework="pt") as file:
        is_compact = any(map(is_parcel, file.keys()))
    if not is_compact:
        return _load_folder(updater, model_path, *args, **options)
    return _load_rebuilt(updater, [item for file in files for item in load_file(file).items()])


def _rebuilder(updater: WeightUpdater) -> Rebuilder:
    """Return the Rebuilder of the server's model. SGLang's own path names the last folder that it loaded."""
    folder = Path(os.environ[BASE_VARIABLE])
    return _rebuilders.setdefault(id(updater.get_model()), Rebuilder(lambda: weight_files(folder)))
