"""Makes one answer ready for the page: its tokens with their texts, versions, logprobs and masks, as JSON columns."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import Any

import numpy as np

from async_rl.storage.log_ratios import AnswerLogRatios, Float16Array
from async_rl.types import Rollout, RolloutGroup
from async_rl.view.token_texts import TokenTexts, called_tools

PREVIEW_CHARS = 400


def answer_columns(
    group: RolloutGroup, number: int, texts: TokenTexts, trained_at: int | None, ratios: AnswerLogRatios | None
) -> dict[str, Any]:
    """Return one answer for the page: by name, lists with one entry a token (ids, versions, ...), and whole texts.

    Args:
        trained_at: version of the learner that trained on the group last; None: nobody did, staleness is not known.
        ratios: log importance ratios from that training; None: they are not known.
    """
    rollout = group.rollouts[number]
    ids = rollout.tokens.tolist()
    versions = rollout.versions.tolist()
    return {
        "ids": ids,
        "pieces": texts.pieces(ids),
        "versions": versions,
        "logprobs": [round(value, 5) for value in rollout.logprobs.tolist()],
        "mask": [int(value) for value in rollout.mask.tolist()],
        "log_ratios": _rounded(ratios.proximal) if ratios else None,
        "learner_log_ratios": _rounded(ratios.learner) if ratios and ratios.learner is not None else None,
        "turn_ends": list(rollout.turn_ends),
        "turn_rewards": list(rollout.turn_rewards),
        "old_kv": [int(value) for value in group.old_kv(rollout).tolist()],
        "trained_at": trained_at,
        "text": texts.decode(ids),
        "parts": parts(rollout, texts),
        "prompt_ids": group.prompt_tokens.tolist(),
        "prompt_text": texts.decode(group.prompt_tokens.tolist()),
    }


def parts(rollout: Rollout, texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the stretches of tokens that the model sampled, or did not, in order, each from token `from` up to `to`.

    `calls` are the tools that a sampled stretch calls, and `said` is the text of the others without a template's marks.
    """
    edges = [0, *(np.flatnonzero(np.diff(rollout.mask.astype(np.int8))) + 1).tolist(), len(rollout.tokens)]
    found = []
    for start, end in itertools.pairwise(edges):
        ids, is_sampled = rollout.tokens[start:end].tolist(), bool(rollout.mask[start])
        said = " · ".join(" ".join(message.split()) for message in texts.messages(ids) or [])
        found.append({
            "from": start, "to": end, "is_sampled": is_sampled,
            "calls": called_tools(texts.decode(ids) or "") if is_sampled else [],
            "said": "" if is_sampled else said[:PREVIEW_CHARS],
        })
    return found


def _rounded(values: Float16Array) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def sibling(group: RolloutGroup, number: int, texts: TokenTexts) -> dict[str, Any]:
    """Return the entry of answer `number` in the list of all the group's answers: reward, length, preview and so on."""
    rollout, episode = group.rollouts[number], episode_facts(group, number)
    text = texts.decode(rollout.tokens[:PREVIEW_CHARS].tolist())
    ran_out = episode is not None and episode["end"] == "timeout"
    turns_calls = [part["calls"] for part in parts(rollout, texts) if part["is_sampled"]] if ran_out else []
    return {
        "number": number,
        "reward": rollout.reward,
        "tokens": len(rollout.tokens),
        "finish_reason": rollout.finish_reason,
        "versions": version_shares(rollout),
        "turns": turns(rollout),
        "episode": episode,
        "last_calls": turns_calls[-1] if turns_calls else [],
        "masked": int((~rollout.mask).sum()),
        "mean_logprob": mean_logprob(rollout),
        "preview": text[:PREVIEW_CHARS] if text is not None else " ".join(map(str, rollout.tokens[:40].tolist())),
    }


def episode_facts(group: RolloutGroup, number: int) -> dict[str, Any] | None:
    """Return what is known of the episode that a rollout is part of, and which of its rows this is, from 1 on.

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


def version_shares(rollout: Rollout) -> list[tuple[int, float]]:
    """Return (version, share of the trained tokens) for each version that sampled some of them, oldest first."""
    trained = rollout.versions[rollout.mask] if rollout.mask.any() else rollout.versions
    versions, counts = np.unique(trained, return_counts=True)
    return [(int(version), int(count) / len(trained)) for version, count in zip(versions, counts, strict=True)]


def turns(rollout: Rollout) -> int:
    """Return the number of turns: stretches of sampled tokens with others, e.g. a tool's result, between them."""
    mask = rollout.mask.astype(np.int8)
    return int(mask[0]) + int((np.diff(mask) == 1).sum())


def mean_logprob(rollout: Rollout) -> float:
    """Return the mean behaviour logprob of the sampled tokens; nan without any."""
    return float(rollout.logprobs[rollout.mask].mean()) if rollout.mask.any() else math.nan
