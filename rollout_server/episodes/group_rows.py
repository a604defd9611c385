"""Turns the episodes of a group into the rows that the learner trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from async_rl.base.types import EpisodeFacts, IntArray, Row
from rollout_server.episodes.conversation.rows import WholeRow, num_shared_tokens
from rollout_server.episodes.episode import Episode


class GroupRows(NamedTuple):
    """The tokens and facts of a group's episodes, as the fields of `Group` with these names."""

    prompt_tokens: IntArray  # [P]
    rows: tuple[Row, ...]
    episodes: tuple[EpisodeFacts, ...]
    left_out: tuple[str, ...]


def group_rows(episodes: Sequence[Episode], max_prompt_tokens: int, max_rows: int) -> GroupRows:
    """Return the rows of a group whose episodes have turns, the last `max_rows` of each episode.

    Args:
        episodes: at least one has rows. Those without are left out.
        max_prompt_tokens: the most tokens that become the prompt of the group.
    """
    played = [episode for episode in episodes if episode.rows]
    kept = [_last_rows(episode.rows, max_rows) for episode in played]
    num_prompt = num_shared_tokens([row for rows in kept for row in rows], max_prompt_tokens)
    rows = tuple(
        row for episode, rows in zip(played, kept, strict=True) for row in _rows(rows, num_prompt, episode.rewards)
    )
    facts = tuple(_facts(episode, len(rows)) for episode, rows in zip(played, kept, strict=True))
    return GroupRows(kept[0][0].tokens[:num_prompt], rows, facts, _left_out(episodes))


def _left_out(episodes: Sequence[Episode]) -> tuple[str, ...]:
    return tuple(episode.error for episode in episodes if not episode.rows)


def _last_rows(rows: Sequence[WholeRow], max_rows: int) -> Sequence[WholeRow]:
    """Return the last `max_rows` rows. Rewards of turns in the others are added to the first turn that is kept."""
    dropped, (first, *rest) = rows[:-max_rows], rows[-max_rows:]
    earned = sum(reward for row in dropped for reward in row.turn_rewards)
    reward, *later = first.turn_rewards
    return [replace(first, turn_rewards=(reward + earned, *later)), *rest]


def question_rows(episodes: Sequence[Episode], prompt_tokens: IntArray) -> GroupRows:
    """Return the rows of a group without turns: the answer of each episode to the question `prompt_tokens`."""
    rows = (
        _row(row, len(prompt_tokens), row.turn_rewards[0], episode.rewards)
        for episode in episodes for row in episode.rows
    )
    return GroupRows(prompt_tokens, tuple(rows), (), _left_out(episodes))


def _rows(rows: Sequence[WholeRow], num_prompt: int, rewards: Mapping[str, float]) -> Iterator[Row]:
    """Yield the rows of one episode, whose reward is the sum of the rewards of all turns that they train."""
    reward = float(sum(reward for row in rows for reward in row.turn_rewards))
    for row in rows:
        ends = tuple(end - num_prompt for end in row.turn_ends)
        yield _row(row, num_prompt, reward, rewards, ends, row.turn_rewards)


def _row(
    row: WholeRow, num_prompt: int, reward: float, rewards: Mapping[str, float],
    turn_ends: tuple[int, ...] = (), turn_rewards: tuple[float, ...] = (),
) -> Row:
    return Row(
        tokens=row.tokens[num_prompt:], logprobs=row.logprobs[num_prompt:], versions=row.versions[num_prompt:],
        mask=row.mask[num_prompt:], reward=reward, finish_reason=row.finish_reason,
        rewards=rewards, turn_ends=turn_ends, turn_rewards=turn_rewards,
    )  # fmt: skip


def _facts(episode: Episode, num_rows: int) -> EpisodeFacts:
    values, prefix = episode.metrics, "env/"
    return EpisodeFacts(
        rows=num_rows, turns=int(values["turns"]), tool_calls=int(values["tool_calls"]),
        generate_s=values["generate_s"], tool_s=values["tool_s"], duration_s=values["duration_s"], end=episode.end,
        metrics={key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)},
        error=episode.error,
    )  # fmt: skip
