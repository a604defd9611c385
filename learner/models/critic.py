"""The critic of PPO: a separate model that predicts the return from every token (GAE, arXiv 1506.02438)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from async_rl.config import Config
from learner.models.network import Network
from learner.models.sequence import gather_tokens, owners
from learner.optimizer import check_finite
from learner.packing.microbatches import ForwardInputs


class Critic(Network):
    """The value model: predicts the return from each response token, by a token classifier with one label.

    Its layer `score` is the value head.
    """

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Return the values of the N response tokens, [N] float32, with gradient."""
        values: Tensor = self.lm.score(self.hidden_states(inputs)).float().sum(-1)
        return values if self.sequence is None else gather_tokens(values, owners(inputs, self.sequence), self.sequence)


def load_critic(config: Config, device: torch.device, compute_dtype: torch.dtype) -> Critic:
    """Return the critic, loaded from critic.path or, if that is empty, from model.path: float32 and not yet sharded.

    A folder without a value head gets one of zeros, so that V = 0 at first.
    """
    path = config.critic.path or config.model.path
    lm, loaded = AutoModelForTokenClassification.from_pretrained(
        path,
        num_labels=1,
        dtype=torch.float32,
        attn_implementation=config.model.attn_implementation,
        output_loading_info=True,
    )
    if any(name.startswith("score.") for name in loaded["missing_keys"]):
        for parameter in lm.score.parameters():
            nn.init.zeros_(parameter)
    lm.to(device).eval()
    check_finite(lm, path)
    return Critic(lm, compute_dtype)
