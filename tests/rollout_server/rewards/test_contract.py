"""The fields of a Reward: what is refused when it is made, and what its function may return."""

from __future__ import annotations

import re
from typing import Any

import pytest

from async_rl.base.errors import RewardError
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward
from tests.kit.rewards import named, scored


def one(question: Question, response: str) -> float:
    return 1.0


@pytest.mark.parametrize(("field", "value"), [
    ("of", "groups"), ("function", 1.0), ("inputs", ["a"]), ("concurrency", -1), ("modules", (re,)),
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


@pytest.mark.parametrize(("returned", "named_by"), [
    (lambda answers: [0.5], "0.5"), (lambda answers: None, "None"), (lambda answers: {0: 1.0, 1: 1.0}, "{0: 1.0"),
    (lambda answers: (1 / 0 for _ in answers), "ZeroDivisionError"),
])  # fmt: skip
def test_verdicts_of_a_group_that_raise_or_are_no_list_of_its_length_fail_the_reward(
    returned: Any, named_by: str
) -> None:
    reward = Reward(function=lambda question, episodes: returned(episodes), of="group")
    with pytest.raises(RewardError, match=re.escape(named_by)):
        scored([named(reward)], "a", "b")
