from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_rl.base.errors import NothingToLearnError, StalenessError
from async_rl.base.messages.reports import EvaluationDue, ServersFilled, StepDone, TrainingEnded
from async_rl.base.run_dir.checkpoints import list_checkpoints
from learner.loop import learner as learner_module
from tests.kit.learner.batches import make_batch
from tests.kit.learner.fakes import FakeClient, FakePublisher, OpenRun, pushed_bytes

pytestmark = pytest.mark.processes  # together they compute for long

METRICS = {
    "batch/episodes", "reward/mean", "staleness/max", "offpolicy/is_weight_max", "offpolicy/ess_truncated",
    "offpolicy/kl_behaviour_proximal_k3", "offpolicy/clip_fraction_positive", "parity/precision/mean_abs",
    "policy/loss", "policy/entropy", "policy/grad_norm", "policy/lr", "response/length_mean", "time/step_s",
    "time/wait_data_s", "time/train_s", "time/sync_s", "buffer/depth",
}  # fmt: skip
"""Some numbers of every step, of each part that computes them."""


def test_a_run_takes_trains_pushes_and_releases_in_order_and_saves_a_model_folder(
    open_run: OpenRun, tiny_model_path: Path, tmp_path: Path, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    learner = open_run(3, weight_sync={"every_steps": 2})
    fake_buffer.calls = publisher.calls
    filled, *reports = learner.run()
    assert filled == ServersFilled(servers=(("rollout/0", 1),), version=0)
    assert publisher.calls == [
        ("fill", 0), ("served", 0), ("take", 0), ("trained", 1), ("take", 1), ("trained", 2), ("push", 2),
        ("served", 2), ("take", 2), ("trained", 3), ("push", 3), ("buffer_checkpoint", 3), ("close", -1),
    ]  # fmt: skip
    assert [report.version for report in reports] == [1, 2, 3]
    keys = [{metric.key for metric in report.metrics} for report in reports]
    for prefix in ("staleness/episodes_", "by_staleness/0/", "by_length/"):
        assert all(any(key.startswith(prefix) for key in of_step) for of_step in keys)
    assert all(of_step >= METRICS for of_step in keys)
    assert {"push/fill_s", "push/filled_servers"} <= keys[0] - keys[1]
    assert {"time/push_s", "push/bytes", "push/pause_s", "version/rollout/0"} <= keys[1] - keys[0]
    assert {"checkpoint/pause_s", "checkpoint/last_write_s"} <= keys[2] - keys[1]
    assert {span.state for span in reports[2].spans} == {"wait_data", "busy", "sync", "checkpoint"}
    assert {span.pool for span in reports[2].spans} == {"learner/0", "rollout/0"}

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    assert set(publisher.weights) == {name for name, _ in saved.named_parameters()}
    assert "lm_head.weight" not in publisher.weights
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter.detach(), publisher.weights[name])
        assert not torch.equal(parameter, before.get_parameter(name))
    for file in tiny_model_path.iterdir():
        assert (tmp_path / "run" / "model" / file.name).exists()

    ((tokens, logprobs),) = publisher.verified  # after the first push only, with the weights of that push
    assert len(tokens) == len(logprobs) + 1


@pytest.mark.parametrize("keep_best", [0, 1], ids=["pinned", "that chooses the best"])
def test_an_evaluation_that_holds_pushes_ends_before_the_learner_takes_gpu_memory(
    open_run: OpenRun, publisher: FakePublisher, keep_best: int
) -> None:
    learner = open_run(
        3, weight_sync={"verify_every": 0}, rollout={"engine": "sglang"}, placement={"colocated": True},
        staleness={"max": 0}, eval={"every_steps": 1, "pin_version": not keep_best},
        checkpoint={"every_steps": 1, "keep_best": keep_best},
    )
    assert learner.config.shares_gpus

    def end_the_evaluation() -> None:
        publisher.calls.append(("evaluated", -1))
        learner.evaluations.schedule.ended()

    for report in learner.run():
        if isinstance(report, EvaluationDue):
            threading.Timer(0.3, end_the_evaluation).start()
    assert [call for call, _ in publisher.calls] == [
        "push", *["release_server_memory", "push", "evaluated"] * 2, "release_server_memory", "push",
    ]


def test_a_run_out_of_time_pushes_its_last_version_and_saves_it(
    open_run: OpenRun, tmp_path: Path, publisher: FakePublisher
) -> None:
    _, *reports = open_run(50, run={"seconds": 1e-9}, weight_sync={"every_steps": 3}).run()
    assert [report.version for report in reports] == [1, 2]  # time counts from the end of the first step
    assert publisher.calls[-1] == ("push", 2)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_buffer_without_another_batch_ends_the_run_with_a_saved_model_and_a_note(
    open_run: OpenRun, tmp_path: Path, publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_raw(client: FakeClient, version: int, interrupted: Callable[[], bool]) -> list[bytes]:
        if version == 2:
            raise NothingToLearnError("the task is solved")
        return [bytes([version])]

    monkeypatch.setattr(FakeClient, "take_raw", take_raw)
    _, *reports = open_run(50, weight_sync={"every_steps": 3}).run()
    assert [report.version for report in reports] == [1, 2, 2]
    assert isinstance(reports[-1], TrainingEnded) and reports[-1].reason == "the task is solved"
    assert [pushed_bytes(report) for report in reports] == [[], [], [7.0]]
    assert publisher.calls[-1] == ("push", 2)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert list(list_checkpoints(tmp_path / "run")) == [2], "though every 100 steps one is due"


def test_in_exact_mode_a_push_waits_for_the_buffer(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    learner = open_run(2, staleness={"max": 2, "mode": "exact"}, weight_sync={"on_update": "drain"})
    fake_buffer.calls = publisher.calls
    list(learner.run())
    assert publisher.calls[3:6] == [("trained", 1), ("await_push", 1), ("push", 1)]
    assert ("await_push", 2) not in publisher.calls  # after the last step nothing waits


def test_the_times_of_a_step_hold_what_their_names_say_and_no_checkpoint(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = open_run(
        2, checkpoint={"every_steps": 1}, rollout={"engine": "sglang"}, staleness={"max": 0},
        placement={"colocated": True}, eval={"every_steps": 1, "pin_version": True},
        weight_sync={"on_update": "drain", "verify_every": 0},
    )
    for slow in ("FakeClient.buffer_checkpoint", "FakeClient.await_push", "FakePublisher.release_server_memory"):
        monkeypatch.setattr(f"tests.kit.learner.fakes.{slow}", lambda *_: time.sleep(0.2) or {})
    for report in learner.run():
        if isinstance(report, EvaluationDue):
            threading.Timer(0.2, learner.evaluations.schedule.ended).start()
        if not isinstance(report, StepDone):
            continue
        values = {metric.key: metric.value for metric in report.metrics}
        spent_s: Counter[str] = Counter()
        for span in report.spans:
            if span.pool == "learner/0":
                spent_s[span.state if span.name != "drain" else "drain"] += span.end_s - span.start_s
        for key, state in (("wait_data", "wait_data"), ("train", "busy"), ("sync", "sync"), ("held_by_eval", "eval")):
            assert values.get(f"time/{key}_s", 0.0) == pytest.approx(spent_s[state], rel=1e-6)
        assert values.get("time/drain_s", 0.0) == pytest.approx(spent_s["drain"], rel=1e-6)


def test_two_runs_with_one_seed_give_the_same_weights(open_run: OpenRun, publisher: FakePublisher) -> None:
    weights = []
    for name in ("a", "b"):
        list(open_run(2, run={"name": name}).run())
        weights.append(publisher.weights)
    assert publisher.calls.count(("push", 2)) == 2
    assert weights[0].keys() == weights[1].keys() and weights[0] is not weights[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_batch_over_the_bound_is_refused_before_anything_is_trained_on(
    open_run: OpenRun, fake_buffer: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = open_run(9, staleness={"max": 1})
    old = make_batch(version=0)
    monkeypatch.setattr(learner_module, "decode_batch", lambda _: dataclasses.replace(old, version=2))
    learner.version = 2
    with pytest.raises(StalenessError, match=r"group 0 .*version 0, .*version 2"):
        list(learner.run())
    assert [op for op, _ in fake_buffer.calls] == ["served", "take"]
    torch.distributed.destroy_process_group()


def test_gloo_and_nccl_stay_on_loopback_when_the_ranks_meet_there(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    open_run()
    assert [os.environ[variable] for variable in variables] == ["lo", "=lo"]  # a bare name is a prefix to NCCL
    torch.distributed.destroy_process_group()


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_a_folder_on_the_way_is_the_model_of_a_run_that_ends_there(
    open_run: OpenRun, tmp_path: Path
) -> None:
    for name, steps, every_steps in (("long", 5, 2), ("short", 2, 0)):
        learner = open_run(steps, run={"name": name}, checkpoint={"models_every_steps": every_steps})
        assert [report.version for report in learner.run()] == list(range(steps + 1))
    models = tmp_path / "long" / "models"
    assert {folder.name for folder in models.iterdir()} == {"step_2", "step_4"}
    assert not (tmp_path / "short" / "models").exists()
    assert {file.name for file in (models / "step_2").iterdir()} == {
        file.name for file in (tmp_path / "long" / "model").iterdir()
    }
    early, ended = weights_in(models / "step_2"), weights_in(tmp_path / "short" / "model")
    assert all(torch.equal(early[name], ended[name]) for name in ended)
    late = weights_in(tmp_path / "long" / "model")
    assert not all(torch.equal(early[name], late[name]) for name in late)
