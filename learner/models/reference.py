"""The reference: the frozen model of a KL penalty. A run without one does not load this module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import check_trainable
from learner.loop.ranks import Ranks
from learner.models.network import has_adapters, open_model
from learner.models.policy import Policy, shard
from learner.packing import ForwardInputs


class Reference:
    """Computes the logprobs of rows under the frozen model of reference.path or, if that is empty, of model.path.

    The model is sharded like the policy, and with reference.offload in CPU memory between uses. With LoRA and no
    reference.path it is the policy without its adapters, which costs no memory.

    Raises:
        ConfigError: the model has another vocabulary size than the policy.
    """

    def __init__(self, config: Config, policy: Policy, dtype: torch.dtype, ranks: Ranks) -> None:
        self._policy = policy
        if not config.model.lora.rank or config.reference.path:
            path = config.reference.path or config.model.path
            check_trainable(path)
            attention = config.model.attn_implementation
            lm = open_model(AutoModelForCausalLM, path, dtype, attn_implementation=attention)
            self._policy = Policy(lm.requires_grad_(False).eval(), dtype)
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
        """Return the logprobs of the N response tokens at their sampling temperature, [N] float32. Collective.

        The reference's routers choose by themselves: recorded routing belongs to the policy.
        """
        inputs = replace(inputs, routing=None)
        if not has_adapters(self.lm):
            return self._policy(inputs)[0]
        from learner.models.lora import without_adapters

        with without_adapters(self.lm):
            return self._policy(inputs)[0]
