"""Proves support, experts and logprob of each token over all ways to push weights, by a decoder of its own.

    python -m benchmarks.exact_pushes --engines hf,sglang --tokens 50000

A random Qwen3-MoE with 2 of 8 experts plays episodes of two turns at top_p 0.95. After every 32 answers it gets other
random weights. Then transformers computes the distribution of each token in float32: by the version that the token is
tagged with, with the experts that are recorded, over the KV that the server must have read. Answers may have tokens of
several versions. After a push in place the second turn finds the first one's KV in SGLang's prefix cache.

A wrong token has experts that its router would not choose, best first, or a support that top_p does not keep, or a
logprob over the support that is off by more than 2e-5. Rounding may decide between experts whose probabilities differ
by less than 1e-5 (ties), and about ids within 5e-5 of the support's border. Cells are added to those in OUT.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import os
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from async_rl.base.config import Config
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from rollout_server.engines.base import Engine, GenerationRequest, SampledReply, open_engine
from rollout_server.engines.http_engine import HttpEngine
from tests.kit.configs import server_config
from tests.kit.engines.pushes import MODELS, connected, deliver, new_version, pushing
from tests.kit.engines.replies import SUPPORT_TOLERANCE, of_tokens, request_for, wrong_sets
from tests.kit.engines.routed import TIE, replayed
from tests.kit.engines.turns import OBSERVED, next_turn
from tests.kit.tiny_moe import save_moe

RESULTS = Path(__file__).parent / "results" / "exact_pushes"
WAYS = {
    "in place": ("in_place", "none"), "retracted": ("retract", "none"), "drained": ("drain", "none"),
    "aborted": ("abort", "none"), "staged": ("in_place", "device"), "delta": ("in_place", "delta"),
    "adapter": ("in_place", "adapter"),
}
"""weight_sync.on_update, and weight_sync.double_buffer or a form of tests/kit/engines/pushes.py."""
TOP_P = 0.95
PLAYERS, ANSWERS, MAX_TOKENS = 16, 32, 100
"""Episodes at a time, answers between two pushes, and the most tokens of an answer."""
LIMIT_S = 900.0
NUMBERS = itertools.count()
"""Each episode has a prompt and a prefix cache of its own."""


class Answer(NamedTuple):
    request: GenerationRequest
    reply: SampledReply
    before: tuple[GenerationRequest, SampledReply] | None = None
    """The turn before."""


async def play(engine: Engine, drains: bool, tokens: int, push: Callable[[], Awaitable[None]]) -> list[Answer]:
    """Play and push until the answers have `tokens` tokens together.

    Args:
        drains: all episodes end before a push, as in a run.
    """
    answers = list[Answer]()

    def goes_on() -> bool:
        return sum(len(answer.reply.tokens) for answer in answers) < tokens

    async def play_episodes(until: float = math.inf) -> None:
        while goes_on() and len(answers) < until:
            first = request_for(  # n=1: no other request computes the prompt's KV, maybe with older weights
                next(NUMBERS), n=1, max_tokens=MAX_TOKENS, top_p=TOP_P, wants_support=True, wants_routing=True
            )
            (said,) = await engine.generate(first)
            second = next_turn(first, said)
            (added,) = await engine.generate(second)
            answers.extend((Answer(first, said), Answer(second, added, (first, said))))

    await push()
    if drains:
        while goes_on():
            until = len(answers) + ANSWERS
            await asyncio.gather(*(play_episodes(until) for _ in range(PLAYERS)))
            await push()
        return answers
    async with asyncio.TaskGroup() as players:
        for _ in range(PLAYERS):
            players.create_task(play_episodes())
        while goes_on():
            until = len(answers) + ANSWERS
            while goes_on() and len(answers) < until:
                await asyncio.sleep(0.01)
            await push()
    return answers


def serve(config: Config, folder: Path, tokens: int, pipe: Connection) -> None:
    """The process of an engine: for each value of on_update in `pipe` it plays, asks there for pushes, and answers."""

    async def run() -> None:
        engine = open_engine(config, 0, folder)

        async def push() -> None:
            pipe.send(None)
            await asyncio.to_thread(pipe.recv)

        try:
            await engine.start()
            pipe.send(engine.url)
            while on_update := await asyncio.to_thread(pipe.recv):
                if isinstance(engine, HttpEngine):
                    engine.resubmits = on_update == "abort"
                async with asyncio.timeout(LIMIT_S):
                    answers = await play(engine, on_update == "drain", tokens, push)
                pipe.send(answers)
        finally:
            await engine.aclose()

    torch.set_num_threads(1)
    asyncio.run(run())


def proof(answers: Sequence[Answer], *, keeps_kv: bool, keeps_history: bool) -> dict[str, Any]:
    """Recompute the distribution of each token.

    Args:
        keeps_kv: each token is fed once. Otherwise a new version computes all KV of an answer anew.
        keeps_history: a second turn reads the KV that the first has left.
    """
    wrong, ties, tokens, in_several, largest = 0, 0, 0, 0, 0.0
    for request, reply, before in answers:
        prompt, sampled, count = request.prompt.tokens, reply, len(reply.tokens)
        if before and keeps_history:
            prompt, said = before[0].prompt.tokens, before[1]
            observed = np.full(len(OBSERVED), reply.versions[0])  # fed by the forward that samples the first token
            sampled = replace(
                reply, tokens=np.concatenate([said.tokens, OBSERVED, reply.tokens]),
                versions=np.concatenate([said.versions, observed, reply.versions]),
            )
        whole, lags = replayed(MODELS, prompt, sampled, request.temperature, keeps_kv)
        whole = whole[-count:]
        errors = np.abs(of_tokens(whole, reply.tokens, reply.support) - reply.logprobs)
        assert reply.support is not None
        is_wrong = lags > TIE
        of_reply = is_wrong[-count:]
        of_reply |= errors > SUPPORT_TOLERANCE
        of_reply[wrong_sets(whole, reply.support, request.sampling)] = True
        wrong, ties = wrong + int(is_wrong.sum()), ties + int(((lags > 0) & (lags <= TIE)).sum())
        tokens, largest = tokens + count, max(largest, float(errors.max()))
        in_several += count if len(set(sampled.versions.tolist())) > 1 else 0
    return {"tokens": tokens, "in_several": in_several, "wrong": wrong, "ties": ties, "largest_log_ratio": largest}


def measure(engine: str, model: Path, ways: Sequence[str], tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a cell for each way to push into one server."""
    folder, config = model.parent, server_config(engine, model, top_p=TOP_P)
    spawning = multiprocessing.get_context("spawn")
    pipe, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(config, folder, tokens, theirs))
    process.start()
    theirs.close()  # so that a dead process ends the wait for it
    url = pipe.recv()
    for way in ways:
        on_update, form = WAYS[way]
        pushed = pushing(SimpleNamespace(config=config), folder / f"{engine} {way}", on_update, "gloo", form)
        publisher, pushes = connected(pushed, url), 0
        pipe.send(on_update)
        while (answers := pipe.recv()) is None:
            deliver(publisher, new_version(pushed))
            pushes += 1
            pipe.send(None)
        publisher.close()
        keeps_kv = on_update == "in_place"
        found = proof(answers, keeps_kv=keeps_kv, keeps_history=keeps_kv and engine == "sglang")
        yield {"engine": engine, "way": way, "pushes": pushes, "answers": len(answers), **found}
    pipe.send("")
    process.join()


