"""Models that are read tensor by tensor have the weights that transformers gives them, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    FalconH1Config,
    FalconH1ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from async_rl.base.config import LearnerConfig, LoraConfig, ModelConfig
from async_rl.base.errors import ConfigError
from learner.loop.ranks import Ranks, open_ranks
from learner.models.network import open_model, read_weights
from learner.models.policy import Policy, open_policy, shard
from tests.kit.configs import learner_config
from tests.kit.model_headers import QWEN2_5, count, fake_ranks, save_headers
from tests.kit.models import save_bare_model, save_bare_reward_model
from tests.kit.tiny_moe import moe_model

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")


@pytest.fixture
def no_group() -> Any:
    """No process group, whatever other tests have left open, and no mesh of one that torch remembers."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()


def save(kind: str, folder: Path) -> Path:
    if kind == "tied":
        return save_bare_model(folder)
    if kind == "experts":
        moe_model(1).save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ))  # fmt: skip
    if kind == "several files":
        model.save_pretrained(folder, max_shard_size="4KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    else:
        model.base_model.save_pretrained(folder)  # names without `model.`, and no head
    return folder


def check_equal(found: Any, expected: Any) -> None:
    tensors = dict(expected.named_parameters()) | dict(expected.named_buffers())
    ours = dict(found.named_parameters()) | dict(found.named_buffers())
    assert ours.keys() == tensors.keys() and len(tensors) > 5
    for name, tensor in tensors.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tied", "experts", "several files"])
def test_a_model_that_is_read_tensor_by_tensor_is_the_one_of_transformers(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    path = str(save(kind, tmp_path))
    lm = open_model(AutoModelForCausalLM, path, dtype)
    assert all(parameter.is_meta for parameter in lm.parameters())
    read_weights(lm, lm, "cpu")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    check_equal(lm, expected)
    assert not lm.training
    tokens = torch.arange(8)[None]
    assert torch.equal(lm(tokens).logits, expected(tokens).logits)


def test_a_classifier_has_the_weights_of_a_folder_without_the_prefix_of_its_model(tmp_path: Path) -> None:
    path = str(save("base model", tmp_path))
    lm = open_model(AutoModelForTokenClassification, path, torch.float32, num_labels=1)
    lm.stored_weights.start(lm.score, torch.zeros)
    read_weights(lm, lm, "cpu")
    expected: Any = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    torch.nn.init.zeros_(expected.score.weight)
    torch.nn.init.zeros_(expected.score.bias)
    check_equal(lm, expected)


def test_a_head_in_the_folder_wins_over_the_start_of_a_fresh_one(tmp_path: Path) -> None:
    path = str(save_bare_reward_model(tmp_path))
    lm = open_model(AutoModelForSequenceClassification, path, torch.float32)
    lm.stored_weights.start(lm.score, torch.zeros)
    read_weights(lm, lm, "cpu")
    check_equal(lm, AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32))


def test_weights_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    lm = open_model(AutoModelForTokenClassification, str(save_bare_model(tmp_path)), torch.float32, num_labels=1)
    with pytest.raises(ConfigError, match=r"2 weights .*score\.bias, score\.weight"):
        read_weights(lm, lm, "cpu")


def test_a_buffer_that_a_module_around_its_own_computes_has_its_value(tmp_path: Path) -> None:
    multipliers = [0.5, 0.25, 2.0, 3.0, 4.0]
    config = FalconH1Config(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8,
        ssm_multipliers=multipliers,
    )
    FalconH1ForCausalLM(config).save_pretrained(tmp_path)
    lm = open_model(AutoModelForCausalLM, str(tmp_path), torch.float32)
    read_weights(lm, lm, "cpu")
    check_equal(lm, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    vector = lm.get_buffer("model.layers.0.mamba.mup_vector").flatten()  # of parts of 32, 32, 8, 8 and 4 numbers
    assert vector.tolist() == [m for m, count in zip(multipliers, (32, 32, 8, 8, 4), strict=True) for _ in range(count)]


@pytest.mark.parametrize("kind", ["tied", "experts", "several files"])
def test_each_of_three_ranks_reads_its_rows_and_no_others(tmp_path: Path, no_group: None, kind: str) -> None:
    path = str(save(kind, tmp_path))
    whole = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    for rank in range(3):
        with fake_ranks(3, rank):
            policy = open_policy(ModelConfig(path=path), torch.float32)
            shard(policy, Ranks(init_device_mesh("cpu", (3,))), LearnerConfig())
        parameters = dict(policy.lm.named_parameters())
        assert parameters.keys() == whole.keys()
        for name, parameter in parameters.items():
            chunks = whole[name].chunk(3)  # the last ranks may have none
            expected = chunks[rank] if rank < len(chunks) else whole[name][:0]
            assert isinstance(parameter, DTensor) and torch.equal(parameter.to_local(), expected), name


def sharded_as(path: str, ranks: int, rank: int, slices: int, **changes: Any) -> Policy:
    """The policy of one of `ranks` ranks, of which `slices` split a row."""
    learner = {"sequence_parallel": slices, **changes}
    nodes = 2 if changes else 1
    placement = {"learner": {"ranks": ranks, "nodes": nodes}, "rollout": {"servers": nodes}}
    config = learner_config(Path(path), learner=learner, placement=placement)
    with fake_ranks(ranks, rank):
        policy = open_policy(config.model, torch.float32)
        shard(policy, open_ranks(config, CPU), config.learner)
    return policy


@pytest.mark.parametrize("kind", ["tied", "several files"])
@pytest.mark.parametrize("changes", [{}, {"sharding": "hybrid"}])
def test_ranks_that_split_rows_read_their_part_of_head_and_embeddings(
    tmp_path: Path, no_group: None, kind: str, changes: dict[str, Any]
) -> None:
    path = str(save(kind, tmp_path))
    whole = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    for rank in range(4):
        policy = sharded_as(path, 4, rank, 2, **changes)
        assert policy.lm.get_output_embeddings().weight.requires_grad
        parameters = dict(policy.lm.named_parameters())
        assert parameters.keys() == whole.keys()
        for name, parameter in parameters.items():
            if "embed" in name or "lm_head" in name:  # first over the ranks that split a row, then over the others
                of_slice = whole[name].chunk(2)[rank % 2]
                expected = of_slice if changes else of_slice.chunk(2)[rank // 2]
            else:
                expected = whole[name].chunk(2)[rank % 2] if changes else (*whole[name].chunk(4), whole[name][:0])[rank]
            assert torch.equal(parameter.to_local(), expected), name  # type: ignore[attr-defined]


def save_with_rows(rows: int, folder: Path) -> str:
    """Save a model with so many rows of embeddings."""
    lm = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=rows, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    ))  # fmt: skip
    lm.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("rows", "refuses"), [(9, True), (12, False), (13, False)])
