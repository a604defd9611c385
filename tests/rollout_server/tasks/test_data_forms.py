"""Prompts in the forms that people have: other columns, several files with weights, globs, saved folders."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import ColumnsConfig, DataConfig
from async_rl.base.errors import ConfigError
from tests.kit.data_files import opened, sums, written

CHAT = [{"role": "user", "content": "What is 8 * 9?"}]


@pytest.mark.parametrize(("row", "expected"), [
    ({"data_source": "sums", "prompt": CHAT, "reward_model": {"ground_truth": "72"}, "ability": "math",
      "extra_info": {"answer": "It is 72.", "index": 3}},
     ("72", "It is 72.", "sums", {"answer": "It is 72.", "index": 3})),
    ({"prompt": CHAT, "answer": "72", "level": 2}, ("72", "", "rows", {"level": 2})),
    ({"prompt": "What is 8 * 9?"}, (None, "", "rows", {})),
    ({"question": "What is 8 * 9?", "answer": "72", "info": '{"level": 2}', "task": "sums", "example_id": 0},
     ("72", "", "sums", {"level": 2, "example_id": 0})),
    ({"question": "What is 8 * 9?", "answer": "72"}, ("72", "", "rows", {})),
], ids=["verl", "trl", "trl-without-reference", "verifiers", "question-and-answer"])  # fmt: skip
def test_the_schemas_of_peers_are_known(tmp_path: Path, row: dict[str, Any], expected: tuple[Any, ...]) -> None:
    question = opened(written(tmp_path / "rows.jsonl", [row])).prompt(0).question
    assert question.messages == tuple(CHAT)
    assert (question.ground_truth, question.solution, question.source, question.extra) == expected


def test_columns_of_any_name_are_taken_and_the_rest_is_extra(tmp_path: Path) -> None:
    row = {"problem": "8 * 9?", "gold": {"value": "72"}, "kind": "sums", "worked": "8 * 9 = 72", "level": 2}
    path = written(tmp_path / "rows.jsonl", [row])
    columns = {"prompt": "problem", "reference": "gold.value", "source": "kind", "solution": "worked"}
    task = opened(path, columns=ColumnsConfig(**columns))
    question = task.prompt(0).question
    assert question.messages == ({"role": "user", "content": "8 * 9?"},)
    assert (question.ground_truth, question.solution, question.source) == ("72", "8 * 9 = 72", "sums")
    assert question.extra == {"level": 2} and task.cautions == []
    with pytest.raises(ConfigError, match=r"answer.*task\.columns\.reference"):
        opened(path, columns=ColumnsConfig(prompt="problem", reference="answer"))


def test_each_source_may_have_columns_of_its_own(tmp_path: Path) -> None:
    known = written(tmp_path / "known.jsonl", [{"question": "1 + 1?", "answer": "2", "id": 7}])
    other = written(tmp_path / "other.jsonl", [{"problem": "2 + 2?", "solution": "4"}])
    named = {"prompt": "problem", "reference": "solution"}
    both = [known, {"path": other, "columns": named}]
    task = opened(both, eval_path=both[::-1], eval_size=2, shuffle=False)
    questions = [[each.question for each in some] for some in ([task.prompt(0), task.prompt(1)], task.eval_prompts())]
    trained, held_out = [[(q.messages[0]["content"], q.ground_truth) for q in some] for some in questions]
    assert trained == held_out[::-1] == [("1 + 1?", "2"), ("2 + 2?", "4")]
    assert questions[0][0].extra == {"id": 7} and questions[0][1].extra == {}
    keys = ("task.path[0].columns", "task.eval_path[1].columns")
    assert [[each for each in task.cautions if key in each and "known.jsonl" in each] for key in keys] == [
        [each] for each in task.cautions if ".columns" in each
    ]  # the columns that were guessed
    common = opened([{"path": known, "columns": {"prompt": "question"}}, other], columns=ColumnsConfig(**named))
    assert sorted(common.prompt(i).question.ground_truth for i in range(2)) == ["2", "4"]


def test_a_system_prompt_comes_before_the_messages_and_counts_for_their_length(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", sums("a", 1))
    prompt = opened(path, system_prompt="Be brief.").prompt(0)
    assert prompt.text == "Be brief.\na0?<sep>" and prompt.question.messages[0]["role"] == "system"
    with pytest.raises(ConfigError, match=r"task\.max_prompt_tokens"):
        opened(path, system_prompt="Be brief.", max_prompt_tokens=8)
    own = written(tmp_path / "own.jsonl", [{"prompt": [{"role": "system", "content": "Sum."}, *CHAT], "answer": "72"}])
    with pytest.raises(ConfigError, match=r"^task\.system_prompt"):
        opened(own, system_prompt="Be brief.")


@pytest.mark.parametrize("weights", [(0.5, 1.0), (0.25, 3.0), (0.001, 1.0)])
def test_the_weights_of_files_say_how_often_their_rows_come_in_an_epoch(
    tmp_path: Path, weights: tuple[float, float]
) -> None:
    sizes = (8, 4)
    data = tuple(
        DataConfig(path=written(tmp_path / f"{name}.jsonl", sums(name, size)), weight=weight)
        for name, size, weight in zip("ab", sizes, weights, strict=True)
    )
    task = opened(data)
    per_epoch = [max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True)]
    assert task.num_prompts == sum(per_epoch)
    epochs = [[task.prompt(e * task.num_prompts + i).text for i in range(task.num_prompts)] for e in range(8)]
    for epoch in epochs:
        assert [sum(text.startswith(name) for text in epoch) for name in "ab"] == per_epoch
    times = Counter(text for epoch in epochs for text in epoch)
    for name, size, count in zip("ab", sizes, per_epoch, strict=True):
        of_file = [times[f"{name}{i}?<sep>"] for i in range(size)]
        assert max(of_file) - min(of_file) <= 1 and sum(of_file) == 8 * count, "every row comes as often as the others"
    assert epochs[0] != epochs[1]
    rows = {task.prompt(i).text: (task.prompt(i).data_row, task.prompt(i).origin) for i in range(task.num_prompts)}
    assert all(row == int(text[1]) + 8 * (text[0] == "b") for text, (row, _) in rows.items())
    assert all(origin == f"row {text[1]} of {tmp_path}/{text[0]}.jsonl" for text, (_, origin) in rows.items())


def test_a_folder_that_datasets_has_saved_is_read(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list(sums("a", 5))
    whole.save_to_disk(tmp_path / "saved", num_shards=2)
    task = opened(str(tmp_path / "saved"), shuffle=False)
    assert [task.prompt(i).text for i in range(5)] == [f"a{i}?<sep>" for i in range(5)]
    whole.select([4, 1]).save_to_disk(tmp_path / "some")
    some = opened(str(tmp_path / "some"), shuffle=False)
    assert [some.prompt(i).text for i in range(2)] == ["a4?<sep>", "a1?<sep>"]
    datasets.DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match=r"/splits/train.*/splits/test"):
        opened(str(tmp_path / "splits"))


@pytest.mark.parametrize("name", ["mine", "openai/gsm8k", "none-*.jsonl"])
def test_a_name_without_files_of_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    written(tmp_path / "mine" / "a.jsonl", sums("a", 1))  # a glob would name it
    with pytest.raises(ConfigError):
        opened(name)


@pytest.mark.parametrize(("name", "content"), [
    ("a.csv", "\ufeffprompt,answer,note\r\n\"a, \"\"b\"\"?\",007,2024-05-01\r\n"),
    ("a.json", ' [{"prompt": "a, \\"b\\"?", "answer": "007", "note": "2024-05-01"}]'),
    ("a.jsonl", '{"prompt": "a, \\"b\\"?", "answer": "007", "note": "2024-05-01"}\n'),
])  # fmt: skip
def test_texts_that_look_like_dates_and_numbers_stay_texts(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    question = opened(str(tmp_path / name)).prompt(0).question
    assert question.messages[0]["content"] == 'a, "b"?'
    assert (question.ground_truth, question.extra) == ("007", {"note": "2024-05-01"})


def test_several_held_out_files_have_names_and_equal_shares(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", sums("t", 3))
    paths = [written(tmp_path / f"{name}.jsonl", sums(name, size)) for name, size in (("a", 9), ("b", 2))]
    task = opened(train, eval_path=[paths[0], {"path": paths[1], "name": "hard"}], eval_size=6)
    found = [(prompt.source, prompt.text[:2], prompt.origin) for prompt in task.eval_prompts()]
    assert [each[:2] for each in found] == [
        ("a", "a0"), ("a", "a1"), ("a", "a2"), ("a", "a3"), ("hard", "b0"), ("hard", "b1")
    ]
    assert found[4][2] == f"row 0 of {paths[1]}"
    with pytest.raises(ConfigError, match=r"^task\.eval_path"):
        opened(train, eval_path=[paths[0], {"path": paths[1], "name": "a"}], eval_size=6)


def test_repeated_prompts_and_held_out_prompts_that_are_trained_on_are_told(tmp_path: Path) -> None:
    """Prompts that differ in case and white space count as the same."""
    def rows(*prompts: Any) -> list[dict[str, Any]]:
        return [{"prompt": prompt, "answer": "1"} for prompt in prompts]

    train = written(tmp_path / "train.jsonl", rows("What is 1?", " what  is\n1? ", "What is 2?"))
    same = [{"role": "user", "content": "WHAT IS 2?"}]
    held_out = written(tmp_path / "one.jsonl", rows("Whatis 1?", same, "New?"))
    again = written(tmp_path / "again.jsonl", rows("new?"))
    told = [each for each in opened(train, eval_path=[held_out, again], eval_size=4).cautions if " of " in each]
    assert sorted(re.findall(r"^(task\.\w+): (\d of \d)", "\n".join(told), re.MULTILINE)) == [
        ("task.eval_path", "1 of 3"), ("task.eval_path", "1 of 4"), ("task.path", "1 of 3")
    ]  # held-out ones of one.jsonl that are trained on, held-out ones twice, trained ones twice
    system = [{"role": "system", "content": "What is 2?"}, {"role": "user", "content": "Now."}]
    other = written(tmp_path / "other.jsonl", rows(system, "Now."))
    assert not any(re.search(r"\d of \d", each) for each in opened(other, eval_path=train, eval_size=1).cautions)
