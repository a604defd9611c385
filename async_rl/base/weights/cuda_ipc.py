"""Pushes between learner ranks and servers on the same GPUs: the transport cuda_ipc, and who uses the memory when.

The server maps the learner's bucket, and no byte leaves the GPU. With several GPUs each rank shares its buckets with
the server on its own GPU: all ranks gather all weights anyway. On a CPU the same code shares host memory.

Barriers between the ranks in a push:

    rank 0                          other ranks
    ------------------------------  ------------------------------------------------
    gather a first bucket           gather a first bucket; both have freed what the step left
    pause all servers
    await_others(STEP)
    the servers' weights come back
    RankSignals.begin(members)  ->  wait_for_begin
    send                            send
    reports                     <-  report(error)
    await_others(GATHERED) <- free(GATHERED), once all weights are gathered
    the KV caches come back
    end_push: RankSignals.end       after a failure it frees ranks that still wait for the begin
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch.distributed import DistError, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from async_rl.base.config import Config, Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.weights.servers import Bucket, Member, Members, start_together
from async_rl.base.weights.transport import BucketTransport, bucket_num_bytes

CALLS = 5
"""A rank may wait for another rank as long as this many calls to servers may take."""


class CudaIpcTransport(BucketTransport):
    """The learner's half of the transport: shares the memory of buckets with servers on the same device."""

    def __init__(self, config: Config, members: Members, rank: int, device: torch.device) -> None:
        super().__init__(config, members, rank, device)
        placement = config.placement
        self._rank_of = placement.ranks_of_servers
        """For each server, by name: the rank whose buckets it reads. Servers without an entry read rank 0's buckets."""
        ranks = placement.learner.ranks
        self._signals: RankSignals | None = None
        if any(self._rank_of.values()):
            self._signals = RankSignals(members.purpose, rank, ranks, members.limit)
        """The messages between the ranks that send; None if rank 0 alone sends."""

    def send(self, staged: Iterator[Bucket], version: int) -> int:
        if self._signals is None:
            return self._send_own(staged, version)
        self._signals.begin(self.members.current)
        num_bytes, error = self._send_and_gather(staged, version)
        errors = [error] if error else []
        errors += [f"learner rank {rank}: {why}" for rank, why in self._signals.reports().items()]
        if errors:
            raise WeightSyncError("; ".join(errors))
        for name in self.members.names:
            if not self._is_own(name):
                self.members.admin(name).note_mapped(version)
        return num_bytes

    def help(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        if self._signals is None:
            return
        staged = self.stage(named_tensors, version)  # all ranks gather the same tensors before they wait
        members = self._signals.wait_for_begin()
        if members is None:
            return
        self.members.replace(members)
        _, error = self._send_and_gather(staged, version)
        self._signals.report(error)

    def end_push(self, served: int | None) -> None:
        if self._signals is not None:
            self._signals.end()

    def _send_and_gather(self, staged: Iterator[Bucket], version: int) -> tuple[int, str]:
        """Send to this rank's servers. Returns (bytes, error or "").

        After an error it still gathers the remaining weights, because gathering is collective.
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
            name: call for name, call in self.members.calls(lambda admin: admin.map_bucket(bucket, label)).items()
            if self._is_own(name)
        }
        return start_together(calls, self.members.limit, f"push of version {version}")

    def _is_own(self, server: str) -> bool:
        """Whether this rank gives the server its weights."""
        return self._rank_of.get(server, 0) == self.rank


class RankWords:
    """Messages between learner ranks during a push, about one subject. The default process group must exist.

    They are sent through the store of that group and not by collectives. Gathering weights is a collective, and if only
    some ranks have failed, the ranks would no longer call the same collectives in the same order.

    Args:
        subject: the prefix of the keys in the store.
    """

    def __init__(self, subject: str, rank: int) -> None:
        self._rank = rank
        default: Any = _get_default_store()
        self._store = PrefixStore(subject, default.clone())  # its own connection: others wait on the default one

    def say(self, key: str, text: str = "") -> None:
        """Publish `text` under `key`, for every rank that calls `hear` now or later."""
        self._store.set(key, text)

    def hear(self, key: str, speaker: int, what: str, limit: Limit, times: int = 1) -> bytes:
        """Wait until a message is published under `key`, and return it.

        Args:
            speaker: the rank that publishes it.
            what: what the speaker does before that, for the error message.
            times: the wait ends after `times` times `limit`.

        Raises:
            WaitTimeoutError: no message was published in that time.
        """
        try:
            self._store.wait([key], timedelta(seconds=times * limit.seconds))
            return bytes(self._store.get(key))
        except DistError as error:
            waited = f"{times} times {limit}" if times > 1 else str(limit)
            raise WaitTimeoutError(
                f"learner rank {self._rank} waited {waited} for learner rank {speaker} to {what}: {error}"
            ) from error


class RankSignals:
    """The barriers between ranks in a push where each rank sends weights to the servers on its own GPU.

    Args:
        purpose: the purpose of the members. Two transports with different purposes do not hear each other.
        ranks: the number of learner ranks. All take part in every push.
        call_limit: the time limit of one call to a server.
    """

    def __init__(self, purpose: str, rank: int, ranks: int, call_limit: Limit) -> None:
        self._rank, self._others = rank, [other for other in range(ranks) if other != rank]
        self._words = RankWords(f"weight-{purpose}", rank)
        self._call_limit = call_limit
        self._push = 0
        """The number of this push. It is part of every key, so that messages of other pushes are not read."""
        self._is_open = False

    def begin(self, members: Iterable[Member] | None) -> None:
        """On rank 0: allow the other ranks to send to `members`, which are paused. None: the push has failed already.
        """
        self._push += 1
        self._is_open = members is not None
        self._words.say(self._key("begin"), json.dumps(None if members is None else [*members]))

    def end(self) -> None:
        """On rank 0: end the push. Ranks that still wait for its `begin` learn that it has failed."""
        if not self._is_open:
            self.begin(None)
        self._is_open = False

    def wait_for_begin(self) -> list[Member] | None:
        """On other ranks: wait for rank 0's `begin` and return its members; None if the push has failed."""
        self._push += 1
        members = json.loads(self._hear("begin", 0, "pause the servers"))
        return None if members is None else [Member(*member) for member in members]

    def report(self, error: str) -> None:
        """On other ranks: report to rank 0 that this rank has sent its weights (""), or the error that stopped it."""
        self._words.say(self._key(str(self._rank)), json.dumps(error))

    def reports(self) -> dict[int, str]:
        """On rank 0: wait for the reports of all other ranks. Returns the errors by rank."""
        heard = {rank: json.loads(self._hear(str(rank), rank, "send its weights")) for rank in self._others}
        return {rank: error for rank, error in heard.items() if error}

    def _key(self, word: str) -> str:
        return f"{self._push}/{word}"

    def _hear(self, word: str, rank: int, what: str) -> bytes:
        return self._words.hear(self._key(word), rank, what, self._call_limit, CALLS)


class FreedMemory:
    """Frees the CUDA cache of a learner rank at two points of each push.

    Rank 0 also waits until other ranks have done so.

    Every rank gathers all weights on its own GPU, but only rank 0 calls the servers. It must know when the GPUs of the
    others have free memory, because the memory saver may end a server that finds none. Needed only if learner and
    servers take turns on the same GPUs.
    """

    STEP, GATHERED = "what its last step has left cached", "what gathering the weights has left cached"

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._others = range(1, config.placement.learner.ranks)
        self._words = RankWords("freed-memory", rank) if self._others else None
        self._has_cache = device.type == "cuda"
        self._push = 0
        """The number of this push. It is part of every key, so that messages of other pushes are not read."""

    def begin_push(self) -> None:
        """On any rank: begin a push, and free what the learner's last step has left in the cache."""
        self._push += 1
        self.free(self.STEP)

    def free(self, left: str) -> None:
        """Free the cache. Other ranks than 0 then report it to rank 0.

        Args:
            left: STEP or GATHERED, what filled the cache.
        """
        if self._has_cache:
            torch.cuda.empty_cache()
        if self._words and self._rank > 0:
            self._words.say(self._key(left, self._rank))

    def await_others(self, left: str, limit: Limit) -> None:
        """On rank 0: wait until each other rank has reported `free(left)`, at most `limit` for each.

        Raises:
            WaitTimeoutError: a rank has not done so.
        """
        if self._words:
            for rank in self._others:
                self._words.hear(self._key(left, rank), rank, f"free {left}", limit)

    def _key(self, left: str, rank: int) -> str:
        return f"{self._push}/{left}/{rank}"


_sharing = threading.Lock()
"""A lock for sharing buckets, because torch's sharing strategy is a setting of the whole process."""


def share_bucket(bucket: Bucket) -> str:
    """Return a pickle, in base64, with which one SGLang server maps the bucket's memory and finds its tensors.

    SGLang accepts no other format. This process itself reads no pickle.
    """
    tensors, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = start + bucket_num_bytes([dtype], [shape])
        tensors.append(SimpleNamespace(
            name=name, shape=torch.Size(shape), dtype=getattr(torch, dtype),
            start_idx=start, end_idx=end, numel=end - start,
        ))
        start = end
    with _sharing:
        before = multiprocessing.get_sharing_strategy()
        # The server finds host memory by its name: torch could pass a file descriptor only to a child process.
        multiprocessing.set_sharing_strategy("file_system")
        try:
            payload = ForkingPickler.dumps({"flattened_tensor": bucket.data, "metadata": tensors})
        finally:
            multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(payload).decode()
