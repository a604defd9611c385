"""Data sets of the Hugging Face hub: which files a name means, and the questions of a task that reads them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.storage.hub import pinned
from async_rl.storage.hub_data import data_files, splits_of
from async_rl.storage.hub_names import find_data, hub_repos
from learner.models.tiny_model import character_tokenizer
from rollout_server.tasks.base import Task, open_task
from tests.kit.hub import HubServer, open_hub, use_hub

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


def parquet(*rows: dict[str, object]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def question(number: int) -> dict[str, object]:
    answer = f"It is {number} + 1 = {number + 1:,}.\n#### {number + 1:,}"
    return {"question": f"What is {number} + 1?", "answer": answer}


def verl_row(number: int) -> dict[str, object]:
    return {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"{number}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with open_hub() as hub:
        hub.add_dataset(GSM8K, {
            "README.md": CARD.encode(), "main/train-00000-of-00002.parquet": parquet(question(1), question(1233)),
            "main/train-00001-of-00002.parquet": parquet(question(3)),
            "main/test-00000-of-00001.parquet": parquet(question(4)),
            "socratic/train-00000-of-00001.parquet": parquet(question(5)),
        })
        hub.use(monkeypatch, tmp_path / "cache")
        yield hub


def files_of(name: str) -> list[str]:
    (repo,) = hub_repos(pinned(load_config(None, ["model.path=none", f"task.path={name}", "eval.size=0"])))
    return ["/".join(file.parts[-2:]) for file in data_files(repo)]


def task_of(path: str, eval_path: str) -> Task:
    config = load_config(None, ["model.path=none", f"task.path={path}", f"task.eval_path={eval_path}", "eval.size=4"])
    return open_task(pinned(config), character_tokenizer())


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        files_of(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", ["", "datasets/"])
def test_a_config_and_a_split_mean_their_files_alone(hub: HubServer, form: str) -> None:
    shards = ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]
    assert files_of(f"hf://{form}{GSM8K}:main/train") == shards
    assert hub.downloads == {"README.md": 1, **dict.fromkeys(shards, 1)}


@pytest.mark.parametrize(("part", "file"), [
    (":test", "main/test-00000-of-00001.parquet"), (":socratic", "socratic/train-00000-of-00001.parquet"),
    ("@main:main/test", "main/test-00000-of-00001.parquet"),
    ("/main/test-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
])  # fmt: skip
def test_a_name_leaves_out_what_is_clear(hub: HubServer, part: str, file: str) -> None:
    assert files_of(f"hf://{GSM8K}{part}") == [file]


def test_a_name_leaves_out_the_usual_config_and_split(hub: HubServer) -> None:
    train = ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]
    assert files_of(f"hf://{GSM8K}") == files_of(f"hf://{GSM8K}:main") == train
    task = task_of(f"hf://{GSM8K}", f"hf://{GSM8K}")
    assert (task.num_prompts, [prompt.question.ground_truth for prompt in task.eval_prompts()]) == (3, ["5"])


def test_the_default_of_a_card_is_the_usual_config(hub: HubServer) -> None:
    hub.add_dataset("some/data", {
        "README.md": CARD.replace("- config_name: socratic\n", "- config_name: socratic\n  default: true\n").encode(),
        **{f"{config}/train-00000-of-00001.parquet": parquet(question(1)) for config in ("main", "socratic")},
    })  # fmt: skip
    assert files_of("hf://some/data") == ["socratic/train-00000-of-00001.parquet"]


def test_a_name_that_could_mean_several_splits_is_refused_with_all_of_them(hub: HubServer) -> None:
    choices = [f"hf://{GSM8K}:{part}" for part in ("main/train", "main/test", "socratic/train")]
    hub.add_dataset("two/configs", {"README.md": CARD.replace("main", "plain").encode()})
    assert refusal("hf://two/configs").endswith("hf://two/configs:plain/train, hf://two/configs:plain/test, "
                                                "hf://two/configs:socratic/train")
    assert refusal(f"hf://{GSM8K}:mian").endswith(f"{', '.join(choices)}. It has no mian")
    assert "has no file main/x.parquet. It has README.md, main/test" in refusal(f"hf://{GSM8K}/main/x.parquet")
    assert "has no data set openai/gsm" in refusal("hf://openai/gsm")
    assert "hf://OWNER/NAME:CONFIG/SPLIT" in refusal("hf://gsm8k")


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


def test_the_task_reads_the_cache_without_the_hub(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = f"hf://{GSM8K}:main/train", f"hf://{GSM8K}:main/test"
    assert task_of(*names).num_prompts == 3
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert task_of(*names).num_prompts == 3
    with pytest.raises(ConfigError, match="the data set openai/gsm8k is not whole in this host's cache"):
        task_of(f"hf://{GSM8K}:socratic/train", names[1])


def test_a_data_set_in_the_schema_of_verl_needs_no_card(hub: HubServer) -> None:
    rows = "".join(json.dumps(verl_row(number)) + "\n" for number in range(5)).encode()
    hub.add_dataset("some/math", {"data/train.jsonl": rows, "data/test.jsonl": rows, "LICENSE": b""})
    task = task_of("hf://some/math:train", "hf://some/math:test")
    assert (task.num_prompts, len(task.eval_prompts())) == (5, 4)


def test_files_that_no_task_reads_are_refused(hub: HubServer) -> None:
    hub.add_dataset("some/text", {"README.md": b"---\nconfigs:\n- data_files: '*.csv'\n---\n", "a.csv": b""})
    assert "a task reads .parquet and .jsonl, got a.csv" in refusal("hf://some/text")
    hub.add_dataset("no/data", {"notes.txt": b""})
    assert "has no .parquet or .jsonl file. It has notes.txt" in refusal("hf://no/data")
    hub.add_dataset("old/card", {"README.md": CARD.encode(), "data.parquet": b""})
    assert "has none of the files that its card names" in refusal("hf://old/card:main/train")


def test_the_forms_of_a_card() -> None:
    names = ["a/x.parquet", "a/test.parquet", "b.jsonl", "train-0.jsonl", "my_validation.jsonl"]
    assert splits_of({}, names) == {"default": {
        "train": ["a/x.parquet", "b.jsonl", "train-0.jsonl"], "test": ["a/test.parquet"],
        "validation": ["my_validation.jsonl"],
    }}
    assert splits_of({"configs": [{"config_name": "c", "data_files": "b.jsonl"}]}, names) == {
        "c": {"train": ["b.jsonl"]}
    }
    assert splits_of({"configs": [{"config_name": "c", "data_dir": "a/"}]}, names) == {
        "c": {"test": ["a/test.parquet"], "train": ["a/x.parquet"]}
    }
    assert splits_of({"configs": [{"data_files": ["a/*", "b.jsonl"]}]}, names) == {
        "default": {"train": ["a/test.parquet", "a/x.parquet", "b.jsonl"]}
    }


@pytest.mark.parametrize(("pattern", "meant"), [
    ("data/*.parquet", ["data/a.parquet", "data/b1.parquet"]), ("data/?.parquet", ["data/a.parquet"]),
    ("data/**", ["data/a.parquet", "data/b1.parquet", "data/old/c.parquet"]), ("*", ["d.parquet"]),
    ("**/[!ab]*.parquet", ["d.parquet", "data/old/c.parquet"]), ("data/[ab]*", ["data/a.parquet", "data/b1.parquet"]),
    ("data/*/c.parquet", ["data/old/c.parquet"]), ("data/a.parquet", ["data/a.parquet"]), ("data/a", []),
])
def test_a_star_in_a_card_stays_within_its_folder(pattern: str, meant: list[str]) -> None:
    names = ["d.parquet", "data/a.parquet", "data/b1.parquet", "data/old/c.parquet"]
    card = {"configs": [{"data_files": [{"split": "train", "path": pattern}]}]}
    assert splits_of(card, names) == {"default": {"train": meant}}


@pytest.mark.parametrize(("word", "split"), [
    ("dev", "validation"), ("val", "validation"), ("valid", "validation"), ("eval", "test"), ("evaluation", "test"),
    ("testing", "test"), ("training", "train"), ("Dev", "validation"), ("device", "train"),
])
def test_the_usual_words_for_a_split_are_known(word: str, split: str) -> None:
    for name in (f"data/{word}.parquet", f"{word}/a.parquet", f"data/my-{word}-00000-of-00001.parquet"):
        assert splits_of({}, [name]) == {"default": {split: [name]}}


def test_a_name_is_pinned_at_its_commit() -> None:
    pinned_names = {
        "hf://o/n": "hf://o/n@abc", "hf://o/n:main/train": "hf://o/n@abc:main/train",
        "hf://datasets/o/n@v1/a/b.jsonl": "hf://datasets/o/n@abc/a/b.jsonl",
        "hf://o/n@refs/convert/parquet/m/0.parquet": "hf://o/n@abc/m/0.parquet",
    }
    repos = {name: find_data(name, "task.path") for name in pinned_names}
    assert {name: repo.at("abc") for name, repo in repos.items() if repo} == pinned_names
    assert find_data("train.parquet", "task.path") is None
