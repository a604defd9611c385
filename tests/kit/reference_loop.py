"""A plain generate-then-train loop: what a run with `staleness.max: 0` must equal.

GRPO by its formulas in plain torch: no buffer, no wire, no engine process, no packing of rows, no FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.models_and_data.model_folder import load_tokenizer, policy_lr
from async_rl.base.types import Batch, Group, Prompt
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.batch import DecodingBatch, OpenRequest
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import open_task


@dataclass(frozen=True)
class Answer:
    """One sampled answer with its reward."""

    prompt: list[int]
    tokens: list[int]
    reward: float


@dataclass(frozen=True)
class Step:
    answers: list[Answer]
    loss: float
    grad_norm: float
    entropy: float


class Reference:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        learner = config.learner
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=policy_lr(config), betas=learner.betas, weight_decay=learner.weight_decay
        )

    def run(self, steps: int) -> Iterator[Step]:
        """Sample each batch with the current weights, then train on it."""
        tokenizer = load_tokenizer(self.config.model.path)
        task = open_task(self.config, tokenizer)
        reward = open_rewards(self.config, task)[0].reward.function
        size = self.config.learner.prompts_per_step
        for first in range(0, steps * size, size):
            answers = []
            for group in self._sample([task.prompt(index) for index in range(first, first + size)]):
                prompt = group.request.prompt
                for reply in group.replies:
                    text = tokenizer.decode(reply.tokens, skip_special_tokens=True)
                    tokens = reply.tokens.tolist()
                    answers.append(Answer(prompt.tokens.tolist(), tokens, reward(prompt.question, text)))
            yield self.train(answers)

    def _sample(self, prompts: list[Prompt]) -> list[OpenRequest]:
        rollout = self.config.rollout
        groups = [
            OpenRequest(GenerationRequest(
                group_id=i, prompt=prompt, start_version=0, seed=self.config.run.seed, n=rollout.group_size,
                max_tokens=rollout.max_response_tokens, temperature=rollout.temperature,
            ))
            for i, prompt in enumerate(prompts)
        ]
        eos = load_tokenizer(self.config.model.path).eos_token_id
        with torch.inference_mode():
            batch = DecodingBatch(self.model, frozenset([eos]))
            batch.add(groups, 0)
            while len(batch):
                batch.step(0)
        return groups

    def train(self, answers: list[Answer]) -> Step:
        """One step of GRPO: A = (r - mean) / std in the group; loss -sum(A exp(l - l0)) / tokens, where l0 = l."""
        size = self.config.rollout.group_size
        tokens = sum(len(answer.tokens) for answer in answers)
        loss = entropy = torch.zeros(())
        for start in range(0, len(answers), size):
            group = answers[start : start + size]
            rewards = torch.tensor([answer.reward for answer in group], dtype=torch.float64)
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).float()
            for answer, advantage in zip(group, advantages, strict=True):
                logprobs, entropies = self._logprobs(answer)
                loss = loss - advantage * torch.exp(logprobs - logprobs.detach()).sum() / tokens
                entropy = entropy + entropies.sum().detach() / tokens
        self._optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.learner.grad_clip)
        self._optimizer.step()
        return Step(answers, float(loss.detach()), float(grad_norm), float(entropy))

    def _logprobs(self, answer: Answer) -> tuple[Tensor, Tensor]:
        """(logprobs, entropies) of the answer's tokens. [T], [T]"""
        ids = torch.tensor([answer.prompt + answer.tokens])
        logits = self.model(ids).logits[0, len(answer.prompt) - 1 : -1].float() / self.config.rollout.temperature
        distribution = torch.log_softmax(logits, dim=-1)
        entropies = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(1, ids[0, len(answer.prompt) :, None])[:, 0], entropies


def answers_of(batch: Batch) -> list[Answer]:
    def of(group: Group) -> list[Answer]:
        return [Answer(group.prompt_tokens.tolist(), r.tokens.tolist(), r.reward) for r in group.rows]

    return [answer for group in batch.groups for answer in of(group)]
