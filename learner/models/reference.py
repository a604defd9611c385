"""The reference model, to which a KL term keeps the policy close.

It is the frozen model of `reference.path` or, if that is empty, the model that the policy started from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from async_rl.config import Config, LoraConfig
from async_rl.errors import ConfigError
from learner.models.lora import without_adapters
from learner.models.policy import Policy, open_policy, shard
from learner.packing.microbatches import ForwardInputs
from learner.ranks import Ranks


class Reference:
    """Computes the logprobs of rows under the frozen model of reference.path or, if that is empty, of model.path.

    It is sharded like the policy, and with reference.offload in CPU memory between uses. With LoRA and no
    reference.path it is the policy without its adapters, which costs no memory.

    Raises:
        ConfigError: the model has another vocabulary size than the policy.
    """

    def __init__(self, config: Config, policy: Policy, dtype: torch.dtype, ranks: Ranks) -> None:
        self._policy = policy
        if not config.model.lora.rank or config.reference.path:
            path = config.reference.path or config.model.path
            model = dataclasses.replace(config.model, path=path, lora=LoraConfig())
            self._policy = open_policy(model, dtype, is_trained=False)
            expected, found = policy.lm.config.vocab_size, self.lm.config.vocab_size
            if expected != found:
                raise ConfigError(
                    f"reference.path {path} must have the policy's vocabulary of {expected} tokens, got {found}"
                )
            shard(self._policy, ranks, config.learner, offload=config.reference.offload)
            self._policy.forbidden = policy.forbidden

    @property
    def lm(self) -> Any:
        """The Hugging Face model."""
        return self._policy.lm

    @torch.no_grad()
    def logprobs(self, inputs: ForwardInputs) -> Tensor:
        """Return the logprobs of the N response tokens at the logged temperature, [N] float32. Collective."""
        with without_adapters(self.lm):
            return self._policy(inputs)[0]
