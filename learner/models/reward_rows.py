"""Makes the rows of tokens that a reward model reads, in training and in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import Config, TaskConfig
from async_rl.storage.model_folder import load_tokenizer
from async_rl.storage.model_loading import load_without_weights
from async_rl.storage.policy_rows import check_positions, usable_positions
from async_rl.template_date import TEMPLATE_DATE
from learner.models.prompt_messages import REPLY, SYSTEM, USER, Messages, PromptReader


@dataclass(frozen=True, slots=True)
class RewardRow:
    """The row of a prompt and an answer, as a reward model reads it."""

    tokens: Sequence[int]
    segments: Sequence[int] = ()
    """The token_type_ids of a pair of texts, which tell the tokens of the second text; (): all are 0."""

    def __len__(self) -> int:
        return len(self.tokens)


class RewardRows:
    """Makes the rows of tokens that a reward model reads, in training and in use.

    A model with the policy's vocabulary, or without a tokenizer, reads the policy's tokens: the prompt with the answer,
    which ends with its eos token. Any other model reads text, tokenized by its own tokenizer: the messages of the
    prompt and the answer in its chat template or, if it has none, as a pair of texts, of which the first is the
    contents of the messages, one per line, with the tokenizer's token_type_ids. If its template takes no system
    message, that message stands at the beginning of the user's first one, before a blank line.

    If PromptReader cannot read the messages of a prompt, its whole text, with the policy's chat template, is one
    message of the user.
    """

    def __init__(self, policy_path: str, reward_path: str, task: TaskConfig) -> None:
        self.reads_text = False
        if not any(Path(reward_path).glob("*token*")) and not any(Path(reward_path).glob("vocab*")):
            return
        policy: Any = load_tokenizer(policy_path)
        own: Any = load_tokenizer(reward_path)
        self.reads_text = policy.get_vocab() != own.get_vocab()
        self._policy, self._own = policy, own
        self._prompts = PromptReader(policy, task)
        self._takes_system = _takes_system(own)

    def can_read(self, prompt: Sequence[int]) -> bool:
        """Whether the messages of a prompt are known, or need not be."""
        return not self.reads_text or self._prompts.messages(prompt) is not None

    def row(self, prompt: list[int], answer: list[int]) -> RewardRow:
        """Return the row of a prompt and an answer, which are given in the policy's tokens."""
        if not self.reads_text:
            return RewardRow([*prompt, *answer])
        asked = self._prompts.messages(prompt) or [{"role": "user", "content": self._policy.decode(prompt)}]
        reply = self._policy.decode(answer, skip_special_tokens=True)
        if self._own.chat_template:
            messages = [*self._own_form(asked), {"role": "assistant", "content": reply}]
            return RewardRow(self._own.apply_chat_template(
                messages, return_dict=False, strftime_now=TEMPLATE_DATE.strftime
            ))  # fmt: skip
        pair = self._own("\n".join(message["content"] for message in asked), reply)
        segments = pair.get("token_type_ids", ())
        return RewardRow(pair["input_ids"], segments if any(segments) else ())

    def _own_form(self, messages: Messages) -> Messages:
        if messages[0]["role"] != "system" or self._takes_system:
            return messages
        system, user, *others = messages
        return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *others]


def row_cautions(config: Config, prompt: Sequence[int], source: str) -> list[str]:
    """Return cautions if the reward model of a run may get rows that are longer than it has positions, or if it gets
    its prompts with the text of the policy's chat template.

    Args:
        prompt: the tokens of the first prompt, which is of `source`.

    Raises:
        ConfigError: it reads the policy's tokens, and has too few positions for the longest row.
    """
    path, cautions = config.reward_model.path, []
    rows = RewardRows(config.model.path, path, config.task)
    model = load_without_weights("reward_model.path", path, config.model.attn_implementation)
    if not rows.reads_text:
        check_positions(model, "reward_model.path", path, config)
        return []
    positions = usable_positions(model)
    if positions and positions < config.longest_tokens:
        cautions.append(
            f"reward_model.path: the model has {positions} positions, and an answer with more tokens of its own "
            f"tokenizer, prompt included, ends the run. In the policy's tokens they may be {config.longest_tokens}."
        )
    if not rows.can_read(prompt):
        cautions.append(
            f"reward_model.path: the model gets a prompt of {source} with the text of the policy's chat template, as "
            "one message of the user. It has another tokenizer, and the prompt is not messages of user and assistant "
            "in turn, the user's last, after at most one system message. batch/unread_prompts counts such prompts."
        )
    return cautions


def _takes_system(tokenizer: Any) -> bool:
    """Whether the chat template of a tokenizer shows a system message."""
    messages = [("system", SYSTEM), ("user", USER), ("assistant", REPLY)]
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages], tokenize=False
        )
    except Exception:  # there is no template, or it refuses the message; it is code, which may raise anything
        return False
    return SYSTEM in text
