"""Vocabularies that the ranks don't divide, as one of eight ranks sees them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_rl.errors import ConfigError
from learner.models.policy import load_policy, shard
from learner.ranks import open_ranks
from tests.kit.configs import learner_config

REFUSED = r"sequence_parallel must be 1 with 9 rows of embeddings on 8 learner ranks: .*0 rows.* for 1\."


def save(folder: Path, rows: int) -> Path:
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=rows, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def as_rank_6() -> Any:
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it holds the meshes of other tests
    dist.init_process_group("fake", store=FakeStore(), rank=6, world_size=8)
    yield
    dist.destroy_process_group()
    _clear_sharding_prop_cache()


@pytest.mark.parametrize(
    ("rows", "outcome"), [(9, pytest.raises(ConfigError, match=REFUSED)), (16, nullcontext())]
)
def test_rows_that_checkpoints_would_take_for_others_are_refused(
    tmp_path: Path, as_rank_6: None, rows: int, outcome: AbstractContextManager[object]
) -> None:
    placement = {"learner": {"ranks": 8}, "rollout": {"servers": 1}}
    config = learner_config(save(tmp_path, rows), learner={"sequence_parallel": 2}, placement=placement)
    policy = load_policy(config.model, torch.device("cpu"), torch.float32)
    with outcome:
        shard(policy, open_ranks(config, torch.device("cpu")), config.learner)
