"""Copies of a driver's files: what belongs to them, how hosts compare theirs, and the cache that holds copies."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest

from async_rl.errors import ConfigError
from async_rl.storage import file_copies, file_sources
from async_rl.storage.file_copies import CopyCache, awaits_push, default_root
from async_rl.storage.file_sources import (
    FileSource,
    find_modules,
    find_source,
    likeness,
    local_names,
    relocated,
)
from async_rl.storage.model_folder import end_tokens, load_tokenizer
from async_rl.storage.row_files import files_of, rows_of
from rollout_server.engines.vllm.server.checkpoint_tensors import checkpoint_shapes
from tests.kit.configs import make_config
from tests.kit.models import save_tiny_model


@pytest.fixture
def cache(tmp_path: Path) -> CopyCache:
    return CopyCache(tmp_path / "cache")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    (tmp_path / "model" / "optimizer.pt").write_bytes(b"of no use")
    return tmp_path / "model"


def copied(cache: CopyCache, source: FileSource, digests: Sequence[str] | None = None) -> Path:
    """The place of a new copy, written in pieces as they come from the driver."""
    copy = cache.begin(source, digests or source.digests())
    for file in source.files:
        offset = 0
        for piece in source.pieces(file):
            copy.write(file.name, offset, piece)
            offset += len(piece)
    return copy.finish()


def test_a_copy_without_weights_has_all_else_that_a_server_reads(cache: CopyCache, model: Path) -> None:
    source = find_source("model.path", str(model)).without_weights()
    place = copied(cache, source)
    assert not list(place.glob("*.safetensors")) and not (place / "optimizer.pt").exists()
    assert load_tokenizer(place).get_vocab() == load_tokenizer(model).get_vocab()
    assert end_tokens(str(place)) == end_tokens(str(model))
    assert awaits_push(str(place)) and not awaits_push(str(model))
    assert checkpoint_shapes(place) == checkpoint_shapes(model)  # of which vLLM's servers expect each push


def test_a_copy_with_weights_has_them_bit_by_bit(
    cache: CopyCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sources, "PIECE_BYTES", 10_000)
    place = copied(cache, find_source("model.path", str(model)))
    for name in ("model.safetensors", "config.json"):
        assert (place / name).read_bytes() == (model / name).read_bytes()
    assert not awaits_push(str(place))


def test_prompts_of_a_copy_are_the_same_rows_in_the_same_order(
    cache: CopyCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name in (("b", "1"), ("a", "2"), ("a", "10")):
        (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / folder / f"part-{name}.jsonl").write_text(json.dumps({"prompt": folder + name}) + "\n")
    (tmp_path / "data" / "notes.txt").write_text("no prompts")
    (tmp_path / "data[1].jsonl").write_text('{"prompt": "a name with brackets"}\n')
    (tmp_path / "saved").mkdir()
    table = pyarrow.table({"prompt": ["x", "y"]})
    with pyarrow.ipc.new_stream(str(tmp_path / "saved" / "rows.arrow"), table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "rows.arrow"}]}))
    monkeypatch.chdir(tmp_path)

    def prompts(path: str) -> list[str]:
        rows = [rows_of(file, lambda names: names).rows for file in files_of(path, "task.path")]
        return [row["prompt"] for found in rows for row in found]

    for path, count in (
        ("data/*/part-*.jsonl", 3), ("data/**/*1*.jsonl", 2), ("data/a/part-2.jsonl", 1), ("data[1].jsonl", 1),
        ("saved", 2), (str(tmp_path / "sav*"), 2),
    ):
        source = find_source("task.path", path)
        named = source.named_in(copied(cache, source))
        assert named.startswith(str(tmp_path / "cache"))
        assert prompts(named) == prompts(path)
        assert len(prompts(path)) == count
        assert Path(named).stem == Path(path).stem  # by which held-out results are named


def test_a_copy_is_found_by_its_contents_until_a_file_of_it_is_gone(cache: CopyCache, model: Path) -> None:
    source = find_source("model.path", str(model))
    assert cache.find(source, source.digests()) is None
    place = copied(cache, source)
    elsewhere = replace(source, path="another/path")
    assert cache.find(elsewhere, source.digests()) == place
    assert cache.find(source.without_weights(), source.without_weights().digests()) is None
    (place / "config.json").unlink()
    assert cache.find(source, source.digests()) is None
    assert copied(cache, source) == place
    assert cache.find(source, source.digests()) == place


def test_two_that_make_the_same_copy_at_once_have_one(cache: CopyCache, model: Path, tmp_path: Path) -> None:
    source = find_source("model.path", str(model)).without_weights()
    slow = cache.begin(source, source.digests())
    place = copied(cache, source)
    for file in source.files:
        slow.write(file.name, 0, b"".join(source.pieces(file)))
    assert slow.finish() == place
    assert list((tmp_path / "cache").iterdir()) == [place]


def test_a_file_that_changes_while_it_is_copied_is_an_error(cache: CopyCache, model: Path, tmp_path: Path) -> None:
    source = find_source("model.path", str(model)).without_weights()
    digests = source.digests()
    (model / "config.json").write_text((model / "config.json").read_text().replace("2", "3"))
    copy = cache.begin(source, digests)
    for file in source.files:
        copy.write(file.name, 0, b"".join(source.pieces(file)))
    with pytest.raises(ConfigError, match=r"model: config\.json was changed while it was copied"):
        copy.finish()
    copy.discard()
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(("name", "offset"), [("config.json", 1), ("../config.json", 0)])
def test_a_piece_that_belongs_nowhere_is_refused(cache: CopyCache, model: Path, name: str, offset: int) -> None:
    source = find_source("model.path", str(model))
    copy = cache.begin(source, source.digests())
    with pytest.raises(ValueError, match="does not follow the one before"):
        copy.write(name, offset, b"{}")
    copy.discard()


def test_the_rest_of_a_killed_process_is_removed_and_that_of_a_living_one_kept(
    cache: CopyCache, model: Path, tmp_path: Path
) -> None:
    source = find_source("model.path", str(model)).without_weights()
    living = cache.begin(source, source.digests())
    killed = tmp_path / "cache" / f"0123-4567@{socket.gethostname()}.partial"
    shutil.copytree(model, killed)
    copied(cache, find_source("model.path", str(model)))
    assert not killed.exists()
    assert len(list((tmp_path / "cache").glob("*.partial"))) == 1
    living.discard()
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_what_another_host_writes_into_a_shared_home_is_kept(
    cache: CopyCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is not seen here, as on NFS: this host would take the copy for one of a killed process."""
    with monkeypatch.context() as there:
        there.setattr(file_copies, "_PARTIAL", f"@x.{socket.gethostname()}.partial")
        there.setattr(file_copies, "_lock", lambda folder: os.open(os.devnull, os.O_RDONLY))
        source = find_source("model.path", str(model))
        digests = source.digests()
        elsewhere = cache.begin(source, digests)
    copied(cache, source.without_weights())
    for file in source.files:
        elsewhere.write(file.name, 0, b"".join(source.pieces(file)))
    assert cache.find(source, digests) is None
    assert elsewhere.finish() == cache.find(source, digests)
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize("name", ["0123-4567@pod-1.partial", "0123-4567.partial", "0123-4567@pod-1.unlocked"])
def test_the_rest_of_a_host_with_another_name_is_removed_after_a_day(
    cache: CopyCache, model: Path, tmp_path: Path, name: str
) -> None:
    left = tmp_path / "cache" / name
    left.mkdir(parents=True)
    (left / "config.json").touch()
    copied(cache, find_source("model.path", str(model)))
    assert left.exists()
    for path in (left, left / "config.json"):
        os.utime(path, (time.time() - 86_500, time.time() - 86_500))
    cache.begin(source := find_source("model.path", str(model)).without_weights(), source.digests()).discard()
    assert not left.exists()


