"""Reports of failed pushes: the servers that are lost or hang, and the cause; weights that no push reaches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config import Config, Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.weights.publisher import SILENCES, PushReport, PushState, WeightPublisher
from async_rl.base.weights.transport import BroadcastTransport, iter_buckets, open_gloo
from rollout_server.engines.vllm.admin import VLLMAdmin
from tests.kit.configs import changed, make_config
from tests.kit.publishers import (
    CONFIG,
    OBJECT_ENGINE,
    AcceptingHandler,
    AnyServer,
    PausingTransport,
    answering,
    names,
    publisher_for,
    url_of,
)

pytestmark = pytest.mark.processes  # together they wait for long

DEAD = "http://127.0.0.1:9"
HANGING = threading.Event()
"""Set: requests that hang are let go."""


def hanging_at(*paths: str) -> type[AcceptingHandler]:
    """A server whose scheduler hangs at these requests, or at all, while its HTTP process answers probes."""

    class HangingHandler(AcceptingHandler):
        def do_POST(self) -> None:
            if not paths or self.path in paths:
                HANGING.wait(60)
            super().do_POST()

    return HangingHandler


STUCK, AT_PAUSE = hanging_at(), hanging_at("/pause_generation")
AT_END, AT_RESUME = hanging_at("/end_weight_update"), hanging_at("/continue_generation")


@pytest.fixture
def url_of_server() -> Iterator[Any]:
    HANGING.clear()
    with ExitStack() as servers:
        yield lambda handler: servers.enter_context(answering(handler))
        HANGING.set()


def push(publisher: WeightPublisher, **settings: Any) -> PushReport:
    return publisher.push([("w", torch.zeros(1))], 1, **settings)


def noting(asked: list[str]) -> type[AcceptingHandler]:
    class NotingHandler(AcceptingHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            super().do_POST()

    return NotingHandler


def test_the_cause_of_a_lost_push_is_reported_and_survivors_that_hang_are_lost_too(url_of_server: Any) -> None:
    urls = [url_of_server(AcceptingHandler), DEAD, url_of_server(AT_END)]
    publisher = publisher_for(changed(CONFIG, timeouts={"push_s": 1.0}), urls)
    report = push(publisher)
    assert names(report.lost) == ("rollout/1", "rollout/2") and publisher.state is PushState.LOST
    assert "rollout/1" in report.cause and "Connection refused" in report.cause
    assert [member.url for member in publisher.members.current] == urls[:1]
    assert push(publisher).lost == () and publisher.state is PushState.SERVING


def test_a_server_that_samples_again_need_not_end_a_push_that_did_not_resume_all(url_of_server: Any) -> None:
    """SGLang would wait with it for the longest reply, and let no other begin."""
    asked, is_dead = list[str](), threading.Event()

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

    publisher = publisher_for(CONFIG, [url_of_server(noting(asked)), url_of_server(DyingHandler)])
    assert names(push(publisher).lost) == ("rollout/1",)
    assert asked.count("/end_weight_update") == 1


def broadcasting(url: str) -> WeightPublisher:
    """A publisher by gloo to the server at `url` and a dead one."""
    publisher = publisher_for(changed(CONFIG, timeouts={"push_s": 1.0}), [url, DEAD], open_gloo)
    assert isinstance(publisher.transport, BroadcastTransport)
    publisher.transport.answer_within_s = 0.5
    return publisher


def test_a_server_that_samples_need_not_end_a_push_that_could_not_connect(url_of_server: Any) -> None:
    """SGLang would wait with it for the longest reply, and let no other begin."""
    report = push(broadcasting(url_of_server(AT_END)))
    assert names(report.lost) == ("rollout/1",) and "rollout/1" in report.cause


def test_a_server_that_hangs_in_the_join_is_lost_with_the_one_that_died(url_of_server: Any) -> None:
    assert names(push(broadcasting(url_of_server(STUCK))).lost) == ("rollout/1", "rollout/0")


@pytest.mark.parametrize("outlives_servers", [False, True])
def test_a_server_that_stood_still_before_a_push_is_pushed_to_again_a_few_times(outlives_servers: bool) -> None:
    class StandingServer:
        """A server that answers to no probe of a connection, and then to the probe of who has died."""

        def __init__(self) -> None:
            self._answers = itertools.cycle([False, False, True])

        def is_ready(self) -> bool:
            return next(self._answers)

        def leave_group(self, name: str) -> None: ...

    class StandingBeside(StandingServer):
        def is_ready(self) -> bool:
            return True

    config = changed(CONFIG, rollout={"engine": OBJECT_ENGINE})
    publisher = publisher_for(config, [url_of(StandingServer()), url_of(StandingBeside())], open_gloo)
    assert isinstance(publisher.transport, BroadcastTransport)
    publisher.transport.answer_within_s = publisher.lost_within_s = 0.0
    publisher.outlives_servers = outlives_servers
    for _ in range(SILENCES):
        report = push(publisher)
        assert (report.lost, report.has_failed) == ((), True)
        assert "rollout/0" in report.cause and "rollout/1" not in report.cause
    if outlives_servers:
        assert names(push(publisher).lost) == ("rollout/0",)
        assert publisher.members.names == ("rollout/1",)
    else:
        with pytest.raises(WeightSyncError, match="rollout/0"):
            push(publisher)


@pytest.mark.timeout(45)  # the learner's own half of the join waits for a minute longer
@pytest.mark.parametrize("outlives_servers", [False, True])
def test_a_live_server_that_does_not_join_is_an_error_or_is_lost(
    outlives_servers: bool, url_of_server: Any
) -> None:
    publisher = publisher_for(CONFIG, [url_of_server(AcceptingHandler)], open_gloo)  # it only says so
    publisher.members.limit, publisher.outlives_servers = Limit(1.0, "timeouts.push_s"), outlives_servers
    publisher.lost_within_s = 0.5
    if outlives_servers:
        assert names(push(publisher).lost) == ("rollout/0",)
    else:
        with pytest.raises((WaitTimeoutError, WeightSyncError), match="learner rank 0"):
            push(publisher)


@pytest.mark.parametrize(
    ("handler", "lost"),
    [(STUCK, ("rollout/1",)), (AT_PAUSE, ("rollout/0", "rollout/1")), (AT_RESUME, ("rollout/1",))],
    ids=["all", "pause", "resume"],
)
def test_servers_that_others_need_not_wait_for_are_lost_once_they_are_slow(
    handler: type[AcceptingHandler], lost: tuple[str, ...], url_of_server: Any
) -> None:
    """Only the servers that hang are lost; if none can be told from the others, all are."""
    urls = [url_of_server(AcceptingHandler), url_of_server(handler)]
    for is_pool_spared in (False, True):
        publisher = publisher_for(CONFIG, urls)  # timeouts.push_s is 20 s
        publisher.lost_within_s = 0.1
        publisher.members.limit, publisher.outlives_servers = Limit(1.0, "of a test"), is_pool_spared
        if is_pool_spared:
            report = push(publisher)
            assert names(report.lost) == lost
            assert "of a test" in report.cause and "rollout/1" in report.cause
            assert publisher.members.names == tuple(name for name in ("rollout/0", "rollout/1") if name not in lost)
        else:
            with pytest.raises(WaitTimeoutError, match="rollout/1"):
                push(publisher)


class BrokenTransport(PausingTransport):
    """Fails to connect in its first `failures` pushes, while its only server answers."""

    failures = 1

    def connect(self) -> None:
        if self.failures:
            self.failures -= 1
            raise WeightSyncError("broken")


def for_object(server: Any, transport: Callable[..., PausingTransport]) -> WeightPublisher:
    config = changed(CONFIG, rollout={"engine": OBJECT_ENGINE})
    publisher = publisher_for(config, [url_of(server)], transport)
    publisher.lost_within_s = 0.1
    return publisher


@pytest.mark.parametrize("outlives_servers", [False, True])
def test_a_push_that_broke_while_every_server_answers_is_repeated_once(outlives_servers: bool) -> None:
    """If it breaks again, nobody knows which server is to blame: it is an error, or all are lost."""
    publisher = for_object(AnyServer(), BrokenTransport)
    publisher.outlives_servers = outlives_servers
    transport: Any = publisher.transport
    for _ in range(2):  # each push may be repeated once
        transport.failures = 1
        assert push(publisher).repeats and publisher.state is PushState.LOST
        assert not push(publisher).has_failed
    transport.failures = 2
    assert push(publisher).repeats
    if outlives_servers:
        report = push(publisher)
        assert (names(report.lost), report.cause, report.repeats) == (("rollout/0",), "broken", False)
        assert not push(publisher).has_failed and not publisher.members
    else:
        with pytest.raises(WeightSyncError):
            push(publisher)


def refuse(*_: Any) -> None:
    raise WeightSyncError("another shape")


@pytest.mark.parametrize(
    ("call", "answer"),
    [*((name, refuse) for name in ("pause", "begin_update", "end_update", "value_sums", "resume")),
     ("unloaded_weights", lambda: ["another shape"])],
)  # fmt: skip
def test_of_servers_that_join_together_only_the_one_that_refuses_is_lost(call: str, answer: Any) -> None:
    servers = [AnyServer(sums=(0.0, 0.0)) for _ in range(3)]
    setattr(servers[1], call, answer)
    filler = publisher_for(changed(CONFIG, rollout={"engine": OBJECT_ENGINE}), [url_of(each) for each in servers])
    filler.lost_within_s, filler.outlives_servers = 0.1, True
    checks = {"erases": True, "compares": True}
    assert push(filler, **checks).repeats  # a push that broke is tried once more
    report = push(filler, **checks)
    assert names(report.lost) == ("rollout/1",) and "another shape" in report.cause
    assert not push(filler, **checks).has_failed
    assert filler.members.names == ("rollout/0", "rollout/2")


class UnloadedServer(AnyServer):
    """A server that does not know one of its weights by the name that is pushed."""

    def unloaded_weights(self) -> list[str]:
        return ["experts.w13_weight"]


@pytest.mark.parametrize("outlives_servers", [False, True])
def test_a_weight_that_no_push_reaches_fails_a_push_only_if_it_erases(outlives_servers: bool) -> None:
    publisher = for_object(UnloadedServer(), PausingTransport)
    publisher.outlives_servers = outlives_servers
    assert push(publisher).num_bytes == 1
    assert push(publisher, erases=True).repeats
    if outlives_servers:
        report = push(publisher, erases=True)
        assert names(report.lost) == ("rollout/0",) and "experts.w13_weight" in report.cause
        return
    with pytest.raises(WeightSyncError, match=r"rollout/0.*experts\.w13_weight"):
        push(publisher, erases=True)


class VLLMServer(VLLMAdmin):
    """The admin of a server of vLLM, and in place of its HTTP server a list of what it is asked."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, "http://h")
        self.asked, self.is_dead = list[str](), False

    def die(self) -> None:
        self.is_dead = True

    def ask(self, method: str, path: str, body: Any = None, limit: Any = None) -> Any:
        if self.is_dead:
            raise WeightSyncError("connection refused")
        if method == "POST":
            self.asked.append((body or {}).get("method", path))
        return {}


