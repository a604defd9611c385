"""The auxiliary loss that balances the load of experts: Switch Transformer, arXiv 2101.03961, equations 4 to 6.

    L = E * sum_e f_e P_e       f_e: choices of expert e by a token and layer, P_e: mean probability of expert e

f_e has no gradient. It is counted over all tokens of a minibatch on all ranks, at the start of the step. So L is a sum
over tokens, and does not depend on how the minibatch is split into micro-batches and ranks. (A loss of each micro-batch
alone would; arXiv 2501.11873 shows why the larger batch is better.) L is about the choices that the routers make by
themselves now, even where recorded choices are replayed, because those are to be balanced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.experts import Experts


class RouterBalance:
    """Counts how often routers chose each expert in the model's last forward pass, and computes the balance loss.

    Args:
        experts: the routers; None: the model has none.

    Raises:
        ConfigError: the model has no experts, or its family does not define this loss in transformers.
    """

    def __init__(self, lm: Any, experts: Experts | None) -> None:
        defined = getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
        if experts is None or defined is None:
            lacking = "has no experts" if experts is None else "has no load_balancing_loss_func in transformers"
            raise ConfigError(
                f"algorithm.router_aux_coef must be 0 with {type(lm).__name__}, which {lacking}: there is no loss that "
                "its routers could be balanced by"
            )
        self._experts = experts
        logits = torch.randn(10, experts.count, generator=torch.Generator().manual_seed(0))
        slopes = _slopes(_count(logits, experts.per_token), 5 * 2)
        own = (_probabilities(logits) @ slopes).sum()
        expected = defined((logits[:5], logits[5:]), experts.count, experts.per_token)
        if not torch.allclose(own, expected, rtol=1e-4):
            raise ConfigError(
                f"algorithm.router_aux_coef must be 0 with {type(lm).__name__}: its load_balancing_loss_func gives "
                f"{float(expected)} where Switch Transformer's gives {float(own)}"
            )
        lm.config.output_router_logits = True
        lm.base_model.register_forward_hook(self._keep)
        self._logits: tuple[Tensor, ...] = ()

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        self._logits = output.router_logits

    def counts(self, fed: Tensor) -> Tensor:
        """Return how often tokens and layers chose each expert, and last the number of tokens times layers. [E + 1]

        Args:
            fed: [tokens] bool, False for padding.
        """
        chosen = sum(_count(logits[fed], self._experts.per_token) for logits in self._logits)
        return torch.cat([torch.as_tensor(chosen), fed.sum()[None] * len(self._logits)])

    @staticmethod
    def slopes(counted: Sequence[Tensor]) -> Tensor:
        """Return E * f_e / N of a minibatch, [E], from the `counts` of its micro-batches on all ranks. Collective."""
        dist.all_reduce(total := torch.stack(list(counted)).sum(0))
        return _slopes(total[:-1], int(total[-1]))

    def loss(self, fed: Tensor, slopes: Tensor) -> Tensor:
        """Return the share of the loss of the last forward pass's tokens, a scalar with gradient.

        Args:
            fed: [tokens] bool, False for padding.
            slopes: [E] of the minibatch, from `slopes`.
        """
        return torch.stack([(_probabilities(logits[fed]) @ slopes).sum() for logits in self._logits]).sum()


def _slopes(chosen: Tensor, tokens: int) -> Tensor:
    """Return E * f_e / N, [E]. The loss is the sum of slopes_e * p_e over N tokens and layers.

    Args:
        chosen: [E] how many tokens and layers have chosen each expert.
        tokens: N, at least 1.
    """
    return len(chosen) * chosen.float() / tokens**2


def _count(logits: Tensor, per_token: int) -> Tensor:
    return torch.bincount(logits.topk(per_token).indices.flatten(), minlength=logits.shape[1])


def _probabilities(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)
