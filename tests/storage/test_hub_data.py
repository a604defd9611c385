"""Data sets of the Hugging Face hub: which files a name means, and the questions of a task that reads them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import pinned
from async_rl.base.models_and_data.hub import data_files
from async_rl.base.models_and_data.hub_names import find_data, hub_repos
from learner.models.tiny_model import character_tokenizer
from rollout_server.tasks.base import Task, open_task
from tests.kit.hub import HubServer, open_hub

GSM8K = "openai/gsm8k"
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: [socratic/train-*]
---
# Questions
"""
TRAIN = ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]


def parquet(*rows: dict[str, object]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def question(number: int) -> dict[str, object]:
    answer = f"It is {number} + 1 = {number + 1:,}.\n#### {number + 1:,}"
    return {"question": f"What is {number} + 1?", "answer": answer}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with open_hub() as hub:
        hub.add_dataset(GSM8K, {
            "README.md": CARD.encode(), TRAIN[0]: parquet(question(1), question(1233)), TRAIN[1]: parquet(question(3)),
            "main/test-00000-of-00001.parquet": parquet(question(4)),
            "socratic/train-00000-of-00001.parquet": parquet(question(5)),
        })
        hub.use(monkeypatch, tmp_path / "cache")
        yield hub


def files_of(name: str) -> list[str]:
    (repo,) = hub_repos(pinned(load_config(None, ["model.path=none", f"task.path={name}", "eval.num_prompts=0"])))
    return ["/".join(file.parts[-2:]) for file in data_files(repo)]


def task_of(path: str, eval_path: str) -> Task:
    config = load_config(None, ["model.path=none", f"task.path={path}", f"task.eval_path={eval_path}",
        "eval.num_prompts=4"])
    return open_task(pinned(config), character_tokenizer())


@pytest.mark.parametrize("form", ["", "datasets/"])
def test_a_config_and_a_split_mean_their_files_alone(hub: HubServer, form: str) -> None:
    assert files_of(f"hf://{form}{GSM8K}:main/train") == TRAIN
    assert hub.downloads == {"README.md": 1, **dict.fromkeys(TRAIN, 1)}


@pytest.mark.parametrize(("part", "files"), [
    (":test", ["main/test-00000-of-00001.parquet"]), (":socratic", ["socratic/train-00000-of-00001.parquet"]),
    ("@main:main/test", ["main/test-00000-of-00001.parquet"]), ("", TRAIN), (":main", TRAIN),
    ("/main/test-00000-of-00001.parquet", ["main/test-00000-of-00001.parquet"]), ("/main/train-*.parquet", TRAIN),
])  # fmt: skip
def test_a_name_leaves_out_what_is_clear(hub: HubServer, part: str, files: list[str]) -> None:
    assert files_of(f"hf://{GSM8K}{part}") == files


def test_held_out_prompts_are_of_the_split_test_unless_the_name_says_more(hub: HubServer) -> None:
    task = task_of(f"hf://{GSM8K}", f"hf://{GSM8K}")
    assert (task.num_prompts, [prompt.question.ground_truth for prompt in task.eval_prompts()]) == (3, ["5"])


def test_a_card_may_name_a_folder_or_cross_folders(hub: HubServer) -> None:
    card = "---\nconfigs:\n- config_name: a\n  data_dir: one\n- config_name: b\n  data_files: '**/*.jsonl'\n---\n"
    files = {"README.md": card.encode(), "one/x.jsonl": b"{}", "two/deep/y.jsonl": b"{}", "z.jsonl": b"{}"}
    commit = hub.add_dataset("some/forms", files)
    assert files_of("hf://some/forms:a") == ["one/x.jsonl"]
    assert files_of("hf://some/forms:b") == ["one/x.jsonl", "deep/y.jsonl", f"{commit}/z.jsonl"]


@pytest.mark.parametrize("name", [
    "hf://two/configs", f"hf://{GSM8K}:mian", f"hf://{GSM8K}/main/x.parquet", "hf://openai/gsm", "hf://gsm8k",
    "hf://no/data", "hf://old/card:main/train", "hf://some/images", "hf://some/images/a.png",
])  # fmt: skip
def test_a_name_that_means_no_files_or_several_splits_is_refused(hub: HubServer, name: str) -> None:
    hub.add_dataset("two/configs", {"README.md": CARD.replace("main", "plain").encode()})
    hub.add_dataset("no/data", {"notes.md": b""})
    hub.add_dataset("old/card", {"README.md": CARD.encode(), "data.parquet": b""})
    hub.add_dataset("some/images", {"README.md": b"---\nconfigs:\n- data_files: '*.png'\n---\n", "a.png": b""})
    with pytest.raises(ConfigError, match=r"^task\.path"):
        files_of(name)


def test_the_task_reads_gsm8k_as_it_is_on_the_hub(hub: HubServer) -> None:
    task = task_of(f"hf://{GSM8K}:main/train", f"hf://{GSM8K}:main/test")
    assert task.num_prompts == 3
    prompts = sorted((task.prompt(index) for index in range(3)), key=lambda prompt: prompt.data_row)
    assert [prompt.question.ground_truth for prompt in prompts] == ["2", "1234", "4"]
    assert "What is 1233 + 1?" in prompts[1].text and "#### " in prompts[1].text
    assert prompts[2].origin.startswith(f"row 2 of hf://{GSM8K}@") and prompts[2].origin.endswith(":main/train")
    assert prompts[2].question.solution == "It is 3 + 1 = 4.\n#### 4"
    assert [prompt.question.ground_truth for prompt in task.eval_prompts()] == ["5"]
    assert task.verify(prompts[1].question, "so it is\n#### 1,234") == 1.0


def test_a_data_set_without_a_card_has_the_splits_of_its_file_names(hub: HubServer) -> None:
    row = {"data_source": GSM8K, "prompt": [{"role": "user", "content": "3?"}], "reward_model": {"ground_truth": "3"}}
    rows = (json.dumps(row) + "\n").encode() * 5
    hub.add_dataset("some/math", {"data/train.jsonl": rows, "data/dev.jsonl": rows, "LICENSE": b""})
    task = task_of("hf://some/math", "hf://some/math:validation")
    assert (task.num_prompts, len(task.eval_prompts())) == (5, 4)


def test_a_name_is_pinned_at_its_commit() -> None:
    pinned_names = {
        "hf://o/n": "hf://o/n@abc", "hf://o/n:main/train": "hf://o/n@abc:main/train",
        "hf://datasets/o/n@v1/a/b.jsonl": "hf://datasets/o/n@abc/a/b.jsonl",
        "hf://o/n@refs/convert/parquet/m/0.parquet": "hf://o/n@abc/m/0.parquet",
    }
    repos = {name: find_data(name, "task.path") for name in pinned_names}
    assert {name: repo.at("abc") for name, repo in repos.items() if repo} == pinned_names
    assert find_data("train.parquet", "task.path") is None
