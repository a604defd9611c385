"""Phases of a rollout group: those of its slowest episode, from the grant of the slot to the last reward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.episodes.episode import Episode
from rollout_server.episodes.group_phases import group_phases


def episode(ended_s: float, *reply_times: tuple[float, float]) -> Episode:
    return Episode(rows=(), answer="", end="done", reply_times=reply_times, ended_s=ended_s)


def test_the_slowest_episode_samples_and_uses_tools_in_turn() -> None:
    quick, slow = episode(13.0, (10.5, 13.0)), episode(20.0, (10.5, 12.0), (15.0, 18.0))
    assert group_phases([quick, slow, quick], granted_s=9.0, began_s=10.0, scored_s=21.0) == [
        ("queued", 1.0), ("tools", 0.5), ("generate", 1.5), ("tools", 3.0), ("generate", 3.0), ("tools", 2.0),
        ("rewards", 1.0),
    ]  # fmt: skip


def test_replies_that_are_sampled_at_once_count_as_one_phase() -> None:
    """An agent may ask for several at once, which need not end in the order in which they began."""
    parallel = episode(9.0, (2.0, 3.0), (1.0, 4.0), (3.5, 6.0))
    phases = group_phases([parallel], 0.0, 0.0, 9.0)
    assert phases == [("tools", 1.0), ("generate", 3.0), ("generate", 2.0), ("tools", 3.0)]


def test_an_answer_to_a_question_is_sampled_and_scored() -> None:
    assert group_phases([episode(5.0, (1.0, 5.0))], 1.0, 1.0, 6.0) == [("generate", 4.0), ("rewards", 1.0)]


@given(
    steps=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=5),
    rest_s=st.floats(0, 10), reward_s=st.floats(0, 10),
)  # fmt: skip
def test_phases_add_up_to_the_time_of_the_group(
    steps: list[tuple[float, float]], rest_s: float, reward_s: float
) -> None:
    now_s, replies = 100.0, []
    for tool_s, generate_s in steps:
        replies.append((now_s + tool_s, now_s + tool_s + generate_s))
        now_s = replies[-1][1]
    phases = group_phases([episode(now_s + rest_s, *replies)], 98.0, 100.0, now_s + rest_s + reward_s)
    assert sum(phase.seconds for phase in phases) == pytest.approx(now_s + rest_s + reward_s - 98.0)
    generated_s = sum(seconds for name, seconds in phases if name == "generate")
    assert generated_s == pytest.approx(sum(generate_s for _, generate_s in steps), abs=1e-6)
