"""A server that joins gets its first weights by itself: erased, loaded and compared, while the others get no call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config import Config, Limit
from async_rl.base.errors import WeightSyncError
from async_rl.base.messages.reports import ServersFilled, ServersLost
from async_rl.base.weights.publisher import open_filler, open_publisher
from async_rl.base.weights.transport import BroadcastTransport
from learner.loop.learner import rank_status
from learner.loop.pushes import Pusher, open_pushers
from learner.loop.updater import Updater
from learner.models.policy import full_parameters
from learner.models.tiny_model import character_tokenizer
from tests.kit.configs import learner_config, make_config
from tests.kit.engines.object_receiver import ObjectReceiver
from tests.kit.engines.serving_process import ServingProcess, checksums
from tests.kit.learner.batches import make_batch
from tests.kit.models import save_bare_model
from tests.kit.publishers import CPU, OBJECT_ENGINE, answering

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
DTYPE = torch.bfloat16
Server = ServingProcess | ObjectReceiver

WAYS: dict[str, dict[str, Any]] = {
    "gloo": {"transport": "gloo"},
    "disk": {"transport": "disk"},
    "staged": {"transport": "gloo", "double_buffer": "device"},
    "delta": {"transport": "gloo", "delta": True},
    "disk delta": {"transport": "disk", "delta": True},
    "adapter": {"transport": "gloo", "lora": "adapter"},
    "cuda_ipc": {"transport": "cuda_ipc"},
}
"""The settings of weight_sync."""


@pytest.fixture(scope="module")
def processes(tiny_model_path: Path) -> Iterator[list[ServingProcess]]:
    """Three servers of the hf engine. Each test fills them anew."""
    with ExitStack() as stack:
        yield [stack.enter_context(ServingProcess(tiny_model_path, "bfloat16")) for _ in range(3)]


def config_of(way: str, model: Path, run_dir: Path) -> Config:
    """A run whose steps change few of the values that servers have."""
    run_dir.mkdir(exist_ok=True)
    return learner_config(
        model, model={"dtype": "bfloat16", "lora": {"rank": 4 * (way == "adapter")}},
        learner={"prompts_per_step": 3, "lr": 1e-5, "max_tokens_per_microbatch": 4096},
        rollout={"engine": OBJECT_ENGINE if way == "cuda_ipc" else "hf", "group_size": 4, "max_response_tokens": 9},
        run={"dir": run_dir}, timeouts={"push_s": 20.0}, weight_sync={"bucket_bytes": 4_000, **WAYS[way]},
    )  # fmt: skip


def weights_of(updater: Updater) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_parameters(updater.policy, updater.dtype)}


def check_served(servers: Sequence[Server], updater: Updater, version: int) -> None:
    expected = checksums(weights_of(updater), DTYPE)
    for server in servers:
        if isinstance(server, ObjectReceiver):
            assert (server.version(), checksums(server.weights, DTYPE)) == (version, expected)
        else:
            assert server.served() == (version, expected)


def calls_of(server: Server) -> list[str]:
    """What was asked of the server since the last time."""
    if isinstance(server, ServingProcess):
        return server.calls()
    calls, server.calls = server.calls, []
    return calls


@pytest.mark.parametrize("way", WAYS)
def test_a_joiner_is_filled_by_itself_and_then_gets_the_pushes_of_all(
    way: str, processes: list[ServingProcess], tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    updater = Updater(config_of(way, tiny_model_path, tmp_path / "run"), CPU)
    pusher = open_pushers(updater.config, updater, 0)["rollout"]
    servers: Sequence[Server] = processes
    if way == "cuda_ipc":
        servers = [ObjectReceiver([*weights_of(updater)]) for _ in range(3)]
    for number, server in enumerate(servers[:2]):
        pusher.members.join(f"rollout/{number}", server.url, 1)
    _, events = pusher.fill(0)
    assert events == [ServersFilled(servers=(("rollout/0", 1), ("rollout/1", 1)), version=0)]
    updater.update(make_batch(0, 0))
    pusher.push(1)
    check_served(servers[:2], updater, 1)

    pusher.members.join("rollout/2", servers[2].url, 1)
    for server in servers:
        calls_of(server)
    with ExitStack() as stack:
        for server in servers[:2]:
            if isinstance(server, ServingProcess):
                stack.enter_context(server.held())
        report, events = pusher.fill(1)
    assert events == [ServersFilled(servers=(("rollout/2", 1),), version=1)]
    assert [calls_of(server) for server in servers[:2]] == [[], []]
    calls = calls_of(servers[2])
    checks = [call for call in calls if call in ("erase_weights", "unloaded_weights", "value_sums", "resume")]
    assert checks == ["erase_weights", "unloaded_weights", *(["value_sums"] if way != "adapter" else []), "resume"]
    assert report.num_compared == (way != "adapter")
    check_served(servers, updater, 1)

    updater.update(make_batch(1, 1))
    report, lost = pusher.push(2)
    assert (lost, report.num_repeats, len(report.spans)) == ([], 0, 3)
    assert (report.changed_share < 0.2) == ("delta" in way), report.changed_share
    check_served(servers, updater, 2)
    assert "erase_weights" not in calls_of(servers[2])
    pusher.close()


class ForgetfulReceiver(ObjectReceiver):
    """Does not load one of its weights."""

    def loaded(self, received: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in received.items() if name != self.names[-1]}


class WrongReceiver(ObjectReceiver):
    """Has other weights than the learner has sent."""

    def loaded(self, received: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor + (name == self.names[-1]) for name, tensor in received.items()}


class LeavingReceiver(ObjectReceiver):
    """The driver loses it while it gets its first weights."""

    leave: Callable[[], None]

    def end_update(self) -> None:
        self.leave()
        super().end_update()


class Pool:
    """A pusher by `way` to a server of a process or object of its own, and what has been reported."""

    def __init__(self, config: Config, first: Server | None = None) -> None:
        self.updater = Updater(config, CPU)
        self.names = [*weights_of(self.updater)]
        publisher = open_publisher(config, [], 0, CPU)
        self.filler = open_filler(publisher)
        self.filler.lost_within_s = 0.1
        self.pusher = Pusher(config, self.updater, publisher, self.filler)
        self.first = first or ObjectReceiver(self.names)
        self.join("rollout/0", self.first.url)
        self.version = 0
        _, events = self.pusher.fill(0)
        assert events == [ServersFilled(servers=(("rollout/0", 1),), version=0)]

    def join(self, name: str, url: str, start: int = 1) -> None:
        self.pusher.members.join(name, url, start)

    def fill(self) -> list[ServersFilled | ServersLost]:
        """Fill the joiners, and check that this costs the first server nothing."""
        calls_of(self.first)
        with self.first.held() if isinstance(self.first, ServingProcess) else nullcontext():
            _, events = self.pusher.fill(self.version)
        assert calls_of(self.first) == []
        return events

    def step(self) -> None:
        """Push the next version, and check that the first server serves it."""
        self.updater.update(make_batch(self.version, self.version))
        self.version += 1
        report, lost = self.pusher.push(self.version)
        assert (lost, report.num_repeats) == ([], 0)
        assert (report.changed_share < 0.2) == self.pusher.publisher.config.weight_sync.delta, report.changed_share
        check_served([self.first], self.updater, self.version)


def pool_of_objects(model: Path, folder: Path) -> Pool:
    return Pool(config_of("cuda_ipc", model, folder / "run"))


@pytest.mark.parametrize("kind", [ForgetfulReceiver, WrongReceiver])
def test_a_joiner_with_other_weights_is_lost_and_costs_the_others_nothing(
    kind: type[ObjectReceiver], tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    """Its name is one of which a server was compared before: so it is known that its engine keeps the pushed values."""
    pool = pool_of_objects(tiny_model_path, tmp_path)
    pool.step()
    pool.join("rollout/1", ObjectReceiver(pool.names).url)
    assert pool.fill() == [ServersFilled(servers=(("rollout/1", 1),), version=1)]
    pool.pusher.members.leave("rollout/1", 1)
    unfit = kind(pool.names)
    pool.join("rollout/1", unfit.url, 2)
    (lost,) = pool.fill()
    assert isinstance(lost, ServersLost) and lost.servers == (("rollout/1", 2),)
    assert "resume" not in calls_of(unfit), "it samples nothing from them"
    pool.step()
    assert calls_of(unfit) == []


def test_a_joiner_that_leaves_while_it_is_filled_gets_no_push_and_is_not_reported(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    pool = pool_of_objects(tiny_model_path, tmp_path)
    members, leaving, successor = pool.pusher.members, LeavingReceiver(pool.names), ObjectReceiver(pool.names)

    def leave() -> None:
        members.leave("rollout/1", 1)
        members.join("rollout/1", successor.url, 2)

    leaving.leave = leave
    pool.step()
    pool.join("rollout/1", leaving.url)
    assert pool.fill() == []
    calls_of(leaving)
    assert pool.fill() == [ServersFilled(servers=(("rollout/1", 2),), version=1)]
    members.leave("rollout/1", 1)  # reported once more
    pool.step()
    assert calls_of(leaving) == []
    check_served([successor], pool.updater, 2)


@pytest.mark.parametrize(
    "way", ["gloo", pytest.param("staged", marks=pytest.mark.nightly), pytest.param("delta", marks=pytest.mark.nightly)]
)
def test_a_joiner_that_refuses_or_hangs_is_lost_and_costs_the_others_nothing(
    way: str, processes: list[ServingProcess], other_model: ServingProcess, says_it_has_joined: str,
    tiny_model_path: Path, tmp_path: Path, one_rank: None,
) -> None:
    """One serves a model of another shape, and refuses its weights. Another says that it has joined, but it hangs."""
    pool = Pool(config_of(way, tiny_model_path, tmp_path / "run"), processes[0])
    pool.step()
    limit = pool.filler.members.limit
    for name, url, limit_s in (("rollout/1", other_model.url, limit.seconds), ("rollout/2", says_it_has_joined, 1.0)):
        pool.filler.members.limit = Limit(limit_s, "of a test")
        pool.join(name, url)
        (lost,) = pool.fill()
        assert isinstance(lost, ServersLost) and lost.servers == ((name, 1),)
    pool.filler.members.limit = limit
    pool.join("rollout/1", processes[1].url, 2)
    assert pool.fill() == [ServersFilled(servers=(("rollout/1", 2),), version=1)]
    assert isinstance(pool.filler.transport, BroadcastTransport)
    group_name, admin = pool.filler.transport.group_name, pool.pusher.members.admin("rollout/1")
    with pytest.raises(WeightSyncError, match=group_name):  # it has left the group already
        admin.leave_group(group_name)
    pool.step()
    check_served(processes[:2], pool.updater, 2)
    pool.pusher.close()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    """A server of a larger model."""
    folder = save_bare_model(tmp_path_factory.mktemp("other"), hidden_size=32)
    character_tokenizer().save_pretrained(folder)
    with ServingProcess(folder, "bfloat16") as process:
        yield process


@pytest.fixture
def says_it_has_joined() -> Iterator[str]:
    """The URL of a server that accepts whatever it is asked, and does nothing."""
    with answering() as url:
        yield url


def test_every_rank_may_push_as_long_as_rank_0_which_alone_knows_the_servers() -> None:
    config = make_config(
        placement={"rollout": {"servers": 3}, "eval": {"servers": 1}}, timeouts={"push_s": 100.0},
        eval={"every_steps": 10},
    )
    pushed_to = {"push": ("rollout/0", "rollout/1"), "eval push": ()}
    first = rank_status(0, ("sync", "push", 0.0), config, pushed_to)
    other = rank_status(1, ("sync", "push", 0.0), config, {"push": (), "eval push": ()})
    assert first.limit_s == other.limit_s == 2 * 100 * (1 + 4)  # each of the four may die, each time in 2 push_s
    assert (first.waits_on, other.waits_on) == ("rollout/0, rollout/1", "learner/0")


@pytest.mark.parametrize(("ranks", "waits_on"), [(1, "the disk"), (2, "the disk, or another rank")])
@pytest.mark.parametrize("part", ["copy", "save", "write"])
def test_a_rank_that_saves_for_too_long_is_overdue(part: str, ranks: int, waits_on: str) -> None:
    """For example on a network disk that hangs. It may wait batch_s for the checkpoint before, and then save."""
    config = make_config(placement={"learner": {"ranks": ranks}}, timeouts={"batch_s": 100.0})
    status = rank_status(0, ("checkpoint", part, 0.0), config, {"push": ()})
    assert (status.doing, status.waits_on, status.limit_s) == ("saves", waits_on, 200.0)
