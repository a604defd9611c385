from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from async_rl.base.types import Batch
from learner.loop import learner as learner_module
from learner.loop import pushes as pushes_module
from learner.loop.learner import Learner
from learner.models.tiny_model import character_tokenizer
from tests.kit.learner.batches import make_batch
from tests.kit.learner.fakes import FakeClient, FakePublisher, OpenRun, open_learner
from tests.kit.learner.rank_process import ALGORITHMS, EPISODE_ALGORITHMS, EXPERT_ALGORITHMS, Case, run_ranks
from tests.kit.models import save_bare_model, save_bare_reward_model
from tests.kit.routing import tiny_experts

torch.set_num_threads(1)
settings.register_profile("learner", deadline=None)  # the machine may be busy
settings.load_profile("learner")


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    """Cases by what they are of: none is empty."""
    vectors: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
    assert all(vectors.values())
    return vectors


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner")
    save_bare_reward_model(folder / "reward-model")
    save_bare_model(folder / "untied", is_tied=False)
    tiny_experts("Qwen3Moe").save_pretrained(folder / "experts")
    (folder / "texts.jsonl").write_text('{"text": "3141592"}\n{"text": "2718281828459045"}\n{"text": "17"}\n')
    character_tokenizer().save_pretrained(folder / "model")  # digits are in the vocabulary of the model
    return save_bare_model(folder / "model")


@pytest.fixture(scope="session")
def two_ranks(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of `rank_main` on each of two ranks."""
    cases = [
        *(Case(algorithm, 26) for algorithm in (*ALGORITHMS, *EPISODE_ALGORITHMS)), Case("token_mean", 26, "hybrid"),
        Case("token_mean", 24), *(Case(algorithm, 26) for algorithm in EXPERT_ALGORITHMS),
    ]  # fmt: skip
    return run_ranks(2, tiny_model_path, tmp_path_factory.mktemp("two_ranks"), cases)


@pytest.fixture(scope="session")
def two_slices(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of `rank_main` on each of two ranks that split every row."""
    algorithms = ("sequence_mean", "constant", *EPISODE_ALGORITHMS, *EXPERT_ALGORITHMS)  # nightly, of four ranks: all
    cases = [Case(algorithm, 26, slices=2) for algorithm in algorithms]
    untied = Case("token_mean", 26, slices=2, untied=True)
    return run_ranks(2, tiny_model_path, tmp_path_factory.mktemp("two_slices"), [untied, *cases])


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> FakePublisher:
    fake = FakePublisher()
    monkeypatch.setattr(pushes_module, "open_publisher", lambda *_: fake)
    monkeypatch.setattr(pushes_module, "open_filler", lambda of: of.filler)
    return fake


@pytest.fixture
def fake_buffer(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The client of every learner that the test opens."""
    client = FakeClient()
    monkeypatch.setattr(learner_module, "LearnerClient", lambda *_: client)

    def decode(frames: list[bytes]) -> Batch:
        version = frames[0][0]
        batch = make_batch(seed=version, version=version)
        groups = tuple(dataclasses.replace(g, group_id=3 * version + g.group_id) for g in batch.groups)
        return dataclasses.replace(batch, groups=groups, gauges={"buffer/depth": 1.0})

    monkeypatch.setattr(learner_module, "decode_batch", decode)
    return client


@pytest.fixture
def open_run(
    tiny_model_path: Path, tmp_path: Path, publisher: FakePublisher, fake_buffer: FakeClient
) -> Iterator[OpenRun]:
    """Opens the learner of a run of so many steps in `tmp_path`, whose buffer and servers are fakes."""

    def open_run(steps: int = 2, **sections: Any) -> Learner:
        run = {"steps": steps, "dir": tmp_path, **sections.pop("run", {})}
        return open_learner(tiny_model_path, run=run, **sections)

    yield open_run
    if dist.is_initialized():  # the learner of a test that failed, else the next tests fail too
        dist.destroy_process_group()
