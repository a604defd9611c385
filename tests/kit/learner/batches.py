"""Batches and micro-batches, importable by the processes that tests start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.base.types import Batch, EpisodeFacts, Row, Support
from learner.packing import ForwardInputs, MicroBatch, MiniBatch, ResponseTokens
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.models import VOCAB


def make_batch(
    seed: int = 0, version: int = 0, groups: int = 3, group_size: int = 4, temperature: float = 0.8
) -> Batch:
    """Random prompts of 2..12 and rows of 1..9 tokens, a fifth of them not trained, but the last one always is.

    Behaviour logprobs are near a uniform policy's.
    """
    rng = np.random.default_rng(seed)
    made = []
    for index in range(groups):
        rows = []
        for _ in range(group_size):
            length = int(rng.integers(1, 10))
            tokens, logprobs = rng.integers(3, VOCAB, length), rng.normal(-3, 0.7, length)
            row = make_row(tokens, logprobs, float(rng.random()), version)
            row.mask[:-1] = rng.random(length)[:-1] >= 0.2
            row.logprobs[~row.mask] = 0
            rows.append(row)
        prompt = rng.integers(3, VOCAB, int(rng.integers(2, 13)))
        made.append(make_group(index, prompt, rows, version, temperature=temperature))
    return batch_of(*made, version=version)


def with_supports(batch: Batch, seed: int = 0) -> Batch:
    """The batch with a random support of each trained token, from itself alone to the whole vocabulary."""
    rng = np.random.default_rng(seed)

    def supported(row: Row) -> Row:
        sizes = np.where(row.mask, rng.integers(1, VOCAB, len(row.tokens), endpoint=True), 0)
        sets = [
            {int(token), *rng.choice(VOCAB, size, replace=False).tolist()} if size else ()
            for token, size in zip(row.tokens, sizes, strict=True)
        ]
        return replace(row, support=Support.of(sets))

    groups = [replace(group, rows=tuple(map(supported, group.rows))) for group in batch.groups]
    return replace(batch, groups=tuple(groups))


def make_routed_batch(layers: int, experts: int, chosen: int) -> Batch:
    """The batch of `make_batch` with random experts for every token. Answers to a question share those of the prompt,
    but for the second answer to the second question.
    """
    rng = np.random.default_rng(5)
    batch, groups = make_batch(), []

    def draw(tokens: int) -> np.ndarray:
        return rng.random((tokens, layers, experts)).argsort(-1)[..., :chosen].astype(np.uint8)

    for index, group in enumerate(batch.groups):
        of_prompt, rows = draw(len(group.prompt_tokens)), []
        for number, row in enumerate(group.rows):
            other = draw(len(of_prompt)) if (index, number) == (1, 1) else of_prompt
            rows.append(replace(row, routing=np.concatenate([other, draw(len(row.tokens) - 1)])))
        groups.append(replace(group, rows=tuple(rows)))
    return replace(batch, groups=tuple(groups))


def make_turns_row(text: str, turn_rewards: Sequence[float], reward: float, version: int = 0) -> Row:
    """A row of an episode. Each character is a token: `r` of a reply, `R` its last one, `.` not trained."""
    return replace(
        make_row([3 + i % 20 for i in range(len(text))], [-1.0 * (c != ".") for c in text], reward, version),
        mask=np.array([c != "." for c in text]),
        turn_ends=tuple(i for i, c in enumerate(text) if c == "R"),
        turn_rewards=tuple(turn_rewards),
    )


def make_episodes(rows: Sequence[int], turns: int = 1) -> tuple[EpisodeFacts, ...]:
    """Episodes of so many rows each."""
    facts = EpisodeFacts(rows=1, turns=turns, tool_calls=0, generate_s=0.5, tool_s=0.0, duration_s=1.0, end="done")
    return tuple(replace(facts, rows=count) for count in rows)


def make_episode_batch(seed: int = 0, is_split: bool = True) -> Batch:
    """Groups of three random episodes of one to three turns; the first group has no prompt.

    If it is split, each episode of several turns has a row for each turn, which begins with the earlier turns. The
    conversations, rewards and behaviour logprobs are the same in either case.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for index, num_prompt_tokens in enumerate((0, 3, 6)):
        rows, counts = [], []
        for _ in range(3):
            text, rewards = "", rng.random(int(rng.integers(1, 4))).tolist()
            for _ in rewards:
                text += "." * int(rng.integers(1, 3)) + "r" * int(rng.integers(0, 3)) + "R"
            whole = replace(
                make_turns_row(text, rewards, sum(rewards)), tokens=rng.integers(3, VOCAB, len(text)).astype(np.int32)
            )
            whole.logprobs[whole.mask] = rng.normal(-3, 0.7, int(whole.mask.sum()))
            parts = turn_rows(whole) if is_split else [whole]
            rows += parts
            counts.append(len(parts))
        group = make_group(index, rng.integers(3, VOCAB, num_prompt_tokens), rows, temperature=0.8)
        groups.append(replace(group, episodes=make_episodes(counts)))
    return batch_of(*groups)


def turn_rows(whole: Row) -> list[Row]:
    """The row as one row for each of its turns."""
    rows, start = [], 0
    for end, reward in zip(whole.turn_ends, whole.turn_rewards, strict=True):
        mask = whole.mask[: end + 1] & (np.arange(end + 1) >= start)
        rows.append(replace(
            whole, tokens=whole.tokens[: end + 1], logprobs=np.where(mask, whole.logprobs[: end + 1], 0),
            versions=whole.versions[: end + 1], mask=mask, turn_ends=(end,), turn_rewards=(reward,),
        ))  # fmt: skip
        start = end + 1
    return rows


def make_response(lengths: Sequence[int], **given: Any) -> ResponseTokens:
    """Tokens of rows of these lengths, float64; all trained, of staleness 0 and advantage 0 unless given."""
    n = sum(lengths)
    zeros = torch.zeros(n, dtype=torch.float64)
    values: dict[str, Any] = {
        "behaviour": zeros, "trained": torch.ones(n).bool(), "comparable": zeros.bool(), "old_kv": zeros.bool(),
        "staleness": zeros.long(), "advantages": zeros,
        "rows": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        "places": torch.arange(n), "rewards": torch.zeros(n),
    } | given  # fmt: skip
    counted = torch.zeros(len(lengths)).index_add(0, values["rows"], values["trained"].float())
    return ResponseTokens(lengths=tuple(lengths), **{"counted": counted} | values)


def make_micro(response: ResponseTokens, **at_start: Tensor) -> MicroBatch:
    """A micro-batch for the loss alone: its forward inputs are empty."""
    nothing = torch.zeros(0).long()
    inputs = ForwardInputs(
        tokens=nothing[None], segments=None, positions=None, where=nothing, targets=nothing, temperature=nothing
    )
    return MicroBatch(inputs=inputs, response=response, rows=(), **at_start)


def make_minibatch(*micro_batches: MicroBatch) -> MiniBatch:
    return MiniBatch(micro_batches, num_tokens=1, normaliser=1.0)
