"""The reward model: a Hugging Face sequence classifier on the learner's devices that scores the answers of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from async_rl.config import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.storage.model_folder import load_tokenizer
from async_rl.types import Batch, IntArray
from learner.models.policy import shard
from learner.packing.plan import Layout, Piece, plan_microbatches

_PLACEHOLDER = "\x00"


class RewardModel:
    """Scores each prompt with its answer. It is frozen and sharded over the learner's ranks.

    A model with the policy's vocabulary gets the policy's tokens. Any other model gets their text, tokenized by its own
    tokenizer: in its chat template or, if it has none, as a pair of texts.

    Raises:
        ConfigError: the model has more than one output.
    """

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype, mesh: DeviceMesh) -> None:
        path = config.reward_model.path
        lm = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        if lm.config.num_labels != 1:
            raise ConfigError(
                f"reward_model.path {path} must have one output, the reward, got {lm.config.num_labels} labels"
            )
        self._scorer = _Scorer(lm.eval().requires_grad_(False).to(device))
        shard(self._scorer, lm, mesh, dtype, config.learner)
        self._retokenizer = _open_retokenizer(config.model.path, path)
        self._device = device
        self._max_tokens = config.learner.max_tokens_per_microbatch
        self._max_positions = getattr(lm.config, "max_position_embeddings", None)

    def score(self, batch: Batch) -> Batch:
        """Return the batch with the model's rewards in place of the worker's, the same on all ranks. Collective.

        Raises:
            AsyncRLError: a prompt with its answer has more tokens than the model has positions.
        """
        sequences = [
            self._retokenizer.convert(group.prompt_tokens, rollout.tokens) if self._retokenizer
            else [*group.prompt_tokens.tolist(), *rollout.tokens.tolist()]
            for group in batch.groups
            for rollout in group.rollouts
        ]  # fmt: skip
        rewards = iter(self._score_sequences(sequences).tolist())
        groups = tuple(
            dataclasses.replace(
                group, rollouts=tuple(dataclasses.replace(r, reward=next(rewards)) for r in group.rollouts)
            )
            for group in batch.groups
        )
        return dataclasses.replace(batch, groups=groups)

    @torch.no_grad()
    def _score_sequences(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the scores of k token sequences, [k] float32 on the CPU. Each rank scores a share. Collective."""
        longest = max(map(len, sequences))
        if self._max_positions and longest > self._max_positions:
            raise AsyncRLError(
                f"reward_model: a prompt with its answer has {longest} tokens, the model {self._max_positions} "
                "positions. Lower task.max_prompt_tokens or rollout.max_response_tokens."
            )
        pieces = [Piece(i, (0,), len(tokens)) for i, tokens in enumerate(sequences)]
        plan = plan_microbatches(pieces, dist.get_world_size(), self._max_tokens, Layout(masked=False))
        rewards = torch.zeros(len(sequences), device=self._device)
        for rows in plan[dist.get_rank()]:
            indices = [piece.group for row in rows for piece in row]
            tokens = [torch.tensor(sequences[i], device=self._device) for i in indices]
            tokens = tokens or [torch.zeros(1, dtype=torch.long, device=self._device)]  # passes are collective
            mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
            rewards[indices] = self._scorer(pad_sequence(tokens, batch_first=True), mask)[: len(indices)]
        dist.all_reduce(rewards)
        return rewards.cpu()


class _Scorer(nn.Module):
    """The classifier as one module, whose forward pass returns the scores."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the scores [B] float32 of rows that are padded on the right; tokens and mask are [B, S] int64.

        Decoders are read at their last token, whatever its id. transformers would skip a last token that has the id of
        the padding, which the end of an answer often has.
        """
        if not hasattr(self.lm, "score"):
            return self.lm(tokens, attention_mask=mask).logits[:, 0].float()
        states = self.lm.base_model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
        last = states[torch.arange(len(tokens), device=tokens.device), mask.sum(1) - 1]
        return self.lm.score(last)[:, 0].float()


def _open_retokenizer(policy_path: str, reward_path: str) -> _Retokenizer | None:
    """Return a converter to the reward model's tokens; None if it has the policy's vocabulary, or no tokenizer."""
    if not any(Path(reward_path).glob("*token*")) and not any(Path(reward_path).glob("vocab*")):
        return None
    policy, own = load_tokenizer(policy_path), load_tokenizer(reward_path)
    return None if policy.get_vocab() == own.get_vocab() else _Retokenizer(policy, own)


class _Retokenizer:
    """Converts the policy's tokens to text and the text to the reward model's tokens."""

    def __init__(self, policy: Any, own: Any) -> None:
        self._policy, self._own = policy, own
        self._before = self._after = ""
        if policy.chat_template:
            message = [{"role": "user", "content": _PLACEHOLDER}]
            frame = policy.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            self._before, _, self._after = frame.partition(_PLACEHOLDER)

    def convert(self, prompt: IntArray, answer: IntArray) -> list[int]:
        question = self._policy.decode(prompt.tolist())
        if question.startswith(self._before) and question.endswith(self._after):  # the prompt is one user message
            question = question[len(self._before) : len(question) - len(self._after)]
        reply = self._policy.decode(answer.tolist(), skip_special_tokens=True)
        if self._own.chat_template:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
            tokens: list[int] = self._own.apply_chat_template(messages, return_dict=False)
        else:
            tokens = self._own(question, reply)["input_ids"]
        return tokens
