"""Rollouts per second of the whole pipeline against TRL's GRPOTrainer (transformers generate), one run, one machine.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.against_trl configs/quickstart.yaml --steps 20 rollout.max_response_tokens=64

Same model folder, prompts, group size, lengths, learning rate, reward. Each side runs alone, in a process of its own;
its first steps (warm-up, first batch) are not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.config.loading import load_config

UNCOUNTED_STEPS = 2


def run_trl(config: Config, steps: int) -> dict[str, float]:
    """TRL's synchronous trainer on the same task."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from async_rl.storage.model_folder import load_tokenizer
    from rollout_server.rewards.base import open_reward
    from rollout_server.tasks.base import open_task

    tokenizer = load_tokenizer(config.model.path)
    task = open_task(config, tokenizer)
    reward = open_reward(config, task)
    prompts = [task.prompt(i) for i in range(steps * config.learner.prompts_per_step)]
    by_text = {prompt.text: prompt for prompt in prompts}
    lengths: list[int] = []

    def reward_function(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        lengths.extend(len(ids) for ids in columns["completion_ids"])
        return [reward(by_text[p], c) for p, c in zip(prompts, completions, strict=True)]

    ends_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends_s.append(time.time())

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=config.model.path,
            reward_funcs=reward_function,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder, report_to="none", save_strategy="no", use_cpu=True, bf16=False, max_steps=steps,
                per_device_train_batch_size=config.rollouts_per_step, gradient_accumulation_steps=1,
                gradient_checkpointing=False, num_generations=config.rollout.group_size,
                max_completion_length=config.rollout.max_response_tokens, temperature=config.rollout.temperature,
                top_k=0, learning_rate=config.learner.lr, beta=0.0, disable_tqdm=True, logging_steps=1000,
                model_init_kwargs={"dtype": "float32"},
            ),
        )
        trainer.train()
    seconds = ends_s[-1] - ends_s[UNCOUNTED_STEPS - 1]
    rollouts = (steps - UNCOUNTED_STEPS) * config.rollouts_per_step
    return {"rollouts_per_s": rollouts / seconds, "tokens_per_rollout": sum(lengths) / len(lengths)}


def run_ours(config: Config) -> dict[str, float]:
    from async_rl.pipeline import run

    summary = run(config)
    return {
        "rollouts_per_s": summary["rollouts_per_s"],
        "tokens_per_rollout": summary["tokens_per_s"] / summary["rollouts_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sides", default="trl,hf,sglang")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    fixed = ["eval.size=0", "run.name=against-trl", f"run.steps={arguments.steps}", *arguments.overrides]
    if arguments.side:
        config = load_config(arguments.config, fixed)
        print(json.dumps(run_trl(config, arguments.steps) if arguments.side == "trl" else run_ours(config)))
        return
    results: dict[str, dict[str, float]] = {}
    for side in arguments.sides.split(","):
        engine = [] if side == "trl" else [f"rollout.engine={side}"]
        command = [sys.executable, "-m", "benchmarks.against_trl", arguments.config, "--side", side]
        command += ["--steps", str(arguments.steps), *arguments.overrides, *engine]
        print(f"running {side}: {' '.join(command[1:])}", flush=True)
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[side] = json.loads(out.strip().splitlines()[-1])
    first = next(iter(results))
    base = results[first]["rollouts_per_s"]
    print(f"\n| side | rollouts/s | against {first} | response tokens, mean |\n| --- | ---: | ---: | ---: |")
    for side, result in results.items():
        rate = result["rollouts_per_s"]
        print(f"| {side} | {rate:.1f} | {rate / base:.2f} | {result['tokens_per_rollout']:.1f} |")
    Path("runs/against-trl.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
