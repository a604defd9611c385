"""Commands with NVIDIA's MPS. Its daemon is a stand-in: there is no GPU here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_suite import _is_installed
from benchmarks.under_mps import CONTROL, main


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 3])
def test_the_daemon_runs_as_long_as_the_command_and_has_files_of_its_own(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, log = tmp_path / CONTROL, tmp_path / "log"
    daemon.write_text(f'#!/bin/sh\nif [ "$1" = -d ]; then echo start; else cat; fi >> {log}\n')
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert _is_installed(f"program {CONTROL}")
    program = f"import os, sys; open({str(log)!r}, 'a').write(os.environ['CUDA_MPS_PIPE_DIRECTORY']); sys.exit({code})"
    assert main([sys.executable, "-c", program]) == code
    started, folder_and_end = log.read_text().splitlines()
    folder = folder_and_end.removesuffix("quit")
    assert started == "start" and folder_and_end.endswith("quit")
    assert len(folder) < 90 and not Path(folder).exists() and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_without_mps_or_a_command_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not _is_installed(f"program {CONTROL}")
    assert main([sys.executable, "-c", "raise SystemExit(9)"]) == 2
    assert CONTROL in capsys.readouterr().err
    assert main([]) == 2
