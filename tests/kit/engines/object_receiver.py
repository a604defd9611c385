"""A server without a process that receives weights as buckets or folders, and notes what it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.base.errors import WeightSyncError
from async_rl.base.weights.servers import Bucket
from async_rl.base.weights.sums import value_sums
from async_rl.base.weights.transport import unpack
from tests.kit.publishers import url_of


class ObjectReceiver:
    """A server of rollout.engine OBJECT_ENGINE at `url`. An update must bring exactly the tensors in `names`."""

    def __init__(self, names: list[str], url: str = "") -> None:
        self.names = names
        self.url = url_of(self, url)
        self.is_alive = True
        self.calls: list[str] = []
        """All that was asked of the server, in order."""
        self.weights: dict[str, Tensor] = {}
        self._received: dict[str, Tensor] = {}
        self._version: int | None = None
        self._serves = 0

    def is_ready(self) -> bool:
        self.calls.append("is_ready")
        return self.is_alive

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._note(name)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if not self.is_alive:
            raise WeightSyncError("connection refused")

    def begin_update(self) -> None:
        self._note("begin_update")
        self._received, self._version = {}, None

    def map_bucket(self, bucket: Bucket, version: int | None) -> None:
        self._note("map_bucket")
        self._receive(dict(unpack(bucket.data, bucket.names, bucket.dtypes, bucket.shapes)), version)

    def load_folder(self, folder: Path, version: int | None) -> None:
        self._note("load_folder")
        tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        if sorted(tensors) != sorted(self.names):  # the folder of a push that has failed is being removed
            raise WeightSyncError("the folder is not whole")
        self._receive(tensors, version)

    def _receive(self, tensors: dict[str, Tensor], version: int | None) -> None:
        self._received |= {name: tensor.clone() for name, tensor in tensors.items()}
        self._version = version

    def end_update(self) -> None:
        self._note("end_update")
        if self._version is not None:
            assert sorted(self._received) == sorted(self.names)
            self.weights |= self.loaded(self._received)
            self._serves = self._version

    def loaded(self, received: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that the server loads of those that it has received. A subclass may load others."""
        return received

    def erase_weights(self) -> None:
        self._note("erase_weights")
        self.weights = {name: torch.tensor(torch.nan) for name in self.names}

    def unloaded_weights(self) -> list[str]:
        self._note("unloaded_weights")
        return [name for name, tensor in self.weights.items() if bool(tensor.isnan().any())]

    def value_sums(self) -> tuple[float, float]:
        self._note("value_sums")
        return value_sums(list(self.weights.values()))

    def version(self) -> int:
        return self._serves

    def checksum(self) -> float:
        return sum(float(tensor.double().sum()) for tensor in self.weights.values())

    def close(self) -> None:
        pass
