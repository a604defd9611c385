"""Makes runs that collapse, and sound ones, on one core in seconds: the parts of a run in one process.

Words of letters are asked for, written backward or in alphabetical order. The task, the hf engine's batch, the
learner's updater and its metrics are those of a run; in place of the processes between them stands a queue, so that the
batch that is trained is exactly `staleness` versions old. The step's record is that of metrics.jsonl, and has
`true/reward`, the mean reward of the answers of the newest version before the step. At staleness 0 these are the
answers that the step trains on, and `true/reward` is `reward/mean`; else they are trained on `staleness` steps later,
and no alarm sees their reward before.
"""

from __future__ import annotations

import dataclasses
import random
import string
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.storage.model_folder import load_tokenizer
from async_rl.telemetry.metrics import reduce_metrics
from async_rl.types import Batch, Group, Row
from learner.models.lora import merged_parameters
from learner.sft import answer_demonstration, base_tokenizer, train_sft
from learner.updater import Updater
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.batch import DecodingBatch, OpenRequest
from rollout_server.question import Question
from rollout_server.tasks.base import Task, open_task

Record = dict[str, float]
PROMPTS, GROUP = 16, 8


class Words(Task):
    """Words of random letters, whose right answer is task.params.rule: `backward` or `sorted`."""

    num_prompts = 100_000

    def train_question(self, position: int) -> Question:
        draw = random.Random(position)
        word = "".join(draw.choice(string.ascii_lowercase) for _ in range(self.params["letters"]))
        answer = word[::-1] if self.params["rule"] == "backward" else "".join(sorted(word))
        return Question(messages=({"role": "user", "content": word},), ground_truth=answer, source="words")

    def eval_questions(self) -> list[Question]:
        return []

    def verify(self, question: Question, response: str) -> float:
        return float(response == question.ground_truth)


class FaultyAdamW(torch.optim.AdamW):
    """AdamW with a fault that begins after so many optimizer steps: a mistake after a sound beginning.

    A run has it by learner.optimizer, and its arguments by learner.optimizer_params.

    Args:
        factor: what the learning rate is multiplied by.
        growth: by what it is multiplied again with each further step.
        gradient: what the gradient is multiplied by, after it was clipped: that of advantages with the wrong sign (-1)
            or scale.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, after: int = 0, factor: float = 1.0,
        growth: float = 1.0, gradient: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self._done, self._after = 0, after
        self._factor, self._growth, self._gradient = factor, growth, gradient

    def step(self, closure: Any = None) -> Any:
        self._done += 1
        late = self._done - self._after
        if late > 0:
            for group in self.param_groups:  # the learner sets it anew for each step
                group["lr"] *= self._factor * self._growth**late
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self._gradient)
        return super().step(closure)


@dataclass(frozen=True, slots=True)
class WordsRun:
    """The settings of a run."""

    name: str
    seed: int
    lr: float
    staleness: int = 0
    rule: str = "backward"
    letters: int = 4
    steps: int = 80
    over: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, by the keys of the configuration."""

    def config(self, model: Path) -> Config:
        settings = {
            "model": {"path": str(model)},
            "task": {
                "name": "benchmarks.collapsing_runs:Words", "max_prompt_tokens": 16,
                "params": {"letters": self.letters, "rule": self.rule},
            },
            "rollout": {"engine": "hf", "group_size": GROUP, "max_response_tokens": self.letters + 4},
            "staleness": {"max": self.staleness}, "run": {"seed": self.seed, "steps": self.steps},
            "learner": {"prompts_per_step": PROMPTS, "lr": self.lr}, "algorithm": {"filter_zero_variance": False},
            "buffer": {"journal": False}, "eval": {"size": 0},
        }  # fmt: skip
        return load_config(settings, [f"{key}={value}" for key, value in self.over.items()])


def supervised(run: WordsRun, folder: Path) -> Path:
    """Return the folder of a model that has begun to learn the task, the same for all runs; it is made once."""
    steps = 200
    model = folder / f"{run.rule}-{run.letters}"
    if not model.is_dir():
        over = {"sft.steps": steps, "sft.batch_size": 64, "sft.target_loss": 0.5}
        config = dataclasses.replace(run, seed=0, over=over).config(model)
        task = open_task(config, base_tokenizer(config))
        pairs = task.sft_pairs(steps * 64)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            target = Path(partial) / "model"
            losses = [report.metrics[0].value for report in train_sft(
                config, [answer_demonstration(prompt.tokens.tolist(), answer) for prompt, answer in pairs], target
            )]
            print(f"{model.name}: loss {losses[-1]:.3f}", flush=True)
            target.rename(model)
    return model


def train(run: WordsRun, model: Path) -> Iterator[Record]:
    """Train, and yield the metrics of each step."""
    config = run.config(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        updater = Updater(config, torch.device("cpu"))
        sampler = _Sampler(config)
        queue: deque[Batch] = deque()
        for version in range(run.steps):
            queue.append(sampler.batch(version))
            while len(queue) <= run.staleness:  # the first batches are all of version 0
                queue.append(sampler.batch(version))
            batch = dataclasses.replace(queue.popleft(), version=version)
            record = reduce_metrics(updater.update(batch))
            sampler.load(updater)
            fresh = queue[-1].groups if queue else batch.groups
            record["true/reward"] = float(np.mean([row.reward for group in fresh for row in group.rows]))
            yield {"step": version + 1, **record}
    finally:
        dist.destroy_process_group()


class _Sampler:
    """Samples batches from a copy of the policy, as the hf engine does."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lm = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        self._tokenizer = load_tokenizer(config.model.path)
        self._task = open_task(config, self._tokenizer)
        self._next = 0

    def load(self, updater: Updater) -> None:
        self._lm.load_state_dict(dict(merged_parameters(updater.policy.lm)), strict=False)  # a tied head is left out

    def batch(self, version: int) -> Batch:
        rollout, seed = self._config.rollout, self._config.run.seed
        count = self._config.learner.prompts_per_step
        prompts = [self._task.prompt(self._next + number) for number in range(count)]
        requests = [
            OpenRequest(GenerationRequest(
                group_id=self._next + number, prompt=prompt, start_version=version, seed=seed, n=GROUP,
                max_tokens=rollout.max_response_tokens, temperature=rollout.temperature,
            ))
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        self._next += count
        with torch.inference_mode():
            decoding = DecodingBatch(self._lm, frozenset([self._tokenizer.eos_token_id]))
            decoding.add(requests, version)
            while len(decoding):
                decoding.step(version)
        groups = tuple(self._group(request) for request in requests)
        return Batch(version=version, groups=groups, finished_versions=(version,) * count)

    def _group(self, opened: OpenRequest) -> Group:
        request = opened.request
        rows = []
        for reply in opened.replies:
            text = str(self._tokenizer.decode(reply.tokens, skip_special_tokens=True))
            rows.append(Row(
                tokens=reply.tokens, logprobs=reply.logprobs, versions=reply.versions,
                mask=np.ones(len(reply.tokens), np.bool_),
                reward=self._task.verify(request.prompt.question, text), finish_reason=reply.finish_reason,
            ))
        return Group(
            group_id=request.group_id, prompt_index=request.prompt.index, start_version=request.start_version,
            temperature=request.temperature, prompt_tokens=request.prompt.tokens, duration_s=0.0, rows=tuple(rows),
        )
