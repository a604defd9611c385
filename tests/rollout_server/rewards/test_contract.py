"""The fields of a Reward: what is refused when it is made, and what its function may return."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config.section import section
from async_rl.base.errors import ConfigError, RewardError
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.base import open_rewards
from rollout_server.rewards.contract import Reward, RewardResult, read_verdict
from tests.kit.rewards import named, of, scored


def one(question: Question, response: str) -> float:
    return 1.0


@pytest.mark.parametrize(("field", "value"), [
    ("of", "groups"), ("of", None), ("of", ["group"]), ("function", 1.0), ("inputs", ["a"]), ("limits", 3),
    ("check", True), ("describe", "words"), ("is_function_of_input", "no"), ("concurrency", -1), ("concurrency", 2.5),
    ("concurrency", True), ("modules", "mine"), ("modules", (re,)),
])  # fmt: skip
def test_a_field_with_a_value_that_is_not_allowed_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^`{field}` .* got {re.escape(repr(value))}"):
        Reward(**{"function": one, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [
    {}, {"function": one, "open": one}, {"function": one, "of": "group", "is_function_of_input": True},
    {"function": one, "of": "episode", "is_function_of_input": True}, {"open": "my:open"},
])
def test_an_entry_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Reward"):
        Reward(**fields)


@pytest.mark.parametrize("kind", ["answer", "episode", "group"])
def test_each_kind_of_a_reward_can_be_made(kind: Any) -> None:
    assert Reward(function=one, of=kind, modules=["re"]).of == kind  # type: ignore[arg-type]


@section("task.rewards.params")
class Scale:
    """The settings of the rewards below."""

    scale: float = 2.0


def of_another_name(question: Question, response: str, scale: Scale) -> float:
    return scale.scale


def by_position_alone(question: Question, response: str, settings: Scale, /) -> float:
    return settings.scale


def by_name_alone(question: Question, response: str, *, settings: Scale) -> float:
    return settings.scale


def among_others(question: Question, response: str, strict: bool = False, settings: Scale | None = None) -> float:
    return settings.scale if settings and not strict else 0.0


OF_ANOTHER_NAME, BY_POSITION_ALONE, BY_NAME_ALONE, AMONG_OTHERS = (
    Reward(function=each, settings=Scale) for each in (of_another_name, by_position_alone, by_name_alone, among_others)
)


@pytest.mark.parametrize("name", ["OF_ANOTHER_NAME", "BY_POSITION_ALONE"])
def test_a_function_that_does_not_take_its_settings_by_their_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^task\.rewards\[0\]\.reward '{__name__}:{name}'"):
        open_rewards(of({"reward": f"{__name__}:{name}"}), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["BY_NAME_ALONE", "AMONG_OTHERS"])
def test_a_function_that_takes_its_settings_by_their_name_gets_them(name: str) -> None:
    config = of({"reward": f"{__name__}:{name}", "params": {"scale": 3.0}})
    verdicts, _ = scored(list(open_rewards(config, None)), "a")  # type: ignore[arg-type]
    assert verdicts[0].reward == 3.0


@pytest.mark.parametrize(("field", "value"), [
    ("metrics", None), ("metrics", ["a"]), ("counts", None), ("reason", None),
])
def test_a_result_with_a_field_of_another_type_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(RewardError, match=rf"^`{field}` .* got {re.escape(repr(value))}"):
        read_verdict(RewardResult(**{"score": 1.0, field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("returned", "named_by"), [
    (lambda answers: [0.5], "0.5"), (lambda answers: 0.5, "0.5"), (lambda answers: None, "None"),
    (lambda answers: {0: 1.0, 1: 1.0}, "{0: 1.0"), (lambda answers: {0.0, 1.0}, "{0.0"),
    (lambda answers: (1 / 0 for _ in answers), "ZeroDivisionError"),
    (lambda answers: (each + 1 for each in answers), "TypeError"),
])  # fmt: skip
def test_verdicts_of_a_group_that_raise_or_are_no_list_of_its_length_fail_the_reward(
    returned: Any, named_by: str
) -> None:
    reward = Reward(function=lambda question, episodes: returned(episodes), of="group")
    with pytest.raises(RewardError, match=re.escape(named_by)):
        scored([named(reward)], "a", "b")


def test_verdicts_of_a_group_that_come_too_late_end_at_the_limit_of_the_call() -> None:
    ended = threading.Event()

    def later(question: Question, episodes: list[Episode]) -> Iterator[float]:
        for _ in episodes:
            ended.wait(60)
            yield 1.0

    with pytest.raises(RewardError, match=r"timeouts\.reward_s"):
        scored([named(Reward(function=later, of="group"), timeout_s=0.1, limit="timeouts.reward_s")], "a", "b")
    ended.set()


class Verdicts:
    """A sequence that has no `__iter__`."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return [1.0, 2.0][index]


@pytest.mark.parametrize("is_async", [False, True])
def test_verdicts_of_a_group_may_be_any_sequence_or_come_one_by_one(is_async: bool) -> None:
    async def later(question: Question, episodes: list[Episode]) -> Verdicts:
        return Verdicts()

    function = later if is_async else lambda question, episodes: (float(len(each.answer)) for each in episodes)
    verdicts, _ = scored([named(Reward(function=function, of="group"))], "a", "bb")
    assert [each.reward for each in verdicts] == [1, 2]


@pytest.mark.parametrize("made_of", ["function=score", "open=score"])
def test_a_misspelt_kind_ends_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_of: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"misspelt_{made_of.partition('=')[0]}"
    (tmp_path / f"{name}.py").write_text(
        "from rollout_server.rewards.contract import Reward\n"
        "def score(question, episodes): return [None] * len(episodes)\n"
        f"RANK = Reward({made_of}, of='groups')\n"
    )
    with pytest.raises(ConfigError, match=rf"^task\.rewards\[0\]\.reward '{name}:RANK' .*'groups'"):
        open_rewards(of({"reward": f"{name}:RANK", "name": "rank"}), None)  # type: ignore[arg-type]
