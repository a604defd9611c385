"""The compiler of SGLang's kernels against the CUDA that torch is built for."""

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
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: None)
    return tmp_path


def program(file: Path, says: str) -> None:
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("release", "lacking"),
    [
        ("13.0", ""), ("13.2", ""), ("", "nvcc"), ("12.4", "CUDA 13 ({nvcc} is of 12)"), ("broken", "CUDA 13 ({nvcc} "),
    ],
)
def test_nvcc_must_be_there_and_of_torchs_cuda_for_sglang(cuda_home: Path, release: str, lacking: str) -> None:
    nvcc = cuda_home / "bin" / "nvcc"
    if release:
        program(nvcc, f"Cuda compilation tools, release {release}, V{release}.1")
    if release == "broken":
        nvcc.write_bytes(bytes(8))  # a file that the system can't execute
    check = host.check_gpu([ENGINES["sglang"]])
    assert "1 x H100" in check.found and lacking.format(nvcc=nvcc) in check.found
    assert check.state == ("broken" if lacking else "ok")
    assert host.check_gpu([ENGINES["hf"]]).state == "ok"
