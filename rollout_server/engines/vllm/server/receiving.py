"""Functions with which a vLLM worker receives weights: check an update, abort a group, map shared memory.

They do not import vLLM. vLLM's environment has no async_rl, so this project's `parcels.py` is loaded by its path.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError, PrefixStore, ProcessGroup, TCPStore

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def _module(name: str) -> Any:
    file = Path(__file__).resolve().parents[4] / "async_rl" / "base" / "weights" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"async_rl_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_parcels, _sums = _module("parcels"), _module("sums")
Rebuilder, is_parcel = _parcels.Rebuilder, _parcels.is_parcel
holds_nan, value_sums = _sums.holds_nan, _sums.value_sums


def checkpoint_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a model folder, from the headers of its safetensors files."""
    shapes: dict[str, list[int]] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes


def weight_files(folder: Path) -> Sequence[Path]:
    """Return the safetensors files of a model folder: the files in its index, else model.safetensors, else all of them.
    """
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return [folder / _SINGLE] if (folder / _SINGLE).is_file() else sorted(folder.glob("*.safetensors"))


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, list[int]], is_tied: bool) -> None:
    """Raise ValueError unless `tensors` have exactly the names and shapes in `expected`.

    Args:
        is_tied: the output layer is tied to the embedding, so lm_head.weight may be left out.
    """
    ignored = {"lm_head.weight"} if is_tied else set()
    got = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{name} must have shape {expected.get(name, '(none: no such tensor)')}, got {got.get(name, 'none')}"
        for name in sorted((expected.keys() | got.keys()) - ignored) if expected.get(name) != got.get(name)
    ]
    if wrong:
        raise ValueError(f"the update differs from the checkpoint in {len(wrong)} tensors: {'; '.join(wrong[:5])}")


def abort_when_told(group: ProcessGroup, name: str, host: str, port: int) -> None:
    """Start a thread that aborts process group `group` when the learner asks for it through its store, or has ended.

    This frees a worker that hangs in a collective of a failed push. async_rl/base/weights/transport.py does the same in
    the learner and in other servers.

    Args:
        name: the group's name, which prefixes its keys in the store.
        host, port: where the learner serves the TCP store.
    """
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)

    def wait_and_abort() -> None:
        with suppress(DistError, RuntimeError):
            PrefixStore(name, store).wait(["aborted"], timedelta(days=1000))
        group.abort()

    threading.Thread(target=wait_and_abort, name=f"abort of {name}", daemon=True).start()


def map_memory(memory: dict[str, list[Any]], device: torch.device) -> Tensor:
    """Map memory that the learner shares, without a copy; return it as a uint8 tensor on `device`.

    Args:
        memory: the result of the learner's `share_bucket`.
    """
    words = zip(memory["handle"], memory["is_bytes"], strict=True)
    handle = [base64.b64decode(word) if is_bytes else word for word, is_bytes in words]
    storage: Any
    if device.type == "cuda":
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle)
    else:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)._shared_decref()
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
