"""Hosts whose GPUs torch does not find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.base.errors import ConfigError
from async_rl.run.before_start import gpus
from async_rl.run.before_start.gpus import check_gpu_driver

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC version: 12.3.0\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with one GPU and an old driver, on which torch is built for CUDA 13 and finds nothing."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "version").write_text(DRIVER)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "VERSION", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_driver_too_old_for_torch_is_refused_with_both_versions(host: Path) -> None:
    with pytest.raises(ConfigError, match=r"13\.0 .* 580 .*535\.183\.01"):
        check_gpu_driver()


def test_a_torch_for_cpus_on_a_host_with_gpus_is_refused(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES="):
        check_gpu_driver()


@pytest.mark.parametrize("why", ["", "-1", "NoDevFiles", "found", "a container without GPUs"])
def test_a_run_that_uses_the_gpus_or_is_told_not_to_is_not_refused(
    host: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "found":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    elif why == "a container without GPUs":
        (host / "nvidia0").unlink()
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", why)
    check_gpu_driver()
