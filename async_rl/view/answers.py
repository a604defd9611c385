"""Makes one answer ready for the page: its tokens with their texts, versions, logprobs and masks, as JSON columns."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import Any

import numpy as np

from async_rl.storage.log_ratios import Float16Array, RowLogRatios
from async_rl.types import Group, Row
from async_rl.view.token_texts import TokenTexts, called_tools

PREVIEW_CHARS = 400


def answer_columns(
    group: Group, number: int, texts: TokenTexts, trained_at: int | None, ratios: RowLogRatios | None
) -> dict[str, Any]:
    """Return one answer for the page: by name, lists with one entry a token (ids, versions, ...), and whole texts.

    Args:
        trained_at: version of the learner that trained on the group last; None: nobody did, staleness is not known.
        ratios: log importance ratios from that training; None: they are not known.
    """
    row = group.rows[number]
    ids = row.tokens.tolist()
    versions = row.versions.tolist()
    return {
        "ids": ids,
        "pieces": texts.pieces(ids),
        "versions": versions,
        "logprobs": [round(value, 5) for value in row.logprobs.tolist()],
        "mask": [int(value) for value in row.mask.tolist()],
        "log_ratios": _rounded(ratios.proximal) if ratios else None,
        "learner_log_ratios": _rounded(ratios.learner) if ratios and ratios.learner is not None else None,
        "turn_ends": list(row.turn_ends),
        "turn_rewards": list(row.turn_rewards),
        "old_kv": [int(value) for value in group.old_kv(row).tolist()],
        "trained_at": trained_at,
        "text": texts.decode(ids),
        "parts": parts(row, texts),
        "prompt_ids": group.prompt_tokens.tolist(),
        "prompt_text": texts.decode(group.prompt_tokens.tolist()),
    }


def parts(row: Row, texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the stretches of tokens that the model sampled, or did not, in order, each from token `from` up to `to`.

    `calls` are the tools that a sampled stretch calls, and `said` is the text of the others without a template's marks.
    """
    edges = [0, *(np.flatnonzero(np.diff(row.mask.astype(np.int8))) + 1).tolist(), len(row.tokens)]
    found = []
    for start, end in itertools.pairwise(edges):
        ids, is_sampled = row.tokens[start:end].tolist(), bool(row.mask[start])
        said = " · ".join(" ".join(message.split()) for message in texts.messages(ids) or [])
        found.append({
            "from": start, "to": end, "is_sampled": is_sampled,
            "calls": called_tools(texts.decode(ids) or "") if is_sampled else [],
            "said": "" if is_sampled else said[:PREVIEW_CHARS],
        })
    return found


def _rounded(values: Float16Array) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def sibling(group: Group, number: int, texts: TokenTexts) -> dict[str, Any]:
    """Return the entry of answer `number` in the list of all the group's answers: reward, length, preview and so on."""
    row, episode = group.rows[number], episode_facts(group, number)
    text = texts.decode(row.tokens[:PREVIEW_CHARS].tolist())
    ran_out = episode is not None and episode["end"] == "timeout"
    turns_calls = [part["calls"] for part in parts(row, texts) if part["is_sampled"]] if ran_out else []
    return {
        "number": number,
        "reward": row.reward,
        "rewards": dict(row.rewards),
        "tokens": len(row.tokens),
        "finish_reason": row.finish_reason,
        "versions": version_shares(row),
        "turns": turns(row),
        "episode": episode,
        "last_calls": turns_calls[-1] if turns_calls else [],
        "masked": int((~row.mask).sum()),
        "mean_logprob": mean_logprob(row),
        "preview": text[:PREVIEW_CHARS] if text is not None else " ".join(map(str, row.tokens[:40].tolist())),
    }


def episode_facts(group: Group, number: int) -> dict[str, Any] | None:
    """Return what is known of the episode that a row is part of, and which of its rows this is, from 1 on.

    None: the group's episodes are plain answers to a question.
    """
    if not group.episodes:
        return None
    ends = list(itertools.accumulate(group.episode_rows))
    place = bisect_right(ends, number)
    facts = group.episodes[place]
    row = number - ends[place] + facts.rows + 1
    return {
        "number": place, "row": row, "rows": facts.rows, "turns": facts.turns, "tool_calls": facts.tool_calls,
        "generate_s": facts.generate_s, "tool_s": facts.tool_s, "duration_s": facts.duration_s, "end": facts.end,
        "rest_s": max(0.0, facts.duration_s - facts.generate_s - facts.tool_s),
    }  # fmt: skip


def version_shares(row: Row) -> list[tuple[int, float]]:
    """Return (version, share of the trained tokens) for each version that sampled some of them, oldest first."""
    trained = row.versions[row.mask] if row.mask.any() else row.versions
    versions, counts = np.unique(trained, return_counts=True)
    return [(int(version), int(count) / len(trained)) for version, count in zip(versions, counts, strict=True)]


def turns(row: Row) -> int:
    """Return the number of turns: stretches of sampled tokens with others, e.g. a tool's result, between them."""
    mask = row.mask.astype(np.int8)
    return int(mask[0]) + int((np.diff(mask) == 1).sum())


def mean_logprob(row: Row) -> float:
    """Return the mean behaviour logprob of the sampled tokens; nan without any."""
    return float(row.logprobs[row.mask].mean()) if row.mask.any() else math.nan
