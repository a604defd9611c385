"""Answers as the page shows them, and the texts of their tokens."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.run_dir.log_ratio_file import RowLogRatios
from async_rl.base.types import Group
from async_rl.tools.view.answers import TokenTexts, answer_parts
from tests.kit.view.run_dirs import (
    HOSTILE,
    RIGHT_TO_LEFT,
    text_group,
    tokens_of,
)


@pytest.fixture
def texts(run_dir: Path) -> TokenTexts:
    return TokenTexts(run_dir, None)


def spans_of(group: Group, texts: TokenTexts, color: str, ratios: RowLogRatios | None) -> list[tuple[str, str, str]]:
    """Return (class, facts, text) of each token of the first answer, which version 3 trained on."""
    html = "".join(part.spans for part in answer_parts(group, 0, texts, 3, ratios, color))
    return re.findall(r'<span class="t (\w+)" data-facts="(.*?)">(.*?)</span>', html, re.DOTALL)


def test_tokens_are_coloured_by_version_or_by_ratio_and_say_what_is_known_of_them(texts: TokenTexts) -> None:
    group = text_group(0, ["right answer"], version=1)
    ratios = RowLogRatios(np.array([np.nan] + [0.5] * 11, np.float16), None)
    spans = spans_of(group, texts, "version", ratios)
    assert [name for name, _, _ in spans] == ["v0"] * 6 + ["v1"] * 6
    assert "".join(text for _, _, text in spans) == "right answer"
    assert spans[0][1].endswith("version 1 · logprob -0.1000 (90.48%) · masked")
    assert spans[11][1].endswith("staleness 1 · importance ratio 1.6487 · on KV of older weights")
    assert [name for name, _, _ in spans_of(group, texts, "ratio", ratios)] == ["m0"] + ["r5"] * 11
    assert {name for name, _, _ in spans_of(group, texts, "ratio", None)} == {"m0"}


def test_html_in_an_answer_is_text(texts: TokenTexts) -> None:
    html = "".join(part.spans for part in answer_parts(text_group(0, [HOSTILE]), 0, texts, None, None, "version"))
    assert html.count("<span") == html.count("<") / 2 == len(HOSTILE)


def test_a_character_of_several_tokens_is_the_text_of_its_last_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    (tmp_path / "model").mkdir()
    names = ["<0xC3>", "<0xA9>", "a"]  # the two bytes of é, then a letter
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    assert TokenTexts(tmp_path, None).pieces([2, 0, 1, 2]) == ["a", "", "\N{LATIN SMALL LETTER E WITH ACUTE}", "a"]


def test_without_a_tokenizer_ids_are_shown_and_the_reason_is_named(tmp_path: Path) -> None:
    assert TokenTexts(tmp_path, "models/tiny").missing
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    texts = TokenTexts(tmp_path, None)
    assert texts.missing and (texts.decode([1, 2]), texts.pieces([1, 2])) == ("1 2", ["1 ", "2 "])


def test_characters_that_hide_or_turn_others_are_shown_by_their_code(texts: TokenTexts) -> None:
    ids = tokens_of(f"a{RIGHT_TO_LEFT}b\nc")
    assert texts.decode(ids) == "a⟨U+202E⟩b\nc"
    assert texts.pieces(ids) == ["a", "⟨U+202E⟩", "b", "\n", "c"]
