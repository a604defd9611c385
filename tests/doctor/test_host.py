"""The doctor reports what is broken and how to mend it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from async_rl.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    NetworkConfig,
    RewardModelConfig,
    RolloutConfig,
    TaskConfig,
    WeightSyncConfig,
)
from async_rl.doctor import host as doctor
from async_rl.doctor.host import Check, examine, print_table
from async_rl.driver.preflight import check_inputs
from async_rl.errors import ConfigError
from async_rl.seams import ENGINES
from rollout_server.sandbox.bubblewrap import Bubblewrap
from tests.kit.configs import make_config
from tests.kit.models import save_tiny_model


def config(tmp_path: Path) -> Config:
    return make_config(tmp_path / "model", run={"dir": tmp_path}, rollout={"engine": "hf"})


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs can be contained, which is not tried."""
    monkeypatch.setattr(Bubblewrap, "check", lambda self: None)


@pytest.fixture
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.metadata.version

    def version(name: str) -> str:
        if name == "sglang":
            raise doctor.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)


@pytest.mark.usefixtures("no_sglang")
def test_a_missing_model_is_broken_on_a_machine_that_is_otherwise_healthy(tmp_path: Path) -> None:
    checks = {check.what: check for check in examine(config(tmp_path))}
    assert [what for what, check in checks.items() if check.state == "broken"] == ["model and tokenizer"]
    assert "async-rl sft CONFIG" in checks["model and tokenizer"].found


@pytest.mark.usefixtures("no_sglang")
def test_every_input_that_train_refuses_is_a_broken_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.driver.preflight.gpus_here", lambda: 0.0)
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    broken = dataclasses.replace(
        config(tmp_path), task=TaskConfig(path=str(tmp_path / "none.jsonl")), critic=CriticConfig(path="none"),
        reward_model=RewardModelConfig(path=str(tmp_path / "model")),
        algorithm=AlgorithmConfig(advantage="gae"),
        weight_sync=WeightSyncConfig(transport="nccl"), network=NetworkConfig(keys=str(tmp_path / "keys")),
    )
    checks = {check.what: check for check in examine(broken)}
    assert [what for what, check in checks.items() if check.state == "broken"] == [
        "critic.path", "reward_model.path", "weight_sync.transport", "network.keys", "task",
    ]
    assert "no such file" in checks["task"].found
    assert checks["reward"] == Check("reward", "warn", "not checked: that needs the task")
    with pytest.raises(ConfigError) as caught:
        check_inputs(broken)
    assert str(caught.value) == checks["critic.path"].found


@pytest.mark.usefixtures("no_sglang")
def test_another_host_than_the_drivers_gets_only_the_common_checks(tmp_path: Path) -> None:
    here, there = (
        {check.what for check in examine(config(tmp_path), is_driver=is_driver)} for is_driver in (True, False)
    )
    assert here - there == {
        "network.host", "placement", "weight_sync.transport", "model.path loads", "disk",
        "memory of the run", "how the learner updates servers", "settings without effect",
    }


@pytest.mark.usefixtures("no_sglang")
def test_a_torch_that_does_not_load_breaks_only_the_checks_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> float:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("async_rl.driver.preflight.gpus_here", load)
    checks = {check.what: check for check in examine(config(tmp_path))}
    assert checks["weight_sync.transport"].found == "can't be checked: libcudart.so.13: cannot open shared object file"
    assert checks["network.host"].state == "ok"


@pytest.mark.usefixtures("no_sglang")
def test_a_missing_sglang_is_broken_only_where_the_config_wants_it(tmp_path: Path) -> None:
    states = {engine: doctor._sglang([ENGINES[engine]] if engine else []) for engine in ("", "hf", "sglang")}
    assert {engine: check.state for engine, check in states.items()} == {
        "": "warn",
        "hf": "warn",
        "sglang": "broken",
    }
    assert "rollout.engine=hf" in states["sglang"].mend


@pytest.mark.processes
def test_an_environment_of_an_engines_own_is_checked_by_importing_its_package(tmp_path: Path) -> None:
    engine = dataclasses.replace(ENGINES["vllm"], packages=("yaml",))
    here, nowhere = (
        dataclasses.replace(config(tmp_path), rollout=RolloutConfig(engine="vllm", python=python))
        for python in (sys.executable, str(tmp_path / "none"))
    )
    found = f"{yaml.__version__} in {sys.executable}"
    assert doctor._own_environment("vllm", engine, here) == Check("vllm", "ok", found)
    missing = doctor._own_environment("vllm", engine, nowhere)
    assert (missing.state, missing.found) == (
        "broken", f"{tmp_path}/none: yaml can't be imported: No such file or directory"
    )  # fmt: skip
    bare = doctor._own_environment("vllm", dataclasses.replace(engine, packages=("no_such",)), here)
    assert bare.found.endswith("no_such can't be imported: ModuleNotFoundError: No module named 'no_such'")
    assert "`make vllm`" in bare.mend


def test_a_package_that_does_not_load_is_broken_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor.importlib, "import_module", load)
    check = doctor._package("torch")
    assert (check.state, check.found) == (
        "broken", "can't be imported: libcudart.so.13: cannot open shared object file"
    )  # fmt: skip


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    assert doctor._memory() == Check("memory", "warn", "1.0 GiB free", doctor._memory().mend)


def test_the_table_shows_each_check_at_once_and_at_last_how_to_mend_the_bad_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def checks() -> Iterator[Check]:
        yield Check("torch", "ok", "2.13")
        assert capsys.readouterr().out == "ok      torch                      2.13\n"
        yield Check("disk", "broken", "0 GiB", "free some")

    assert not print_table(checks())
    assert capsys.readouterr().out == (
        "broken  disk                       0 GiB\n\nbroken: disk: 0 GiB\n  to mend it: free some\n"
    )
    assert print_table([Check("torch", "ok", "2.13"), Check("memory", "warn", "1 GiB free", "end programs")])


def test_a_sandbox_that_can_not_contain_programs_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Bubblewrap) -> None:
        raise ConfigError("task.sandbox: programs can't run in bubblewrap here: no namespaces. Either ...")

    monkeypatch.setattr(Bubblewrap, "check", fail)
    (check,) = (each for each in examine(config(tmp_path)) if each.what == "sandbox")
    assert check.state == "warn" and "no namespaces" in check.found and "task.sandbox.url" in check.mend
