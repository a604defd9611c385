"""Names of the Hugging Face hub become folders of this host's cache, by huggingface_hub's client and a small hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import located, pinned
from async_rl.base.models_and_data.hub import (
    NotInCacheError,
    cached_folder,
    check_login,
    upload_model,
)
from async_rl.base.models_and_data.hub_names import find_model
from async_rl.base.models_and_data.model_folder import check_model_folder
from tests.kit.configs import make_config
from tests.kit.hub import HubServer, open_hub, use_hub
from tests.kit.models import save_tiny_model
from tests.kit.runs import make_checkpoint

NAME = "Qwen/Qwen9-tiny"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    save_tiny_model("tiny-qwen2", folder, seed=0)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    return folder


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with open_hub() as hub:
        hub.add_model(NAME, model)
        hub.use(monkeypatch, tmp_path / "cache")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield hub


def config_of(name: str, *overrides: str) -> Config:
    return load_config(None, [f"model.path={name}", "task.name=reasoning_gym/chain_sum", *overrides])


def folder_of(name: str) -> Path:
    return Path(located(pinned(config_of(name))).model.path)


def test_a_hub_id_becomes_a_folder_of_the_cache_with_a_whole_model(hub: HubServer, tmp_path: Path) -> None:
    config = pinned(config_of(NAME))
    commit = hub.models[NAME].branches["main"]
    assert config.model.path == f"hf://{NAME}@{commit}"
    folder = Path(located(config).model.path)
    assert folder.is_relative_to(tmp_path / "cache") and folder.name == commit
    assert check_model_folder(folder, 100) == check_model_folder(folder_of(config.model.path), 100)
    names = {file.name for file in folder.rglob("*")}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not names & {"consolidated.safetensors", "onnx", "pytorch_model.bin"}


def test_what_is_in_the_cache_is_neither_downloaded_nor_asked_for(hub: HubServer) -> None:
    config = pinned(config_of(NAME))
    located(config)
    assert set(hub.downloads.values()) == {1}
    before = hub.requests.copy()
    assert located(pinned(config)) == located(config)
    assert hub.requests == before


def test_a_revision_is_a_branch_or_a_commit(hub: HubServer) -> None:
    first, files = next(iter(hub.models[NAME].commits.items()))
    second = hub.models[NAME].commit({**files, "generation_config.json": b"{}"}, branch="v2")
    assert folder_of(NAME).name == first
    assert folder_of(f"{NAME}@v2").name == folder_of(f"hf://{NAME}@{second}").name == second
    with pytest.raises(ConfigError, match=r"^model\.path"):
        folder_of(f"{NAME}@v3")


@pytest.mark.parametrize("offline", [True, False], ids=["HF_HUB_OFFLINE", "no network"])
def test_the_cache_serves_without_the_hub(
    hub: HubServer, offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = folder_of(NAME)
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    before = hub.requests.copy()
    assert folder_of(NAME) == folder
    assert hub.requests == before
    with pytest.raises(NotInCacheError, match=r"^model\.path Qwen/other"):
        folder_of("Qwen/other")


def test_a_cut_download_is_completed_and_without_the_hub_refused(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = pinned(config_of(NAME))
    (Path(located(config).model.path) / "model.safetensors").unlink()
    assert cached_folder(config.model.path) == folder_of(config.model.path)
    assert (folder_of(config.model.path) / "model.safetensors").is_file()
    (folder_of(config.model.path) / "model.safetensors").unlink()
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    for blob in (tmp_path / "cache" / "hub").glob("models--*/blobs/*"):
        blob.unlink()
    with pytest.raises(NotInCacheError):
        folder_of(config.model.path)


@pytest.mark.parametrize("name", ["Qwen/Qwen0", "hf://Qwen/Qwen0", "hf://Qwen", "some/gguf", "some/gated"])
def test_a_name_without_a_model_that_may_be_read_is_refused(hub: HubServer, name: str, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"")
    hub.add_model("some/gguf", tmp_path / "gguf")
    hub.add_model("some/gated", tmp_path / "gguf")
    hub.models["some/gated"].is_gated = True
    with pytest.raises(ConfigError, match=r"^model\.path"):
        folder_of(name)


def test_a_token_opens_a_gated_model(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models[NAME].is_gated = True
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    assert (folder_of(NAME) / "config.json").is_file()


@pytest.mark.parametrize("name", [
    "models/Qwen9", "runs/quickstart", "./Qwen/Qwen9", "../Qwen9", "Qwen9", "/Qwen/Qwen9", "a/b/c", "mine/other", "",
])  # fmt: skip
def test_a_path_is_no_name_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model(name, "model.path") is None


def test_a_folder_goes_before_the_hub_and_the_scheme_before_the_folder(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    config = config_of(NAME)
    assert located(pinned(config)) == config
    assert folder_of(f"hf://{NAME}").is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize("file", ["config.yaml", "config.resuming.yaml"])
def test_a_resume_takes_the_commit_of_its_run(hub: HubServer, tmp_path: Path, file: str) -> None:
    run_dir = tmp_path / "runs" / "first"
    checkpoint = make_checkpoint(run_dir, 4, lineage=1)
    first = pinned(config_of(NAME))
    (run_dir / "config.yaml").write_text(dump_config(config_of(NAME)))
    (run_dir / file).write_text(dump_config(first))
    if file != "config.yaml":  # of a resume that was killed after this checkpoint, before it had logged a step
        (run_dir / ".resuming").write_text("lineage_0 2 models")
    files = next(iter(hub.models[NAME].commits.values()))
    hub.models[NAME].commit({**files, "generation_config.json": b"{}"})
    resumed = f"run.resume={checkpoint}"
    assert pinned(config_of(NAME, resumed)).model.path == first.model.path
    assert pinned(config_of(f"{NAME}@main", resumed)).model.path != first.model.path


@pytest.mark.processes
def test_processes_of_a_host_download_once(hub: HubServer, tmp_path: Path) -> None:
    files = next(iter(hub.models[NAME].commits.values()))
    hub.models[NAME].commit({**files, "model.safetensors": files["model.safetensors"] + bytes(30_000_000)})
    program = (
        "from async_rl.base.config.loading import load_config\n"
        "from async_rl.base.models_and_data.fetching import located, pinned\n"
        f"config = load_config(None, ['model.path={NAME}', 'task.name=reasoning_gym/chain_sum']); "
        "print(located(pinned(config)).model.path)"
    )
    environment = {**os.environ, **hub.environment(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    commands: list[Any] = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {command.communicate(timeout=120)[0].strip() for command in commands}
    assert [command.returncode for command in commands] == [0, 0, 0]
    assert len(folders) == 1 and Path(folders.pop()).is_dir()
    assert set(hub.downloads.values()) == {1}


@pytest.fixture
def trained(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a trained model, and a token with which it may be uploaded."""
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return folder


UPLOADS = make_config(checkpoint={"push_to_hub": "me/my-model"})


def test_an_upload_brings_every_file_into_a_private_repository(hub: HubServer, trained: Path) -> None:
    notes: list[str] = []
    for _ in range(2):  # the second time the repository is there
        upload_model(UPLOADS, trained, notes.append)
    repository = hub.models["me/my-model"]
    files = repository.commits[repository.branches["main"]]
    assert files == {file.name: file.read_bytes() for file in trained.iterdir()}
    assert repository.is_private and notes == [f"{trained} is on the hub as me/my-model"] * 2


def test_a_failed_upload_is_noted_with_the_command_that_tries_again(hub: HubServer, trained: Path) -> None:
    hub.status = 403
    notes: list[str] = []
    upload_model(UPLOADS, trained, notes.append)
    assert notes[0].endswith(f"hf upload me/my-model {trained}")


def test_an_upload_without_a_token_is_refused_before_the_run(
    hub: HubServer, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_login(UPLOADS.checkpoint.push_to_hub)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"checkpoint\.push_to_hub"):
        check_login(UPLOADS.checkpoint.push_to_hub)
