"""The task of configs/smollm2_cpu.yaml: its questions, and its reward by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from configs.json_lists import COUNTS, KINDS, WORKED, JsonLists, array_of_texts, graded, question
from tests.kit.engines.fakes import TOKENIZER

CONFIG = Path(__file__).parents[3] / "configs" / "smollm2_cpu.yaml"


def test_every_number_of_each_kind_is_asked_for_and_held_out_kinds_are_not_trained() -> None:
    task = JsonLists(load_config(CONFIG, ["eval.num_prompts=1000"]), TOKENIZER)
    trained = [task.train_question(position).messages[-1]["content"] for position in range(task.num_prompts)]
    held_out = [each.messages[-1]["content"] for each in task.eval_questions()]
    assert len(set(trained) | set(held_out)) == len(trained) + len(held_out) == len(KINDS) * len(COUNTS)
    kinds = {text.split("exactly ")[1].split(" as a JSON")[0][2:] for text in trained}
    assert kinds & {text.split("exactly ")[1].split(" as a JSON")[0][2:] for text in held_out} == set()
    assert len(JsonLists(load_config(CONFIG), TOKENIZER).eval_questions()) == 24


@pytest.mark.parametrize(("response", "reward"), [
    ('["oak", "elm", "fir"]', 1.0), (' ["oak", "elm", "fir"]\n', 1.0),
    ('["oak", "oak", "Oak "]', 0.1 + 0.3 + 0.3 + 0.3 / 3), ('["oak", "elm"]', 0.1 + 0.3 + 0.3 * 2 / 3 + 0.3),
    ('["red", "cow", "fir"]', 0.1 + 0.3 + 0.3 + 0.3 / 3),  # two are of the worked turns
    (json.dumps([str(number) for number in range(9)]), 0.1 + 0.3 + 0 + 0.3),  # three times as many
    ('["oak", "elm", "fir"', 0.0), ('[oak, elm, fir]', 0.1), ('[]', 0.1), ("[1, 2, 3]", 0.1), ('{"a": ["oak"]}', 0.0),
    ('Sure: ["oak", "elm", "fir"]', 0.0), ('["oak", "elm", "fir"] These are trees.', 0.0), ("", 0.0),
    ("[" * 10_000, 0.0),
])  # fmt: skip
def test_the_reward_grades_brackets_json_count_and_difference(response: str, reward: float) -> None:
    verdict = graded(question(3, "trees"), response)
    assert verdict.score == pytest.approx(reward)
    assert set(verdict.metrics) == {"bracketed", "json", "count", "distinct"}


def test_the_worked_turns_are_json_arrays_of_the_number_asked_for() -> None:
    for kind, things in WORKED:
        answer = question(len(things), kind).messages
        assert {"role": "assistant", "content": json.dumps(things)} in answer
        assert array_of_texts(json.dumps(things)) == things