def table(cells: Sequence[dict[str, Any]]) -> Table:
    header = (
        "engine", "way", "pushes", "answers", "tokens", "of them over several versions", "wrong",
        "ties decided otherwise", "largest log ratio",
    )
    keys = ("engine", "way", "pushes", "answers", "tokens", "in_several", "wrong", "ties")
    return Table(header, [[*(str(cell[key]) for key in keys), f"{cell['largest_log_ratio']:.1e}"] for cell in cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="hf,sglang")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--tokens", type=int, default=50_000, help="sampled tokens of each cell, about")
    parser.add_argument("--out", type=Path, default=RESULTS, help="adds to OUT.json and writes OUT.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file = arguments.out.with_name(f"{arguments.out.name}.json")
    cells = json.loads(file.read_text())["cells"] if file.exists() else []
    command = shlex.join(["python", "-m", "benchmarks.exact_pushes", *sys.argv[1:]])
    for engine in arguments.engines.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = save_moe(Path(folder) / "model", num_experts=8, num_experts_per_tok=2)
            for cell in measure(engine, model, arguments.ways.split(","), arguments.tokens):
                cells.append({**cell, "load": round(os.getloadavg()[0], 1), "command": command})
                commands = "\n".join(f"`{each}`" for each in {cell["command"]: 0 for cell in cells})
                setting = f"A random Qwen3-MoE, 2 layers, 2 of 8 experts, top_p {TOP_P}, episodes of two turns."
                page = f"{setting} {machine_text()}.\n\n{table(cells).markdown()}\n{commands}\n"
                write_page(arguments.out, page, {"machine": describe_machine(), "cells": cells})


if __name__ == "__main__":
    main()
