"""The metrics and weights of an update, and the logprobs that it must have computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.base.telemetry.metrics import Metric
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