class DyingTransport(PausingTransport):
    """Brings all weights to rollout/0; then rollout/1 dies."""

    def send(self, staged: Iterator[tuple[str, Tensor]], version: int) -> int:
        (bucket,) = iter_buckets(staged, 2**20, torch.float32, [None, None])
        self.members.admin("rollout/0").receive_bucket(bucket, version, "group")
        dying: Any = self.members.admin("rollout/1")
        dying.die()
        raise WeightSyncError("rollout/1 died")


def test_a_staged_push_that_fails_after_its_last_weights_loads_none_of_them() -> None:
    sync = {"double_buffer": "device", "on_update": "retract"}
    of_vllm = make_config(rollout={"engine": "vllm"}, weight_sync=sync)
    servers = [VLLMServer(of_vllm) for _ in range(2)]
    config = make_config(rollout={"engine": OBJECT_ENGINE}, weight_sync=sync)
    publisher = publisher_for(config, [url_of(server) for server in servers], DyingTransport)
    assert names(publisher.push([("w", torch.zeros(4))], 7).lost) == ("rollout/1",)
    asked = servers[0].asked
    assert "/update_weights" in asked and "/pause" not in asked
    after = asked[asked.index("/update_weights") + 1 :]
    assert "drop_weight_update" in after and "/finish_weight_update" not in after
