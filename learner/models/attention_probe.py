"""Finds out whether a model's attention gets position ids, with which flash attention tells packed rows apart."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AutoModel

_PROBE = "position_probe"
"""The name of the attention function in transformers' table that answers."""


class _AnswerError(Exception):
    """Ends a pass at its first attention: the layers behind it may need data."""

    def __init__(self, has_positions: bool) -> None:
        self.has_positions = has_positions


def attention_gets_positions(config: Any) -> bool:
    """Whether the layers of the model that `config` describes hand position ids on to their attention.

    It is asked in a pass without data. A model whose attention can't be replaced in transformers can't be asked, and
    counts as one without.
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
    """Return a copy of a config, without the kinds of rotary embedding that look at the positions, which have no data.
    """
    copied = deepcopy(config)
    rotations = getattr(copied, "rope_parameters", None) or {}
    for each in (rotations, *rotations.values()):  # some models have one of each type of layers
        if isinstance(each, dict) and "rope_type" in each:
            each["rope_type"] = "default"
    return copied


def _answer(*_: Any, position_ids: Any = None, **__: Any) -> NoReturn:
    raise _AnswerError(position_ids is not None)
