"""The driver's files on other hosts: who gets which, what is sent, and how a host that can't take them ends the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from async_rl.config import Config
from async_rl.driver import file_sending
from async_rl.driver.file_receiver import FileReceiver
from async_rl.driver.file_sending import SentFiles, can_lack_weights, send_files, servers_elsewhere
from async_rl.driver.placement import Reservation
from async_rl.driver.resources import HostDemand
from async_rl.driver.signals import StopSignals
from async_rl.errors import AsyncRLError, ConfigError, ProcessDiedError, WaitTimeoutError
from async_rl.storage import file_sources
from async_rl.storage.file_copies import awaits_push
from async_rl.storage.file_sources import FileSource, Places, find_source
from tests.kit.configs import changed, make_config
from tests.kit.models import save_tiny_model

Send = Callable[..., SentFiles]


def reservation(**hosts: list[str]) -> Reservation:
    """A reservation of processes by host; `here` is this one."""
    bundles = [HostDemand(gpus_of=dict.fromkeys(names, 0.0)) for names in hosts.values()]
    addresses = [ray.util.get_node_ip_address() if host == "here" else host for host in hosts]
    return Reservation(None, bundles, addresses)


def test_hosts_of_learner_ranks_get_no_models_and_data() -> None:
    found = servers_elsewhere(Reservation(
        None, [HostDemand(gpus_of=dict.fromkeys(names, 0.0)) for names in (
            ["buffer", "rollout/0", "learner/0"], ["rollout/1"], ["eval/0", "judge/0"], ["rollout/2"],
        )], ["a", "b", "c", "b"],
    ))  # fmt: skip
    assert found == {"b": ["rollout/1", "rollout/2"], "c": ["eval/0", "judge/0"]}


@pytest.mark.parametrize(("sections", "expected"), [
    ({}, True),
    ({"weight_sync": {"verify": False}}, False),
    ({"weight_sync": {"lora": "adapter"}, "model": {"lora": {"rank": 4}}}, False),
    ({"model": {"lora": {"rank": 4}}}, True),
    ({"rollout": {"server_args": {"max-running-requests": 4}}}, True),
    ({"rollout": {"server_args": {"load_format": "auto"}}}, False),
    ({"rollout": {"server_args": {"speculative-algorithm": "EAGLE"}}}, False),
    ({"rollout": {"server_url": "http://127.0.0.1:1"}}, False),
    ({"rollout": {"engine": "tests.extensions.engine:COUNTING"}}, False),
    ({"placement": {"rollout": {"servers": 2, "engines": ["sglang", "hf"]}}}, True),
    ({"placement": {"rollout": {"servers": 2, "engines": ["sglang", "tests.extensions.engine:COUNTING"]}}}, False),
])  # fmt: skip
def test_weights_are_left_out_where_all_servers_can_start_without(sections: dict[str, Any], expected: bool) -> None:
    assert can_lack_weights(make_config(**{"rollout": {"engine": "sglang"}, **sections})) is expected


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 5)
    return make_config(
        "model", run={"dir": tmp_path, "name": "run"}, task={"name": "", "path": "ro*.jsonl"}, eval={"size": 0},
        rollout={"engine": "hf"}, timeouts={"work_s": 300.0},
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """{key of a source: hosts} of all that a driver on the host `first` has sent, by a sender that sends nothing."""
    found: dict[str, list[str]] = {}

    class NoSender:
        lack_weights = False

        def __init__(self, config: Config, signals: StopSignals, note: Callable[[str], None], hosts: list[str]) -> None:
            self.places: dict[str, Places] = {host: {} for host in hosts}

        def check_run_folder(self, hosts: list[str]) -> None:
            found["run.dir"] = hosts

        def send(self, source: FileSource, hosts: list[str]) -> None:
            found[source.key] = hosts

        def close(self) -> None: ...

    monkeypatch.setattr(file_sending, "_Sender", NoSender)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "first")
    return found


def test_modules_and_files_of_params_go_to_all_other_hosts(
    config: Config, asked: dict[str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(question, response):\n    return 1.0\n")
    (tmp_path / "table.json").write_text("{}")
    task = {"reward": "mine:score", "params": {"table": "table.json", "split": "model"}}
    hosts = reservation(first=["learner/0"], second=["learner/1"], third=["rollout/0"])
    sent = send_files(changed(config, task=task), hosts, StopSignals(), lambda text: None)
    assert asked == {
        "model.path": ["third"], "task.path": ["third"], "task.params": ["second", "third"],
        "modules": ["second", "third"], "run.dir": ["second"],
    }
    assert list(sent.places) == ["second", "third"]


def test_a_run_on_the_drivers_host_alone_sends_nothing(
    config: Config, asked: dict[str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(question, response):\n    return 1.0\n")
    here = reservation(first=["learner/0", "rollout/0"])
    sent = send_files(changed(config, task={"reward": "mine:score"}), here, StopSignals(), lambda text: None)
    assert (asked, sent) == ({}, SentFiles())


def test_a_learner_elsewhere_is_asked_for_the_runs_folder_where_nothing_is_sent(
    config: Config, asked: dict[str, list[str]]
) -> None:
    send_files(config, reservation(second=["buffer", "rollout/0", "learner/0"]), StopSignals(), lambda text: None)
    assert asked == {"run.dir": ["second"]}


def without_files(cache: Path, fault: Callable[[], None] = lambda: None) -> type[FileReceiver]:
    """A receiver on a host that has no files. It keeps copies in `cache`; `fault` is called before it writes."""

    class Elsewhere(FileReceiver):
        def __init__(self) -> None:
            super().__init__()
            os.environ["XDG_CACHE_HOME"] = str(cache)

        def likeness(self, source: Any) -> Any:
            return "none"

        def write(self, *piece: Any) -> None:
            fault()
            super().write(*piece)

    return Elsewhere


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def send(ray_here: None, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Send:
    """Send the files of a configuration from a driver elsewhere to a server here."""
    (tmp_path / "run").mkdir()
    here = ray.util.get_node_ip_address()
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.9")

    def run(
        config: Config, receiver: type[FileReceiver], on_note: Callable[[StopSignals], None] | None = None,
        process: str = "rollout/0",
    ) -> SentFiles:
        signals, target = StopSignals(), Reservation(None, [HostDemand(gpus_of={process: 0.0})], [here])
        monkeypatch.setattr(file_sending, "FileReceiver", receiver)
        return send_files(config, target, signals, lambda text: on_note(signals) if on_note else notes.append(text))

    return run


def test_a_host_that_has_the_same_files_gets_none(config: Config, send: Send, notes: list[str]) -> None:
    sent = send(config, FileReceiver)
    assert (list(sent.places.values()), sent.lack_weights, notes) == ([{}], False, [])


def test_a_learners_host_that_does_not_see_the_runs_folder_is_named(
    config: Config, send: Send, tmp_path: Path
) -> None:
    class Blind(FileReceiver):
        def sees(self, file: str) -> bool:
            assert super().sees(file)
            return False

    send(config, FileReceiver, process="learner/0")
    told = rf"^run\.dir must .* does not see the {tmp_path}/run of this host\..* placement\.learner\.resource: learner$"
    with pytest.raises(ConfigError, match=told):
        send(config, Blind, process="learner/0")
    assert list((tmp_path / "run").glob(".*")) == []


def test_a_host_without_files_gets_them_once(config: Config, send: Send, notes: list[str], tmp_path: Path) -> None:
    sent = send(config, without_files(tmp_path / "cache"))
    assert sent.lack_weights
    [(host, places)] = sent.places.items()
    model, rows = places["model.path", "model"], places["task.path", "ro*.jsonl"]
    assert awaits_push(model)
    assert Path(rows).with_name("rows.jsonl").read_text() == (tmp_path / "rows.jsonl").read_text()
    first, second = notes
    assert first.startswith(f"{host} gets model.path model from the driver: ")
    assert first.endswith(" kB, all but the weights, which the learner pushes")
    assert second.startswith(f"{host} gets task.path ro*.jsonl from the driver: 1 file(s), ")
    assert send(config, without_files(tmp_path / "cache")).places == sent.places
    assert len(notes) == 2  # the host had them from before


def test_weights_travel_in_many_pieces_and_arrive_whole(
    config: Config, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sources, "PIECE_BYTES", 20_000)
    whole = changed(config, weight_sync={"verify": False})
    sent = send(whole, without_files(tmp_path / "cache"))
    assert not sent.lack_weights
    [places] = sent.places.values()
    copy = Path(places["model.path", "model"])
    for name in ("model.safetensors", "config.json"):
        assert (copy / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def refuse() -> None:
    raise ConfigError("no room on this disk")


def fail() -> None:
    raise OSError("a bad block")


@pytest.mark.parametrize(("fault", "kind", "message"), [
    (refuse, ConfigError, r"^\S+: no room on this disk$"),
    (fail, AsyncRLError, r"^\S+ could not finish the copy of model\.path model: OSError: a bad block$"),
    (lambda: os._exit(9), ProcessDiedError, r"^\S+ was lost before it had finished the copy of model\.path model: "),
])  # fmt: skip
def test_a_host_that_can_not_take_the_files_is_named(
    config: Config, send: Send, tmp_path: Path, fault: Callable[[], None], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        send(config, without_files(tmp_path / "cache", fault))


@pytest.mark.nightly
def test_a_host_that_hangs_is_named_after_the_time_limit(config: Config, send: Send, tmp_path: Path) -> None:
    short = changed(config, timeouts={"work_s": 10.0})
    with pytest.raises(WaitTimeoutError, match=r"waited 10 s \(timeouts\.work_s\) for \S+ to finish the copy of"):
        send(short, without_files(tmp_path / "cache", lambda: time.sleep(100)))


def test_nothing_is_left_of_what_was_begun_when_ctrl_c_came(config: Config, send: Send, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        send(config, without_files(tmp_path / "cache"), StopSignals.request)
    assert list((tmp_path / "cache" / "async-rl" / "copies").iterdir()) == []


def test_files_of_the_same_content_are_used_where_they_are(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied without their time of change: by their content, unless the weights come by a push anyway."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, rows = find_source("model.path", "model"), find_source("task.path", "rows.jsonl")
    for file in (tmp_path / "model" / "model.safetensors", tmp_path / "rows.jsonl"):
        os.utime(file, ns=(1, 1))
    receiver = FileReceiver()
    assert receiver.likeness(model) == receiver.likeness(rows) == "unsure"
    assert receiver.find(rows, rows.digests()) == "rows.jsonl"
    assert receiver.find(model, model.digests()) == "model"
    assert receiver.find(model.without_weights(), model.without_weights().digests()) == ""
    receiver.discard()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "3"}\n' * 5)
    assert receiver.find(rows, ["0" * 64]) == ""
    receiver.discard()
