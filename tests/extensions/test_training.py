"""A run that trains with parts from outside the packages, named as module:name in its configuration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.seams import TransportEntry
from async_rl.pipeline import run
from tests.extensions.task import Additions
from tests.extensions.transport import NewFolderTransport
from tests.kit.configs import changed

SEEN = "settings-"
"""The first part of the names of the files in which parts write the settings that their process has."""


def note_settings(config: Config, process: str) -> None:
    if config.run_dir.is_dir():  # else it is a check before the start
        (config.run_dir / f"{SEEN}{process}.yaml").write_text(dump_config(config))


class NotedTask(Additions):
    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        note_settings(config, "rollout")


class NotedTransport(NewFolderTransport):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        note_settings(self.config, "learner")


NOTED = TransportEntry(open=NotedTransport, delivers="folder", devices=("cpu",), writes_files=True)
OUTSIDE = [
    "rollout.engine=tests.extensions.engine:COUNTING", "weight_sync.transport=tests.extensions.test_training:NOTED",
    "task.name=tests.extensions.test_training:NotedTask",
    "task.reward=tests.extensions.reward:answer_length", "algorithm.loss=tests.extensions.loss:POLICY_GRADIENT",
    "algorithm.advantage=tests.extensions.advantage:WIN_RATE",
    "algorithm.correction.kind=tests.extensions.correction:ROOT",
]


@pytest.mark.e2e
def test_a_run_trains_with_parts_from_outside_the_packages(smoke_yaml: Path) -> None:
    config = load_config(smoke_yaml, ["run.name=outside", "staleness.max=1", "eval.num_prompts=0", *OUTSIDE])
    summary = run(config)
    assert summary["steps"] == 4
    assert summary["buffer"]["buffer/trained"] == 4 * config.learner.prompts_per_step
    versions = Counter((config.run_dir / "logs" / "counting-0.log").read_text().split())
    assert {"0", "1", "2"} <= versions.keys()
    seen = {file.name: load_config(file) for file in config.run_dir.glob(f"{SEEN}*")}
    assert seen.keys() == {f"{SEEN}rollout.yaml", f"{SEEN}learner.yaml"}
    own = config.network  # of what a process works with, the run has decided the folder of the keys
    assert all(changed(each, network=own) == config and each.network.keys for each in seen.values())
