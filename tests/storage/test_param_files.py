"""Files that texts in params name: which texts count, and how they get other values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.seams import module_files
from async_rl.storage.file_copies import CopyCache
from async_rl.storage.file_sources import find_source, relocated
from async_rl.storage.param_files import param_files
from tests.kit.configs import make_config


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of each kind, and folders `train` and `corpus`."""
    monkeypatch.chdir(tmp_path)
    for name in ("table.json", "plain", "data/rows", "train/a.txt", "corpus/deep/b.txt", "run.sh"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("run.sh").chmod(0o755)
    Path("empty").mkdir()
    return tmp_path


def with_params(**params: Any) -> Config:
    return make_config(task={"name": "tests.extensions.task:Spelling", "params": params})


def test_texts_that_name_files_are_found_however_deep(here: Path) -> None:
    absolute = str(here / "data" / "rows")
    config = with_params(a="table.json", b=[{"c": "data/rows"}, ["./plain"]], d=absolute, e=1, f=None, g="table.json")
    assert [text for _, text in param_files(config)] == ["table.json", "data/rows", "./plain", absolute]


@pytest.mark.parametrize("text", [
    "train", "corpus", "plain", "data/none.json", "data", "corpus/deep", ".", "./", "../", "/", "", "a\0b.json",
    "x" * 5000 + "/", "run.sh", "./run.sh", "empty/", "~/table.json", "train.txt", "several\nlines.txt",
])  # fmt: skip
def test_a_text_that_only_looks_like_a_file_stays_as_it_is(text: str) -> None:
    notes: list[str] = []
    assert param_files(with_params(value=text), notes.append) == notes == []


def test_a_folder_is_sent_if_its_text_ends_in_a_slash() -> None:
    assert param_files(with_params(at="corpus/", split="train")) == [("task.params", "corpus/")]


def test_a_folder_that_is_too_large_is_not_sent_and_the_console_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_files, "PACKAGE_BYTES", 5)
    notes: list[str] = []
    assert param_files(with_params(at="corpus/"), notes.append) == []
    assert notes == [
        "caution: task.params names the folder corpus/, which has more than 64 MB or 5000 files and is not sent: every "
        "host needs it at that path"
    ]


def test_params_of_rewards_and_flags_of_servers_count_too() -> None:
    config = make_config(
        task={"rewards": ({"reward": "tests.extensions.reward:SPELLING", "params": {"table": "table.json"}},)},
        rollout={"engine": "sglang", "server_args": {"chat-template": "data/rows"}},
    )  # fmt: skip
    assert param_files(config) == [("task.rewards", "table.json"), ("rollout.server_args", "data/rows")]
    places = {("task.rewards", "table.json"): "/c/table.json", ("rollout.server_args", "data/rows"): "/c/rows"}
    moved = relocated(config, places)
    assert moved.task.rewards == (replace(config.task.rewards[0], params={"table": "/c/table.json"}),)
    assert moved.rollout.server_args == {"chat-template": "/c/rows"}


def test_on_a_host_with_copies_the_params_name_these(here: Path) -> None:
    config = with_params(table="table.json", more=[{"at": "corpus/"}, "table.json"], split="train", size=3)
    cache = CopyCache(here / "cache[1]")
    places = {}
    for key, text in param_files(config):
        source = find_source(key, text)
        copy = cache.begin(source, source.digests())
        for file in source.files:
            copy.write(file.name, 0, b"".join(source.pieces(file)))
        places[key, text] = source.named_in(copy.finish())
    params = relocated(config, places).task.params
    assert Path(params["table"]).read_text() == "table.json"
    assert Path(params["table"]).name == "table.json"  # a name or an ending may tell what the file is
    assert Path(params["more"][0]["at"], "deep", "b.txt").read_text() == "corpus/deep/b.txt"
    assert (params["more"][1], params["split"], params["size"]) == (params["table"], "train", 3)
