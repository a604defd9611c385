"""Renders chat messages as the tokens of a prompt, and answers as the tokens that a model would have sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.template_date import TEMPLATE_DATE


def prompt_text(
    tokenizer: Any, messages: Sequence[dict[str, str]], source: str, settings: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return the messages in the chat template, ready for a reply, or without one their contents, one per line.

    Args:
        settings: further arguments of the chat template, task.chat_template_kwargs.

    Raises:
        ConfigError: the chat template does not take such messages, which are of `source`.
    """
    if not tokenizer.chat_template:
        return "\n".join(message["content"] for message in messages)
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, strftime_now=TEMPLATE_DATE.strftime,
                **settings,
            )
        )  # fmt: skip
    except Exception as error:  # a template is code, which may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"the chat template of the model's tokenizer can't be applied to a prompt of {source} "
            f"with the roles {roles}: {type(error).__name__}: {error}. Change the prompts, or the model's "
            "chat_template.jinja (chat_template in tokenizer_config.json)"
        ) from error


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt from `prompt_text`; with a chat template it has the special tokens already."""
    tokens: list[int] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    return tokens


def answer_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of an answer with the eos token at its end."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
