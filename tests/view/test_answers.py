"""Answers as the page shows them, and the texts of their tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from async_rl.view.answers import episode_facts, parts, sibling, turns, version_shares
from async_rl.view.run_files import RunFiles
from async_rl.view.token_texts import TokenTexts, called_tools, find_tokenizer
from tests.kit.view.run_dirs import (
    CHAT_PROMPT,
    CHAT_TURNS,
    RIGHT_TO_LEFT,
    make_chat,
    make_episodes,
    text_group,
    tokens_of,
    write_tokenizer,
)


def test_a_sibling_is_described_by_its_reward_length_and_versions(run_dir: Path) -> None:
    found = sibling(text_group(5, ["x", "right"], version=3), 1, TokenTexts(RunFiles(run_dir)))
    assert (found["reward"], found["tokens"], found["preview"]) == (1.0, 5, "right")
    assert found["versions"] == [(3, 2 / 5), (4, 3 / 5)]


@pytest.mark.parametrize("mask, number", [("111", 1), ("1101", 2), ("0110101", 3), ("000", 0)])
def test_turns_are_stretches_of_sampled_tokens(mask: str, number: int) -> None:
    row = text_group(0, ["a" * len(mask)]).rows[0]
    assert turns(dataclasses.replace(row, mask=np.array([each == "1" for each in mask]))) == number


def test_rows_of_one_episode_share_its_facts() -> None:
    found = [episode_facts(make_episodes(0), number) for number in range(3)]
    assert [(each["number"], each["row"], each["rows"], each["turns"]) for each in found if each] == [
        (0, 1, 1, 2), (1, 1, 2, 4), (1, 2, 2, 4),
    ]  # fmt: skip
    assert episode_facts(text_group(0, ["a"]), 0) is None
    assert version_shares(make_episodes(0, version=3).rows[0]) == [(3, 0.5), (4, 0.5)]


def test_one_version_has_all_tokens() -> None:
    assert version_shares(text_group(0, ["a"], version=6).rows[0]) == [(7, 1.0)]


def test_a_character_of_several_tokens_is_the_text_of_its_last_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    (tmp_path / "model").mkdir()
    names = ["<0xC3>", "<0xA9>", "a"]  # the two bytes of é, then a letter
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    texts = TokenTexts(RunFiles(tmp_path))
    assert texts.pieces([2, 0, 1, 2]) == ["a", "", "\N{LATIN SMALL LETTER E WITH ACUTE}", "a"]


def test_the_tokenizer_of_a_relative_model_path_is_found_above_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "project" / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("model:\n  path: models/tiny\n")
    assert find_tokenizer(RunFiles(run_dir)) is None
    write_tokenizer(tmp_path / "project" / "models" / "tiny")
    assert find_tokenizer(RunFiles(run_dir)) == tmp_path / "project/models/tiny/tokenizer.json"


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    texts = TokenTexts(RunFiles(tmp_path))
    assert "can't be read" in texts.missing
    assert (texts.decode([1]), texts.pieces([1])) == (None, None)


def test_messages_of_a_prompt_come_without_the_marks_of_its_template(run_dir: Path) -> None:
    texts = TokenTexts(RunFiles(run_dir))
    assert texts.messages(tokens_of(CHAT_PROMPT)) == ["You are a shop. Answer in one line.", "What does a pear cost?"]
    assert texts.messages(tokens_of("3 + 4 =")) == ["3 + 4 ="]
    assert texts.messages(tokens_of("<|im_start|>")) == []


def test_a_turn_names_the_tool_that_it_calls_and_a_result_begins_with_its_text(run_dir: Path) -> None:
    found = parts(make_chat(0).rows[0], TokenTexts(RunFiles(run_dir)))
    assert [(part["is_sampled"], part["calls"], part["said"]) for part in found] == [
        (True, ["price"], ""), (False, [], "3 euros a piece"), (True, [], ""),
    ]  # fmt: skip
    assert [part["to"] - part["from"] for part in found] == [len(tokens_of(turn)) for turn in CHAT_TURNS]


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


def test_an_episode_that_hung_says_where_its_time_went_and_what_it_called_last(run_dir: Path) -> None:
    texts = TokenTexts(RunFiles(run_dir))
    done, hung = (sibling(make_chat(0), number, texts) for number in (0, 1))
    assert (done["last_calls"], done["episode"]["rest_s"]) == ([], 0.0)
    assert (hung["last_calls"], hung["episode"]["rest_s"], hung["episode"]["end"]) == (["price"], 60.0, "timeout")


def test_characters_that_hide_or_turn_others_are_shown_by_their_code(run_dir: Path) -> None:
    texts = TokenTexts(RunFiles(run_dir))
    ids = tokens_of(f"a{RIGHT_TO_LEFT}b\nc")
    assert texts.decode(ids) == "a⟨U+202E⟩b\nc"
    assert texts.pieces(ids) == ["a", "⟨U+202E⟩", "b", "\n", "c"]