def test_rows_of_embeddings_that_checkpoints_would_miscount_are_refused_by_some_rank(
    rows: int, refuses: bool, tmp_path: Path, no_group: None
) -> None:
    path, refused = save_with_rows(rows, tmp_path), []
    for rank in range(8):
        try:
            sharded_as(path, 8, rank, 2)
        except ConfigError as error:
            refused.append(str(error))
    assert bool(refused) == refuses
    assert all(f"{rows} rows of embeddings on 8 learner ranks" in each for each in refused)


def test_adapters_begin_alike_however_they_are_sharded(tmp_path: Path, no_group: None) -> None:
    config = ModelConfig(path=str(save_bare_model(tmp_path)), lora=LoraConfig(rank=4))
    torch.manual_seed(5)
    alone = open_policy(config, torch.float32)
    read_weights(alone, alone.lm, "cpu")
    for name, parameter in alone.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if ".lora_" in name:
            assert parameter.any() == (".lora_A." in name)
    torch.manual_seed(5)
    with fake_ranks(2, 1):
        sharded = open_policy(config, torch.float32)
        shard(sharded, Ranks(init_device_mesh("cpu", (2,))), LearnerConfig())
    for (name, whole), part in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(part.to_local(), whole.chunk(2)[1]), name  # type: ignore[attr-defined]
        assert part.requires_grad == whole.requires_grad


def test_a_rank_needs_no_more_than_its_shards_and_a_block_while_it_reads(tmp_path: Path, no_group: None) -> None:
    save_headers(Qwen2Config(**QWEN2_5["0.5B"] | {"num_hidden_layers": 4, "tie_word_embeddings": False}), tmp_path)
    found = count(tmp_path, 8)
    assert found.shards <= found.peak <= found.shards + found.block < found.whole / 4


@pytest.mark.nightly
@pytest.mark.parametrize("size", ["7B", "32B", "72B"])
def test_large_models_need_shards_and_a_block_at_8_and_64_ranks(tmp_path: Path, no_group: None, size: str) -> None:
    save_headers(Qwen2Config(**QWEN2_5[size]), tmp_path)
    for ranks in (8, 64):
        found = count(tmp_path, ranks)
        assert found.shards <= found.peak <= found.shards + found.block
        assert found.shards == pytest.approx(found.whole / ranks, rel=0.01)
