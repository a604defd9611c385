"""Groups of episodes of several turns as messages: what comes back, what is refused, and by whom."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.errors import WireError
from async_rl.base.messages.codec import decode_group, encode_group
from async_rl.base.types import EpisodeFacts, Group, Row, Slot
from tests.kit.groups import assert_same, make_group, make_row
from tests.kit.random_episodes import LIMITS, random_episodes

pytestmark = pytest.mark.processes  # together they compute for long

SLOT = Slot(group_id=5, prompt_index=9, start_version=3)


def row_of_turns(mask: str, turn_ends: tuple[int, ...], rewards: tuple[float, ...], reward: float) -> Row:
    is_trained = np.array([each == "1" for each in mask])
    logprobs = np.where(is_trained, np.float32(-0.5), np.float32(0))
    return make_row(
        len(mask), reward=reward, version=3, mask=is_trained, logprobs=logprobs, turn_ends=turn_ends,
        turn_rewards=rewards,
    )


def facts(rows: int, turns: int, **changes: Any) -> EpisodeFacts:
    plain: dict[str, Any] = {
        "tool_calls": 1, "generate_s": 1.5, "tool_s": 0.5, "duration_s": 2.0, "end": "done", "metrics": {"score": 3}
    }
    return EpisodeFacts(rows=rows, turns=turns, **{**plain, **changes})


GROUP = make_group(
    SLOT,
    rows=(
        row_of_turns("110011", (1, 5), (0.25, 1.0), 1.25),
        row_of_turns("0000111", (6,), (-1.0,), 0.5),  # the first of two rows of the second episode
        row_of_turns("0101", (1, 3), (0.5, 1.0), 0.5),
    ),
    episodes=(facts(1, 2), facts(2, 3, end="timeout")),
)
GOOD: dict[str, Any] = msgpack.unpackb(encode_group(GROUP))


def ints(*values: int) -> list[Any]:
    return ["<i4", len(values), np.array(values, np.int32).tobytes()]


def floats(*values: float) -> list[Any]:
    return ["<f8", len(values), np.array(values).tobytes()]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_a_group_of_episodes_comes_back_as_it_was(seed: int) -> None:
    group = random_episodes(SLOT, np.random.default_rng(seed), newest=7)
    assert_same(decode_group(encode_group(group), LIMITS), group)


def test_the_largest_valid_group_of_episodes_is_within_the_byte_limit() -> None:
    limits = dataclasses.replace(LIMITS, max_rows=4, max_turns=16)
    metrics = {f"{i:03}" + "\N{PILE OF POO}" * 197: 0.1 for i in range(64)}
    row = make_row(
        32, version=3, reward=1.0, rewards=metrics, turn_ends=tuple(range(24, 32)), turn_rewards=(0.0625,) * 8
    )
    biggest = make_group(
        dataclasses.replace(SLOT, group_id=2**62, prompt_index=2**62),
        prompt_tokens=np.zeros(16, np.int32), rows=(row,) * 4, worker="\N{PILE OF POO}" * 200,
        episodes=(facts(2, 16, end="timeout", metrics=metrics, error="\N{PILE OF POO}" * 2000),) * 2,
        data_row=2**62,
    )  # fmt: skip
    data = encode_group(biggest)
    assert_same(decode_group(data, limits), biggest)
    assert len(data) > 0.8 * limits.max_group_bytes, "a limit that is never approached was not tried"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("rows", ints(1, 3), r"episodes\.rows: got 4"),
        ("rows", ints(3, 0), r"episodes\[1\]\.rows: got 0"),
        ("rows", ints(1, 1, 1), r"episodes\.rows: 3 elements"),
        ("turns", ints(2, 2), r"episodes\[1\]\.turns: got 2"),
        ("turns", ints(2, 11), r"episodes\.turns: got 11"),
        ("generate_s", floats(1, -1.0), r"episodes\[1\]\.generate_s: got -1.0"),
        ("tool_s", floats(1, math.nan), r"episodes\[1\]\.tool_s: got nan"),
        ("end", ["done", "failed"], r"episodes\[1\]\.end: got 'failed'"),
        ("metrics", [{}], r"episodes\.metrics: got a list of 1"),
        ("metrics", [{}, [1]], r"episodes\[1\]\.metrics: got a list of 1"),
        ("metrics", [{}, {str(i): 0.0 for i in range(65)}], r"episodes\[1\]\.metrics: got a dict of 65"),
        ("metrics", [{"m" * 201: 0.0}, {}], r"episodes\[0\]\.metrics: got 'mm"),
        ("metrics", [{"m": math.inf}, {}], r"episodes\[0\]\.metrics\.m: got inf"),
        ("metrics", [{"m": "1"}, {}], r"episodes\[0\]\.metrics\.m: got '1'"),
        ("error", ["", "x" * 2001], r"episodes\[1\]\.error: got 'xx.*"),
        ("error", [""], r"episodes\.error: got a list of 1"),
        ("row_turns", ints(2, 0, 3), r"episodes\.row_turns: got 0"),
        ("row_turns", ints(2, 3), r"episodes\.row_turns: 2 elements"),
        ("row_turns", ints(1, 1, 2), r"episodes\.turn_ends: 5 elements"),
        ("row_turns", ints(2, 2**31 - 1, 2**31 - 1), r"episodes\[1\]\.turns: got 3"),
        ("turn_ends", ints(1, 5, 6, 1, 4), r"rows\[2\]\.turn_ends: got 4"),
        ("turn_ends", ints(-1, 5, 6, 1, 3), r"rows\[0\]\.turn_ends: got -1"),
        ("turn_ends", ints(1, 5, 6, 3, 3), r"rows\[2\]\.turn_ends: got 3"),
        ("turn_ends", ints(0, 1, 6, 1, 3), r"rows\[0\]\.turn_ends: got 1"),
        ("turn_rewards", floats(0.25, 1, -1, 0.5), r"episodes\.turn_rewards: 4 elements"),
        (
            "turn_rewards", floats(0.25, 1, -1, 0.5, 1.001),
            r"episodes\[1\], sum of turn_rewards: got 0.50.*",
        ),
        ("turn_rewards", floats(math.nan, 1, -1, 0.5, 1), r"rows\[0\]\.turn_rewards: got nan"),
        ("turn_rewards", floats(1e308, 1e308, -1, 0.5, 1), r"episodes\[0\], sum of turn_rewards: got inf"),
    ],
)  # fmt: skip
def test_an_invalid_column_of_episodes_is_refused_by_name(column: str, value: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_group(msgpack.packb({**GOOD, "episodes": {**GOOD["episodes"], column: value}}), LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": floats(1.25, 0.5, 0.25)}, r"rows\[2\]\.reward: got 0.25"),
        ({"reward": floats(1.0, 0.5, 0.5)}, r"episodes\[0\], sum of turn_rewards: got 1.25"),
        ({"mask": ["|b1", 17, bytes([1] * 16 + [0])]}, r"rows\[2\]\.mask: got False"),
        ({"logprobs": ["<f4", 17, np.full(17, -1, np.float32).tobytes()]}, r"rows\[0\]\.logprobs: got -1.0, all"),
        ({"episodes": {}}, r"episodes\.duration_s: missing"),
        ({"data_row": -2}, r"data_row: got -2"),
        ({"left_out": ["x" * 2001]}, r"left_out\[0\]: got 'xx.*"),
        ({"left_out": [""] * 7}, r"left_out: got a list of 7"),
        ({"episodes": {**GOOD["episodes"], "colour": 1}}, r"episodes\.colour: got 'a field'"),
        ({"episodes": None}, r"lengths: 3 elements"),
        ({"lengths": ints(*[1] * 7)}, r"lengths: 7 elements"),
        ({"finish_reason": ["stop", "timeout", "turns"]}, r"rows\[2\]\.finish_reason: got 'turns'"),
    ],
)  # fmt: skip
def test_a_group_that_its_episodes_do_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_group(msgpack.packb({**GOOD, **changes}), LIMITS)


def test_rounding_of_the_sum_of_turn_rewards_is_allowed() -> None:
    rewards = (1e6, -1e6 + 0.1, 0.3)
    row = row_of_turns("111", (0, 1, 2), rewards, 0.4)
    assert sum(rewards) != 0.4
    group = make_group(SLOT, rows=(row, row), episodes=(facts(1, 3), facts(1, 3)))
    assert_same(decode_group(encode_group(group), LIMITS), group)


def test_episodes_that_failed_may_be_left_out_of_a_group_up_to_a_limit() -> None:
    left = dataclasses.replace(GROUP, rows=GROUP.rows[1:], episodes=GROUP.episodes[1:])
    assert_same(decode_group(encode_group(left), dataclasses.replace(LIMITS, fewest_episodes=1)), left)
    with pytest.raises(WireError, match=r"episodes\.rows: 1 elements"):
        decode_group(encode_group(left), LIMITS)
    four = dataclasses.replace(GROUP, rows=GROUP.rows * 2, episodes=GROUP.episodes * 2)
    with pytest.raises(WireError, match=r"episodes\.rows: 4 elements"):
        decode_group(encode_group(four), dataclasses.replace(LIMITS, fewest_episodes=1))


def test_a_long_error_or_one_that_is_no_text_is_sent_as_far_as_it_can_be() -> None:
    odd = dataclasses.replace(
        GROUP, data_row=7, left_out=("half a character: \ud83d", "x" * 5000),
        episodes=tuple(dataclasses.replace(episode, error="y" * 5000) for episode in GROUP.episodes),
    )  # fmt: skip
    group = decode_group(encode_group(odd), LIMITS)
    assert (group.data_row, group.left_out) == (7, ("half a character: ?", "x" * 2000))
    assert [episode.error for episode in group.episodes] == ["y" * 2000] * 2


def test_turns_that_can_not_be_sent_are_refused_by_the_sender() -> None:
    one_reward = row_of_turns("11", (0, 1), (0.5,), 0.5)
    with pytest.raises(WireError, match=r"rows\[1\]\.turn_rewards: 1 values for 2 turns"):
        encode_group(make_group(SLOT, rows=(make_row(2, version=3), one_reward)))
    with pytest.raises(WireError, match=r"rows\[0\]\.turn_ends: got \(1, 5\)"):
        encode_group(dataclasses.replace(GROUP, episodes=()))


def check_by_hand(group: Group) -> None:
    """Assert, token by token, all that a learner relies on."""
    assert sum(episode.rows for episode in group.episodes) == len(group.rows)
    rows = iter(group.rows)
    for episode in group.episodes:
        of_episode = [next(rows) for _ in range(episode.rows)]
        total = sum(reward for row in of_episode for reward in row.turn_rewards)
        assert 1 <= sum(len(row.turn_ends) for row in of_episode) <= episode.turns
        times = (episode.generate_s, episode.tool_s, episode.duration_s)
        assert all(map(math.isfinite, (*times, *episode.metrics.values())))
        for row in of_episode:
            assert math.isclose(row.reward, total, abs_tol=1e-3 * (1 + sum(map(abs, row.turn_rewards))))
            assert row.reward == of_episode[0].reward
            assert list(row.turn_ends) == sorted(set(row.turn_ends)) and row.turn_ends[-1] == len(row.tokens) - 1
            assert all(row.mask[end] for end in row.turn_ends)
            for logprob, is_trained in zip(row.logprobs, row.mask, strict=True):
                assert logprob == 0 if not is_trained else -math.inf < logprob <= 0


def test_mutated_bytes_of_episodes_give_a_valid_group_or_are_refused() -> None:
    rng = random.Random(0)
    refused = 0
    messages = [encode_group(random_episodes(SLOT, np.random.default_rng(i), newest=7)) for i in range(20)]
    for _ in range(10_000):
        data = bytearray(rng.choice(messages))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            check_by_hand(decode_group(bytes(data), LIMITS))
        except WireError:
            refused += 1
    assert 5000 < refused < 10_000


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARRAYS = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 7), max_size=6).map(lambda values: ints(*values)),
    st.lists(st.floats(), max_size=6).map(lambda values: floats(*values)),
)


@given(columns=st.dictionaries(st.sampled_from(sorted(GOOD["episodes"])), JUNK | ARRAYS, min_size=1, max_size=3))
@settings(max_examples=500, deadline=None)
def test_junk_in_place_of_columns_is_refused_with_an_error_of_the_wire(columns: dict[str, Any]) -> None:
    try:
        check_by_hand(decode_group(msgpack.packb({**GOOD, "episodes": {**GOOD["episodes"], **columns}}), LIMITS))
    except WireError as error:
        assert len(str(error)) < 500
