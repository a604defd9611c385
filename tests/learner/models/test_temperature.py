"""In bfloat16 too rows are scored at the temperature that was logged, not at the nearest one of that type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from async_rl.base.config import LearnerConfig, LoraConfig, ModelConfig
from learner.loop.ranks import Ranks
from learner.models.policy import open_policy, shard
from learner.packing import ForwardInputs

PROMPT, ROW = [4, 5, 6], [7, 8, 9, 2, 11, 3]
TEMPERATURE, ROUNDED = 0.6, 77 / 128
"""From 1/2 to 1 numbers of bfloat16 are 1/256 apart: 0.6 lies between 153/256 and 154/256, closer to the latter."""


@torch.no_grad()
def exact_scores(folder: Path, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies from the bfloat16 logits of transformers: all that follows them is float64."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    states = lm.model(torch.tensor([[*PROMPT, *ROW[:-1]]]), use_cache=False).last_hidden_state[0, len(PROMPT) - 1 :]
    logp = ((states @ lm.lm_head.weight.T).double() / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(ROW)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("kind", ["whole rows", "adapters", "split rows"])
def test_the_temperature_is_not_rounded_to_the_type_of_the_model(
    tiny_model_path: Path, one_rank: None, kind: str
) -> None:
    ranks = Ranks(init_device_mesh("cpu", (1,)))
    if kind == "split rows":  # by one rank, which exchanges with itself
        grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "sequence"))
        ranks = Ranks(ranks.mesh, grid["sequence"], grid["data"])
    adapters = LoraConfig(rank=2 * (kind == "adapters"))  # they begin without an effect
    policy = open_policy(ModelConfig(path=str(tiny_model_path), lora=adapters), torch.bfloat16)
    shard(policy, ranks, LearnerConfig())
    tokens = torch.tensor([[*PROMPT, *ROW[:-1]]])
    found = policy(ForwardInputs(
        tokens=tokens, segments=None, positions=None, where=torch.arange(len(PROMPT) - 1, tokens.shape[1]),
        targets=torch.tensor(ROW), temperature=torch.full((len(ROW),), TEMPERATURE),
    ))  # fmt: skip
    exact, rounded = exact_scores(tiny_model_path, TEMPERATURE), exact_scores(tiny_model_path, ROUNDED)
    for scores, expected, at_another in zip(found, exact, rounded, strict=True):
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=0)
        assert (expected - at_another).abs().max() > 1e-3
