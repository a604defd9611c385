"""`async-rl servers`: requests to a running run, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.run_dir import locked, write_config
from async_rl.base.run_dir.server_requests import Action, ServerRequest, drop_requests, request_of, take_requests
from async_rl.base.telemetry.status import NORMAL_END, ServerStatus, write_status
from async_rl.cli import main
from tests.kit.configs import make_config

UP_TO_FOUR = {"min": 2, "max": 4}
URLS = ["http://10.0.0.1:3", "http://10.0.0.2:3"]


def run_dir_of(folder: Path, servers: int | dict[str, int], urls: list[str] | None = None) -> Path:
    """The directory of a run with two rollout servers and an evaluation server."""
    config = make_config(
        run={"name": "r", "dir": folder}, rollout={"server_urls": urls or []},
        placement={"rollout": {"servers": servers}},
    )
    config.run_dir.mkdir()
    write_config(config)
    names = {"rollout/0": "serving", "rollout/1": "starting", "eval/0": "serving"}
    servers_ = [ServerStatus(name=n, state=s, place="10.0.0.9", version=3, since_s=0.0) for n, s in names.items()]
    write_status(config.run_dir, [], NORMAL_END, servers=servers_)
    return config.run_dir


def test_requests_reach_a_running_run_once_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_dir_of(tmp_path, UP_TO_FOUR, URLS)
    with locked(run_dir):
        for words in (["max", "3"], ["remove", "rollout/1"], ["remove", "rollout/0", "--now"], ["add", URLS[0]]):
            assert main(["servers", str(run_dir), *words]) == 0
    assert take_requests(run_dir) == [
        ServerRequest(action="max", number=3), ServerRequest(action="remove", name="rollout/1"),
        ServerRequest(action="remove", name="rollout/0", now=True), ServerRequest(action="add", url=URLS[0]),
    ]
    assert take_requests(run_dir) == []
    assert "rollout/1" in capsys.readouterr().out


def test_a_request_to_an_earlier_start_of_a_run_is_dropped(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path, UP_TO_FOUR)
    drop_requests(run_dir)
    with locked(run_dir):
        assert main(["servers", str(run_dir), "max", "4"]) == 0
    drop_requests(run_dir)
    assert take_requests(run_dir) == []


def test_the_servers_of_a_run_that_has_ended_are_listed_and_can_not_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_dir_of(tmp_path, UP_TO_FOUR)
    assert main(["servers", str(run_dir)]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["rollout/0", "serving"], ["rollout/1", "starting"], ["eval/0", "serving"],
    ]
    assert main(["servers", str(run_dir), "remove", "rollout/1"]) == 2
    assert str(run_dir) in capsys.readouterr().err and take_requests(run_dir) == []


@pytest.mark.parametrize(("servers", "urls", "action", "value", "key"), [
    (2, None, "remove", "rollout/1", "placement.rollout.servers"),
    (2, None, "max", "2", "placement.rollout.servers"),
    (2, URLS, "add", URLS[0], "placement.rollout.servers"),
    *((UP_TO_FOUR, None, "remove", name, "NAME") for name in ("", "rollout/4", "eval/0", "1")),
    *((UP_TO_FOUR, None, "max", number, "N") for number in ("", "1", "5", "-3", "2.5", "all")),
    *((UP_TO_FOUR, URLS, "add", url, "URL") for url in ("", "10.0.0.3:3", "ftp://h", "http://h h:3")),
    (UP_TO_FOUR, None, "add", URLS[0], "rollout.server_urls"),
])
def test_a_request_that_the_run_can_not_meet_is_refused(
    servers: int | dict[str, int], urls: list[str] | None, action: Action, value: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} "):
        request_of(run_dir_of(tmp_path, servers, urls), action, value, now=False)


@pytest.mark.parametrize("words", [[], ["max", "3"]])
def test_a_folder_that_is_no_run_directory_is_refused(
    words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["servers", str(tmp_path), *words]) == 2
    assert str(tmp_path) in capsys.readouterr().err
