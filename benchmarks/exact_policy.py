"""Proves and prices the supports of tokens: with rollout.top_p, top_k or min_p, the ids that each token was drawn from.

    python -m benchmarks.exact_policy tiny --engines sglang,hf --tokens 50000
    python -m benchmarks.exact_policy models/SmolLM2-135M-Instruct --tokens 6000 --temperatures 0.6,1

For each engine, temperature and rule an engine answers the same prompts in turns with supports and without. Then

proof      transformers computes every token's distribution from scratch, in float32. Wrong tokens are those whose set
           is not what the rule keeps, rounding at its border being allowed for (5e-5), or whose logprob over its set
           is off by more than 2e-5
ratios     learner's over behaviour probability at equal weights: over the sets, and over the whole vocabulary
bytes      what the supports take in a message, and so in the journal, for each sampled token
cost       tokens the engine and its client generate in a second, and seconds of a learner's step on the same tokens,
           with supports and without. Seconds are processor seconds, so that other load on the machine counts little

Cells are added to those in OUT.json.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.messages.packed import pack_supports
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.base.types import Batch, Group, Row
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from benchmarks.random_model import SIZES, save_random_model
from learner.loop.updater import Updater
from rollout_server.engines.base import Engine, GenerationRequest, SampledReply, open_engine
from rollout_server.tasks.base import Task, open_task
from tests.kit.engines.replies import SUPPORT_TOLERANCE, distributions, of_tokens, wrong_sets
from tests.kit.models import save_sharp_model

RESULTS = Path(__file__).parent / "results" / "exact_policy"
RULES = ("top_p=0.8", "top_p=0.9", "top_p=0.95", "top_k=20", "min_p=0.05")
GROUP_SIZE, MAX_TOKENS = 8, 128

Answered = list[tuple[GenerationRequest, list[SampledReply]]]


def requests_of(config: Config, task: Task, count: int, first: int, wants_support: bool) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            group_id=first + i, prompt=task.prompt(i), start_version=0, seed=first, n=GROUP_SIZE,
            max_tokens=MAX_TOKENS, **config.rollout.sampling._asdict(), wants_support=wants_support,
        )
        for i in range(count)
    ]


async def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[Answered, float]:
    """Return the replies to all requests, which run at the same time, and tokens per second."""
    start_s = processor_seconds()
    replies = await asyncio.gather(*map(engine.generate, requests))
    tokens = sum(len(reply.tokens) for group in replies for reply in group)
    return list(zip(requests, replies, strict=True)), tokens / (processor_seconds() - start_s)


def processor_seconds() -> float:
    """Return the processor seconds of this process and of those that it has started and that live."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


