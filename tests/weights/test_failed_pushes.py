"""Reports of failed pushes: the servers that are lost or hang, and the cause; weights that no push reaches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config import Config, Limit, PlacementConfig, TimeoutsConfig
from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.weights import broadcast
from async_rl.weights import publisher as publisher_module
from async_rl.weights.broadcast import BroadcastPublisher
from async_rl.weights.members import PROBES, find_silent, wait_for_all
from async_rl.weights.transport import iter_buckets
from rollout_server.engines.sglang import admin as sglang_admin
from rollout_server.engines.vllm import admin as vllm_admin
from rollout_server.engines.vllm.admin import VLLMAdmin
from tests.kit.configs import make_config
from tests.kit.publishers import CONFIG, CPU, AcceptingHandler, PausingPublisher

DEAD = "http://127.0.0.1:9"
HANGING = threading.Event()
"""Set: requests that hang are let go."""


class HangingHandler(AcceptingHandler):
    """A server whose HTTP process answers while its scheduler hangs in a collective of the failed push."""

    def do_POST(self) -> None:
        if self.path == "/end_weight_update":
            HANGING.wait(60)
        super().do_POST()


class StuckHandler(HangingHandler):
    """A server whose scheduler hangs in a pause, and in all that comes after it."""

    def do_POST(self) -> None:
        HANGING.wait(60)
        super().do_POST()


class SlowHandler(AcceptingHandler):
    """A server whose pause takes too long, while it answers everything else."""

    def do_POST(self) -> None:
        if self.path == "/pause_generation":
            HANGING.wait(60)
        super().do_POST()


class StuckAtEndHandler(AcceptingHandler):
    """A server whose scheduler hangs once the update has ended, when it is to resume."""

    def do_POST(self) -> None:
        if self.path == "/continue_generation":
            HANGING.wait(60)
        super().do_POST()


@pytest.fixture
def url_of() -> Iterator[Any]:
    servers: list[ThreadingHTTPServer] = []

    def start(handler: type[AcceptingHandler]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    HANGING.clear()
    yield start
    HANGING.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_cause_of_a_lost_push_is_reported_and_survivors_that_hang_are_lost_too(url_of: Any) -> None:
    config = replace(CONFIG, timeouts=TimeoutsConfig(push_s=1.0))
    urls = [url_of(AcceptingHandler), DEAD, url_of(HangingHandler)]
    publisher = PausingPublisher(config, urls, 0, CPU)
    report = publisher.push([("w", torch.zeros(1))], 1)
    assert report.lost == ("rollout/1", "rollout/2")
    assert "pause before a weight push: rollout/1 failed" in report.cause and "Connection refused" in report.cause
    assert publisher.servers == {"rollout/0": urls[0]}
    assert publisher.push([("w", torch.zeros(1))], 1).lost == ()


def test_a_server_that_samples_again_need_not_end_a_push_that_did_not_resume_all(url_of: Any) -> None:
    """SGLang would wait with it for the longest reply, and let no other begin."""
    asked, is_dead = list[str](), threading.Event()

    class NotingHandler(AcceptingHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            super().do_POST()

    class DyingHandler(AcceptingHandler):
        """A server that dies when it is to resume."""

        def do_GET(self) -> None:
            if not is_dead.is_set():
                super().do_GET()

        def do_POST(self) -> None:
            if self.path == "/continue_generation":
                is_dead.set()
            else:
                super().do_POST()

    publisher = PausingPublisher(CONFIG, [url_of(NotingHandler), url_of(DyingHandler)], 0, CPU)
    assert publisher.push([("w", torch.zeros(1))], 1).lost == ("rollout/1",)
    assert asked.count("/end_weight_update") == 1


@pytest.mark.parametrize("is_at_start", [True, False])
def test_a_server_that_samples_need_not_end_a_push_that_could_not_connect(
    is_at_start: bool, url_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would wait with it for the longest reply, and let no other begin."""
    monkeypatch.setattr(broadcast, "ANSWER_WITHIN_S", 0.5)
    config = replace(CONFIG, timeouts=TimeoutsConfig(push_s=1.0))
    publisher = BroadcastPublisher(config, [url_of(HangingHandler), DEAD], 0, CPU, backend="gloo")
    report = publisher.connect_living() if is_at_start else publisher.push([("w", torch.zeros(1))], 1)
    assert report.lost == ("rollout/1",)


