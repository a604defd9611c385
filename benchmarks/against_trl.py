"""Measures episodes per second of TRL's synchronous GRPOTrainer, to compare with `async-rl train` of the same config.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.against_trl configs/quickstart.yaml --steps 20 rollout.max_response_tokens=64
    async-rl train configs/quickstart.yaml run.steps=20 eval.num_prompts=0 rollout.max_response_tokens=64

Model folder, prompts, group size, lengths, learning rate and reward are the config's. TRL's first two steps do not
count. `async-rl train` prints its episodes per second in its summary. `python -m benchmarks.engines` runs both in turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.models_and_data.fetching import located, pinned
from async_rl.base.models_and_data.model_folder import load_tokenizer, policy_lr
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import open_task

UNCOUNTED_STEPS = 2


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step of TRL ends, and stops the training `seconds` after the end of the uncounted first steps."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.monotonic())
        counted = self.ends_s[UNCOUNTED_STEPS - 1 :]
        if len(counted) > 1 and self.seconds and counted[-1] - counted[0] > self.seconds:
            control.should_training_stop = True


def run_trl(config: Config, steps: int, seconds: float = 0.0) -> tuple[float, float]:
    """Train with TRL; return episodes per second and the mean number of tokens in an episode.

    Args:
        steps: the most steps to take.
        seconds: the time after which no further step begins; 0: no limit.
    """
    tokenizer = load_tokenizer(config.model.path)
    task = open_task(config, tokenizer)
    reward = open_rewards(config, task)[0].reward.function
    assert reward is not None, "a rule has a function"
    prompts = [task.prompt(i) for i in range(steps * config.learner.prompts_per_step)]
    by_text = {prompt.text: prompt.question for prompt in prompts}
    lengths: list[int] = []
    clock = StepClock(seconds)

    def reward_function(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        lengths.extend(len(ids) for ids in columns["completion_ids"])
        return [reward(by_text[p], c) for p, c in zip(prompts, completions, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=config.model.path, reward_funcs=reward_function, processing_class=tokenizer, callbacks=[clock],
            train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
            args=GRPOConfig(
                output_dir=folder, report_to="none", save_strategy="no", use_cpu=True, bf16=False, max_steps=steps,
                per_device_train_batch_size=config.episodes_per_step, gradient_accumulation_steps=1,
                gradient_checkpointing=False, num_generations=config.rollout.group_size,
                max_completion_length=config.rollout.max_response_tokens, temperature=config.rollout.temperature,
                top_k=0, learning_rate=policy_lr(config), beta=0.0, disable_tqdm=True, logging_steps=1000,
                model_init_kwargs={"dtype": "float32"},
            ),
        )  # fmt: skip
        trainer.train()
    took_s = clock.ends_s[-1] - clock.ends_s[UNCOUNTED_STEPS - 1]
    counted = len(clock.ends_s) - UNCOUNTED_STEPS
    return counted * config.episodes_per_step / took_s, sum(lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no further step after so many seconds")
    parser.add_argument("--out", type=Path, help="write the two numbers to this JSON file too")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    config = located(pinned(load_config(arguments.config, arguments.overrides)))
    rate, tokens = run_trl(config, arguments.steps, arguments.seconds)
    print(f"TRL: {rate:.1f} episodes/s, {tokens:.1f} tokens an episode")
    if arguments.out:
        arguments.out.write_text(json.dumps({"episodes_per_s": rate, "tokens_per_s": rate * tokens}))


if __name__ == "__main__":
    main()
