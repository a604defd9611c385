"""A whole learner step against a plain FSDP forward and backward pass on the same packed batch.

    python -m benchmarks.learner_step                      # CPU: one thread, a model of 3 M parameters made from config
    python -m benchmarks.learner_step --size 1b --groups 64 --answers 8 --mean 256 --longest 1024 --max-tokens 32768

step          Updater.update: plan, pack, forward, loss with correction and diagnostics, backward, clipping, AdamW
plain         the same micro-batches through a plain fully_shard'ed transformers model: lm(...).logits,
              -advantage * log-probability, backward; nothing else
lean          plain, but logits at the response's positions alone
plain, rows   the same answers one a row, prompt repeated, padded to the longest: what packing is compared with
checkpointed  the step with learner.gradient_checkpointing

MFU is 6 * parameters * tokens that are not padding (attention not counted) / seconds / --ceiling-tflops, on GPUs.

All take turns in one process, in a new order each round; on CPU seconds are processor seconds. Memory is the peak above
what the process holds at the start of the step: activations, gradients, logits.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import AutoModelForCausalLM

from async_rl.config import Config, LearnerConfig, ModelConfig, RolloutConfig, StalenessConfig, TaskConfig
from async_rl.types import Batch, Rollout, RolloutGroup
from benchmarks.random_model import SIZES, save_random_model
from learner.algorithms.token_advantages import batch_advantages
from learner.models import token_scores as scoring
from learner.models.policy import shard
from learner.packing.attention_mask import attention_mask
from learner.packing.microbatches import MicroBatch, collate
from learner.packing.plan import Layout, make_pieces
from learner.train_step import Updater

RESULTS = Path(__file__).parent / "results"


def make_batch(groups: int, answers: int, prompt: int, mean: int, longest: int, vocab: int) -> Batch:
    """Lognormal answer lengths of coefficient of variation 1; tokens and rewards at random."""
    rng = np.random.default_rng(0)
    sigma = np.log(2) ** 0.5
    made = []
    for index in range(groups):
        rollouts = []
        for _ in range(answers):
            length = int(np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), 1, longest))
            rollouts.append(
                Rollout(
                    tokens=rng.integers(3, vocab, length).astype(np.int32),
                    logprobs=rng.normal(-np.log(vocab), 0.1, length).astype(np.float32),
                    versions=np.zeros(length, np.int32), mask=np.ones(length, bool), reward=float(rng.random()),
                    finish_reason="stop",
                )
            )  # fmt: skip
        made.append(
            RolloutGroup(
                group_id=index, prompt_index=index, start_version=0, temperature=1.0,
                prompt_tokens=rng.integers(3, vocab, int(rng.integers(prompt // 2, prompt + 1))).astype(np.int32),
                rollouts=tuple(rollouts), duration_s=1.0,
            )
        )  # fmt: skip
    return Batch(version=0, groups=tuple(made), finished_versions=(0,) * groups)


class Plain(nn.Module):
    """What a trainer without further thought does with a micro-batch."""

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        model = config.model
        lm = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=torch.float32, attn_implementation=model.attn_implementation
        )
        self.lm = lm.eval().to(device)
        self.dtype = dtype
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        shard(self, self.lm, mesh, dtype, LearnerConfig())

    def forward(self, micro: MicroBatch, is_lean: bool) -> torch.Tensor:
        """Summed loss."""
        mask = None if micro.inputs.segments is None else attention_mask(micro.inputs.segments, self.dtype)
        inputs = {"attention_mask": mask, "position_ids": micro.inputs.positions, "use_cache": False}
        if is_lean:
            states = self.lm.base_model(micro.inputs.tokens, **inputs).last_hidden_state
            logits = self.lm.lm_head(states.flatten(0, 1)[micro.inputs.where])
        else:
            logits = self.lm(micro.inputs.tokens, **inputs).logits.flatten(0, 1)[micro.inputs.where]
        return functional.cross_entropy(logits.float(), micro.inputs.targets, reduction="sum")

    def step(self, micro_batches: list[MicroBatch], is_lean: bool = False) -> None:
        for micro in micro_batches:
            self(micro, is_lean).backward()
        self.zero_grad(set_to_none=True)


def one_a_row(config: Config, batch: Batch, device: torch.device) -> list[MicroBatch]:
    """Answers in the order they came, prompt repeated, as many rows as the budget allows at the longest's width."""
    pairs = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rollouts))]
    budget, layout = config.learner.max_tokens_per_microbatch, Layout(masked=False)
    pieces = make_pieces(batch.groups, pairs, budget, 1, layout)
    width = max(piece.length for piece in pieces)
    advantages = [[np.ones(len(r.tokens), np.float32) for r in group.rollouts] for group in batch.groups]
    size = max(1, budget // width)
    cuts = [pieces[i : i + size] for i in range(0, len(pieces), size)]
    share = cuts[dist.get_rank() :: dist.get_world_size()]
    return [collate(batch, [[piece] for piece in cut], advantages, device) for cut in share]


class Memory:
    """Peak above what is held at the start, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
            return
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.held = _status_bytes("VmRSS")

    def peak(self) -> int:
        held = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else _status_bytes("VmHWM")
        return held - self.held


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(config: Config, batch: Batch, rounds: int, device: torch.device, profile: Path | None) -> dict[str, Any]:
    """Seconds of every round and peak bytes of every side."""
    updater = Updater(config, device)
    plain = Plain(config, device, updater.policy.compute_dtype)
    checkpointed = Updater(
        dataclasses.replace(config, learner=dataclasses.replace(config.learner, gradient_checkpointing=True)), device
    )
    (minibatch,) = updater.pack(batch, batch_advantages(config, batch))
    packed, rows = list(minibatch.micro_batches), one_a_row(config, batch, device)
    sides: dict[str, Callable[[], Any]] = {
        "step": lambda: updater.update(batch),
        "plain": lambda: plain.step(packed),
        "lean": lambda: plain.step(packed, is_lean=True),
        "plain, rows": lambda: plain.step(rows),
        "checkpointed": lambda: checkpointed.update(batch),
    }
    memory = Memory(device)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peaks: dict[str, int] = {}
    for number in range(rounds + 2):  # one to warm up, one for memory
        names = list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]
        for side in names:
            if number == 1:
                memory.start()
            start_s = _clock(device)
            sides[side]()
            elapsed_s = _clock(device) - start_s
            if number > 1:
                seconds[side].append(elapsed_s)
            elif number == 1:
                peaks[side] = memory.peak()
    if profile:
        write_profile(sides["step"], device, profile)
    layouts = {"packed": packed, "rows": rows}
    counts = {layout: len(micros) for layout, micros in layouts.items()}
    tokens = {layout: sum(m.inputs.tokens.numel() for m in micros) for layout, micros in layouts.items()}
    fill = {layout: sum(map(_real_tokens, micros)) / tokens[layout] for layout, micros in layouts.items()}
    return {
        "seconds": seconds, "peak_bytes": peaks, "fill": fill, "micro_batches": counts, "fed_tokens": tokens,
        "trained_tokens": minibatch.num_tokens,
    }  # fmt: skip


def write_profile(step: Callable[[], Any], device: torch.device, target: Path) -> None:
    """Where one more step spends its time, by operation."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        _clock(device)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=30) + "\n")


def utilisation(found: dict[str, Any], parameters: int, ceiling_flops: float) -> dict[str, float]:
    """Model FLOP/s of each side over the ceiling; recomputed activations don't count."""
    shares = {}
    for side, seconds in found["seconds"].items():
        layout = "rows" if side == "plain, rows" else "packed"
        flops = 6 * parameters * found["fill"][layout] * found["fed_tokens"][layout]
        shares[side] = flops / statistics.median(seconds) / ceiling_flops
    return shares


def _real_tokens(micro: MicroBatch) -> int:
    """Fed tokens that aren't padding."""
    segments = micro.inputs.segments
    return int((micro.inputs.tokens != 0 if segments is None else segments[0] >= 0).sum())


def _clock(device: torch.device) -> float:
    """Seconds; on CPU those in which a thread of this process ran, which other processes hardly disturb."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def report(found: dict[str, Any], header: dict[str, Any]) -> str:
    """The Markdown page."""
    seconds, tokens = found["seconds"], found["trained_tokens"]
    rates = {side: tokens / statistics.median(times) for side, times in seconds.items()}
    ratios = {
        side: sorted(p / s for p, s in zip(seconds[side], seconds["step"], strict=True)) for side in ("plain", "lean")
    }
    found["ratio"] = {side: statistics.median(values) for side, values in ratios.items()}
    lines = [
        "# Learner step against plain FSDP forward + backward", "",
        f"Command: `{header['command']}`, commit {header['commit']}, {header['machine']}.", "",
        f"{header['model']}; {header['batch']}; {tokens} trained tokens a step. Packed: "
        f"{found['micro_batches']['packed']} micro-batches of together {found['fed_tokens']['packed']} tokens, "
        f"{found['fill']['packed']:.0%} not padding. One answer a row: {found['micro_batches']['rows']} of "
        f"{found['fed_tokens']['rows']}, {found['fill']['rows']:.0%}.", "",
        f"Trained tokens/s of the whole step, medians of {len(seconds['step'])} alternating rounds and their range:",
        *(
            f"**{found['ratio'][side]:.2f}** ({values[0]:.2f} to {values[-1]:.2f}) of the {side} pass on the same batch"
            for side, values in ratios.items()
        ),
        "(aim: 0.9).", "",
        "| side | trained tokens/s | seconds a step (median, min-max) | peak memory above start |",
        "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for side, times in seconds.items():
        lines.append(
            f"| {side} | {rates[side]:.0f} | {statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f}) | "
            f"{found['peak_bytes'][side] / 2**20:.0f} MiB |"
        )
    if "mfu" in found:
        lines += ["", "MFU: " + ", ".join(f"{side} {share:.1%}" for side, share in found["mfu"].items())]
    sides = (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n\n", "\n```\n\n")
    return "\n".join([*lines, "", "```", sides, ""])


def save(out: Path, page: str, found: dict[str, Any]) -> None:
    """As out.md and out.json; a dot in the name, as in 0.1b, begins no suffix."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".md", page), (".json", json.dumps(found, indent=2) + "\n")):
        out.with_name(out.name + suffix).write_text(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="Hugging Face folder; empty: made from config")
    parser.add_argument("--size", choices=list(SIZES), default="3m", help="of the model made from config")
    parser.add_argument("--ceiling-tflops", type=float, default=790.0, help="bf16 matrix product of an H200, measured")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="longest prompt; the shortest is half")
    parser.add_argument("--mean", type=int, default=48, help="mean answer")
    parser.add_argument("--longest", type=int, default=256, help="longest answer")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--logits-mib", type=float, default=256, help="learner.models.token_scores.LOGITS_BYTES")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="on CPU; one is least disturbed by other processes")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a table of the operations of one step")
    parser.add_argument("--out", type=Path, default=RESULTS / "learner_step")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    scoring.LOGITS_BYTES = int(arguments.logits_mib * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            save_random_model(arguments.size, Path(folder) / "model")
        path = arguments.model or str(Path(folder) / "model")
        config = Config(
            model=ModelConfig(path=path, dtype=arguments.dtype, attn_implementation=arguments.attention),
            task=TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=arguments.prompt),
            rollout=RolloutConfig(group_size=arguments.answers, max_response_tokens=arguments.longest),
            learner=LearnerConfig(
                prompts_per_step=arguments.groups, lr=1e-6, max_tokens_per_microbatch=arguments.max_tokens
            ),
            staleness=StalenessConfig(max=2),
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        lm = AutoModelForCausalLM.from_pretrained(path)
        parameters, vocab, kind = sum(p.numel() for p in lm.parameters()), lm.config.vocab_size, type(lm).__name__
        del lm
        batch = make_batch(
            arguments.groups, arguments.answers, arguments.prompt, arguments.mean, arguments.longest, vocab
        )
        found = measure(config, batch, arguments.rounds, device, arguments.profile)
        if device.type == "cuda":
            found["mfu"] = utilisation(found, parameters, 1e12 * arguments.ceiling_tflops)
        dist.destroy_process_group()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else ""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    header = {
        "command": shlex.join(["python", "-m", "benchmarks.learner_step", *sys.argv[1:]]),
        "commit": commit or "unknown",
        "machine": f"{gpu or platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}",
        "model": f"{kind} of {parameters / 1e6:.0f} M parameters, vocabulary {vocab}, compute type "
        f"{config.model.dtype}, {arguments.attention}",
        "batch": f"{arguments.groups} groups of {arguments.answers} answers, prompts to {arguments.prompt}, answers of "
        f"mean {arguments.mean} to {arguments.longest} tokens, budget {arguments.max_tokens}, float32 logits to "
        f"{arguments.logits_mib:g} MiB",
    }
    text = report(found, header)
    save(arguments.out, text, {**header, **found})
    print(text)


if __name__ == "__main__":
    main()
