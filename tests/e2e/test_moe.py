"""A mixture of experts of five million parameters is trained end to end; its servers have the learner's experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.base.config.loading import load_config
from async_rl.pipeline import run
from tests.kit.assembled import run_assembled
from tests.kit.engines.noted_pushes import GLOO, expected_sums, noted
from tests.kit.engines.routed import row_experts
from tests.kit.episode_policies import configure
from tests.kit.models import load_model
from tests.kit.runs import logged
from tests.kit.tiny_moe import save_moe

pytestmark = pytest.mark.e2e

SIZES = {
    "hidden_size": 192, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 16,
    "num_experts_per_tok": 2,
}


@pytest.mark.nightly
def test_experts_that_a_run_trains_are_those_that_its_servers_sample_with(smoke_yaml: Path, tmp_path: Path) -> None:
    """After each push the server has the bits of all weights that the learner wrote of that version."""
    model = save_moe(tmp_path / "moe", **SIZES)
    config = load_config(smoke_yaml, [
        f"model.path={model}", f"run.dir={tmp_path / 'runs'}", "rollout.engine=sglang", "run.steps=3",
        "staleness.max=0", "learner.lr=1e-2", "eval.num_prompts=0", "task.reward=tests.e2e.test_old_kv:vowels",
        "weight_sync.bucket_bytes=1000000", f"weight_sync.transport={GLOO}", "checkpoint.models_every_steps=1",
    ])
    run(config)
    start, end = (load_file(folder / "model.safetensors") for folder in (model, config.run_dir / "model"))
    assert {name: tensor.shape for name, tensor in end.items()} == {name: t.shape for name, t in start.items()}
    experts = [name for name in start if ".experts." in name]
    assert len(experts) == 4 * 16 * 3
    moved = [float((end[name] - start[name]).abs().max()) for name in experts]
    assert sum(size > 1e-3 for size in moved) > len(experts) / 2
    pushes = noted(config.run_dir)
    assert sorted(pushes) == [1, 2, 3]
    for version, sums in pushes.items():
        tensors = load_file(config.run_dir / "models" / f"step_{version}" / "model.safetensors")
        assert sums["rollout/0"] == expected_sums("sglang", tensors, torch.float32)
    mismatches = [record["parity/precision/mean_abs"] for record in logged(config.run_dir) if "staleness/max" in record]
    assert max(mismatches) < 2e-5, mismatches


@pytest.mark.parametrize(
    ("on_update", "turns"), [pytest.param("in_place", False, marks=pytest.mark.nightly), ("retract", True)]
)
def test_every_token_is_trained_with_the_experts_that_sampled_it(
    smoke_yaml: Path, tmp_path: Path, on_update: str, turns: bool
) -> None:
    """Of a whole run of the hf engine, with pushes in the midst of answers; recomputed by transformers alone."""
    model = save_moe(tmp_path / "moe", num_experts=8, num_experts_per_tok=2)
    common = [
        f"model.path={model}", f"run.dir={tmp_path / 'runs'}", "rollout.engine=hf", "weight_sync.transport=disk",
        "learner.lr=1e-2", "eval.num_prompts=0", "checkpoint.models_every_steps=1",
        f"weight_sync.on_update={on_update}",
    ]
    if turns:
        config = configure(smoke_yaml, tmp_path, ("bounded", "wait", on_update), *common)
    else:
        reward = "task.reward=tests.e2e.test_old_kv:vowels"
        config = load_config(smoke_yaml, [*common, reward, "rollout.max_response_tokens=96", "staleness.max=2"])
    done = run_assembled(config)
    saved = {v: config.run_dir / "models" / f"step_{v}" for v in range(1, len(done.steps) + 1)}
    models = {version: load_model(folder) for version, folder in {0: model, **saved}.items()}
    counted = wrong = spanning = num_rows = num_replies = 0
    for group in (group for batch in done.batches for group in batch.groups):
        assert len(group.rows) == len(group.episode_rows)  # so all replies of a row are trained in it
        for row in group.rows:
            expected = row_experts(models, group, row, keeps_kv=on_update == "in_place")
            assert row.routing is not None and row.routing.shape == expected.shape
            wrong += int((row.routing != expected).any((1, 2)).sum())
            counted += len(expected)
            spanning += len(set(row.versions[row.mask].tolist())) > 1
            num_rows += 1
            num_replies += max(1, len(row.turn_ends))
    assert wrong == 0 and counted > 1000 and spanning > 0, (wrong, counted, spanning)
    assert turns == (num_replies > num_rows), (num_replies, num_rows)
    assert max(step["parity/precision/mean_abs"] for step in done.steps if "parity/precision/mean_abs" in step) < 2e-5
    changed = [step["routing/changed_fraction"] for step in done.steps]
    assert min(changed) >= 0 and 0 < max(changed) < 0.9
