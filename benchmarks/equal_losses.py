"""Trains five small runs at several commits, and compares their metrics and weights with the last one's bit for bit.

    python -m benchmarks.equal_losses 8a06ec1d 65521ad3 HEAD --out benchmarks/results/equal_losses

All commits run with this Python and its packages, each from a folder of its own with the files of `git archive`. The
runs are strictly synchronous, on the hf engine, whose answers are a function of seed, prompt and weights; so a number
that differs is a change of what is computed, but for the mismatch and what follows from it in step 2 of the run with
adapters: the engine may score the probe of the first push beside answers, which rounds these otherwise. A reward that
counts vowels gives an untrained model something to learn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from learner.models.tiny_model import TINY_MODELS, tiny_model

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "equal_losses"
CASES: dict[str, list[str]] = {
    "GRPO": [],
    "PPO: a critic, two minibatches": ["algorithm.advantage=gae", "critic.lr=1e-3", "algorithm.num_minibatches=2"],
    "adapters, KL to the reference": ["model.lora.rank=4", "learner.lr=1e-2", "algorithm.kl.kind=k2_loss"],
    "GSPO": ["algorithm.loss=gspo", "algorithm.aggregation=sequence_mean", "algorithm.entropy_coef=0.01"],
    "two ranks, small micro-batches": ["placement.learner.ranks=2", "learner.max_tokens_per_microbatch=128"],
}
COMPARED = ("policy/", "critic/", "reward/", "kl/", "batch/", "parity/", "offpolicy/")
"""Beginnings of the names of metrics that are a function of what is computed, not of time."""
REWARD = '''def vowels(question, response):
    return sum(letter in "aeiou" for letter in response) / 12
'''
RUN_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """The records of one run at two commits, compared."""

    steps: int
    """Steps that both runs have logged."""
    numbers: int
    """Numbers that both have."""
    different: tuple[str, ...]
    """`step: metric` of each that differs."""
    only_in_one: tuple[str, ...]
    """The metrics that only one commit has."""
    same_weights: bool


def write_inputs(folder: Path, steps: int) -> Path:
    """Write a tiny model, the reward and a configuration; return the latter."""
    tiny_model("tiny-qwen2", 0).save_pretrained(folder / "model")
    TINY_MODELS["tiny-qwen2"].tokenizer().save_pretrained(folder / "model")
    (folder / "letters.py").write_text(REWARD)
    tree = {
        "run": {"steps": steps, "seed": 0}, "model": {"path": str(folder / "model")},
        "task": {
            "name": "reasoning_gym/spell_backward", "params": {"min_word_len": 3, "max_word_len": 5}, "size": 200,
            "max_prompt_tokens": 80, "reward": "letters:vowels",
        },
        "rollout": {"engine": "hf", "group_size": 4, "max_response_tokens": 12}, "staleness": {"max": 0},
        "learner": {"prompts_per_step": 4, "lr": 1e-3, "max_tokens_per_microbatch": 1024}, "eval": {"num_prompts": 0},
        "logging": {"wandb": "disabled"},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def unpack(commit: str, folder: Path) -> str:
    """Write the files of a commit into `folder`, and return its short name."""
    folder.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    named = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", commit], capture_output=True, check=True, text=True
    )
    return named.stdout.strip()


def train(code: Path, config: Path, run_dir: Path, settings: Sequence[str]) -> None:
    """Train one run with the code in `code`.

    Raises:
        RuntimeError: the run failed.
    """
    paths = os.pathsep.join([str(code), str(config.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "async_rl.cli", "train", str(config), f"run.dir={run_dir.parent}",
         f"run.name={run_dir.name}", *settings],
        cwd=code, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=RUN_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{code.name} could not train {settings}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def records(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return {step: its record} of a run's metrics."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "policy/loss" in line}


def compare(old: Mapping[int, dict[str, Any]], new: Mapping[int, dict[str, Any]], same_weights: bool) -> ComparedRun:
    """Compare the metrics of two runs, by the bits of the numbers that JSON gives back."""
    pairs = [
        (step, key, old[step].get(key), new[step].get(key))
        for step in sorted(old.keys() & new.keys())
        for key in sorted(old[step].keys() | new[step].keys()) if key.startswith(COMPARED)
    ]  # fmt: skip
    both = [pair for pair in pairs if pair[2] is not None and pair[3] is not None]
    return ComparedRun(
        steps=len(old.keys() & new.keys()), numbers=len(both), same_weights=same_weights,
        different=tuple(f"{step}: {key}" for step, key, a, b in both if repr(a) != repr(b)),
        only_in_one=tuple(sorted({key for _, key, a, b in pairs if a is None or b is None})),
    )


def digest(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def report(found: Mapping[tuple[str, str], ComparedRun], new: str, header: str, note: str = "") -> str:
    """Return the page of the comparisons, {(old commit, case): comparison with `new`}, and a note under the table."""
    rows = [
        [old, case, str(each.steps), str(each.numbers), str(len(each.different)), "yes" if each.same_weights else "no"]
        for (old, case), each in found.items()
    ]  # fmt: skip
    columns = ["old", "run", "steps", "numbers compared", "that differ", "same weights at the end"]
    first = [f"- {', '.join(key)}: {', '.join(each.different[:3])}" for key, each in found.items() if each.different]
    alone = sorted({key for each in found.values() for key in each.only_in_one})
    parts = [
        f"# Losses at {new} and before", header,
        "Strictly synchronous runs of a tiny model on the hf engine, at all commits with the same packages. Compared"
        "\nare the bits of the metrics of losses, gradients, rewards, corrections and batches of each step, and of the"
        "\ntrained weights.",
        Table(columns, rows).markdown().rstrip("\n"),
        *(["The first numbers that differ:\n\n" + "\n".join(first)] if first else []), *([note] if note else []),
        *([f"Only one of the commits has {', '.join(f'`{key}`' for key in alone)}."] if alone else []),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+", metavar="COMMIT", help="the last is compared with each of the others")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--note", default="", help="text under the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="writes OUT.md and OUT.json")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_inputs(folder, arguments.steps)
        *old, new = (unpack(commit, folder / f"code-{index}") for index, commit in enumerate(arguments.commits))
        for number, (case, settings) in enumerate(CASES.items()):
            runs = [folder / f"runs-{index}" / f"case-{number}" for index in range(len(arguments.commits))]
            for index, run_dir in enumerate(runs):
                train(folder / f"code-{index}", config, run_dir, settings)
            for commit, run_dir in zip(old, runs[:-1], strict=True):
                same = digest(run_dir) == digest(runs[-1])
                found[commit, case] = compare(records(run_dir), records(runs[-1]), same)
                print(commit, case, found[commit, case], flush=True)
    found = dict(sorted(found.items(), key=lambda item: old.index(item[0][0])))
    header = f"`python -m benchmarks.equal_losses {' '.join(arguments.commits)}`, {machine_text()}."
    runs_found = [{"old": commit, "run": case, **asdict(each)} for (commit, case), each in found.items()]
    numbers = {"machine": describe_machine(), "new": new, "runs": runs_found}
    write_page(arguments.out, report(found, new, header, arguments.note), numbers)


if __name__ == "__main__":
    main()
