"""The learner records, for every trained token, its log importance ratio at the step in which it was trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.base.config import AlgorithmConfig, RunConfig
from async_rl.base.run_dir.log_ratio_file import FOLDER, read_log_ratios
from async_rl.base.types import Batch
from learner.loop.updater import LogRatioRecorder, Updater
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.fakes import OpenRun
from tests.kit.learner.updates import batch_logprobs

pytestmark = pytest.mark.processes  # together they compute for long


def record(path: Path, tmp_path: Path, batch: Batch, algorithm: AlgorithmConfig) -> None:
    config = learner_config(path, algorithm=algorithm, run=RunConfig(dir=str(tmp_path)))
    config.run_dir.mkdir()
    recorder = LogRatioRecorder(config, 0, None)
    Updater(config, torch.device("cpu")).update(batch, recorder)
    recorder.write(batch, 1)
    recorder.close()


@pytest.mark.parametrize("epochs", [1, 3])
def test_recorded_ratios_are_those_of_the_model_at_the_start_of_the_step(
    tiny_model_path: Path, tmp_path: Path, one_rank: None, epochs: int
) -> None:
    batch = make_batch()
    record(tiny_model_path, tmp_path, batch, AlgorithmConfig(epochs=epochs, num_minibatches=epochs))
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    proximal = batch_logprobs(lm, batch)
    for g, group in enumerate(batch.groups):
        for number, row in enumerate(group.rows):
            found = read_log_ratios(tmp_path / "run", 1, group.group_id, number)
            assert found is not None
            expected = np.where(row.mask, proximal[g, number].numpy() - row.logprobs, np.nan)
            np.testing.assert_allclose(found.proximal, expected, rtol=2e-3, atol=1e-4)
            assert (found.learner is None) == (epochs == 1)
            if found.learner is not None and row.mask.any():
                np.testing.assert_array_equal(np.isnan(found.learner), ~row.mask)
                assert np.nanmax(np.abs(found.learner)) > 0


def test_a_run_with_a_journal_keeps_the_ratios_of_each_step(
    open_run: OpenRun, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    list(open_run(2, buffer={"journal": True}).run())
    assert sorted(path.name for path in (tmp_path / "run" / FOLDER).iterdir()) == [
        "step_1.rank_0.npz", "step_2.rank_0.npz",
    ]  # fmt: skip
    assert read_log_ratios(tmp_path / "run", 2, 3, 0) is not None  # the second batch begins with group 3
