"""The settings with which weights can't travel as adapters or as changed values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from async_rl.config import ModelConfig, WeightSyncConfig
from async_rl.config.compact import check_compact_type
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from tests.kit.configs import make_config

ADAPTER = ["weight_sync.lora=adapter", "model.lora.rank=4"]
DELTA = ["weight_sync.delta=true", "model.dtype=bfloat16"]


def load(folder: Path, *overrides: str) -> None:
    (folder / "c.yaml").write_text("model: {path: none}\ntask: {name: reasoning_gym/chain_sum}\n")
    load_config(folder / "c.yaml", list(overrides))


@pytest.mark.parametrize("engine", ["sglang", "vllm", "hf"])
@pytest.mark.parametrize("transport", ["auto", "nccl", "gloo", "disk"])
@pytest.mark.parametrize("form", [ADAPTER, DELTA])
def test_compact_pushes_work_with_every_engine(
    form: list[str], transport: str, engine: str, tmp_path: Path
) -> None:
    load(tmp_path, *form, f"weight_sync.transport={transport}", f"rollout.engine={engine}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weight_sync.lora=adapter"], "weight_sync.lora must be merged with model.lora.rank 0, got 'adapter'"),
        ([*ADAPTER, *DELTA], "weight_sync.delta must be false with weight_sync.lora adapter, got True"),
        ([*DELTA, "model.dtype=float32"], "weight_sync.delta must be false with model.dtype float32, got True"),
        ([*ADAPTER, "weight_sync.transport=cuda_ipc"], "merged with weight_sync.transport cuda_ipc, got 'adapter'"),
        ([*DELTA, "weight_sync.transport=cuda_ipc"], "Others: nccl or gloo or disk."),
        ([*ADAPTER, "weight_sync.staging=device"], "must be merged with weight_sync.staging device, got 'adapter'"),
        ([*DELTA, "weight_sync.staging=host"], "weight_sync.delta must be false with weight_sync.staging host"),
        ([*DELTA, "rollout.server_url=http://there"], "weight_sync.delta must be false with rollout.server_url"),
        (
            [*ADAPTER, "rollout.server_args={quantization: fp8}"],
            "weight_sync.lora must be merged with quantization in rollout.server_args, got 'adapter'",
        ),
        (
            [*DELTA, "rollout.engine=vllm", "rollout.server_args={quantization: fp8}"],
            "weight_sync.delta must be false with quantization in rollout.server_args, got True",
        ),
        (
            [*ADAPTER, "rollout.engine=tests.extensions.engine:COUNTING"],
            "must be merged with rollout.engine tests.extensions.engine:COUNTING, got 'adapter'",
        ),
    ],
)
def test_compact_pushes_are_refused_where_nobody_can_make_them_whole(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    assert message in str(caught.value)


def test_a_sparse_push_is_refused_where_auto_gives_float32() -> None:
    sparse = dataclasses.replace(make_config(), weight_sync=WeightSyncConfig(delta=True))
    check_compact_type(sparse.weight_sync, sparse.model, "cuda")
    check_compact_type(sparse.weight_sync, ModelConfig(path="none", dtype="bfloat16"), "cpu")
    with pytest.raises(ConfigError, match=r"false with model\.dtype auto on a CPU.*Or set model\.dtype: bfloat16"):
        check_compact_type(sparse.weight_sync, sparse.model, "cpu")
