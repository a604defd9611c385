"""The transport between processes on one GPU: the server maps the learner's bucket, and no byte leaves the GPU.

Where learner ranks and servers share several GPUs, each rank shares its buckets with the server of its own GPU: all
ranks gather all weights anyway. On a CPU the same code shares host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.weights.members import start_together
from async_rl.weights.rank_signals import RankSignals
from async_rl.weights.server_admin import Bucket
from async_rl.weights.transport import BucketPublisher


class CudaIpcPublisher(BucketPublisher):
    """The learner's half of the transport: sends buckets by sharing their memory with servers on the same device."""

    def __init__(self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device) -> None:
        super().__init__(config, engine_urls, rank, device)
        placement = config.placement
        self._rank_of = placement.ranks_of_servers
        """The rank that gives its buckets to each server, by the server's name; rank 0 if it is not here."""
        ranks = placement.learner.ranks
        self._signals = RankSignals(rank, ranks, self.push_limit) if any(self._rank_of.values()) else None
        """None: rank 0 alone sends."""

    def send(self, staged: Iterator[Bucket], version: int) -> int:
        if self._signals is None:
            return self._send_own(staged, version)
        self._signals.begin(self.servers)
        num_bytes, error = self._send_and_gather(staged, version)
        errors = [error] if error else []
        errors += [f"learner rank {rank}: {why}" for rank, why in self._signals.reports().items()]
        if errors:
            raise WeightSyncError("; ".join(errors))
        for name in self.servers:
            if not self._is_own(name):
                self.admin(name).note_mapped(version)
        return num_bytes

    def help(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        if self._signals is None:
            return
        staged = self.stage(named_tensors, version)  # all ranks gather the same tensors before they wait
        servers = self._signals.wait_for_begin()
        if servers is None:
            return
        self.servers = servers
        _, error = self._send_and_gather(staged, version)
        self._signals.report(error)

    def end_push(self) -> None:
        if self._signals is not None:
            self._signals.end()

    def _send_and_gather(self, staged: Iterator[Bucket], version: int) -> tuple[int, str]:
        """Send to this rank's servers; return (bytes, error or ""). All weights are gathered, as every rank takes part.
        """
        try:
            return self._send_own(staged, version), ""
        except (WeightSyncError, WaitTimeoutError) as error:
            for _ in staged:
                pass
            return 0, str(error)

    def _send_own(self, staged: Iterator[Bucket], version: int) -> int:
        try:
            return super().send(staged, version)
        finally:
            if self.device.type == "cuda":
                torch.cuda.ipc_collect()  # frees the buckets that no server maps any more

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        if bucket.data.is_cuda:
            torch.cuda.current_stream(bucket.data.device).synchronize()  # the bucket must be filled before it is read
        label = version if bucket.is_last else None
        calls = {
            name: call for name, call in self.calls(lambda admin: admin.map_bucket(bucket, label)).items()
            if self._is_own(name)
        }
        return start_together(calls, self.push_limit, f"push of version {version}")

    def _is_own(self, server: str) -> bool:
        """Whether this rank gives the server its weights."""
        return self._rank_of.get(server, 0) == self.rank
