"""Finds out whether a model's attention gets position ids. Flash attention needs them to separate packed rows.

Only a run with flash attention loads this module.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AutoModel

_PROBE = "position_probe"
"""The name in transformers' table of the attention function that reports whether it got position ids."""


class _AnswerError(Exception):
    """An exception that brings the answer out of a forward pass at its first attention: later layers may need data."""

    def __init__(self, has_positions: bool) -> None:
        self.has_positions = has_positions


def attention_gets_positions(config: Any) -> bool:
    """Return whether the layers of the model of `config` pass position ids to their attention.

    A forward pass without data finds it out. A model whose attention can't be replaced in transformers counts as one
    that passes none.
    """
    AttentionInterface.register(_PROBE, _answer)
    try:
        with torch.device("meta"):
            base = AutoModel.from_config(_with_plain_rotations(config), attn_implementation=_PROBE).eval()
            positions = torch.zeros(1, 2, dtype=torch.long)
            # not tokens, whose ids some models look at
            base(inputs_embeds=torch.zeros(1, 2, config.hidden_size), position_ids=positions, use_cache=False)
    except _AnswerError as answer:
        return answer.has_positions
    except Exception:  # it is code of any model, which may raise anything
        return False
    return False


def _with_plain_rotations(config: Any) -> Any:
    """Return a copy of a config with the default rotary embedding. Other kinds need the values of the positions."""
    copied = deepcopy(config)
    rotations = getattr(copied, "rope_parameters", None) or {}
    for each in (rotations, *rotations.values()):  # some models have one of each type of layers
        if isinstance(each, dict) and "rope_type" in each:
            each["rope_type"] = "default"
    return copied


def _answer(*_: Any, position_ids: Any = None, **__: Any) -> NoReturn:
    raise _AnswerError(position_ids is not None)
