"""Answers as the page shows them, and the texts of their tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from async_rl.view.answers import episode_facts, sibling, turns, version_shares
from async_rl.view.run_files import RunFiles
from async_rl.view.token_texts import TokenTexts, find_tokenizer
from tests.view.factories import make_episodes, make_group, write_tokenizer


def test_a_sibling_is_described_by_its_reward_length_and_versions(run_dir: Path) -> None:
    found = sibling(make_group(5, ["x", "right"], version=3), 1, TokenTexts(RunFiles(run_dir)))
    assert (found["reward"], found["tokens"], found["preview"]) == (1.0, 5, "right")
    assert found["versions"] == [(3, 2 / 5), (4, 3 / 5)]


@pytest.mark.parametrize("mask, number", [("111", 1), ("1101", 2), ("0110101", 3), ("000", 0)])
def test_turns_are_stretches_of_sampled_tokens(mask: str, number: int) -> None:
    rollout = make_group(0, ["a" * len(mask)]).rollouts[0]
    assert turns(dataclasses.replace(rollout, mask=np.array([each == "1" for each in mask]))) == number


def test_rows_of_one_episode_share_its_facts() -> None:
    found = [episode_facts(make_episodes(0), number) for number in range(3)]
    assert [(each["number"], each["row"], each["rows"], each["turns"]) for each in found if each] == [
        (0, 1, 1, 2), (1, 1, 2, 4), (1, 2, 2, 4),
    ]  # fmt: skip
    assert episode_facts(make_group(0, ["a"]), 0) is None
    assert version_shares(make_episodes(0, version=3).rollouts[0]) == [(3, 0.5), (4, 0.5)]


def test_one_version_has_all_tokens() -> None:
    assert version_shares(make_group(0, ["a"], version=6).rollouts[0]) == [(7, 1.0)]


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