def test_a_server_that_hangs_in_the_join_is_lost_with_the_one_that_died(
    url_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "ANSWER_WITHIN_S", 0.5)
    config = replace(CONFIG, timeouts=TimeoutsConfig(push_s=1.0))
    publisher = BroadcastPublisher(config, [url_of(StuckHandler), DEAD], 0, CPU, backend="gloo")
    assert publisher.connect_living().lost == ("rollout/1", "rollout/0")


def test_torchs_limit_leaves_the_learner_time_to_find_dead_servers_and_to_abort(
    url_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of the group NCCL ends the process of the learner."""
    limits = list[float]()

    def join_group(*arguments: Any) -> Any:
        limits.append(arguments[-1])
        return SimpleNamespace(abort=lambda: None)

    monkeypatch.setattr(broadcast, "join_group", join_group)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda _: None)
    publisher = BroadcastPublisher(CONFIG, [url_of(AcceptingHandler)], 0, CPU, backend="gloo")
    publisher.connect()
    publisher.give_up()
    longest_probe_s = max(sglang_admin._PROBE.seconds, vllm_admin._PROBE.seconds)
    search_s = publisher_module.LOST_WITHIN_S + PROBES * longest_probe_s
    assert limits == [pytest.approx(CONFIG.timeouts.push_s + 60.0)]
    assert limits[0] - CONFIG.timeouts.push_s > 3 * search_s


def test_servers_are_asked_once_to_leave_the_group_of_a_push_that_ended(
    url_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    class NotingHandler(AcceptingHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            super().do_POST()

    monkeypatch.setattr(broadcast, "join_group", lambda *_: SimpleNamespace(abort=lambda: None))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda _: None)
    publisher = BroadcastPublisher(CONFIG, [url_of(NotingHandler)], 0, CPU, backend="gloo")
    publisher.connect()
    publisher.give_up()
    publisher.connect()
    join, leave = "/init_weights_update_group", "/destroy_weights_update_group"
    assert [path for path in asked if path in (join, leave)] == [join, leave, join]


@pytest.mark.parametrize(
    ("handler", "lost"), [
        (StuckHandler, ("rollout/1",)), (SlowHandler, ("rollout/0", "rollout/1")), (StuckAtEndHandler, ("rollout/1",)),
    ],
)
def test_servers_that_others_need_not_wait_for_are_lost_once_they_are_slow(
    handler: type[AcceptingHandler], lost: tuple[str, ...], url_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the servers that hang are lost; if none can be told from the others, all are."""
    monkeypatch.setattr(publisher_module, "LOST_WITHIN_S", 0.1)
    urls = [url_of(AcceptingHandler), url_of(handler)]
    for is_pool_spared in (False, True):
        publisher = PausingPublisher(CONFIG, urls, 0, CPU)  # timeouts.push_s is 20 s
        publisher.push_limit, publisher.loses_slow_servers = Limit(1.0, "of a test"), is_pool_spared
        if is_pool_spared:
            report = publisher.push([("w", torch.zeros(1))], 1)
            assert report.lost == lost
            assert "the learner waited 1 s (of a test) for rollout/1" in report.cause
            assert tuple(publisher.servers) == tuple(name for name in ("rollout/0", "rollout/1") if name not in lost)
        else:
            with pytest.raises(WaitTimeoutError, match="for rollout/1"):
                publisher.push([("w", torch.zeros(1))], 1)


class UnloadedAdmin:
    """A server that does not know one of its weights by the name that is pushed."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: True

    def unloaded_weights(self) -> list[str]:
        return ["experts.w13_weight"]


class OneWayPublisher(PausingPublisher):
    def admin(self, name: str) -> Any:
        return UnloadedAdmin()

    def send(self, staged: Iterator[tuple[str, Tensor]], version: int) -> int:
        return len(list(staged))


def test_a_weight_that_no_push_reaches_fails_the_first_push_only_if_it_is_verified(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "LOST_WITHIN_S", 0.1)
    publisher = OneWayPublisher(CONFIG, ["http://x"], 0, CPU)
    assert publisher.push([("w", torch.zeros(1))], 1).num_bytes == 1
    assert publisher.push([("w", torch.zeros(1))], 1, erases=True).repeats
    with pytest.raises(WeightSyncError, match=r"did not reach 1 weights of rollout/0, .*: experts\.w13_weight\. Its"):
        publisher.push([("w", torch.zeros(1))], 1, erases=True)


def test_the_learner_frees_its_memory_before_servers_of_its_gpu_allocate_theirs(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's allocator keeps what a push took; a server that gets no memory for its KV cache ends."""
    calls: list[str] = []

    class Admin:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: calls.append(" ".join([name, *arguments]))

    monkeypatch.setattr(OneWayPublisher, "admin", lambda self, name: Admin())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    placement, sync = PlacementConfig(colocated=True), replace(CONFIG.weight_sync, on_update="retract")
    config = replace(CONFIG, placement=placement, weight_sync=sync)
    publisher = OneWayPublisher(config, ["http://x"], 0, torch.device("cuda"))
    publisher.push([("w", torch.zeros(1))], 1)
    assert calls == [
        "empty_cache", "pause retract", "resume_memory weights", "begin_update", "end_update", "empty_cache",
        "resume_memory kv_cache", "resume",
    ]


class DyingPublisher(PausingPublisher):
    """Server rollout/1 dies when rollout/0 has received all weights. `asked` has what rollout/0 was asked for."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, ["http://h:1", "http://h:2"], 0, CPU)
        self.asked, self.is_dead = list[str](), False
        self._fakes = {name: self._fake(name) for name in self.servers}

    def _fake(self, name: str) -> VLLMAdmin:
        publisher = self

        class Admin(VLLMAdmin):
            def ask(self, method: str, path: str, body: Any = None, limit: Any = None) -> Any:
                if name == "rollout/1" and publisher.is_dead:
                    raise WeightSyncError("connection refused")
                if name == "rollout/0" and method == "POST":
                    publisher.asked.append((body or {}).get("method", path))
                return {}

        return Admin(self.config, self.servers[name])

    def admin(self, name: str) -> Any:
        return self._fakes[name]

    def send(self, staged: Iterator[tuple[str, Tensor]], version: int) -> int:
        (bucket,) = iter_buckets(staged, 2**20, torch.float32, [None, None])
        self.admin("rollout/0").receive_bucket(bucket, version, "group")
        self.is_dead = True
        raise WeightSyncError("rollout/1 died")


def test_a_staged_push_that_fails_after_its_last_weights_loads_none_of_them() -> None:
    config = make_config(rollout={"engine": "vllm"}, weight_sync={"staging": "device", "on_update": "retract"})
    publisher = DyingPublisher(config)
    assert publisher.push([("w", torch.zeros(4))], 7).lost == ("rollout/1",)
    assert "/update_weights" in publisher.asked and "/pause" not in publisher.asked
    after = publisher.asked[publisher.asked.index("/update_weights") + 1 :]
    assert "drop_weight_update" in after and "/finish_weight_update" not in after


def test_a_server_that_misses_a_single_probe_is_not_taken_for_dead() -> None:
    answers = {"busy": iter([False, True]), "dead": iter([False, False]), "well": iter([True])}
    assert find_silent({name: partial(next, answer) for name, answer in answers.items()}) == ("dead",)


def test_servers_that_are_busy_for_a_while_are_waited_for() -> None:
    busy = iter([False, False, False, True])
    assert wait_for_all({"busy": partial(next, busy), "well": lambda: True}, 30.0) == ()
    assert wait_for_all({"dead": lambda: False, "well": lambda: True}, 0.1) == ("dead",)
