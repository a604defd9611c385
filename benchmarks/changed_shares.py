"""Measures which share of its bfloat16 values a training step changes in a real model, and the bytes of their push.

    python -m benchmarks.smollm2 models/SmolLM2-135M-Instruct
    python -m benchmarks.changed_shares models/SmolLM2-135M-Instruct

The steps are those of configs/smollm2_cpu.yaml with each learning rate and eight answers a step, since AdamW's steps
have the size of the learning rate whatever the gradient's. The answers are sampled once, by the model as it is. After
each step the weights become parcels as weight_sync.delta pushes them. The learner trains float32 weights, which start
in two ways: `as loaded`, each on a bfloat16 value, as of a folder in bfloat16; and `spread`, each anywhere in the cell
of its bfloat16 value (uniform noise of at most half a unit in the last place), as after many steps.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.storage.model_folder import load_tokenizer
from async_rl.sweeps.machine import describe_machine, machine_text
from async_rl.sweeps.tables import Table, write_page
from async_rl.types import Batch, Group, Row
from async_rl.weights.changed_weights import ChangedWeights
from learner.models.policy import full_parameters
from learner.updater import Updater
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.tasks.base import open_task

RESULTS = Path(__file__).parent / "results" / "changed_shares"
CONFIG = "configs/smollm2_cpu.yaml"
SMALL_BATCHES = ("learner.prompts_per_step=2", "rollout.group_size=4")
SERVED = torch.bfloat16
SERVERS = {"rollout/0": "any"}
BFLOAT16_DIGITS = 8
"""The binary digits of a bfloat16 value."""


async def sample_batches(config: Config, count: int) -> list[Batch]:
    """Return so many batches of the run's task, sampled by the model of the run before its first step."""
    tokenizer = load_tokenizer(config.model.path)
    task, engine = open_task(config, tokenizer), HFEngine(config, 0)

    async def sample(index: int) -> Group:
        prompt = task.prompt(index)
        replies = await engine.generate(GenerationRequest(
            group_id=index, prompt=prompt, start_version=0, seed=index, n=config.rollout.group_size,
            max_tokens=config.rollout.max_response_tokens, temperature=1.0,
        ))  # fmt: skip
        rows = tuple(
            Row(
                tokens=reply.tokens, logprobs=reply.logprobs, versions=reply.versions,
                mask=np.ones(len(reply.tokens), np.bool_), finish_reason=reply.finish_reason,
                reward=task.verify(prompt.question, str(tokenizer.decode(reply.tokens, skip_special_tokens=True))),
            )
            for reply in replies
        )  # fmt: skip
        return Group(
            group_id=index, prompt_index=index, start_version=0, temperature=1.0, prompt_tokens=prompt.tokens,
            rows=rows, duration_s=1.0,
        )  # fmt: skip

    size = config.learner.prompts_per_step
    await engine.start()
    try:
        groups = await asyncio.gather(*map(sample, range(count * size)))
    finally:
        await engine.aclose()
    return [
        Batch(version=step, groups=tuple(groups[step * size : (step + 1) * size]), finished_versions=(0,) * size)
        for step in range(count)
    ]


def save_spread(folder: str, target: Path) -> None:
    """Save the model in float32 with each weight moved by at most half a unit in the last place of bfloat16."""
    shutil.copytree(folder, target)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread(parameter, generator))
    model.save_pretrained(target)


def spread(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform noise of at most half a unit in the last bfloat16 digit of each value, none for zeros."""
    unit = torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - BFLOAT16_DIGITS)
    return (torch.rand(weight.shape, generator=generator) - 0.5) * unit * (weight != 0)


def measure(config: Config, batches: Sequence[Batch]) -> dict[str, list[float]]:
    """Return the share of changed values and the bytes of the sparse push after each batch."""
    updater, changes = Updater(config, torch.device("cpu")), ChangedWeights(SERVED)
    found: dict[str, list[float]] = {"changed": [], "bytes": []}

    def push(version: int) -> int:
        parcels = changes.parcels(full_parameters(updater.policy, SERVED), version, SERVERS)
        num_bytes = sum(parcel.nbytes for _, parcel in parcels)
        changes.delivered(SERVERS)
        return num_bytes

    found["whole_bytes"] = [push(0)]
    for batch in batches:
        updater.update(batch)
        found["bytes"].append(push(batch.version + 1))
        found["changed"].append(changes.changed_share)
    return found


def table(rows: list[dict[str, Any]], gbit: float) -> Table:
    steps = [f"step {number}" for number in range(1, 1 + len(rows[0]["changed"]))]
    header = ("learning rate", "float32 weights", *(f"{step}, changed %" for step in steps), "largest push, MB",
              "of a whole one", f"its bytes alone at {gbit:g} Gb/s, s")  # fmt: skip
    lines = []
    for row in rows:
        largest, (whole,) = max(row["bytes"]), row["whole_bytes"]
        lines.append([
            f"{row['lr']:g}", row["start"], *(f"{100 * share:.2f}" for share in row["changed"]),
            f"{largest / 2**20:.2f}", f"{largest / whole:.2%}", f"{largest * 8 / (gbit * 1e9):.3f}",
        ])  # fmt: skip
    return Table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="FOLDER", help="a model in bfloat16")
    parser.add_argument("--lrs", default="1e-6,1e-5,3e-5", help="learning rates")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gbit", type=float, default=1.0, help="between two sites, for the last column")
    parser.add_argument("--out", type=Path, default=RESULTS, help="writes OUT.md and OUT.json")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(CONFIG, [*SMALL_BATCHES, f"model.path={arguments.model}", f"run.dir={folder}"])
        batches = asyncio.run(sample_batches(config, arguments.steps))
        save_spread(arguments.model, Path(folder) / "spread")
        for lr in map(float, arguments.lrs.split(",")):
            for start, path in (("as loaded", arguments.model), ("spread", str(Path(folder) / "spread"))):
                settings = replace(
                    config, model=replace(config.model, path=path), learner=replace(config.learner, lr=lr)
                )
                rows.append({"lr": lr, "start": start, **measure(settings, batches)})
                gc.collect()  # cycles hold the updater, 2 GB
                print(rows[-1], flush=True)
    whole = rows[0]["whole_bytes"][0]
    page = (
        f"`python -m benchmarks.changed_shares {' '.join(sys.argv[1:])}`, {machine_text()}. A whole push is of "
        f"{whole / 2**20:.1f} MB, whose bytes alone take {whole * 8 / (arguments.gbit * 1e9):.2f} s at "
        f"{arguments.gbit:g} Gb/s.\n\n"
    )
    numbers = {"machine": describe_machine(), "rows": rows}
    write_page(arguments.out, page + table(rows, arguments.gbit).markdown(), numbers)


if __name__ == "__main__":
    main()
