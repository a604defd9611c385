"""Freezes the weights of the policy whose names fit model.frozen."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from async_rl.base.errors import ConfigError

_SHOWN = 5


def freeze(lm: Any, patterns: Sequence[str]) -> None:
    """Keep the weights of a model that fit a pattern, such as `model.layers.0.*`, from being trained.

    Tied weights have one name, the embeddings'.

    Raises:
        ConfigError: no weight fits a pattern, or no weight is left to train.
    """
    weights = dict(lm.named_parameters())
    for pattern in patterns:
        fitting = [name for name in weights if fnmatchcase(name, pattern)]
        if not fitting:
            some = ", ".join([*weights][:_SHOWN])
            raise ConfigError(f"model.frozen: no weight has a name like {pattern!r}. The model has {some}, ...")
        for name in fitting:
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError(f"model.frozen must leave weights to train, got {list(patterns)}, which fit all of them")
