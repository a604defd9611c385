"""The interface with which the learner controls one rollout server: pause, receive weights, resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from async_rl.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from async_rl.base.seams import EngineEntry

_IN_EACH_PUSH = ("is_ready", "pause", "resume", "begin_update", "end_update")
_OF_VERIFICATION = ("erase_weights", "unloaded_weights", "value_sums", "score_tokens")
_FOR_BROADCASTS = ("join_group", "receive_bucket", "leave_group")
_OF_A_WAY = {
    "nccl": _FOR_BROADCASTS, "gloo": _FOR_BROADCASTS, "shared_memory": ("map_bucket", "note_mapped"),
    "folder": ("load_folder",),
}
"""For each way of delivery in an engine's `receives`: the calls that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Part of a model's weights: tensors packed one after the other in `data`, in the order of `names`."""

    names: list[str]
    dtypes: list[str]
    """Torch names without the prefix, e.g. `float32`."""
    shapes: list[list[int]]
    data: Tensor  # [bytes] uint8
    is_last: bool


class ServerAdmin(Protocol):
    """Administers one rollout server. The entry of the engine in ENGINES names the implementation.

    All calls block until the server has done what was requested, and may come from any thread. All except `is_ready`
    raise WeightSyncError if the server refuses or can't be reached, and WaitTimeoutError if it does not answer within
    timeouts.push_s.

    New weights arrive between `begin_update` and `end_update`, in the way that the transport's entry names in
    `delivers`: nccl and gloo use `join_group`, `receive_bucket` and `leave_group`; shared_memory uses `map_bucket` and,
    on several GPUs, `note_mapped`; folder uses `load_folder`. An engine needs only the calls of the ways that it
    `receives`. The call with the last weights also gets their policy version, all others get None. If the last call
    never comes, the push has failed, and the server is not resumed before another push has sent all weights.

    With weight_sync.double_buffer, `begin_update` and the calls that bring weights come while the server samples with
    the old weights. Then follow `pause`, `erase_weights` if at all, and `end_update`. If that push fails before the
    pause, the server continues with the old weights. The engine's entry declares which values of double_buffer it
    supports.
    """

    def is_ready(self) -> bool:
        """Return whether the server answers. A paused server answers too."""

    def pause(self, on_update: str) -> None:
        """Stop sampling. Later requests must not read KV of the old weights, unless `on_update` is in_place.

        Args:
            on_update: weight_sync.on_update, what happens to running requests.
        """

    def resume(self) -> None:
        """Resume sampling after `pause`, with the weights and the version of the last complete update."""

    def begin_update(self) -> None:
        """Prepare to receive weights. Drop the weights of an earlier, incomplete update."""

    def end_update(self) -> None:
        """Load the weights received since `begin_update`, with their version. Sampling uses them after `resume`."""

    def join_group(
        self, *, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        """Make all ranks of the server join a torch.distributed group, as `first_rank` and the following ranks.

        Args:
            host, port: where the learner serves the group's TCPStore.
            backend: nccl or gloo.
        """

    def receive_bucket(self, bucket: Bucket, version: int | None, group_name: str) -> None:
        """Make the server receive a bucket, whose bytes rank 0 of the group broadcasts. `bucket.data` is not read here.
        """

    def leave_group(self, name: str) -> None:
        """Make all ranks of the server leave the torch.distributed group `name` and destroy it."""

    def map_bucket(self, bucket: Bucket, version: int | None) -> None:
        """Make the server load weights from the memory of `bucket`, which is on the server's own device or host."""

    def note_mapped(self, version: int) -> None:
        """Record that another process, a learner rank on the server's GPU, has mapped all buckets of `version`."""

    def load_folder(self, folder: Path, version: int | None) -> None:
        """Make the server load the safetensors files of a model folder."""

    def release_memory(self) -> None:
        """Pause, and free the memory of weights and KV cache.

        Called only if the engine's entry declares `releases_memory`.
        """

    def resume_memory(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate the memory of weights or KV cache again, with undefined contents. Do nothing if it was not released.
        """

    def erase_weights(self) -> None:
        """Fill the weights in use with NaN. Called before `end_update` of a verified push, while the server is paused.

        A weight that the push does not contain, or that the server does not load, then stays NaN.
        """

    def unloaded_weights(self) -> list[str]:
        """Return the server's names of all weights that contain a NaN."""

    def value_sums(self) -> tuple[float, float]:
        """Return (sum of x, sum of |x|) over all values of the weights in use, in float64.

        The server may be paused or not.
        """

    def score_tokens(self, tokens: Sequence[int]) -> list[float]:
        """Return log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1 by the server: len(tokens) - 1 values."""


def check_admin(engine: str, entry: EngineEntry, *, verifies: bool) -> None:
    """Check that the ServerAdmin class of an engine defines all calls that pushes need.

    Args:
        engine: the engine's name.
        entry: its entry.
        verifies: whether weight_sync.verify_every is set.

    Raises:
        ConfigError: its open_admin is no class, or the class lacks calls. The message says what needs each of them.
    """
    admin = entry.load_admin()
    if not isinstance(admin, type):
        raise ConfigError(f"rollout.engine {engine}: its open_admin must be a class, or load one, got {admin!r}")
    needed = dict.fromkeys(_IN_EACH_PUSH, "every push")
    for way in entry.receives:
        needed |= dict.fromkeys(_OF_A_WAY.get(way, ()), f"`receives` {way}")
    if entry.releases_memory:
        needed |= dict.fromkeys(("release_memory", "resume_memory"), "`releases_memory`")
    if verifies:
        needed |= dict.fromkeys(_OF_VERIFICATION, "weight_sync.verify_every")
    lacking = ", ".join(
        f"{call} (for {why})" for call, why in needed.items()
        if getattr(admin, call, None) in (None, getattr(ServerAdmin, call))  # a subclass of the Protocol inherits stubs
    )
    if lacking:
        raise ConfigError(f"rollout.engine {engine}: {admin!r} must define {lacking}, see base/weights/server_admin.py")
