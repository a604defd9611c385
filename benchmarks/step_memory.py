"""Compares the memory that `async-rl train --dry-run` says a learner rank needs with what steps and a push take.

    python -m benchmarks.step_memory --out benchmarks/results/step_memory      # ten minutes, .md and .json
    python -m benchmarks.step_memory --gpu --out benchmarks/results/gpu/step_memory            # two minutes

Each case is a process (with two ranks, two) that makes an `Updater`, trains on two batches that fill their
micro-batches, and gathers the weights into buckets as a push does. Measured is its largest resident memory (VmHWM)
above what it held before; freed memory goes back at once (MALLOC_MMAP_THRESHOLD_), as a GPU's allocator would reuse it.
With --gpu there are cases of one rank with a larger model, and measured is the most that torch had allocated on the
GPU, with what the process had there beside torch's reserves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_rl.base.config import Config
from async_rl.base.types import Batch, Group, Row
from async_rl.base.weights.transport import iter_buckets
from benchmarks.page import machine_text, write_page
from benchmarks.random_model import save_random_model
from learner.loop.updater import Updater
from learner.memory.memory_plan import RankMemory, RankMemoryEstimate
from learner.models.policy import full_parameters

MIB = 2**20
SHAPES: dict[str, dict[str, Any]] = {
    "deep": {"vocab_size": 8000, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12,
             "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "wide head": {"vocab_size": 64_000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 3,
                  "num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": False},
}  # fmt: skip
"""Models of which the activations, or the head and its logits, take the most."""
PROMPT, ANSWER = 16, 496
CASE_S = 1800
"""How long the ranks of a case may take."""
CASES: dict[str, dict[str, Any]] = {
    "deep": {},
    "deep, checkpointed": {"learner": {"gradient_checkpointing": True}},
    "deep, two ranks": {"placement": {"learner": {"ranks": 2}}},
    "deep, two ranks that split rows": {
        "learner": {"sequence_parallel": 2}, "placement": {"learner": {"ranks": 2}},
    },
    "deep, with a critic": {"algorithm": {"advantage": "gae"}},
    "deep, adapters": {"model": {"lora": {"rank": 16}}},
    "deep, bfloat16": {"model": {"dtype": "bfloat16"}},
    "wide head": {},
    "wide head, checkpointed, two ranks": {
        "learner": {"gradient_checkpointing": True}, "placement": {"learner": {"ranks": 2}},
    },
    "wide head, two ranks that split rows": {
        "learner": {"sequence_parallel": 2}, "placement": {"learner": {"ranks": 2}},
    },
    "wide head, small micro-batches": {"learner": {"max_tokens_per_microbatch": 512}},
}  # fmt: skip
"""Settings of a case, on the model of SHAPES with which its name begins."""
GPU_CASES: dict[str, dict[str, Any]] = {
    "1b": {},
    "1b, checkpointed": {"learner": {"gradient_checkpointing": True}},
    "1b, checkpointed, moments offloaded": {"learner": {"gradient_checkpointing": True, "offload": "moments"}},
    "1b, checkpointed, all offloaded": {"learner": {"gradient_checkpointing": True, "offload": "all"}},
    "1b, adapters": {"model": {"lora": {"rank": 16}}},
    "1b, with a critic, checkpointed": {"algorithm": {"advantage": "gae"}, "learner": {"gradient_checkpointing": True}},
}  # fmt: skip
"""Settings of a case on a GPU, on the model of random_model.SIZES with which its name begins."""
GPU_ANSWER = 1008


def case_config(case: str, root: Path) -> Config:
    on_gpu = case in GPU_CASES
    settings = json.loads(json.dumps((CASES | GPU_CASES)[case]))
    learner = {
        "prompts_per_step": 32 if on_gpu else 4, "max_tokens_per_microbatch": 16_384 if on_gpu else 2048,
        "gradient_checkpointing": False,
    }  # fmt: skip
    return Config(**{
        **settings, "model": {**settings.get("model", {}), "path": str(root / case.split(",")[0])},
        "task": {"name": "reasoning_gym/chain_sum", "max_prompt_tokens": PROMPT},
        "rollout": {"group_size": 2, "max_response_tokens": GPU_ANSWER if on_gpu else ANSWER, "engine": "hf"},
        "learner": learner | settings.get("learner", {}),
        "weight_sync": {"bucket_bytes": (512 if on_gpu else 32) * MIB},
    })  # fmt: skip


def save_models(root: Path, on_gpu: bool) -> None:
    if on_gpu:
        save_random_model("1b", root / "1b")
        return
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=1024)).save_pretrained(root / name)


def full_batch(config: Config, version: int) -> Batch:
    """Return a batch of answers of the greatest length."""
    rng = np.random.default_rng(version)
    answer = config.rollout.max_response_tokens
    groups = []
    for index in range(config.learner.prompts_per_step):
        rows = tuple(
            Row(
                tokens=rng.integers(3, 8000, answer).astype(np.int32), reward=float(number % 2), finish_reason="length",
                logprobs=np.full(answer, -9.0, np.float32), versions=np.full(answer, version, np.int32),
                mask=np.ones(answer, bool),
            )
            for number in range(config.rollout.group_size)
        )  # fmt: skip
        groups.append(Group(
            group_id=index, prompt_index=index, start_version=version, temperature=1.0, rows=rows, duration_s=1.0,
            prompt_tokens=rng.integers(3, 8000, PROMPT).astype(np.int32),
        ))  # fmt: skip
    return Batch(version=version, groups=tuple(groups), finished_versions=(version,) * len(groups))


def status_bytes(key: str) -> int:
    """Return a size of this process, such as VmRSS, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(case: str, root: Path, rank: int, ranks: int, store: str) -> int:
    """Return the bytes that two steps and a push take as one of `ranks` ranks."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if case in GPU_CASES else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    config = case_config(case, root)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status_bytes("VmRSS")
    updater = Updater(config, device)
    buffers: list[torch.Tensor | None] = [None, None]
    for version in range(2):
        if device.type == "cuda":  # there a push keeps none for the next one
            buffers = [None, None]
        updater.update(full_batch(config, version))
        tensors = full_parameters(updater.policy, updater.dtype)
        for _ in iter_buckets(tensors, config.weight_sync.bucket_bytes, updater.dtype, buffers):
            pass
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() + process_gpu_bytes() - torch.cuda.memory_reserved()
    else:
        peak = status_bytes("VmHWM") - before
    dist.barrier()
    return peak


def process_gpu_bytes() -> int:
    """Return the memory that this process has on the first GPU, the CUDA context included."""
    import pynvml  # of nvidia-ml-py, which SGLang brings on a GPU host

    pynvml.nvmlInit()
    there = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    used = {process.pid: process.usedGpuMemory for process in there}
    if os.getpid() not in used:
        raise RuntimeError(
            f"the driver lists the processes {sorted(used)} on the first GPU, not this one, {os.getpid()}, as in a "
            "container with process ids of its own. Run it where process ids are the host's"
        )
    return int(used[os.getpid()])


def compare(case: str, root: Path) -> tuple[RankMemory, int]:
    """Return (what the dry run says of a rank, the bytes that the fullest rank took), for models in `root`."""
    config = case_config(case, root)
    ranks = config.placement.learner.ranks
    store = tempfile.mktemp(dir=root)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "benchmarks.step_memory", "--case", case, str(root), store]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        measured = max(int(process.communicate(timeout=CASE_S)[0].split()[-1]) for process in processes)
    finally:
        for process in processes:
            process.kill()
    return said(config, "cuda" if case in GPU_CASES else "cpu"), measured


def said(config: Config, device_type: str) -> RankMemory:
    """Return what the dry run says of a rank."""
    return RankMemoryEstimate(config, device_type).rank_memory(checkpoints=bool(config.learner.gradient_checkpointing))


def numbers_of(case: str, root: Path) -> dict[str, Any]:
    """Return the peak of a case as the dry run says it and as it was measured, in bytes."""
    estimate, measured = compare(case, root)
    return {
        "case": case, "ranks": case_config(case, root).placement.learner.ranks, "said": estimate.peak,
        "moment": max(estimate.peaks, key=estimate.peaks.__getitem__), "measured": measured,
    }  # fmt: skip


def page(found: list[dict[str, Any]], machine: str, on_gpu: bool) -> str:
    rows = [
        f"| {each['case']} | {each['ranks']} | {each['said'] / MIB:.0f} | {each['moment']} | "
        f"{each['measured'] / MIB:.0f} | {each['said'] / each['measured'] - 1:+.1%} |"
        for each in found
    ]
    words = "--gpu --out benchmarks/results/gpu/step_memory" if on_gpu else "--out benchmarks/results/step_memory"
    return "\n".join([
        "# The memory of a step, said and measured", "", f"`python -m benchmarks.step_memory {words}`, {machine}.", "",
        f"The peak of a learner rank in MiB, on {'a GPU' if on_gpu else 'the CPU with one thread a rank'}: said by the "
        "dry run, with the moment that it takes for the fullest, and measured.", "",
        "| case | ranks | said | fullest | measured | difference |", "| --- | ---: | ---: | --- | ---: | ---: |",
        *rows, "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action="store_true", help="the cases for a GPU, on the first one")
    parser.add_argument("--only", nargs="+", choices=[*CASES, *GPU_CASES], help="some of the cases")
    parser.add_argument("--out", type=Path, default=Path("runs/step_memory"))
    args = parser.parse_args()
    if args.case:
        case, root, store, rank = args.case
        ranks = case_config(case, Path(root)).placement.learner.ranks
        print(measure(case, Path(root), int(rank), ranks, store))
        return
    machine, found = machine_text(), []
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder), args.gpu)
        for case in args.only or (GPU_CASES if args.gpu else CASES):
            found.append(numbers_of(case, Path(folder)))
            print(found[-1], flush=True)
    write_page(args.out, page(found, machine, args.gpu), {"machine": machine, "cases": found})


if __name__ == "__main__":
    main()
