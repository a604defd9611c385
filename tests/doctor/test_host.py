"""The doctor reports what is broken and how to mend it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import yaml

from async_rl.base.config import Config, RolloutConfig
from async_rl.base.errors import ConfigError
from async_rl.base.seams import ENGINES
from async_rl.run.before_start.preflight import check_inputs
from async_rl.tools.doctor import host as doctor
from async_rl.tools.doctor.host import Check, examine
from rollout_server.rewards.code.sandbox import Bubblewrap
from tests.kit.configs import changed, make_config
from tests.kit.gpus import pretend_gpus
from tests.kit.models import save_tiny_model


def config(tmp_path: Path) -> Config:
    return make_config(tmp_path / "model", run={"dir": tmp_path}, rollout={"engine": "hf"})


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs can be contained, which is not tried."""
    monkeypatch.setattr(Bubblewrap, "check", lambda self: None)


def test_a_missing_model_is_broken_on_a_machine_that_is_otherwise_healthy(tmp_path: Path) -> None:
    checks = {check.what: check for check in examine(config(tmp_path))}
    assert [what for what, check in checks.items() if check.state == "broken"] == ["configuration"]
    assert "async-rl sft CONFIG" in checks["configuration"].found


def test_what_train_refuses_first_is_a_broken_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    broken = changed(config(tmp_path), critic={"path": "none"}, algorithm={"advantage": "gae"})
    checks = {check.what: check for check in examine(broken)}
    assert [what for what, check in checks.items() if check.state == "broken"] == ["configuration"]
    with pytest.raises(ConfigError, match=r"^critic\.path") as caught:
        check_inputs(broken)
    assert str(caught.value) == checks["configuration"].found
    elsewhere = {check.what: check for check in examine(broken, is_driver=False)}
    assert elsewhere["configuration"].state == "ok", "servers have no critic"


@pytest.mark.processes
def test_an_engine_is_checked_by_importing_its_package_in_the_python_of_its_servers(tmp_path: Path) -> None:
    engine = dataclasses.replace(ENGINES["vllm"], packages=("yaml",))
    here, nowhere = (
        dataclasses.replace(config(tmp_path), rollout=RolloutConfig(engine="vllm", python=python))
        for python in (sys.executable, str(tmp_path / "none"))
    )
    found = f"{yaml.__version__} in {sys.executable}"
    assert doctor.check_engine("vllm", engine, here) == Check("vllm", "ok", found)
    missing = doctor.check_engine("vllm", engine, nowhere)
    bare = doctor.check_engine("vllm", dataclasses.replace(engine, packages=("no_such",)), here)
    assert missing.state == bare.state == "broken"
    assert f"{tmp_path}/none" in missing.found and "No module named 'no_such'" in bare.found
    unused = doctor.check_engine("sglang", dataclasses.replace(ENGINES["sglang"], packages=("no_such",)), None)
    assert unused.state == "warn" and "No module named 'no_such'" in unused.found


def test_a_package_that_does_not_load_is_broken_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor.importlib, "import_module", load)
    check = doctor.check_package("torch")
    assert check.state == "broken" and check.found.endswith("libcudart.so.13: cannot open shared object file")


def test_a_sandbox_that_can_not_contain_programs_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Bubblewrap) -> None:
        raise ConfigError("task.sandbox: programs can't run in bubblewrap here: no namespaces. Either ...")

    monkeypatch.setattr(Bubblewrap, "check", fail)
    (check,) = (each for each in examine(config(tmp_path)) if each.what == "sandbox")
    assert check.state == "warn" and "no namespaces" in check.found and "task.sandbox.url" in check.mend
