"""The pages and their data, asked for as a browser does; and what is refused."""

from __future__ import annotations

import contextlib
import html
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from buffer.journal import FILE_NAME
from tests.kit.sweeps import make_sweep
from tests.kit.view.client import Client
from tests.kit.view.run_dirs import HOSTILE, make_run, metrics_of

PAGES = ["./", "./groups", "./groups/1", "./groups/1?color=ratio&answer=1", "./data/charts", "./data/changes"]


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_shown(client: Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert "script-src 'self'" in response.headers["content-security-policy"]


@pytest.mark.parametrize("missing", ["metrics.jsonl", "timeline.json", "status.json", "config.yaml", FILE_NAME])
def test_pages_of_a_run_that_lacks_a_file_are_shown(run_dir: Path, missing: str) -> None:
    (run_dir / missing).unlink()
    codes = {path: Client(run_dir).get(path).status_code for path in PAGES if "/1" not in path}
    assert set(codes.values()) == {200}


@pytest.mark.parametrize("shown", [".", "run"])
def test_a_folder_that_is_removed_while_it_is_shown_is_no_failure_of_the_server(tmp_path: Path, shown: str) -> None:
    make_run(tmp_path / "run")
    client = Client(tmp_path / shown)
    shutil.rmtree(tmp_path / "run")
    if shown == ".":
        tmp_path.rmdir()
    pages = ("/", "/run/run/", "/run/run/groups", "/run/run/data/charts", "/run/run/data/changes")
    assert {client.get(path).status_code for path in pages} <= {200, 302, 307, 404}


def test_a_run_whose_journal_is_of_another_version_has_its_page(run_dir: Path) -> None:
    with contextlib.closing(sqlite3.connect(run_dir / FILE_NAME)) as database, database:
        database.execute("PRAGMA user_version = 99")
    assert Client(run_dir).get("./").status_code == 200
    assert "99" in Client(run_dir).get("./groups").text


def test_a_single_run_is_the_first_page_and_several_are_listed(run_dir: Path) -> None:
    response = Client(run_dir).get("/")
    assert (response.status_code, response.headers["location"]) == (307, "/run/my-run/")
    make_run(run_dir.parent / "other run")
    text = Client(run_dir.parent).get("/").text
    assert "/run/my-run/" in text and "/run/other%20run/" in text
    assert Client(run_dir.parent).get("/run/other%20run/groups/1").status_code == 200


def test_the_cells_of_a_sweep_are_listed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, bounds=(0,), seeds=1)
    (sweep / "sweep.json").write_text("{}")
    for folder in (sweep, tmp_path):
        client = Client(folder)
        assert "/run/sweep%3Astaleness-0.seed-0/" in client.get("/").text
        assert client.get("/run/sweep%3Astaleness-0.seed-0/").status_code == 200


def test_an_alarm_is_a_banner_only_while_it_is_on(run_dir: Path) -> None:
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(status | {"alarms": f"The run has stopped learning {HOSTILE}"}))
    text = Client(run_dir).get("./").text
    assert "kl" in text and "has stopped learning" not in text
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(13) | {"alarm/kl": 1.0}) + "\n")
    text = Client(run_dir).get("./").text
    assert "The run has stopped learning" in text and HOSTILE not in text


def test_text_of_models_and_data_is_escaped(client: Client) -> None:
    for path in ("./groups", "./groups/1", "./", "./groups?where='" + HOSTILE.replace("'", "")):
        text = client.get(path).text
        assert "<script>window" not in text
        assert "<img src=x" not in text
    assert html.escape("<script>window.hacked") in client.get("./groups").text


def test_reports_are_escaped(run_dir: Path) -> None:
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(status | {"note": HOSTILE, "processes": [{"doing": HOSTILE}]}))
    text = Client(run_dir).get("./").text
    assert "<script>window" not in text and html.escape("<script>window") in text


@pytest.mark.parametrize(
    "path, code",
    [
        ("./groups?page=" + "9" * 400, 400),
        (f"./groups/{2**63}", 400), ("./groups/999", 404), ("/run/..%2F..%2Fetc/", 404),
        ("/static/..%2Fapp.py", 404),
    ],
)  # fmt: skip
def test_bad_requests_get_one_sentence(client: Client, path: str, code: int) -> None:
    response = client.get(path)
    assert response.status_code == code
    text = response.json()["error"] if "/data/" in path else response.text
    assert text and len(text) < 2000


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost:8717", 200), ("127.0.0.1", 200), ("192.0.2.7:8717", 400), ("gpu-7", 400), ("localhost.evil", 400),
        ("rebound.evil.example", 400),
    ],
)  # fmt: skip
def test_names_of_other_hosts_are_refused(client: Client, host: str, status: int) -> None:
    """A site whose name points here by DNS rebinding sends its own name."""
    assert client.get("./", host=host).status_code == status
