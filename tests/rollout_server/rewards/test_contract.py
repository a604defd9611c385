"""The fields of a Reward: what is refused when it is made, and what its function may return."""

from __future__ import annotations

import re
from typing import Any

import pytest

from async_rl.base.config.section import section
from async_rl.base.errors import ConfigError, RewardError
from rollout_server.question import Question
from rollout_server.rewards.base import open_rewards
from rollout_server.rewards.contract import Reward
from tests.kit.rewards import named, of, scored


def one(question: Question, response: str) -> float:
    return 1.0


@pytest.mark.parametrize(("field", "value"), [
    ("of", "groups"), ("of", ["group"]), ("function", 1.0), ("inputs", ["a"]), ("limits", 3), ("check", True),
    ("describe", "words"), ("is_function_of_input", "no"), ("concurrency", -1), ("concurrency", True),
    ("modules", "mine"), ("modules", (re,)),
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


@section("task.rewards.params")
class Scale:
    """The settings of the rewards below."""

    scale: float = 2.0


def of_another_name(question: Question, response: str, scale: Scale) -> float:
    return scale.scale


def by_name_alone(question: Question, response: str, *, settings: Scale) -> float:
    return settings.scale


OF_ANOTHER_NAME, BY_NAME_ALONE = (Reward(function=each, settings=Scale) for each in (of_another_name, by_name_alone))


def test_a_function_gets_settings_by_their_name_and_another_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^task\.rewards\[0\]\.reward "):
        open_rewards(of({"reward": f"{__name__}:OF_ANOTHER_NAME"}), None)  # type: ignore[arg-type]
    config = of({"reward": f"{__name__}:BY_NAME_ALONE", "params": {"scale": 3.0}})
    verdicts, _ = scored(list(open_rewards(config, None)), "a")  # type: ignore[arg-type]
    assert verdicts[0].reward == 3.0


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
