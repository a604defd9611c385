"""Loads models without their weights, to check before a run starts that they can be loaded with them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.utils import logging

from async_rl.errors import ConfigError

_HEADS: dict[str, Any] = {
    "critic.path": AutoModelForTokenClassification, "reward_model.path": AutoModelForSequenceClassification,
    "reward_training.base": AutoModelForSequenceClassification,
}
_MAY_LACK_HEAD = ("critic.path", "reward_training.base")
"""The keys of models that get a new head if their folder has none."""


def load_without_weights(key: str, path: str, attn_implementation: str) -> Any:
    """Return the model in `path`, the value of `key`, with meta tensors: only names and shapes of weights are read.

    A reward model has the attention that transformers chooses for it, as in the learner: it may be an encoder that the
    policy's does not fit.

    Raises:
        ConfigError: transformers can't build the model, or its files lack weights or hold weights of another shape.
    """
    attention = None if key == "reward_model.path" else attn_implementation
    with quiet_loading():
        try:
            lm, loaded = _HEADS.get(key, AutoModelForCausalLM).from_pretrained(
                path, device_map="meta", attn_implementation=attention, output_loading_info=True,
                ignore_mismatched_sizes=True, local_files_only=True,
            )
        except Exception as error:  # transformers raises errors of many types
            reason = textwrap.shorten(str(error), 250)
            raise ConfigError(f"{key} {path}: this model can't be loaded: {reason}") from None
    if mismatched := sorted(loaded["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ConfigError(
            f"{key} {path}: {len(mismatched)} weights do not have the shape that config.json gives them: {name} is "
            f"{list(found)}, expected {list(expected)}. Take config.json and weights of one model"
        )
    may_lack = ("score.",) if key in _MAY_LACK_HEAD else ()
    missing = sorted(name for name in loaded["missing_keys"] if not name.startswith(may_lack))
    if missing:
        raise ConfigError(
            f"{key} {path}: the weight files lack {len(missing)} weights of the model that config.json describes: "
            f"{', '.join(missing[:3])}. Take config.json and weights of one model"
        )
    return lm


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep the progress bars and tables of weights of transformers from the terminal within the block."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
