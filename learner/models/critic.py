"""The critic: the value model of algorithm.advantage gae and vtrace. A run without one does not load this module.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from async_rl.base.config import Config
from learner.models.network import Network, open_model
from learner.packing import ForwardInputs


class Critic(Network):
    """The value model: predicts the return from each response token. It is a token classifier with one label.

    Its layer `score` is the value head.
    """

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Return the values of the N response tokens, [N] float32, with gradient."""
        values: Tensor = self.lm.score(self.hidden_states(inputs)).float().sum(-1)
        if self.sequence is None:
            return values
        from learner.models.sequence import gather_tokens, owners

        return gather_tokens(values, owners(inputs, self.sequence), self.sequence)


def open_critic(config: Config, compute_dtype: torch.dtype) -> Critic:
    """Return the critic of critic.path (if empty, of model.path) without weights. `shard` reads them later, as float32.

    If the folder has no value head, the head starts as zeros, so that V = 0 at first.
    """
    path, attention = config.critic.path or config.model.path, config.model.attn_implementation
    classifier = AutoModelForTokenClassification
    lm = open_model(classifier, path, torch.float32, num_labels=1, attn_implementation=attention)
    lm.stored_weights.start(lm.score, torch.zeros)
    return Critic(lm, compute_dtype)
