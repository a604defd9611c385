"""Checks, before a run starts, that the learner can load and use the models of the run. No weights are read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.utils import logging

from async_rl.config import ModelConfig
from async_rl.errors import ConfigError
from async_rl.storage.model_folder import check_trainable
from learner.models.lora import add_adapters

_HEADS: dict[str, Any] = {
    "model.path": AutoModelForCausalLM, "reference.path": AutoModelForCausalLM,
    "critic.path": AutoModelForTokenClassification, "reward_model.path": AutoModelForSequenceClassification,
}


def check_loading(key: str, path: str, config: ModelConfig) -> None:
    """Check that the learner can load the model in `path`, the value of `key`, and compute what it needs of it.

    Raises:
        ConfigError: transformers can't build the model; its files lack weights or hold weights of another shape; the
            learner can't compute its logprobs; or its layers can't have the adapters of `config`.
    """
    if _HEADS[key] is AutoModelForCausalLM:
        check_trainable(path, key)
    with _quiet():
        try:
            lm, loaded = _HEADS[key].from_pretrained(
                path, device_map="meta", attn_implementation=config.attn_implementation, output_loading_info=True,
                ignore_mismatched_sizes=True, local_files_only=True,
            )
        except Exception as error:  # transformers raises errors of many types
            reason = textwrap.shorten(str(error), 250)
            raise ConfigError(f"{key} {path}: the learner can't load this model: {reason}") from None
    if mismatched := sorted(loaded["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ConfigError(
            f"{key} {path}: {len(mismatched)} weights do not have the shape that config.json gives them: {name} is "
            f"{list(found)}, expected {list(expected)}. Take config.json and weights of one model"
        )
    missing = sorted(name for name in loaded["missing_keys"] if key != "critic.path" or not name.startswith("score."))
    if missing:
        raise ConfigError(
            f"{key} {path}: the weight files lack {len(missing)} weights of the model that config.json describes: "
            f"{', '.join(missing[:3])}. Take config.json and weights of one model"
        )
    if key == "model.path" and config.lora.rank:
        add_adapters(lm, config.lora)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's progress bars and tables of weights from the terminal within the block."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
