"""Measures importance ratios on answers of a real engine: with routing and supports replayed, and without.

    python -m benchmarks.exact_ratios versions                       makes policies of the grid, old and new
    python -m benchmarks.exact_ratios lags --engine sglang           adds engine types, lags 0, 2 and 8 to OUT.csv
    python -m benchmarks.exact_ratios rules --engine sglang          adds sampling rules at equal weights to OUT.csv

The engine samples with version 24 - lag in bfloat16 or float32. The learner scores its answers with version 24 in
float32, once with the engine's experts and once with its own, once over the support of each token and once over the
vocabulary. `random` is another mixture of experts, untrained but sure of its tokens, with more experts: at lag 0 only.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import dataclasses
import gc
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.base.types import Batch
from benchmarks.exact_grid import MODEL, ExactCell, ratio_numbers, ratios, train
from benchmarks.exact_policy import Answered
from benchmarks.exact_routing import group_of
from learner.loop.updater import Updater
from rollout_server.engines.base import Engine, GenerationRequest, open_engine
from rollout_server.engines.http_admin import HttpAdmin
from rollout_server.tasks.base import Task, open_task
from tests.kit.tiny_moe import save_moe

RESULTS = Path(__file__).parent / "results" / "exact_ratios"
SEEDS = (100, 101, 102)
"""Those of the policies, each trained by itself."""
NEWEST, LAGS = 24, (0, 2, 8)
RULES = ("top_p=0.8", "top_p=0.9", "top_p=0.95", "top_k=20", "min_p=0.05")
RANDOM = {
    "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
GROUP_SIZE = 8


def folder_of(seed: int, lag: int) -> Path:
    return MODEL / f"seed-{seed}-version-{NEWEST - lag}"


def make_versions() -> None:
    """Save versions of cells at lag 0, from before the learning rate falls."""
    for seed in SEEDS:
        saved = {NEWEST - lag: folder_of(seed, lag) for lag in LAGS}
        train(ExactCell(seed, 0, "1", "TIS", "sampled", engine="float32"), steps=32, every=32, saved=saved)


def config_of(model: Path, engine: str, dtype: str, rule: str, max_tokens: int) -> Config:
    return load_config("configs/quickstart.yaml", [
        f"model.path={model}", f"model.dtype={dtype}", f"rollout.engine={engine}", f"rollout.{rule}",
        f"rollout.group_size={GROUP_SIZE}", f"rollout.max_response_tokens={max_tokens}", "eval.num_prompts=0",
        "learner.prompts_per_step=64", "run.seed=5",
    ])  # fmt: skip


def load(config: Config, url: str, folder: Path) -> None:
    """Have a server take the weights of a folder, in its own type, and none of the KV of other ones."""
    admin = HttpAdmin(config, url)
    with tempfile.TemporaryDirectory() as copy:
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.model.dtype)).save_pretrained(copy)
        admin.pause("abort")
        admin.begin_update()
        admin.load_folder(Path(copy), version=0)
        admin.end_update()
        admin.resume()


async def generate(config: Config, engine: Engine, task: Task, prompts: int) -> Answered:
    requests = [
        GenerationRequest(
            group_id=i, prompt=task.prompt(i), start_version=0, seed=5, n=GROUP_SIZE,
            max_tokens=config.rollout.max_response_tokens, **config.rollout.sampling._asdict(),
            wants_support=config.records_support, wants_routing=True,
        )
        for i in range(prompts)
    ]
    return [*zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True)]


async def answer(config: Config, folders: Sequence[Path], prompts: int) -> list[Answered]:
    """Return the answers of a server that gets the weights of each folder in turn."""
    task = open_task(config, load_tokenizer(config.model.path))
    with tempfile.TemporaryDirectory() as logs:
        engine = open_engine(config, 0, Path(logs))
        await engine.start()
        try:
            found = []
            for folder in folders:
                if folder != folders[0]:
                    await asyncio.to_thread(load, config, engine.url, folder)
                found.append(await generate(config, engine, task, prompts))
        finally:
            await engine.aclose()
    return found


def measure(config: Config, answered: Answered) -> dict[tuple[str, str], dict[str, float]]:
    """Return the numbers of the ratios by (routing, support) with which the learner of `config` scores the answers."""
    groups = [
        dataclasses.replace(group, rows=tuple(
            dataclasses.replace(row, support=reply.support) for row, reply in zip(group.rows, replies, strict=True)
        ))
        for group, replies in ((group_of(request, replies), replies) for request, replies in answered)
    ]  # fmt: skip
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        updater = Updater(config, torch.device("cpu"))
        assert updater.policy.routing is not None
        found = {}
        kinds = itertools.product(("sampled", "ignore"), ("support", "vocabulary"))
        for routing, support in [*kinds] if config.records_support else [("sampled", "none"), ("ignore", "none")]:
            left_out: dict[str, Any] = {"routing": None} if routing == "ignore" else {}
            left_out |= {"support": None} if support == "vocabulary" else {}
            changed = tuple(
                dataclasses.replace(group, rows=tuple(dataclasses.replace(row, **left_out) for row in group.rows))
                for group in groups
            )
            updater.policy.routing.take_counts()
            batch = Batch(version=0, groups=changed, finished_versions=(0,) * len(groups))
            log_w, staleness = ratios(updater, batch)
            w = log_w.exp()
            replayed, differ = updater.policy.routing.take_counts()
            found[routing, support] = ratio_numbers("w", log_w, staleness) | {
                "tokens": len(w), "w_median": float(w.median()), "w_max_log": float(log_w.abs().max()),
                "w_outside": float(((w < 0.9) | (w > 1.1)).double().mean()),
                "changed": float(differ / replayed) if replayed else float("nan"),
            }
        return found
    finally:
        dist.destroy_process_group()
        gc.collect()


def measure_server(engine: str, dtype: str, model: str, rule: str, prompts: int, out: Path) -> None:
    """Measure one server, at all lags of all policies if nothing is left out of sampling; add to the file."""
    start = time.process_time()
    if model == "random":
        places, max_tokens = {(0, 0): save_moe(MODEL / "random", sharpness=4, **RANDOM)}, 64
    else:
        every = itertools.product(SEEDS, LAGS) if rule == "top_p=1" else [(SEEDS[0], 0)]
        places, max_tokens = {place: folder_of(*place) for place in every}, 8
    first = next(iter(places.values()))
    answers = asyncio.run(answer(config_of(first, engine, dtype, rule, max_tokens), [*places.values()], prompts))
    rows = []
    for ((seed, lag), folder), answered in zip(places.items(), answers, strict=True):
        newest = folder if model == "random" else folder_of(seed, 0)
        found = measure(config_of(newest, engine, "float32", rule, max_tokens), answered)
        rows += [
            {"engine": engine, "dtype": dtype, "model": model, "rule": rule, "seed": seed, "lag": lag,
             "routing": routing, "support": support, **{name: f"{value:.6g}" for name, value in numbers.items()}}
            for (routing, support), numbers in found.items()
        ]  # fmt: skip
    is_new = not out.exists()
    with out.open("a", newline="") as opened:
        writer = csv.DictWriter(opened, [*rows[0]], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    shown = "engine dtype model rule seed lag routing support tokens w_mean w_var w_abs w_k3 w_outside changed"
    for row in rows:
        print(*(row[name] for name in shown.split()))
    print(f"{time.process_time() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("versions", "lags", "rules"))
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--models", default="grid,random")
    parser.add_argument("--prompts", type=int, default=400, help="with 8 answers each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.out.with_name(f"{arguments.out.name}.csv")
    if arguments.what == "versions":
        make_versions()
        return
    for dtype in arguments.dtypes.split(","):
        for model in arguments.models.split(",") if arguments.what == "lags" else ["grid"]:
            for rule in ["top_p=1"] if arguments.what == "lags" else RULES:
                prompts = arguments.prompts // 8 if model == "random" else arguments.prompts
                measure_server(arguments.engine, dtype, model, rule, prompts, out)


if __name__ == "__main__":
    main()
