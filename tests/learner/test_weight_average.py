"""The moving average of the policy's weights: what it is, who gets it, and that training does not notice it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.base.config import ModelConfig
from async_rl.base.config.check import SettingsError
from async_rl.base.config.loading import dump_config
from async_rl.base.messages.reports import StepDone, TrainingEnded
from async_rl.base.run_dir.checkpoints import checkpoint_folder
from learner.loop.updater import Updater
from learner.models.export import export
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.checkpointed import train
from tests.kit.learner.fakes import FakeClient, FakePublisher, OpenRun
from tests.kit.learner.updates import weights_of

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")
DECAY = 0.75


def trained_by(path: Path, steps: int, **learner: object) -> tuple[Updater, list[dict[str, Tensor]]]:
    """Return an updater after so many optimizer steps, and the weights before the first and after each of them."""
    updater = Updater(learner_config(path, learner=learner), CPU)
    history = [weights_of(updater)]
    for version in range(steps):
        updater.update(make_batch(seed=version, version=version))
        history.append(weights_of(updater))
    return updater, history


def average_of(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weighted sum that the recursion comes to: decay^n of the first, (1 - decay) decay^(n - k) of the k-th."""
    steps = len(history) - 1
    shares = [DECAY**steps, *((1 - DECAY) * DECAY ** (steps - k) for k in range(1, steps + 1))]
    assert sum(shares) == pytest.approx(1)
    return {
        name: sum(share * each[name].double() for share, each in zip(shares, history, strict=True)).float()
        for name in history[0]
    }


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=1e-6)


def test_the_average_is_that_of_all_optimizer_steps_and_training_is_as_without_it(
    tiny_model_path: Path, one_rank: None
) -> None:
    updater, history = trained_by(tiny_model_path, 4, ema_decay=DECAY)
    _, plain = trained_by(tiny_model_path, 4)
    for with_average, without in zip(history, plain, strict=True):
        assert_equal(with_average, without)
    with updater.averaged():
        got = weights_of(updater)
        logprobs = updater.probe_logprobs([3, 7, 5, 11])  # leaves the root's weights gathered
    assert_close(got, average_of(history))
    assert_equal(weights_of(updater), history[-1])
    assert logprobs != updater.probe_logprobs([3, 7, 5, 11])
    with updater.averaged():
        assert_equal(weights_of(updater), got)


def test_the_last_push_the_saved_models_and_an_export_have_the_average(
    open_run: OpenRun, tiny_model_path: Path, tmp_path: Path, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    publisher.calls = fake_buffer.calls
    learner = open_run(
        4, learner={"ema_decay": DECAY}, checkpoint={"every_steps": 2, "models_every_steps": 2},
        model=ModelConfig(path=str(tiny_model_path)),
    )  # fmt: skip
    pushed = [publisher.weights for report in learner.run() if isinstance(report, StepDone)]
    history = [load_file(tiny_model_path / "model.safetensors"), *pushed[:3]]  # training samples with the weights
    run_dir = tmp_path / "run"
    model = load_file(run_dir / "model" / "model.safetensors")
    assert_equal(pushed[3], model)
    calls = [call for call in publisher.calls if call[0] in ("trained", "ended", "push")]
    assert calls[-3:] == [("trained", 4), ("ended", 4), ("push", 4)] and ("ended", 4) not in calls[:-2]
    assert_close(load_file(run_dir / "models" / "step_2" / "model.safetensors"), average_of(history[:3]))
    (run_dir / "config.yaml").write_text(dump_config(learner.config))
    for version, folder in ((4, run_dir / "model"), (2, run_dir / "models" / "step_2")):
        export(checkpoint_folder(run_dir, version), tmp_path / f"out-{version}")
        exported = load_file(tmp_path / f"out-{version}" / "model.safetensors")
        assert_equal(exported, load_file(folder / "model.safetensors"))


def test_a_run_whose_batches_end_early_also_ends_with_a_push_of_the_average(
    open_run: OpenRun, tmp_path: Path, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    publisher.calls = fake_buffer.calls
    learner = open_run(9, learner={"ema_decay": DECAY})
    for report in learner.run():
        if report.version == 2 and not isinstance(report, TrainingEnded):
            sampled_with = publisher.weights
            learner.requests.end("the user has seen enough")
    assert isinstance(report, TrainingEnded)
    assert_equal(publisher.weights, load_file(tmp_path / "run" / "model" / "model.safetensors"))
    assert not torch.equal(publisher.weights["model.norm.weight"], sampled_with["model.norm.weight"])
    calls = [call for call in publisher.calls if call[0] in ("served", "ended", "push")]
    assert calls[-3:] == [("served", 2), ("ended", 2), ("push", 2)], "the buffer knows before the push"


def test_an_average_asked_for_at_a_resume_begins_with_the_weights_of_the_checkpoint(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    saved = weights_of(train(learner_config(tiny_model_path), 2, tmp_path / "step_2", save_at=2))
    train(learner_config(tiny_model_path), 3, tmp_path / "step_2", save_at=2)
    resumed = train(learner_config(tiny_model_path, learner={"ema_decay": DECAY}), 0, tmp_path / "step_2")
    with resumed.averaged():
        assert_equal(weights_of(resumed), saved)


def test_an_average_needs_servers_that_are_evaluated_and_not_sampled_with() -> None:
    beside = {"learner": {"ema_decay": DECAY}, "eval": {"every_steps": 5}}
    with pytest.raises(SettingsError, match=r"^learner\.ema_decay .*placement\.eval\.servers"):
        learner_config(**beside)
    learner_config(**beside, placement={"eval": {"servers": 1}})
    learner_config(learner={"ema_decay": DECAY})
