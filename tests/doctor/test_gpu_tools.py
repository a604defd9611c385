"""The tools with which SGLang builds its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.base.seams import ENGINES
from async_rl.tools.doctor import host

pytestmark = pytest.mark.processes


@pytest.fixture
def cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with one GPU, ninja, libnuma and torch_memory_saver."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "ninja", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: None)
    return tmp_path


def program(file: Path, says: str) -> None:
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)


def test_nvcc_must_be_there_for_sglang(cuda_home: Path) -> None:
    check = host.check_gpu([ENGINES["sglang"]])
    assert "1 x H100" in check.found and "nvcc" in check.found and check.state == "broken"
    assert host.check_gpu([ENGINES["hf"]]).state == "ok"
    program(cuda_home / "bin" / "nvcc", "")
    assert host.check_gpu([ENGINES["sglang"]]).state == "ok"
