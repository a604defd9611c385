"""Evaluations beside training: who is asked, and what happens if a server dies meanwhile. Processes are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.base.config import Limit
from async_rl.base.errors import AsyncRLError, ProcessDiedError, WaitTimeoutError
from async_rl.base.messages.reports import EvaluationDone, EvaluationDue
from async_rl.base.telemetry.metrics import Metric, reduce_metrics
from async_rl.run.watch.evaluations import RunningEvaluations
from tests.kit.configs import make_config

Answer = Callable[[int, bool, tuple[int, int]], Awaitable[EvaluationDone]]


class Log:
    """Keeps the results, and the versions that were skipped."""

    def __init__(self) -> None:
        self.results: list[tuple[int, dict[str, float]]] = []
        self.skipped: list[tuple[int, str]] = []

    def add_eval(self, *reports: EvaluationDone) -> None:
        values = reduce_metrics(metric for report in reports for metric in report.metrics)
        self.results.append((reports[0].version, values))

    def skipped_eval(self, version: int, reason: str) -> None:
        self.skipped.append((version, reason))


class Processes:
    """Actors that answer an evaluation by a function, and a learner that counts how often one has ended."""

    def __init__(self, **answers: Answer) -> None:
        self.num_ended = self.num_cancelled = 0
        self.limits: list[Limit] = []
        self.actors: dict[str, Any] = {
            name.replace("_", "/"): self.actor(answer) for name, answer in answers.items()
        }
        self.actors["learner/0"] = SimpleNamespace(evaluated=SimpleNamespace(remote=self._end))

    @staticmethod
    def actor(answer: Answer) -> SimpleNamespace:
        def remote(version: int, *, beside_training: bool, part: tuple[int, int]) -> Awaitable[EvaluationDone]:
            return answer(version, beside_training, part)

        return SimpleNamespace(evaluate=SimpleNamespace(remote=remote))

    def _end(self) -> None:
        self.num_ended += 1

    def cancel(self, call: Awaitable[EvaluationDone]) -> None:
        self.num_cancelled += 1

    async def call(self, name: str, call: Awaitable[EvaluationDone], limit: Limit, what: str) -> EvaluationDone:
        self.limits.append(limit)
        return await call


class Fixture:
    def __init__(self, **answers: Answer) -> None:
        self.log, self.processes = Log(), Processes(**answers)
        self.running = {name for name in self.processes.actors if name != "learner/0"}
        self.lost: list[str] = []
        self.evaluations = RunningEvaluations(
            make_config(), self.processes, self.log, self.running, self._lose,  # type: ignore[arg-type]
        )

    def _lose(self, name: str, error: AsyncRLError) -> None:
        self.lost.append(name)
        self.running.discard(name)

    def evaluate(self, *servers: str, version: int = 4) -> None:
        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                self.evaluations.begin(EvaluationDue(version=version, servers=servers), tasks)
                await self.evaluations.wait()

        asyncio.run(run())
        assert self.processes.num_ended == 1


def answering(asked: list[Any], share_right: float = 0.5, weight: int = 1) -> Answer:
    async def answer(version: int, beside_training: bool, part: tuple[int, int]) -> EvaluationDone:
        asked.append((beside_training, part))
        return EvaluationDone(version=version, metrics=(Metric("eval/accuracy", share_right, weight=weight),))

    return answer


def failing(error: AsyncRLError) -> Answer:
    async def answer(version: int, beside_training: bool, part: tuple[int, int]) -> EvaluationDone:
        raise error

    return answer


def test_evaluation_servers_share_the_prompts_and_their_result_is_that_of_all() -> None:
    asked: list[Any] = []
    fixture = Fixture(rollout_0=answering([]), eval_0=answering(asked, 0.5, 3), eval_1=answering(asked, 1.0))
    fixture.evaluate("eval/0", "eval/1")
    assert asked == [(False, (0, 2)), (False, (1, 2))]
    assert fixture.log.results == [(4, {"eval/accuracy": 0.625})] and not fixture.log.skipped


def test_without_evaluation_servers_the_first_rollout_server_that_is_up_evaluates() -> None:
    asked: list[Any] = []
    fixture = Fixture(rollout_0=answering([]), rollout_1=answering(asked), eval_0=answering([]))
    fixture.running.discard("rollout/0")
    fixture.evaluate()
    assert asked == [(True, (0, 1))] and fixture.log.results == [(4, {"eval/accuracy": 0.5})]


def test_the_part_of_a_server_that_dies_goes_to_one_that_still_serves_the_version() -> None:
    asked: list[Any] = []
    fixture = Fixture(rollout_0=answering([]), eval_0=failing(ProcessDiedError("gone")), eval_1=answering(asked))
    fixture.evaluate("eval/0", "eval/1")
    assert sorted(asked) == [(False, (0, 2)), (False, (1, 2))]
    assert fixture.lost == ["eval/0"] and len(fixture.log.results) == 1


def test_a_version_whose_only_server_dies_is_not_asked_of_its_successor() -> None:
    asked: list[Any] = []
    fixture = Fixture(rollout_0=answering(asked))

    async def die_and_return(version: int, beside_training: bool, part: tuple[int, int]) -> EvaluationDone:
        fixture.processes.actors["eval/0"] = Processes.actor(answering(asked))  # it serves version 0
        raise ProcessDiedError("gone")

    fixture.processes.actors["eval/0"] = Processes.actor(die_and_return)
    fixture.running.add("eval/0")
    fixture.evaluate("eval/0")
    assert (asked, fixture.lost, fixture.log.results, len(fixture.log.skipped)) == ([], [], [], 1)


@pytest.mark.parametrize("servers", [(), ("eval/0",)])
@pytest.mark.parametrize("error", [WaitTimeoutError("too late"), AsyncRLError("no verdict")])
def test_an_evaluation_that_fails_or_takes_too_long_is_skipped_and_training_goes_on(
    error: AsyncRLError, servers: tuple[str, ...]
) -> None:
    fixture = Fixture(rollout_0=failing(error), eval_0=failing(error))
    fixture.evaluate(*servers)
    assert [version for version, _ in fixture.log.skipped] == [4] and not fixture.log.results and not fixture.lost
    is_late = isinstance(error, WaitTimeoutError)
    assert fixture.processes.num_cancelled == is_late, "the server would go on with it beside the next one"


def test_an_evaluation_is_cancelled_at_its_server_when_the_user_ends_the_run() -> None:
    fixture = Fixture()

    async def answer(version: int, beside_training: bool, part: tuple[int, int]) -> EvaluationDone:
        fixture.evaluations.cancel()
        await asyncio.Event().wait()
        raise AssertionError

    fixture.processes.actors["rollout/0"] = Processes.actor(answer)
    fixture.running.add("rollout/0")

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            fixture.evaluations.begin(EvaluationDue(version=4), tasks)
            await fixture.evaluations.wait()

    asyncio.run(run())
    assert fixture.processes.num_cancelled == 1 and not fixture.log.results


def test_answers_of_another_version_are_not_taken_for_those_of_the_one_that_was_due() -> None:
    """The server was started again between the push and the call, and serves version 0."""

    async def answer(version: int, beside_training: bool, part: tuple[int, int]) -> EvaluationDone:
        metrics = (Metric("eval/accuracy", 0.5), Metric("eval/oldest_version", 0.0, "min"))
        return EvaluationDone(version=version, metrics=metrics)

    fixture = Fixture(rollout_0=answering([]), eval_0=answer)
    fixture.evaluate("eval/0")
    assert [version for version, _ in fixture.log.skipped] == [4]
    first = Fixture(rollout_0=answering([]), eval_0=answer)
    first.evaluate("eval/0", version=0)
    assert len(first.log.results) == 1


def test_a_failed_evaluation_ends_when_all_of_its_parts_have_ended() -> None:
    ended: list[int] = []

    async def answer_later(version: int, beside_training: bool, part: tuple[int, int]) -> EvaluationDone:
        await asyncio.sleep(0.05)
        ended.append(fixture.processes.num_ended)
        return EvaluationDone(version=version)

    fixture = Fixture(rollout_0=answering([]), eval_0=failing(AsyncRLError("")), eval_1=answer_later)
    fixture.evaluate("eval/0", "eval/1")
    assert ended == [0] and len(fixture.log.skipped) == 1
