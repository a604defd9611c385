"""The loss that balances experts is the one of the models' families, over all tokens of a minibatch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from learner.algorithms.diagnostics import MetricAccumulator
from learner.loop.updater import Updater
from learner.models.balance import RouterBalance
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.models import save_bare_model
from tests.kit.routing import CHOSEN, COUNT, experts_in, tiny_experts

COEF = 0.3


def balanced(model: Path, max_tokens: int = 4096, coef: float = COEF) -> Config:
    learner = {"max_tokens_per_microbatch": max_tokens}
    return learner_config(model, algorithm={"router_aux_coef": coef}, learner=learner)


@pytest.mark.parametrize("max_tokens", [4096, 25])
def test_the_gradient_is_that_of_the_familys_loss_over_the_whole_minibatch(
    max_tokens: int, tmp_path: Path, one_rank: None
) -> None:
    lm = tiny_experts("Qwen3Moe")
    lm.save_pretrained(tmp_path / "model")
    updater, batch = Updater(balanced(tmp_path / "model", max_tokens), torch.device("cpu")), make_batch(group_size=1)
    no_advantages = [[np.zeros(len(row.tokens), np.float32) for row in group.rows] for group in batch.groups]
    (minibatch,) = updater.at_step_start(updater.pack(batch, no_advantages))
    assert (len(minibatch.micro_batches) > 1) == (max_tokens == 25)
    losses, _ = updater.forward_backward(minibatch, MetricAccumulator(), trains_policy=True, is_first_epoch=True)
    of_rows = [
        lm.model(torch.tensor([[*g.prompt_tokens, *g.rows[0].tokens[:-1]]]), output_router_logits=True).router_logits
        for g in batch.groups
    ]
    logits = tuple(torch.cat(of_layer) for of_layer in zip(*of_rows, strict=True))
    expected = COEF * load_balancing_loss_func(logits, COUNT, CHOSEN)
    expected.backward()
    assert float(losses["policy"]) == pytest.approx(float(expected.detach()), rel=1e-5)
    found = {name: parameter.grad.full_tensor() for name, parameter in updater.policy.lm.named_parameters()}  # type: ignore[union-attr]
    for name, parameter in lm.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5 * scale + 1e-9, rtol=0)
    assert sum(float(p.grad.abs().max()) > 1e-4 for n, p in lm.named_parameters() if "gate.weight" in n) == 2


def test_a_model_without_this_loss_is_refused(tmp_path: Path, one_rank: None) -> None:
    for family in ("Mixtral", "Qwen2Moe", "Olmoe"):
        lm = tiny_experts(family)
        RouterBalance(lm, experts_in(lm))
    lm = tiny_experts("DeepseekV3")  # its biases balance the load
    with pytest.raises(ConfigError, match=r"router_aux_coef.*load_balancing_loss_func"):
        RouterBalance(lm, experts_in(lm))
    with pytest.raises(ConfigError, match=r"router_aux_coef.*no experts"):
        Updater(balanced(save_bare_model(tmp_path / "dense")), torch.device("cpu"))