def test_a_copy_that_is_about_to_be_locked_is_not_swept(
    cache: CopyCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, lock = find_source("model.path", str(model)).without_weights(), file_copies._lock

    def sweep_first(folder: Path) -> int:
        monkeypatch.setattr(file_copies, "_lock", lock)
        cache.begin(source, source.digests()).discard()
        return lock(folder)

    monkeypatch.setattr(file_copies, "_lock", sweep_first)
    assert copied(cache, source) == cache.find(source, source.digests())


def test_a_disk_without_room_or_that_can_not_be_written_is_named(
    cache: CopyCache, model: Path, tmp_path: Path
) -> None:
    source = find_source("model.path", str(model))
    large = replace(source, files=tuple(replace(file, num_bytes=2**60) for file in source.files))
    with pytest.raises(ConfigError, match=r"cache has .* GB free, and .* GB are needed .*XDG_CACHE_HOME"):
        cache.begin(large, source.digests())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"copies of the driver's files can't be written into .*file/cache"):
        CopyCache(tmp_path / "file" / "cache").begin(source, source.digests())


def test_a_host_tells_its_own_files_from_the_drivers(model: Path) -> None:
    source = find_source("model.path", str(model))
    assert likeness(source) == "same"
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert likeness(source) == "unsure"
    (model / "chat_template.jinja").write_text("another template")
    assert likeness(source) == "other"
    shutil.rmtree(model)
    assert likeness(source) == "none"


def test_modules_are_compared_one_by_one_and_others_beside_them_do_not_count(
    cache: CopyCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "helper.py"):
        Path(name).write_text(f"NAME = {name!r}\nimport helper\n")
    source = find_modules(make_config(task={"reward": "mine:score"}))
    assert source is not None and [file.name for file in source.files] == ["helper.py", "mine.py"]
    Path("other.py").touch()
    assert likeness(source) == "same"
    copy = copied(cache, source)
    assert source.named_in(copy) == str(copy)
    assert (copy / "mine.py").read_text() == Path("mine.py").read_text()
    Path("helper.py").write_text("an outdated version")
    assert likeness(source) == "other"
    Path("helper.py").unlink()
    assert likeness(source) == "other"
    Path("mine.py").unlink()
    assert likeness(source) == "none"
    assert find_modules(make_config(task={"reward": "gsm8k"})) is None


def test_only_local_names_are_listed_and_get_other_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    paths = ["hf://owner/name:main/train", "rows.jsonl", {"path": "more.jsonl", "weight": 2.0}]
    judge = {"judge": {"path": "owner/judge"}, "placement": {"judge": {"servers": 1}}}
    config = make_config("mine/model", task={"name": "", "path": paths}, **judge)
    keys = ("model.path", "judge.path", "task.path", "task.eval_path")
    assert list(local_names(config, keys)) == [
        ("model.path", "mine/model"), ("task.path", "rows.jsonl"), ("task.path", "more.jsonl")
    ]
    places = {("model.path", "mine/model"): "/copy", ("task.path", "more.jsonl"): "/copies/more.jsonl"}
    moved = relocated(config, places)
    assert moved.model.path == "/copy"
    assert [(each.path, each.weight) for each in moved.task.train_data] == [
        ("hf://owner/name:main/train", 1.0), ("rows.jsonl", 1.0), ("/copies/more.jsonl", 2.0)
    ]


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/disk")
    assert default_root() == Path("/disk/async-rl/copies")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_root() == Path.home() / ".cache/async-rl/copies"
