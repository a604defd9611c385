"""The base of the learner's networks, a Hugging Face model with its last hidden states, and the critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForTokenClassification

from async_rl.base.config import Config
from learner.models.loading import open_model
from learner.models.sequence import gather_tokens, owners, split_states
from learner.packing.attention_mask import attention_mask, block_mask
from learner.packing.microbatches import ForwardInputs, PackedTokens

MASKED = ("sdpa", "eager")
"""The attention of transformers that takes a mask of numbers."""


class Network(nn.Module):
    """A Hugging Face model, `lm`, whose activations have the type `compute_dtype`."""

    def __init__(self, lm: Any, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.lm = lm
        self.compute_dtype = compute_dtype
        self.sequence: DeviceMesh | None = None
        """The ranks that hold slices of the same rows; None: this rank holds whole rows. `shard` sets it."""

    def hidden_states(self, inputs: PackedTokens) -> Tensor:
        """Return the last hidden states that predict the N response tokens, [N, hidden].

        With `sequence` they belong to the tokens that `owners` gives to this rank.
        """
        if self.sequence is not None:
            return split_states(self.lm, inputs, self.compute_dtype, self.sequence)
        mask: Tensor | BlockMask | None = None
        attention = self.lm.config._attn_implementation
        if inputs.segments is not None and attention == "flex_attention":
            mask = block_mask(inputs.segments)
        elif inputs.segments is not None and attention in MASKED:
            mask = attention_mask(inputs.segments, self.compute_dtype)
        output = self.lm.base_model(inputs.tokens, attention_mask=mask, position_ids=inputs.positions, use_cache=False)
        states: Tensor = output.last_hidden_state.flatten(0, 1)[inputs.where]
        return states


class Critic(Network):
    """The value model: predicts the return from each response token, by a token classifier with one label.

    Its layer `score` is the value head.
    """

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Return the values of the N response tokens, [N] float32, with gradient."""
        values: Tensor = self.lm.score(self.hidden_states(inputs)).float().sum(-1)
        return values if self.sequence is None else gather_tokens(values, owners(inputs, self.sequence), self.sequence)


def open_critic(config: Config, compute_dtype: torch.dtype) -> Critic:
    """Return the critic of critic.path or, if that is empty, of model.path, without its weights, which are float32.

    `shard` reads them. A folder without a value head gets one of zeros, so that V = 0 at first.
    """
    path, attention = config.critic.path or config.model.path, config.model.attn_implementation
    classifier = AutoModelForTokenClassification
    lm = open_model(classifier, path, torch.float32, num_labels=1, attn_implementation=attention)
    lm.stored_weights.start(lm.score, torch.zeros)
    return Critic(lm, compute_dtype)
