"""Episodes of several turns end to end on a real SGLang server: every mode, late policy and update policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.assembled import run_assembled
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.episode_policies import Case, check, configure

UPDATES = ("in_place", "retract", "drain", "abort")
BOUNDED = [("bounded", late, on_update) for late in ("wait", "drop", "mask") for on_update in UPDATES]
ALL = [*(case for case in BOUNDED if case[1:] != ("mask", "drain")), ("exact", "wait", "drain")]
IN_CI = [("bounded", "wait", "in_place"), ("bounded", "mask", "abort")]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in IN_CI else pytest.mark.nightly) for case in ALL], ids="-".join
)
def test_episodes_keep_the_bound_under_each_policy(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread, case: Case
) -> None:
    config = configure(smoke_yaml, tmp_path, case, *sglang_server.overrides)
    check(run_assembled(config), config, case)
