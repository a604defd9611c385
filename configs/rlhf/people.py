"""Plays the people of the three stages: writes text, and compares answers of the first stage's model.

    python configs/rlhf/people.py               300 comparisons, 1000 held-out ones and 2000 texts, in runs/rlhf
    python configs/rlhf/people.py --pairs 100 --errors 0.1 --seed 1

They judge by the gold reward of the task, which the reward model and the policy never see.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from async_rl.base.config.loading import load_config
from async_rl.base.models_and_data.model_folder import load_tokenizer
from rollout_server.tasks.base import prompt_text, prompt_tokens
from rollout_server.tasks.examples import Letters, gold_reward

CONFIG = Path(__file__).parent / "reward_model.yaml"
BATCH = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="comparisons to train on (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=1000, help="held-out comparisons (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=2000, help="pretraining texts (default: %(default)s)")
    parser.add_argument("--errors", type=float, default=0.0, help="share of the comparisons that are wrong")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="the model that answers (default: model.path of reward_model.yaml)")
    parser.add_argument("--out", type=Path, default=Path("runs/rlhf"), help="folder (default: %(default)s)")
    args = parser.parse_args()
    config = load_config(CONFIG, [f"model.path={args.model}"] if args.model else [])
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = load_tokenizer(config.model.path)
    task = Letters(config, tokenizer)
    texts = [prompt_text(tokenizer, each.messages, "letters") + each.solution
             for each in map(task.train_question, range(args.texts))]
    write(args.out / "texts.jsonl", [{"text": text} for text in texts])
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    pairs = comparisons(config.model.path, tokenizer, config.rollout.max_response_tokens)
    for name, count, errors in (("comparisons", args.pairs, args.errors), ("held_out", args.held_out, 0.0)):
        rows = [next(pairs) for _ in range(count)]
        for row in rows:
            if rng.random() < errors:
                row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
        write(args.out / f"{name}.jsonl", rows)
    print(f"{args.pairs} comparisons, {args.held_out} held-out ones and {args.texts} texts written to {args.out}")


def comparisons(path: str, tokenizer: Any, max_tokens: int) -> Iterator[dict[str, str]]:
    """Yield comparisons of two sampled answers without end; pairs of the same gold reward are left out."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    while True:
        answers = {name: sampled(model, tokenizer, name, max_tokens) for name in "AB"}
        for number in range(0, BATCH, 2):
            for name, found in answers.items():
                gold = [gold_reward(name, answer) for answer in found[number : number + 2]]
                if gold[0] != gold[1]:
                    best = number + (gold[1] > gold[0])
                    yield {"prompt": name, "chosen": found[best], "rejected": found[2 * number + 1 - best]}


def sampled(model: Any, tokenizer: Any, name: str, max_tokens: int) -> list[str]:
    """Return BATCH answers of the model to the prompt of a class."""
    prompt = prompt_tokens(tokenizer, prompt_text(tokenizer, [{"role": "user", "content": name}], "letters"))
    tokens = model.generate(
        torch.tensor([prompt]), do_sample=True, top_k=0, max_new_tokens=max_tokens, num_return_sequences=BATCH,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    texts: list[str] = tokenizer.batch_decode(tokens[:, len(prompt) :], skip_special_tokens=True)
    return texts


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
