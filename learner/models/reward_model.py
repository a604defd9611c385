"""The reward model: a Hugging Face sequence classifier on the learner's devices that scores the answers of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.models_and_data.model_folder import TEMPLATE_DATE, has_tokenizer, load_tokenizer
from async_rl.base.models_and_data.model_loading import usable_positions
from async_rl.base.types import Batch, Row
from learner.loop.ranks import Ranks
from learner.models.network import Network, open_model
from learner.models.policy import shard
from learner.models.sequence import gather_tokens, owners
from learner.packing import Layout, PackedTokens, Piece, plan_microbatches

OFFSET = "reward_offset"
"""The key of config.json whose value is subtracted from the output of the model."""


@dataclass(frozen=True, slots=True)
class RewardRow:
    """A prompt with an answer, as tokens that a reward model reads."""

    tokens: Sequence[int]
    segments: Sequence[int] = ()
    """For a pair of texts the tokenizer's token_type_ids, 1 for tokens of the second text; (): all are 0."""

    def __len__(self) -> int:
        return len(self.tokens)


class RewardRows:
    """Makes the rows of tokens that a reward model reads, both in training and in use.

    A model with the policy's vocabulary, or without a tokenizer, reads the policy's tokens: the prompt and the answer
    with its eos token. Any other model reads text, tokenized by its own tokenizer:

        with a chat template   the prompt's messages and the answer in that template. If it takes no system message,
                               that message is put before the user's first message, with a blank line between
        without one            a pair of texts: the contents of the prompt's messages, one per line, and the answer,
                               with the tokenizer's token_type_ids
    """

    def __init__(self, policy_path: str, reward_path: str) -> None:
        self.reads_text = False
        if not has_tokenizer(reward_path):
            return
        policy: Any = load_tokenizer(policy_path)
        own: Any = load_tokenizer(reward_path)
        self.reads_text = policy.get_vocab() != own.get_vocab()
        self._policy, self._own = policy, own

    def row(self, messages: Sequence[Mapping[str, str]], prompt: Sequence[int], answer: Sequence[int]) -> RewardRow:
        """Return the row of a prompt and an answer.

        Args:
            messages: the messages of the prompt.
            prompt, answer: in the policy's tokens.
        """
        if not self.reads_text:
            return RewardRow([*prompt, *answer])
        reply = self._policy.decode(answer, skip_special_tokens=True)
        if self._own.chat_template:
            said = [*self._in_own_form(messages), {"role": "assistant", "content": reply}]
            return RewardRow(self._rendered(said, tokenize=True))
        pair = self._own("\n".join(message["content"] for message in messages), reply)
        segments = pair.get("token_type_ids", ())
        return RewardRow(pair["input_ids"], segments if any(segments) else ())

    def _in_own_form(self, messages: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
        """Return the messages, with a system message merged into the next one if the model's chat template takes none.
        """
        if messages[0]["role"] != "system" or self._takes_system:
            return messages
        return [{"role": "user", "content": "\n\n".join(each["content"] for each in messages[:2])}, *messages[2:]]

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the model's chat template shows a system message."""
        said = [{"role": role, "content": f"<{role}>"} for role in ("system", "user", "assistant")]
        try:
            return "<system>" in self._rendered(said, tokenize=False)
        except Exception:  # it refuses the message; a template is code, which may raise anything
            return False

    def _rendered(self, messages: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
        return self._own.apply_chat_template(
            list(messages), tokenize=tokenize, return_dict=False, strftime_now=TEMPLATE_DATE.strftime
        )


class RewardModel:
    """Scores each prompt with its answer. The model is frozen and sharded over the learner's ranks.

    With learner.sequence_parallel the rows of a decoder are split like the policy's. Other models, whose attention
    looks both ways, get whole rows, and each rank scores different rows.

    RewardRows makes the tokens that the model reads. If its config.json has `reward_offset`, that is subtracted from
    all rewards.

    Raises:
        ConfigError: the model has more than one output, or another vocabulary in a run whose answers call tools.
    """

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype, ranks: Ranks) -> None:
        path = config.reward_model.path
        lm = open_model(AutoModelForSequenceClassification, path, dtype)
        if lm.config.num_labels != 1:
            raise ConfigError(
                f"reward_model.path {path} must have one output, the reward, got {lm.config.num_labels} labels"
            )
        self._scorer = Scorer(lm.requires_grad_(False), dtype)
        self._offset = float(getattr(lm.config, OFFSET, 0.0))
        self._ranks = ranks if self._scorer.reads_last_token else Ranks(ranks.mesh)
        shard(self._scorer, self._ranks, config.learner)
        self._rows = RewardRows(config.model.path, path)
        if self._rows.reads_text and config.task.has_turns:
            raise ConfigError(
                f"reward_model.path {path} must have the policy's vocabulary with task.tools, got another one. A model "
                "with another vocabulary reads a question and an answer as text, and can't read calls of tools"
            )
        self._scores_timeouts = config.task.on_timeout == "partial"
        self._task_weight = config.reward_model.task_weight
        self._device = device
        slices = 1 if self._ranks.sequence is None else self._ranks.sequence.size()
        self._max_tokens = config.learner.max_tokens_per_microbatch * slices
        self._max_positions = usable_positions(lm)

    def score(self, batch: Batch) -> Batch:
        """Return the batch with the model's rewards instead of the worker's, the same on all ranks. Collective.

        With reward_model.task_weight w a reward is the model's plus w times the worker's, and each row also records the
        model's alone, as `reward_model`. Each row must be a whole episode; the model's reward goes to the last turn. An
        episode that ran out of time keeps the worker's reward, 0, unless task.on_timeout is partial.

        Raises:
            AsyncRLError: a prompt with its answer has more tokens than the model has positions, or a reward is NaN or
                infinite.
        """
        read = [
            self._rows.row(group.messages, group.prompt_tokens.tolist(), row.tokens.tolist())
            for group in batch.groups
            for row in group.rows
        ]
        scores = self._score_rows(read)
        if infinite := int((~scores.isfinite()).sum()):
            raise AsyncRLError(
                f"reward_model.path: {infinite} of its {len(scores)} rewards are NaN or infinite. Check the model with "
                "answers of this task, or set model.dtype: float32"
            )
        rewards = iter(scores.tolist())
        groups = []
        for group in batch.groups:
            rows = tuple(self._rewarded(row, next(rewards)) for row in group.rows)
            groups.append(replace(group, rows=rows))
        return replace(batch, groups=tuple(groups))

    def _rewarded(self, row: Row, reward: float) -> Row:
        if row.finish_reason == "timeout" and not self._scores_timeouts:
            return row
        weight = self._task_weight
        turn_rewards = [weight * each for each in row.turn_rewards]
        if turn_rewards:
            turn_rewards[-1] += reward
        named = {**row.rewards, "reward_model": reward} if weight else row.rewards
        total = reward + weight * row.reward
        return replace(row, reward=total, rewards=named, turn_rewards=tuple(turn_rewards))

    @torch.no_grad()
    def _score_rows(self, rows: Sequence[RewardRow]) -> Tensor:
        """Return the scores [k] of k rows, in CPU memory. Each rank scores a share of the rows. Collective."""
        longest = max(map(len, rows))
        if self._max_positions and longest > self._max_positions:
            raise AsyncRLError(
                f"reward_model: a prompt with its answer has {longest} tokens, the model {self._max_positions} "
                "positions. Lower task.max_prompt_tokens or rollout.max_response_tokens."
            )
        pieces = [Piece(i, (0,), len(row)) for i, row in enumerate(rows)]
        ranks = self._ranks
        plan = plan_microbatches(pieces, ranks.shares, self._max_tokens, Layout(masked=False))
        rewards = torch.zeros(len(rows), device=self._device)
        for planned in plan[ranks.share]:
            indices = [piece.group for row in planned for piece in row]
            chosen = [rows[i] for i in indices] or [RewardRow([0])]  # passes are collective
            rewards[indices] = self._scorer(*padded_rows(chosen, self._device))[: len(indices)]
        dist.all_reduce(rewards)
        return rewards.cpu() / (dist.get_world_size() // ranks.shares) - self._offset


def padded_rows(rows: Sequence[RewardRow], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (tokens, mask, segments) for a Scorer, [B, S] int64 each, padded on the right; segments None if all are 0.
    """
    def padded(lines: Iterable[Sequence[int]]) -> Tensor:
        return pad_sequence([torch.tensor(line, device=device) for line in lines], batch_first=True)

    segments = padded(row.segments or [0] * len(row) for row in rows) if any(row.segments for row in rows) else None
    return padded(row.tokens for row in rows), padded([1] * len(row) for row in rows), segments


class Scorer(Network):
    """A sequence classifier with one output. Scores rows of tokens, both in training and in use."""

    @property
    def reads_last_token(self) -> bool:
        """Whether the model is a decoder. Then the hidden state of the last token has seen the whole row."""
        return hasattr(self.lm, "score")

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the scores [B] float32 of rows from `padded_rows`.

        Only encoders with segment embeddings, such as BERT, get the segments. A decoder is read at the last token,
        whatever its id: transformers would skip a last token with the id of the padding, which the end of an answer
        often has.
        """
        if not self.reads_last_token:
            has_segments = segments is not None and getattr(self.lm.config, "type_vocab_size", 0) > 1
            given = {"token_type_ids": segments} if has_segments else {}
            return self.lm(tokens, attention_mask=mask, **given).logits[:, 0].float()
        rows, last = torch.arange(len(tokens), device=tokens.device), mask.sum(1) - 1
        if self.sequence is not None:  # the padding is on the right, where causal attention does not see it
            where = rows * tokens.shape[1] + last
            inputs = PackedTokens(tokens=tokens, segments=None, positions=None, where=where)
            scores = self.lm.score(self.hidden_states(inputs))[:, 0].float()
            return gather_tokens(scores, owners(inputs, self.sequence), self.sequence)
        states = self.lm.base_model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
        return self.lm.score(states[rows, last])[:, 0].float()
