"""The model of a run that has ended is uploaded to the hub, and a failure of that is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from async_rl import pipeline
from async_rl.driver.signals import StopSignals
from async_rl.errors import ConfigError
from async_rl.storage.hub_upload import check_login, upload_model
from tests.kit.configs import make_config
from tests.kit.hub import HubServer, open_hub

CONFIG = make_config(checkpoint={"push_to_hub": "me/my-model"})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with open_hub() as hub:
        hub.use(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
        yield hub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return folder


def test_the_hub_gets_every_file_in_a_private_repository(hub: HubServer, model: Path) -> None:
    notes: list[str] = []
    for _ in range(2):  # the second time the repository is there
        upload_model(CONFIG, model, notes.append)
    assert notes == [f"{model} is on the hub as me/my-model"] * 2
    repository = hub.models["me/my-model"]
    files = repository.commits[repository.branches["main"]]
    assert files == {file.name: file.read_bytes() for file in model.iterdir()}
    assert repository.is_private


def test_a_failed_upload_is_noted_with_the_command_that_tries_again(hub: HubServer, model: Path) -> None:
    hub.status = 403
    notes: list[str] = []
    upload_model(CONFIG, model, notes.append)
    (note,) = notes
    assert note.startswith(f"{model} could not be uploaded to me/my-model: ")
    assert note.endswith(f"Try again with: hf upload me/my-model {model}")


def test_nothing_is_uploaded_unless_it_is_asked_for_and_there_is_a_model(hub: HubServer, model: Path) -> None:
    notes: list[str] = []
    upload_model(make_config(), model, pytest.fail)
    upload_model(CONFIG, model / "none", notes.append)
    assert notes == [f"nothing is uploaded to me/my-model: there is no {model}/none here"]
    assert not hub.requests


def test_without_a_token_the_run_is_refused_before_it_starts(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    check_login(CONFIG)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"push_to_hub me/my-model needs a token.*hf auth login"):
        check_login(CONFIG)
    check_login(make_config())


@pytest.mark.parametrize("name", ["my-model", "a/b/c", "a b/c"])
def test_a_name_that_is_none_of_a_repository_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.push_to_hub must be OWNER/NAME"):
        make_config(checkpoint={"push_to_hub": name})


def test_the_summary_is_written_before_the_model_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload may hang for hours, and a run that is killed then has come to its end."""
    config = make_config(run={"dir": tmp_path})
    config.run_dir.mkdir()
    uploads: list[bool] = []
    stand_ins: dict[str, Any] = {
        "RunLog": lambda *_: Mock(summary=lambda _: {"steps": 1}), "own_keys": lambda *_: nullcontext(config),
        "open_ray": nullcontext, "ray_messages_in": nullcontext, "reserve": Mock(),
        "resolve_placement": lambda *_: config, "_start": lambda *_, **__: ("", {}), "_close_buffer": lambda *_: {},
        "_evaluate": Mock(), "plot_learning_curve": Mock(),
        "upload_model": lambda *_: uploads.append((config.run_dir / "summary.json").is_file()),
        "driver.file_sending.send_files": lambda *_: Mock(lack_weights=False),
        "driver.actor_group.ActorGroup": MagicMock(), "driver.supervisor.Supervisor": lambda *_: Mock(guard=None),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(f"async_rl.{'' if '.' in name else 'pipeline.'}{name}", stand_in)
    with StopSignals() as signals:
        assert pipeline._run(config, signals, (), MagicMock()) == {"steps": 1}
    assert uploads == [True]
