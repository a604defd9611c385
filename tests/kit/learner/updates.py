"""The metrics, weights and gradient of an update, and the logprobs that it must have computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.base.telemetry.metrics import Metric
from async_rl.base.types import Batch
from learner.algorithms.advantages import batch_advantages
from learner.algorithms.diagnostics import MetricAccumulator
from learner.loop.updater import Updater
from learner.models.policy import full_parameters


def values_of(metrics: list[Metric]) -> dict[str, float]:
    return {metric.key: metric.value for metric in metrics}


def weights_of(updater: Updater) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_parameters(updater.policy, torch.float32)}


def reference_logprobs(lm: Any, prompt: np.ndarray, row: np.ndarray, temperature: float) -> Tensor:
    ids = torch.tensor([[*prompt.tolist(), *row.tolist()]])
    logits = lm(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(row)), torch.tensor(row.tolist())]


@torch.no_grad()
def batch_logprobs(lm: Any, batch: Batch) -> dict[tuple[int, int], Tensor]:
    """The logprobs of each row by transformers alone, by the numbers of its group and of itself."""
    return {
        (g, i): reference_logprobs(lm, group.prompt_tokens, row.tokens, group.temperature)
        for g, group in enumerate(batch.groups) for i, row in enumerate(group.rows)
    }  # fmt: skip


def gradients(updater: Updater, batch: Batch) -> dict[str, Tensor]:
    """The gradient of the policy, whose steps have one minibatch."""
    packed = updater.pack(batch, batch_advantages(updater.config, batch))
    (minibatch,) = updater.objective.prepare(updater.at_step_start(packed))
    updater.forward_backward(minibatch, MetricAccumulator(), trains_policy=True, is_first_epoch=True)
    return {name: p.grad.full_tensor() for name, p in updater.policy.lm.named_parameters()}  # type: ignore[union-attr]
