"""Checks that another model than the policy, the critic or the reference, can read the rows that the policy samples."""

from __future__ import annotations

from typing import Any

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.storage.model_folder import has_tokenizer, load_tokenizer


def usable_positions(lm: Any) -> int | None:
    """Return how many tokens the longest row of a model may have, or None where it has no limit.

    A table of positions with a row for padding, as in RoBERTa, is used from the row after that one on.
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


def check_positions(lm: Any, key: str, path: str, config: Config) -> None:
    """Check that `lm`, the model in `path`, the value of `key`, has positions for the longest row.

    Raises:
        ConfigError: it has too few.
    """
    longest, positions = config.longest_tokens, usable_positions(lm)
    if positions is not None and positions < longest:
        raise ConfigError(
            f"{key} {path} must have {longest} or more positions, which are task.max_prompt_tokens + "
            f"rollout.max_response_tokens, or rollout.max_episode_tokens if set, got {positions}. Lower these, or take "
            "a model with more positions"
        )


def check_reads_rows(lm: Any, key: str, path: str, config: Config) -> None:
    """Check that `lm`, the model in `path`, the value of `key`, takes the policy's tokens and the longest row.

    Its embeddings may have more rows than there are tokens: models of one vocabulary are padded to several sizes. A
    token that its own tokenizer, if the folder has one, does not know may have one of these rows. Special and added
    tokens may have other names: models that were trained further often rename reserved ones.

    Raises:
        ConfigError: it has too few positions, too few embeddings, or a tokenizer that has another token for an id.
    """
    policy = config.model.path
    check_positions(lm, key, path, config)
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
    others = sorted((number, token) for token, number in vocabulary.items() if token_of.get(number, token) != token)
    if others:
        number, token = others[0]
        raise ConfigError(
            f"{key} {path} must have the policy's tokens, got {len(others)} others: {number} is {token_of[number]!r} "
            f"in its tokenizer and {token!r} in the policy's. {hint}"
        )
