"""Runs the tests of this folder that need packages of others, each in an environment that has them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kit.virtual_environments import ROOT, environment_variables, new_environment

HERE = Path(__file__).parent


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("test", "requirements"),
    [
        ("test_skyrl_gym.py", ("skyrl-gym==0.4.0",)),
        ("test_textarena.py", ("textarena==0.7.4",)),
        ("test_mcp.py", ("mcp==2.3.0",)),
        ("test_frameworks.py", ("openai-agents==0.24.0", "pydantic-ai-slim[anthropic,openai]==2.68.0")),
    ],
)
def test_the_tests_pass_beside_the_package(test: str, requirements: tuple[str, ...], tmp_path: Path) -> None:
    python = new_environment(tmp_path / "venv", requirements, sees_ours=True)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly", HERE / test], cwd=ROOT,
        env=environment_variables(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout
