"""A resumed learner continues exactly as without the interruption: weights, optimizers, random numbers, ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.fsdp import FSDPModule

from async_rl.base.config import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    TimeoutsConfig,
)
from async_rl.base.errors import AsyncRLError, ConfigError, WaitTimeoutError
from async_rl.base.messages.reports import ServersFilled
from async_rl.base.run_dir.checkpoints import checkpoint_folder, list_checkpoints, read_training_state
from learner.loop.checkpointing import Checkpointer
from learner.loop.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.forked import start_ranks
from tests.kit.learner.batches import make_batch
from tests.kit.learner.checkpointed import state_at, train
from tests.kit.learner.fakes import FakeClient, FakePublisher, OpenRun, pushed_bytes
from tests.kit.learner.updates import weights_of

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")


def whole(updater: Updater) -> dict[str, torch.Tensor]:
    """Return every trained weight, optimizer moment and average, gathered."""
    tensors: dict[str, Any] = {}
    for network, optimizer in updater.optimizers.items():
        assert isinstance(optimizer.module, FSDPModule)
        optimizer.module.reshard()
        for name, parameter in optimizer.module.named_parameters():
            if parameter.requires_grad:
                own = {"": parameter.detach(), **optimizer.state_of(parameter)}
                own |= {"average": optimizer.average.of(parameter)} if optimizer.average else {}
                tensors |= {f"{network}.{name} {key}": tensor for key, tensor in own.items()}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


CASES: dict[str, dict[str, Any]] = {
    "policy": {},
    "critic that warms up": {
        "algorithm": AlgorithmConfig(advantage="gae"), "critic": CriticConfig(lr=1e-3, warmup_steps=3),
    },
    "SGD": {"learner": {"optimizer": "SGD", "optimizer_params": {"momentum": 0.9}}},
    "AdamW with a third tensor": {"learner": {"optimizer_params": {"amsgrad": True}}},
    "a moving average": {"learner": {"ema_decay": 0.9}},
    "adapters with dropout": {"model": {"lora": LoraConfig(rank=2, dropout=0.3)}},
    "an optimizer from outside": {"learner": {"optimizer": "tests.extensions.optimizer:MuonWithAdamW"}},
    "an optimizer with numbers of its own": {"learner": {"optimizer": "tests.kit.learner.optimizers:Counting"}},
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_a_checkpoint_as_without_the_interruption(
    case: str, tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    config = learner_config(tiny_model_path, **CASES[case])
    uninterrupted = whole(train(config, 4, tmp_path / "step_2", save_at=2))
    torch.manual_seed(99)  # dropout draws: the checkpoint must bring its random state
    resumed = whole(train(config, 2, tmp_path / "step_2"))
    assert set(resumed) == set(uninterrupted) != set()
    assert not case.startswith("adapters") or all("lora" in name for name in resumed)
    for name, tensor in resumed.items():
        assert torch.equal(tensor, uninterrupted[name]), name


def test_a_checkpoint_holds_the_state_at_the_call_although_training_goes_on(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    config = learner_config(tiny_model_path)
    updater = Updater(config, CPU)
    checkpointer = Checkpointer(config, updater.optimizers, CPU)
    before = whole(updater)
    checkpointer.save(tmp_path / "checkpoints" / "step_0", state_at(checkpointer, 0))
    updater.update(make_batch())
    checkpointer.close()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in whole(updater).items())
    again = Updater(config, CPU)
    Checkpointer(config, again.optimizers, CPU).load(tmp_path / "checkpoints" / "step_0")
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(again).items())
    assert list(list_checkpoints(tmp_path)) == [0]
    assert not (tmp_path / "checkpoints" / "step_0.partial").exists()


GPU_STATE = torch.arange(16, dtype=torch.uint8)
"""The random state of a GPU, as torch.cuda.get_rng_state returns it."""


def test_a_checkpoint_of_a_gpu_is_resumed_on_a_cpu_and_the_other_way_round(
    tiny_model_path: Path, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = Updater(learner_config(tiny_model_path), CPU)
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: GPU_STATE)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: kept.append(state.clone()))
    pageable = StagingOptions(False, False, False, False)
    monkeypatch.setattr("learner.loop.checkpointing.StagingOptions", lambda **_: pageable)  # no CUDA here
    on = {kind: Checkpointer(updater.config, updater.optimizers, torch.device(kind)) for kind in ("cpu", "cuda")}
    drawn = {}
    for kind, checkpointer in on.items():
        torch.manual_seed(99)
        checkpointer.save(tmp_path / kind / "step_0", state_at(checkpointer, 0))
        checkpointer.close()
        drawn[kind] = torch.rand(3)
    for saved, loaded in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        torch.manual_seed(0)
        on[loaded].load(tmp_path / saved / "step_0")
        assert torch.equal(torch.rand(3), drawn[saved])
    assert [state.tolist() for state in kept] == [GPU_STATE.tolist()], "only from one GPU to another"


@pytest.mark.parametrize(
    ("saved", "resumed", "names"),
    [
        ({}, CASES["critic that warms up"], "critic"),
        ({}, {"model": {"lora": LoraConfig(rank=2)}}, r"model\.lora"),
        ({"model": {"frozen": ("model.layers.0.*",)}}, {}, r"layers\.0"),
        ({}, {"model": {"frozen": ("model.embed_tokens.*",)}}, r"embed_tokens\.weight"),
        (
            {"model": {"lora": LoraConfig(rank=2, target_modules=("q_proj", "k_proj"))}},
            {"model": {"lora": LoraConfig(rank=2, target_modules=("q_proj",))}}, r"\.k_proj\.lora_A\.",
        ),
    ],
    ids=["other networks", "adapters", "frozen before", "frozen now", "fewer adapters"],
)
def test_a_checkpoint_of_other_weights_is_refused(
    saved: dict[str, Any], resumed: dict[str, Any], names: str, tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    average = {"learner": {"ema_decay": 0.9}}
    train(learner_config(tiny_model_path, **average, **saved), 1, tmp_path / "step_0", save_at=0)
    with pytest.raises(ConfigError, match=names):
        train(learner_config(tiny_model_path, **average, **resumed), 1, tmp_path / "step_0")


def _train_rank(
    rank: int, ranks: int, slices: int, store: str, model: str, folder: str, save_at: int, steps: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    layout = {"learner": {"sequence_parallel": slices, "ema_decay": 0.9}, "placement": {"learner": {"ranks": ranks}}}
    updater = train(learner_config(Path(model), **layout), steps, Path(folder), save_at)
    tensors = whole(updater)
    with updater.averaged():
        tensors |= {f"averaged {name}": tensor for name, tensor in weights_of(updater).items()}
    if rank == 0:
        torch.save(tensors, f"{store}.pt")
    dist.destroy_process_group()


def run_ranks(
    ranks: int, slices: int, store: Path, model: Path, folder: Path, save_at: int, steps: int
) -> dict[str, torch.Tensor]:
    start_ranks(_train_rank, ranks, ranks, slices, str(store), str(model), str(folder), save_at, steps)
    tensors: dict[str, torch.Tensor] = torch.load(f"{store}.pt", weights_only=True)
    return tensors


@pytest.mark.parametrize(
    ("before", "after", "slices"),
    [  # in CI 1 -> 2: e2e/test_resume.py
        (2, 2, (2, 1)), pytest.param(1, 2, (1, 1), marks=pytest.mark.nightly),
        pytest.param(2, 1, (1, 1), marks=pytest.mark.nightly), pytest.param(2, 2, (1, 2), marks=pytest.mark.nightly),
        pytest.param(2, 4, (2, 2), marks=pytest.mark.nightly), pytest.param(4, 3, (2, 3), marks=pytest.mark.nightly),
    ],
)
def test_other_ranks_that_split_rows_or_not_resume_to_the_same_weights(
    before: int, after: int, slices: tuple[int, int], tiny_model_path: Path, tmp_path: Path
) -> None:
    """The model's 23 rows of embeddings divide neither by two nor by three."""
    folder = tmp_path / "step_2"
    uninterrupted = run_ranks(before, slices[0], tmp_path / "a", tiny_model_path, folder, save_at=2, steps=4)
    resumed = run_ranks(after, slices[1], tmp_path / "b", tiny_model_path, folder, save_at=-1, steps=2)
    assert read_training_state(folder).ranks == before
    for name, tensor in resumed.items():
        torch.testing.assert_close(tensor, uninterrupted[name], atol=2e-5, rtol=2e-5)


def test_a_resumed_learner_serves_its_version_first_and_trains_the_rest(
    open_run: OpenRun, tmp_path: Path, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    every = {"checkpoint": {"every_steps": 2}, "weight_sync": {"verify_every": 0}}
    list(open_run(5, run={"name": "a"}, **every).run())
    weights = publisher.weights
    assert list(list_checkpoints(tmp_path / "a")) == [2, 4, 5]
    state = read_training_state(checkpoint_folder(tmp_path / "a", 2))
    assert (state.version, state.lineage) == (2, 0)

    publisher.calls.clear()
    (tmp_path / "a" / "config.lineage_0.yaml").touch()  # by async_rl/base/run_dir/resuming.py
    fake_buffer.calls = publisher.calls
    filled, *steps = open_run(5, run={"name": "a", "resume": checkpoint_folder(tmp_path / "a", 2)}, **every).run()
    assert filled == ServersFilled(servers=(("rollout/0", 1),), version=2)
    assert [(step.version, len(pushed_bytes(step))) for step in steps] == [(3, 1), (4, 1), (5, 1)]
    assert publisher.calls[:4] == [("fill", 2), ("served", 2), ("take", 2), ("trained", 3)]
    assert all(torch.equal(weights[name], tensor) for name, tensor in publisher.weights.items())
    assert read_training_state(checkpoint_folder(tmp_path / "a", 4)).lineage == 1


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    may_write, write = threading.Event(), dcp.FileSystemWriter.write_data

    def wait(*arguments: Any) -> Any:
        may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", wait)
    yield may_write
    may_write.set()


def test_a_checkpoint_that_never_gets_written_is_named_with_the_rank_that_waits(
    tiny_model_path: Path, tmp_path: Path, one_rank: None, slow_disk: threading.Event
) -> None:
    updater = Updater(learner_config(tiny_model_path, timeouts=TimeoutsConfig(batch_s=0.05)), CPU)
    checkpointer = Checkpointer(updater.config, updater.optimizers, CPU)
    checkpointer.save(tmp_path / "step_3", state_at(checkpointer, 3))
    checkpointer.check()  # still being written
    with pytest.raises(WaitTimeoutError, match=r"learner/0 .*timeouts\.batch_s.*step_3"):
        checkpointer.wait()


def test_a_checkpoint_that_cannot_be_written_is_named_with_the_reason(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    updater = Updater(learner_config(tiny_model_path), CPU)
    checkpointer = Checkpointer(updater.config, updater.optimizers, CPU)
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    checkpointer.save(tmp_path / "checkpoints" / "step_3", state_at(checkpointer, 3))
    with pytest.raises(AsyncRLError, match=rf"{tmp_path}/checkpoints/step_3 .*No space left.*--resume {tmp_path}$"):
        until_it_raises(checkpointer.check)


def until_it_raises(check: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        check()
        time.sleep(0.01)
