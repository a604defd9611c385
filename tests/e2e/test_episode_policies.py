"""Episodes of several turns end to end on a real SGLang server: every mode, late policy and update policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.assembled import run_assembled
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.episode_policies import Case, check, configure

NIGHTLY = [
    ("bounded", "wait", "in_place"), ("bounded", "drop", "retract"), ("bounded", "drop", "drain"),
    ("exact", "wait", "drain"),
]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case", [("bounded", "mask", "abort"), *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHTLY)],
    ids="-".join,
)
def test_episodes_keep_the_bound_under_each_policy(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread, case: Case
) -> None:
    config = configure(smoke_yaml, tmp_path, case, *sglang_server.overrides)
    check(run_assembled(config), config, case)
