"""Answers as the page shows them, and the texts of their tokens."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.run_dir.log_ratio_file import RowLogRatios
from async_rl.base.types import Group
from async_rl.tools.view.answers import answer_parts, episode_facts, version_shares
from async_rl.tools.view.token_texts import TokenTexts, called_tools, find_tokenizer
from tests.kit.view.run_dirs import (
    CHAT_PROMPT,
    HOSTILE,
    RIGHT_TO_LEFT,
    make_chat,
    make_episodes,
    text_group,
    tokens_of,
    write_tokenizer,
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


def test_rows_of_one_episode_share_its_facts() -> None:
    found = [episode_facts(make_episodes(0), number)[0] for number in range(3)]
    assert found == ["episode 0", "episode 1, row 1 of 2", "episode 1, row 2 of 2"]
    assert episode_facts(make_chat(0), 1)[-1] == "ended by timeout"
    assert episode_facts(text_group(0, ["a"]), 0) == []
    assert version_shares(make_episodes(0, version=3).rows[0]) == [(3, 0.5), (4, 0.5)]


def test_turns_have_their_rewards_and_tools_and_what_others_said_is_folded(texts: TokenTexts) -> None:
    found = answer_parts(make_chat(0), 0, texts, None, None, "version")
    assert [(part.is_turn, part.title) for part in found] == [
        (True, "turn 1 · 53 tokens · calls price · reward 0.000"),
        (False, "3 euros a piece · 68 tokens that the model did not sample"),
        (True, "turn 2 · 18 tokens · reward 1.000"),
    ]  # fmt: skip
    (only,) = answer_parts(text_group(0, ["one answer"]), 0, texts, None, None, "version")
    assert only.title == ""


def test_a_character_of_several_tokens_is_the_text_of_its_last_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    (tmp_path / "model").mkdir()
    names = ["<0xC3>", "<0xA9>", "a"]  # the two bytes of é, then a letter
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    assert TokenTexts(tmp_path, None).pieces([2, 0, 1, 2]) == ["a", "", "\N{LATIN SMALL LETTER E WITH ACUTE}", "a"]


def test_the_tokenizer_of_a_relative_model_path_is_found_above_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "project" / "runs" / "mine"
    run_dir.mkdir(parents=True)
    assert find_tokenizer(run_dir, "models/tiny") is None
    write_tokenizer(tmp_path / "project" / "models" / "tiny")
    assert find_tokenizer(run_dir, "models/tiny") == tmp_path / "project/models/tiny/tokenizer.json"


def test_without_a_tokenizer_ids_are_shown_and_the_reason_is_named(tmp_path: Path) -> None:
    assert TokenTexts(tmp_path, "models/tiny").missing
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    texts = TokenTexts(tmp_path, None)
    assert texts.missing and (texts.decode([1, 2]), texts.pieces([1, 2])) == ("1 2", ["1 ", "2 "])


def test_messages_of_a_prompt_come_without_the_marks_of_its_template(texts: TokenTexts) -> None:
    assert texts.messages(tokens_of(CHAT_PROMPT)) == ["You are a shop. Answer in one line.", "What does a pear cost?"]
    assert texts.question(tokens_of(CHAT_PROMPT)) == "What does a pear cost?"
    assert texts.question(tokens_of("3 + 4 =")) == "3 + 4 ="
    assert texts.messages(tokens_of("<|im_start|>")) == []


@pytest.mark.parametrize(
    "text, tools",
    [
        ('<tool_call>\n{"name": "a.b", "x": {}}\n</tool_call>\n<tool_call>{"name":"c"}</tool_call>', ["a.b", "c"]),
        ('{"arguments": 1, "name": "search"}', ["search"]), ('<|python_tag|>{"type": "f", "name": "f"}', ["f"]),
        ("<tool_call>get_price\n<arg_key>item</arg_key>", ["get_price"]), ("", []),
        ('My {"name": "a"} is no call.', []),
    ],
)  # fmt: skip
def test_tools_are_named_in_the_formats_of_the_model_families(text: str, tools: list[str]) -> None:
    assert called_tools(text) == tools


def test_characters_that_hide_or_turn_others_are_shown_by_their_code(texts: TokenTexts) -> None:
    ids = tokens_of(f"a{RIGHT_TO_LEFT}b\nc")
    assert texts.decode(ids) == "a⟨U+202E⟩b\nc"
    assert texts.pieces(ids) == ["a", "⟨U+202E⟩", "b", "\n", "c"]
