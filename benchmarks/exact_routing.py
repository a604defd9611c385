"""Proves and prices the routing of a mixture of experts: the experts that the engine recorded and the learner replays.

    python -m benchmarks.exact_routing --engines hf,sglang --tokens 50000

For each engine, two servers of a random Qwen3-MoE answer the same prompts, in turns: one records (rollout.routing
replay), the other does not (ignore). Then

proof      the model in transformers, from scratch in float32. Wrong tokens have experts in some layer that its router
           would not choose, best first, or a logprob over the recorded experts that is off by more than 2e-5.
           Probabilities that differ by less than 1e-5 are ties: rounding decides, and another batch rounds otherwise.
           Ties that the engine decided otherwise than transformers are counted
bytes      what the experts take in a message, and so in the journal, for each sampled token
cost       tokens the engine and its client generate in a processor second, and processor seconds of a learner's step
           on the same tokens, with and without

Random routers choose more evenly than trained ones, so bytes are an upper bound. Cells are added to those in OUT.json.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.messages.packed import pack_routing
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.base.types import Batch, Group, Row
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.exact_policy import GROUP_SIZE, MAX_TOKENS, Answered, generate, time_steps
from benchmarks.page import machine_text, write_page
from rollout_server.engines.base import Engine, GenerationRequest, SampledReply, open_engine
from rollout_server.tasks.base import Task, open_task
from tests.kit.engines.replies import SUPPORT_TOLERANCE, of_tokens
from tests.kit.engines.routed import TIE, replayed
from tests.kit.models import load_model
from tests.kit.tiny_moe import save_moe

RESULTS = Path(__file__).parent / "results" / "exact_routing"
SIZES = {
    "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 6, "num_experts": 64,
    "num_experts_per_tok": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
KINDS = ("replay", "ignore")
STEP_TOKENS = 4096
"""About so many sampled tokens are in a learner's step."""