async def answer(config: Config, task: Task, tokens: int, rounds: int) -> tuple[Answered, dict[str, list[float]]]:
    """Return replies with supports that have `tokens` tokens or more together, and the speeds with and without."""
    with tempfile.TemporaryDirectory() as logs:
        engine = open_engine(config, 0, Path(logs))
        await engine.start()
        try:
            count = max(1, -(-tokens // (rounds * GROUP_SIZE * MAX_TOKENS)))
            (sample,) = requests_of(config, task, 1, 0, wants_support=True)
            await generate(engine, [dataclasses.replace(sample, max_tokens=8)])  # warm up
            answered: Answered = []
            speeds: dict[str, list[float]] = {"with": [], "without": []}
            for number in range(rounds if tokens else 0):
                for kind in ("with", "without")[:: 1 - 2 * (number % 2)]:
                    first = (2 * number + (kind == "with") + 1) * 10_000
                    requests = requests_of(config, task, count, first, wants_support=kind == "with")
                    found, speed = await generate(engine, requests)
                    speeds[kind].append(speed)
                    answered += found if kind == "with" else []
        finally:
            await engine.aclose()
    return answered, speeds


def proof(model: Path, answered: Answered) -> dict[str, Any]:
    """Recompute the set and the logprob of every token."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    wrong, tokens, ratios, kept = 0, 0, [], []
    for request, replies in answered:
        for reply in replies:
            assert reply.support is not None
            whole = distributions(lm, request.prompt.tokens, reply.tokens, request.temperature)
            log_ratios = of_tokens(whole, reply.tokens, reply.support) - reply.logprobs
            off = set(wrong_sets(whole, reply.support, request.sampling))
            off |= set(np.flatnonzero(np.abs(log_ratios) > SUPPORT_TOLERANCE).tolist())
            wrong, tokens = wrong + len(off), tokens + len(reply.tokens)
            ratios.append(log_ratios.astype(np.float64))
            kept.append((of_tokens(whole, reply.tokens, None) - reply.logprobs).astype(np.float64))
    log_ratio = np.concatenate(ratios)
    return {
        "tokens": tokens, "wrong": wrong, "largest_log_ratio": float(np.abs(log_ratio).max()),
        "mean_ratio": float(np.exp(log_ratio).mean()), "mean_ratio_without": float(np.exp(np.concatenate(kept)).mean()),
    }


def rows_of(replies: Sequence[SampledReply]) -> Iterator[Row]:
    for number, reply in enumerate(replies):
        yield Row(
            tokens=reply.tokens, logprobs=np.minimum(reply.logprobs, 0), versions=reply.versions,
            mask=np.ones(len(reply.tokens), np.bool_), reward=float(number % 2), finish_reason=reply.finish_reason,
            support=reply.support,
        )


def sizes(answered: Answered) -> dict[str, float]:
    """Return how many ids a token has, and the bytes of its support in a message, group by group as they are sent."""
    packed = [pack_supports("support", [*rows_of(replies)]) for _, replies in answered]
    counts = np.concatenate([r.support.sizes for _, replies in answered for r in replies if r.support is not None])
    return {
        "bytes_a_token": sum(len(each[1]) for each in packed) / len(counts),
        "ids_mean": float(counts.mean()), "ids_p95": float(np.quantile(counts, 0.95)), "ids_max": float(counts.max()),
    }


def step_seconds(config: Config, answered: Answered, rounds: int, most_tokens: int) -> dict[str, list[float]]:
    """Return the processor seconds of steps on the same tokens with and without their supports, in turns."""
    groups, tokens = [], 0
    for request, replies in answered:
        if tokens < most_tokens:
            groups.append(Group(
                group_id=request.group_id, prompt_index=request.group_id, start_version=0,
                temperature=request.temperature, prompt_tokens=request.prompt.tokens, rows=tuple(rows_of(replies)),
                duration_s=1.0,
            ))
            tokens += sum(len(reply.tokens) for reply in replies)
    without = [
        dataclasses.replace(group, rows=tuple(dataclasses.replace(row, support=None) for row in group.rows))
        for group in groups
    ]
    batches = {
        kind: Batch(version=0, groups=tuple(each), finished_versions=(0,) * len(each))
        for kind, each in (("with", groups), ("without", without))
    }
    return time_steps(dict.fromkeys(batches, config), batches, rounds)


def time_steps(configs: dict[str, Config], batches: dict[str, Batch], rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of a learner's steps on the batch of each kind, with its config, in turns."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    updaters = {kind: Updater(config, torch.device("cpu")) for kind, config in configs.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in batches}
    for number in range(rounds + 1):
        for kind in [*batches][:: 1 - 2 * (number % 2)]:
            start_s = time.process_time()
            updaters[kind].update(batches[kind])
            if number:  # the first warms up
                seconds[kind].append(time.process_time() - start_s)
    dist.destroy_process_group()
    return seconds


def table(cells: Sequence[dict[str, Any]]) -> Table:
    header = (
        "model", "engine", "T", "rule", "tokens", "wrong", "mean ratio with / without", "largest log ratio",
        "ids: mean, p95, max", "bytes a token", "tokens/s with / without", "step, s with / without",
    )
    rows = []
    for cell in cells:
        speed = {kind: statistics.median(values) for kind, values in cell["speeds"].items()}
        step = {kind: statistics.median(values) for kind, values in cell["step_s"].items()}
        rows.append([
            cell["model"], cell["engine"], f"{cell['temperature']:g}", cell["rule"], str(cell["tokens"]),
            str(cell["wrong"]), f"{cell['mean_ratio']:.5f} / {cell['mean_ratio_without']:.3f}",
            f"{cell['largest_log_ratio']:.1e}", f"{cell['ids_mean']:.1f}, {cell['ids_p95']:.0f}, {cell['ids_max']:.0f}",
            f"{cell['bytes_a_token']:.1f}",
            f"{speed['with']:.0f} / {speed['without']:.0f} ({speed['with'] / speed['without'] - 1:+.1%})",
            f"{step['with']:.2f} / {step['without']:.2f} ({step['with'] / step['without'] - 1:+.1%})" if step else "-",
        ])
    return Table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=(
        "a Hugging Face folder, the size of a random model, all of whose tokens are about as probable: "
        f"{', '.join(SIZES)}; or tiny, a random model that is sure of its tokens, as the tests have it"
    ))
    parser.add_argument("--engines", default="sglang,hf")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--temperatures", default="1")
    parser.add_argument("--tokens", type=int, default=50_000, help="sampled tokens of each cell, about")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--step-tokens", type=int, default=4096, help="in a learner's step, about; 0: no step")
    parser.add_argument("--out", type=Path, default=RESULTS, help="adds to OUT.json and writes OUT.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    step = arguments.step_tokens
    file = arguments.out.with_name(f"{arguments.out.name}.json")
    cells = json.loads(file.read_text())["cells"] if file.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(arguments.model)
        if arguments.model in SIZES:
            model = Path(folder) / "model"
            save_random_model(arguments.model, model)
        elif arguments.model == "tiny":
            model = save_sharp_model(Path(folder))
        for engine in arguments.engines.split(","):
            for temperature in map(float, arguments.temperatures.split(",")):
                for rule in arguments.rules.split(","):
                    config = load_config(None, [
                        f"model.path={model}", "model.dtype=float32", "task.name=reasoning_gym/chain_sum",
                        f"rollout.engine={engine}", f"rollout.temperature={temperature}", f"rollout.{rule}",
                        f"rollout.group_size={GROUP_SIZE}", f"rollout.max_response_tokens={MAX_TOKENS}",
                        "learner.prompts_per_step=32", "eval.num_prompts=0", *arguments.overrides,
                    ])
                    task = open_task(config, load_tokenizer(model))
                    answered, speeds = asyncio.run(answer(config, task, arguments.tokens, arguments.rounds))
                    cells.append({
                        "model": Path(arguments.model).name, "engine": engine,
                        "temperature": temperature, "rule": rule, "load": round(os.getloadavg()[0], 1),
                        **proof(model, answered), **sizes(answered), "speeds": speeds,
                        "step_s": step_seconds(config, answered, arguments.rounds, step) if step else {},
                    })
                    commands = {cell["command"]: 0 for cell in cells if "command" in cell}
                    command = shlex.join(["python", "-m", "benchmarks.exact_policy", *sys.argv[1:]])
                    cells[-1]["command"] = command
                    shown = "\n".join(f"`{each}`" for each in [*commands, *([] if command in commands else [command])])
                    page = f"{machine_text()}. Medians over the rounds.\n\n{table(cells).markdown()}\n{shown}\n"
                    write_page(arguments.out, page, {"machine": describe_machine(), "cells": cells})


if __name__ == "__main__":
    main()
