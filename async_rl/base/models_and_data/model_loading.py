"""Checks before a run starts that its models can be loaded and support its rows, without reading their weights."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.utils import logging

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import has_tokenizer, load_tokenizer

_HEADS: dict[str, Any] = {
    "critic.path": AutoModelForTokenClassification, "reward_model.path": AutoModelForSequenceClassification,
    "reward_training.base": AutoModelForSequenceClassification,
}
_MAY_LACK_HEAD = ("critic.path", "reward_training.base")
"""The keys of models that get a new head if their folder has none."""


def load_without_weights(key: str, path: str, attn_implementation: str) -> Any:
    """Load the model in `path`, the value of `key`, with meta tensors: only names and shapes of weights are read.

    A reward model gets the attention that transformers chooses for it, as in the learner: it may be an encoder that
    does not support the policy's.

    Raises:
        ConfigError: transformers can't build the model, or its files lack weights or have weights of another shape.
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


def usable_positions(lm: Any) -> int | None:
    """Return how many tokens the longest row of a model may have, or None if there is no limit.

    If the table of positions has a row for padding, as in RoBERTa, only the rows after it are used.
    """
    positions: int | None = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    unused = [
        table.padding_idx + 1
        for name, table in lm.named_modules()
        if "position" in name and getattr(table, "num_embeddings", None) == positions and table.padding_idx is not None
    ]
    return positions - max(unused, default=0)


def check_reads_rows(lm: Any, key: str, path: str, config: Config) -> None:
    """Check that a model supports the policy's tokens and the longest row.

    It may have more embeddings than there are tokens, because models pad them to several sizes. Special and added
    tokens may have other names, because further training often renames reserved ones.

    Args:
        lm: the model in `path`, the value of `key`.

    Raises:
        ConfigError: it has too few positions, too few embeddings, or a tokenizer with another token for an id.
    """
    policy, longest, positions = config.model.path, config.longest_tokens, usable_positions(lm)
    if positions is not None and positions < longest:
        raise ConfigError(
            f"{key} {path} must have {longest} or more positions, which are task.max_prompt_tokens + "
            f"rollout.max_response_tokens, or rollout.max_episode_tokens if set, got {positions}. Lower these, or take "
            "a model with more positions"
        )
    tokenizer = load_tokenizer(policy)
    vocabulary = tokenizer.get_vocab()
    needed, rows = max(vocabulary.values()) + 1, lm.get_input_embeddings().num_embeddings
    hint = f"It reads the policy's tokens. Take a model that was trained with the tokenizer of model.path {policy}"
    if rows < needed:
        raise ConfigError(
            f"{key} {path} must have embeddings of {needed} or more tokens, the policy's, got {rows}. {hint}"
        )
    if not has_tokenizer(path):
        return
    its = load_tokenizer(path)
    added, own = tokenizer.added_tokens_decoder | its.added_tokens_decoder, its.get_vocab()
    token_of = {number: token for token, number in own.items() if number not in added}
    for token, number in vocabulary.items():
        if token_of.get(number, token) != token:
            raise ConfigError(
                f"{key} {path} must have the policy's tokens, got {token_of[number]!r} for {number}, which is {token!r}"
                f" in the policy's tokenizer. {hint}"
            )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Within this context transformers shows no progress bars and no tables of weights."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