async def answer(
    configs: dict[str, Config], task: Task, tokens: int, rounds: int
) -> tuple[Answered, dict[str, list[float]]]:
    """Return replies with routing that have `tokens` tokens or more together, and the speeds of both engines."""

    def requests(count: int, first: int, kind: str) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                group_id=first + i, prompt=task.prompt(first + i), start_version=0, seed=first, n=GROUP_SIZE,
                max_tokens=MAX_TOKENS, temperature=1.0, wants_routing=kind == "replay",
            )
            for i in range(count)
        ]

    answered: Answered = []
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as logs:
        try:
            for kind, config in configs.items():
                engines[kind] = open_engine(config, 0, Path(logs) / kind)
                (Path(logs) / kind).mkdir()
                await engines[kind].start()
                await generate(engines[kind], requests(2, 0, kind))  # warm up
            count = max(1, -(-tokens // (rounds * GROUP_SIZE * MAX_TOKENS)))
            for number in range(rounds):
                for kind in KINDS[:: 1 - 2 * (number % 2)]:
                    found, speed = await generate(engines[kind], requests(count, 100 * (number + 1), kind))
                    speeds[kind].append(speed)
                    answered += found if kind == "replay" else []
        finally:
            for engine in engines.values():
                await engine.aclose()
    return answered, speeds


def proof(model: Path, answered: Answered) -> dict[str, Any]:
    """Recompute the routers' choices and the logprob of every token, over the recorded experts."""
    models, wrong, ties, tokens, largest = {0: load_model(model)}, 0, 0, 0, 0.0
    for request, replies in answered:
        for reply in replies:
            whole, lags = replayed(models, request.prompt.tokens, reply, request.temperature, keeps_kv=True)
            count, errors = len(reply.tokens), np.abs(of_tokens(whole, reply.tokens, None) - reply.logprobs)
            is_wrong = lags > TIE
            is_wrong[-count:] |= errors > SUPPORT_TOLERANCE
            wrong, ties = wrong + int(is_wrong.sum()), ties + int(((lags > 0) & (lags <= TIE)).sum())
            tokens, largest = tokens + count, max(largest, float(errors.max()))
    return {"tokens": tokens, "wrong": wrong, "ties": ties, "largest_log_ratio": largest}


def group_of(request: GenerationRequest, replies: Sequence[SampledReply]) -> Group:
    rows = [
        Row(
            tokens=reply.tokens, logprobs=np.minimum(reply.logprobs, 0), versions=reply.versions,
            mask=np.ones(len(reply.tokens), np.bool_), reward=float(number % 2), finish_reason=reply.finish_reason,
            routing=reply.routing,
        )
        for number, reply in enumerate(replies)
    ]
    return Group(
        group_id=request.group_id, prompt_index=request.group_id, start_version=0, duration_s=1.0, rows=tuple(rows),
        temperature=request.temperature, prompt_tokens=request.prompt.tokens,
    )  # fmt: skip


def sizes(groups: Sequence[Group]) -> dict[str, float]:
    """Return the bytes of the experts for each sampled token, in a message and before compression."""
    tokens = sum(group.num_tokens for group in groups)
    columns = [pack_routing("routing", group)[3] for group in groups]
    return {
        "bytes_a_token": sum(len(frame) for _, frame in columns) / tokens,
        "raw_bytes_a_token": sum(size for size, _ in columns) / tokens,
    }


def step_seconds(configs: dict[str, Config], groups: Sequence[Group], rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of steps on the same tokens with replay and without, in turns."""
    chosen: list[Group] = []
    for group in groups:
        if sum(each.num_tokens for each in chosen) < STEP_TOKENS:
            chosen.append(group)
    without = [
        dataclasses.replace(group, rows=tuple(dataclasses.replace(row, routing=None) for row in group.rows))
        for group in chosen
    ]
    batches = {
        kind: Batch(version=0, groups=tuple(of_kind), finished_versions=(0,) * len(of_kind))
        for kind, of_kind in zip(KINDS, (chosen, without), strict=True)
    }
    return time_steps(configs, batches, rounds)


def table(cells: Sequence[dict[str, Any]]) -> Table:
    header = (
        "engine", "tokens", "wrong", "ties decided otherwise", "largest log ratio", "bytes a token, before compression",
        "tokens/s with / without", "step, s with / without",
    )
    rows = []
    for cell in cells:
        speed, step = (
            {kind: statistics.median(values) for kind, values in cell[key].items()} for key in ("speeds", "step_s")
        )
        rows.append([
            *(str(cell[key]) for key in ("engine", "tokens", "wrong", "ties")), f"{cell['largest_log_ratio']:.1e}",
            f"{cell['bytes_a_token']:.1f}, {cell['raw_bytes_a_token']:.1f}",
            *(
                f"{by['replay']:.{digits}f} / {by['ignore']:.{digits}f} ({by['replay'] / by['ignore'] - 1:+.1%})"
                for by, digits in ((speed, 0), (step, 2))
            ),
        ])
    return Table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="hf,sglang")
    parser.add_argument("--tokens", type=int, default=50_000, help="sampled tokens of each cell, about")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS, help="adds to OUT.json and writes OUT.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    file = arguments.out.with_name(f"{arguments.out.name}.json")
    cells = json.loads(file.read_text())["cells"] if file.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        model = save_moe(Path(folder) / "model", sharpness=3, **SIZES)
        for engine in arguments.engines.split(","):
            configs = {
                kind: load_config(None, [
                    f"model.path={model}", "model.dtype=float32", "task.name=reasoning_gym/chain_sum",
                    f"rollout.engine={engine}", f"rollout.routing={kind}", f"rollout.group_size={GROUP_SIZE}",
                    f"rollout.max_response_tokens={MAX_TOKENS}", "learner.prompts_per_step=32", "eval.num_prompts=0",
                    *arguments.overrides,
                ])
                for kind in KINDS
            }  # fmt: skip
            task = open_task(configs["replay"], load_tokenizer(model))
            answered, speeds = asyncio.run(answer(configs, task, arguments.tokens, arguments.rounds))
            groups = [group_of(*each) for each in answered]
            command = shlex.join(["python", "-m", "benchmarks.exact_routing", *sys.argv[1:]])
            cells.append({
                "engine": engine, "load": round(os.getloadavg()[0], 1), "command": command, "speeds": speeds,
                **proof(model, answered), **sizes(groups), "step_s": step_seconds(configs, groups, arguments.rounds),
            })
            commands = "\n".join(f"`{each}`" for each in {cell["command"]: 0 for cell in cells})
            chosen = f"{SIZES['num_experts_per_tok']} of {SIZES['num_experts']} experts"
            shape = f"{SIZES['num_hidden_layers']} layers, {chosen}"
            page = f"A random Qwen3-MoE, {shape}. {machine_text()}. Medians over the rounds.\n\n"
            page += f"{table(cells).markdown()}\n{commands}\n"
            write_page(arguments.out, page, {"machine": describe_machine(), "cells": cells})


if __name__ == "__main__":
    main()
