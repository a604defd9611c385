"""Rewards from a Hugging Face sequence-classification model on the learner's devices."""

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
    """Scores each prompt with its answer; frozen, sharded over the learner's ranks.

    A folder with the policy's vocabulary reads its tokens as they are. Another gets their text: in its own chat
    template if it has one, else as a pair of texts.

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
        self._reader = _open_reader(config.model.path, path)
        self._device = device
        self._max_tokens = config.learner.max_tokens_per_microbatch
        self._max_positions = getattr(lm.config, "max_position_embeddings", None)

    def score(self, batch: Batch) -> Batch:
        """The batch with the model's rewards in place of the worker's; the same on all ranks. Collective.

        Raises:
            AsyncRLError: a prompt with its answer is longer than the model's positions.
        """
        sequences = [
            self._reader.read(group.prompt_tokens, rollout.tokens) if self._reader
            else [*group.prompt_tokens.tolist(), *rollout.tokens.tolist()]
            for group in batch.groups
            for rollout in group.rollouts
        ]  # fmt: skip
        rewards = iter(self.score_sequences(sequences).tolist())
        groups = tuple(
            dataclasses.replace(
                group, rollouts=tuple(dataclasses.replace(r, reward=next(rewards)) for r in group.rollouts)
            )
            for group in batch.groups
        )
        return dataclasses.replace(batch, groups=groups)

    @torch.no_grad()
    def score_sequences(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[k] on CPU, float32; each rank scores its share. Collective."""
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
            scored = self._score_rows([sequences[i] for i in indices] or [[0]])
            rewards[indices] = scored[: len(indices)]
        dist.all_reduce(rewards)
        return rewards.cpu()

    def _score_rows(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[B]"""
        rows = [torch.tensor(tokens, device=self._device) for tokens in sequences]
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        scores: Tensor = self._scorer(pad_sequence(rows, batch_first=True), mask)
        return scores


class _Scorer(nn.Module):
    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Of rows padded on the right, [B, S] each; [B] float32.

        Decoders are read at their last token, whatever its id: transformers would step over one that equals the
        padding's, which is often the end of the answer.
        """
        if not hasattr(self.lm, "score"):
            return self.lm(tokens, attention_mask=mask).logits[:, 0].float()
        states = self.lm.base_model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
        last = states[torch.arange(len(tokens), device=tokens.device), mask.sum(1) - 1]
        return self.lm.score(last)[:, 0].float()


def _open_reader(policy_path: str, reward_path: str) -> _Reader | None:
    """None where the reward model reads the policy's tokens."""
    if not any(Path(reward_path).glob("*token*")) and not any(Path(reward_path).glob("vocab*")):
        return None
    policy, own = load_tokenizer(policy_path), load_tokenizer(reward_path)
    return None if policy.get_vocab() == own.get_vocab() else _Reader(policy, own)


class _Reader:
    """From the policy's tokens to the reward model's, by way of their text."""

    def __init__(self, policy: Any, own: Any) -> None:
        self._policy, self._own = policy, own
        self._before = self._after = ""
        if policy.chat_template:
            message = [{"role": "user", "content": _PLACEHOLDER}]
            frame = policy.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            self._before, _, self._after = frame.partition(_PLACEHOLDER)

    def read(self, prompt: IntArray, answer: IntArray) -> list[int]:
        question = self._policy.decode(prompt.tolist())
        if question.startswith(self._before) and question.endswith(self._after):  # one user message
            question = question[len(self._before) : len(question) - len(self._after)]
        reply = self._policy.decode(answer.tolist(), skip_special_tokens=True)
        if self._own.chat_template:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
            tokens: list[int] = self._own.apply_chat_template(messages, return_dict=False)
        else:
            tokens = self._own(question, reply)["input_ids"]
        return tokens
