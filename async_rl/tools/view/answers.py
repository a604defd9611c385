"""Prepares the answers of a group for the page: token ids as text, and an answer as HTML with a span for each token."""

from __future__ import annotations

import itertools
import math
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from async_rl.base.models_and_data.hub import cached_folder
from async_rl.base.run_dir.log_ratio_file import RowLogRatios
from async_rl.base.types import Group, Row

PREVIEW_TOKENS = 400
LONGEST_SAID = 400
SHORT = 8
"""A shorter sequence of tokens that the model did not sample is not folded."""
RATIO_LEVELS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
RATIO_NAMES = ("below 0.5", "0.5 to 0.8", "0.8 to 0.95", "about 1", "1.05 to 1.25", "1.25 to 2", "above 2")
COLORS = 8
"""The number of colours for versions; after that they repeat: version start + 8 has the same colour as the start
version."""
TOKENIZER_FILE = "tokenizer.json"
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]"
)
"""Control characters except tabs and line ends, marks that change the direction of text, and spaces without width."""
_ROLE = re.compile(r"\A\s*(system|developer|user|assistant|model|tool|ipython|observation)\s*(\n|\Z)")
_TAG_LINE = re.compile(r"^[ \t]*</?\w+>[ \t]*$", re.MULTILINE)


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


def visible(text: str) -> str:
    """Replace each invisible character in a text by its code, e.g. ⟨U+202E⟩.

    Such characters hide what a model wrote, or change how other text is shown.
    """
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


class TokenTexts:
    """Decodes token ids of a run to text without invisible characters.

    Args:
        run_dir: the run's directory.
        model: the run's model.path.
    """

    def __init__(self, run_dir: Path, model: object) -> None:
        self._tokenizer: Any = None
        self._marks: re.Pattern[str] | None = None
        self.missing = ""
        """One sentence for the user if there is no tokenizer, and every text is its ids; else empty."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the run needs the cores more
        file = find_tokenizer(run_dir, model)
        if file is None:
            self.missing = (
                f"Token ids are shown without text: no {TOKENIZER_FILE} is in the run's folder model, in its "
                f"checkpoints, or at model.path, {model or 'which config.yaml does not tell'}. Copy the model's "
                f"{TOKENIZER_FILE} to {run_dir / 'model'}."
            )
            return
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))
            marks = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None
        except Exception as error:  # the library raises bare Exceptions for files that it can't read
            self.missing = f"Token ids are shown without text: {file} can't be read: {error}."

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence, special tokens included."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return visible(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def messages(self, ids: Sequence[int]) -> list[str]:
        """Split a part of a conversation into messages, without the marks of the chat template.

        Marks are the tokens that were added to the tokenizer's vocabulary, names of roles, and lines with nothing but
        a tag.
        """
        text = self.decode(ids)
        parts = self._marks.split(text) if self._marks else [text]
        said = (_TAG_LINE.sub("", _ROLE.sub("", part)).strip() for part in parts)
        return [message for message in said if message]

    def question(self, prompt: Sequence[int]) -> str:
        """Return the last message of a prompt: that is where prompts differ. Without messages: the whole text."""
        messages = self.messages(prompt)
        return messages[-1] if messages else self.decode(prompt)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds.

        If several tokens form a character, the last one has all of it, the others "".
        """
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in ids:
            try:
                pieces.append(visible(stream.step(self._tokenizer, token) or ""))
            except Exception:  # an id outside of the vocabulary, or bytes that never become a character
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append("\N{REPLACEMENT CHARACTER}")
        return pieces


def find_tokenizer(run_dir: Path, model: object) -> Path | None:
    """Return the tokenizer file of a run: its own copy, or the file of model.path; None if there is none.

    A relative model.path is searched in the working directory and in the folders above the run directory, a name on the
    hub in this host's cache.
    """
    folders = [run_dir / "model", *sorted((run_dir / "checkpoints").glob("step_*/model"), reverse=True)]
    if isinstance(model, str) and model:
        folders += [Path(model), *(above / model for above in run_dir.absolute().parents)]
        folders += filter(None, [cached_folder(model)])
    return next((folder / TOKENIZER_FILE for folder in folders if (folder / TOKENIZER_FILE).is_file()), None)
