"""Prepares the answers of a group for the page: their facts, and one answer as HTML with a span for each token."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from async_rl.base.run_dir.log_ratio_file import RowLogRatios
from async_rl.base.types import Group, Row
from async_rl.tools.view.token_texts import TokenTexts

PREVIEW_TOKENS = 400
LONGEST_SAID = 400
SHORT = 8
"""A shorter sequence of tokens that the model did not sample is not folded."""
RATIO_LEVELS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
RATIO_NAMES = ("below 0.5", "0.5 to 0.8", "0.8 to 0.95", "about 1", "1.05 to 1.25", "1.25 to 2", "above 2")
COLORS = 8
"""The number of colours for versions; after that they repeat: version start + 8 has the same colour as the start
version."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of an answer that were all sampled by the model in one turn, or all written by others."""

    title: str
    """The summary shown when the part is folded; empty: it is not folded."""
    is_turn: bool
    spans: Markup


def answer_parts(
    group: Group, number: int, texts: TokenTexts, trained_at: int | None, ratios: RowLogRatios | None, color: str
) -> list[Part]:
    """Return the parts of one answer, in order, with a span for each token. The span's data-facts describe the token.

    Args:
        number: the answer's row in the group.
        trained_at: the version of the learner's last training on the group; None: it was never trained on.
        ratios: log importance ratios from that training; None: not known.
        color: `version` or `ratio`, what the colours of the spans show.
    """
    row = group.rows[number]
    spans = _token_spans(group, row, texts, trained_at, ratios, color)
    edges = [0, *(np.flatnonzero(np.diff(row.mask.astype(np.int8))) + 1).tolist(), len(row.tokens)]
    rewards = dict(zip(row.turn_ends, row.turn_rewards, strict=True))
    is_one = len(edges) == 2
    parts, turn = [], 0
    for start, end in itertools.pairwise(edges):
        ids, is_turn = row.tokens[start:end].tolist(), bool(row.mask[start])
        turn += is_turn
        title = ""
        if is_turn and not is_one:
            title = f"turn {turn} · {end - start} tokens"
            title += f" · reward {rewards[end - 1]:.3f}" if end - 1 in rewards else ""
        elif not is_turn and end - start >= SHORT:
            said = " · ".join(" ".join(message.split()) for message in texts.messages(ids))[:LONGEST_SAID]
            title = f"{said} · {end - start} tokens that the model did not sample"
        parts.append(Part(title, is_turn, Markup("").join(spans[start:end])))
    return parts


def _token_spans(
    group: Group, row: Row, texts: TokenTexts, trained_at: int | None, ratios: RowLogRatios | None, color: str
) -> list[Markup]:
    ids, versions, logprobs = row.tokens.tolist(), row.versions.tolist(), row.logprobs.tolist()
    mask, old_kv = row.mask.tolist(), group.old_kv(row).tolist()
    log_ratios = ratios.proximal.tolist() if ratios else [math.nan] * len(ids)
    spans = []
    for at, piece in enumerate(texts.pieces(ids)):
        ratio = math.exp(log_ratios[at])
        is_trained = mask[at] and not (ratios and math.isnan(ratio))
        if color == "version":
            name = f"v{(versions[at] - group.start_version) % COLORS}" if mask[at] else "m0"
        else:
            name = "m0" if math.isnan(ratio) else f"r{bisect_right(RATIO_LEVELS, ratio)}"
        facts = f"token {at} · id {ids[at]} · " + (
            f"version {versions[at]} · logprob {logprobs[at]:.4f} ({math.exp(logprobs[at]):.2%})"
            if mask[at] else "not sampled by the model"
        )  # fmt: skip
        if trained_at is not None and mask[at]:
            facts += f" · staleness {trained_at - versions[at]}" if is_trained else " · masked"
            facts += "" if math.isnan(ratio) else f" · importance ratio {ratio:.4f}"
        facts += " · on KV of older weights" if old_kv[at] and mask[at] else ""
        shown = piece.replace("\n", "⏎\n").replace("\t", "⇥\t") or "·"
        spans.append(Markup(f'<span class="t {name}" data-facts="{facts}">{escape(shown)}</span>'))
    return spans


def legend(row: Row, start_version: int, trained_at: int | None, has_ratios: bool, color: str) -> list[tuple[str, str]]:
    """Return (CSS class, text) for each colour of an answer's tokens."""
    if color == "version":
        found = []
        for version, _ in version_shares(row):
            age = "" if trained_at is None else f", staleness {trained_at - version}"
            found.append((f"v{(version - start_version) % COLORS}", f"version {version}{age}"))
        return found if row.mask.all() else [*found, ("m0", "not sampled by the model")]
    if not has_ratios:
        why = "never trained on this answer" if trained_at is None else "recorded no ratios of this answer"
        return [("m0", f"The learner {why}.")]
    return [*((f"r{level}", name) for level, name in enumerate(RATIO_NAMES)), ("m0", "not trained on")]


def sibling(group: Group, number: int, texts: TokenTexts) -> dict[str, Any]:
    """Return the facts about one answer for the list of the group's answers."""
    row, versions = group.rows[number], version_shares(group.rows[number])
    facts = [f"{len(row.tokens)} tokens", row.finish_reason, *episode_facts(group, number)]
    facts.append(f"v{versions[0][0]}" + (f"-{versions[-1][0]}" if len(versions) > 1 else ""))
    return {
        "number": number, "reward": row.reward, "rewards": dict(row.rewards), "facts": " · ".join(facts),
        "versions": [((version - group.start_version) % COLORS, share) for version, share in versions],
        "preview": texts.decode(row.tokens[:PREVIEW_TOKENS].tolist())[:PREVIEW_TOKENS],
    }  # fmt: skip


def episode_facts(group: Group, number: int) -> list[str]:
    """Return facts about the episode of a row; [] if the episodes are plain answers to a question."""
    if not group.episodes:
        return []
    ends = list(itertools.accumulate(group.episode_rows))
    place = bisect_right(ends, number)
    facts = group.episodes[place]
    row = number - ends[place] + facts.rows + 1
    return [
        f"episode {place}" + (f", row {row} of {facts.rows}" if facts.rows > 1 else ""), _counted(facts.turns, "turn"),
        _counted(facts.tool_calls, "tool call"), f"{facts.duration_s:.2f} s ({facts.generate_s:.2f} s sampling, "
        f"{facts.tool_s:.2f} s tools)", *([] if facts.end == "done" else [f"ended by {facts.end}"]),
    ]  # fmt: skip


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def version_shares(row: Row) -> list[tuple[int, float]]:
    """Return (version, its share of the trained tokens), oldest version first."""
    trained = row.versions[row.mask] if row.mask.any() else row.versions
    versions, counts = np.unique(trained, return_counts=True)
    return [(int(version), int(count) / len(trained)) for version, count in zip(versions, counts, strict=True)]
