"""Random groups of episodes of several turns, built token by token as a worker builds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from async_rl.base.messages.fields import Limits
from async_rl.base.types import EpisodeFacts, Group, Row, Slot

MAX_ROWS, MAX_ROW_TURNS, MAX_CONTEXT, MAX_REPLY = 3, 3, 3, 4
LIMITS = Limits(
    group_size=2, fewest_episodes=2, max_rows=2 * MAX_ROWS, max_turns=10, max_prompt_tokens=16, max_response_tokens=32
)
"""Every group of `random_episodes` is within them."""


def random_episodes(slot: Slot, rng: np.random.Generator, newest: int = -1, group_size: int = 2) -> Group:
    """A valid group. Its tokens have versions from the slot's to `newest`; about one in ten has no prompt.

    Some first rows begin with a reply. Sometimes an episode had one turn more than its rows train.
    """
    has_prompt = rng.random() < 0.9
    newest = max(newest, slot.start_version)
    rows, episodes = [], []
    for _ in range(group_size):
        of_episode = [_random_row(slot, rng, newest, has_prompt) for _ in range(_up_to(rng, MAX_ROWS))]
        reward = sum(reward for row in of_episode for reward in row.turn_rewards)
        rows += [replace(row, reward=reward) for row in of_episode]
        num_turns = sum(len(row.turn_ends) for row in of_episode)
        episodes.append(
            EpisodeFacts(
                rows=len(of_episode), turns=num_turns + int(rng.integers(0, 2)), tool_calls=int(rng.integers(0, 5)),
                generate_s=float(rng.exponential()), tool_s=float(rng.exponential()),
                duration_s=5 + float(rng.exponential()), end=str(rng.choice(["done", "length", "turns", "timeout"])),
                metrics={f"metric {i}": float(rng.normal()) for i in range(rng.integers(0, 3))},
                error=str(rng.choice(["", "all 4 turns are taken"])),
            )
        )
    return Group(
        group_id=slot.group_id, prompt_index=slot.prompt_index, start_version=slot.start_version, temperature=1.0,
        prompt_tokens=rng.integers(0, 100, _up_to(rng, 5) if has_prompt else 0, dtype=np.int32),
        rows=tuple(rows), duration_s=float(rng.exponential()), worker="rollout/0",
        keeps_kv=bool(rng.random() < 0.5), episodes=tuple(episodes), data_row=int(rng.integers(-1, 100)),
        left_out=("the agent raised KeyError: 'plum'",) * int(rng.integers(0, 3)),
    )  # fmt: skip


def _random_row(slot: Slot, rng: np.random.Generator, newest: int, may_begin_with_reply: bool) -> Row:
    mask: list[bool] = []
    turn_ends = []
    for turn in range(_up_to(rng, MAX_ROW_TURNS)):
        is_short = turn == 0 and may_begin_with_reply and rng.random() < 0.5
        mask += [False] * (0 if is_short else _up_to(rng, MAX_CONTEXT)) + [True] * _up_to(rng, MAX_REPLY)
        turn_ends.append(len(mask) - 1)
    size = len(mask)
    return Row(
        tokens=rng.integers(0, 2**31 - 1, size, dtype=np.int32),
        logprobs=np.where(mask, -rng.exponential(size=size), 0).astype(np.float32),
        versions=np.sort(rng.integers(slot.start_version, newest + 1, size)).astype(np.int32),
        mask=np.array(mask), reward=0.0, finish_reason=str(rng.choice(["stop", "length", "timeout"])),
        turn_ends=tuple(turn_ends), turn_rewards=tuple(rng.normal(size=len(turn_ends)).tolist()),
    )  # fmt: skip


def _up_to(rng: np.random.Generator, high: int) -> int:
    return int(rng.integers(1, high + 1))
