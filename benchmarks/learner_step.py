"""Measures speed and memory of a whole learner step, beside a plain FSDP forward and backward pass on the same batch.

    python -m benchmarks.learner_step                      # CPU: one thread, a random model of 3 M parameters
    python -m benchmarks.learner_step --size 1b --groups 64 --rows 8 --mean 256 --longest 1024 --max-tokens 32768

step          Updater.update: plan, pack, forward, loss with correction and diagnostics, backward, clipping, AdamW
plain         the same micro-batches through a plain fully_shard'ed transformers model: lm(...).logits, cross-entropy,
              backward; nothing else
lean          as plain, but logits at the response's positions alone
checkpointed  as step, with learner.gradient_checkpointing

The four sides take turns in one process, in a new order each round. On a CPU, seconds are processor seconds. Peak
memory is above what the process holds at the start of the step. On a GPU there is MFU: 6 * parameters * tokens that are
not padding (attention not counted) / seconds, over the FLOP/s of a large bfloat16 matrix product in the same process.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config, LearnerConfig, ModelConfig, RolloutConfig, StalenessConfig, TaskConfig
from async_rl.base.types import Batch, Group, Row
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from benchmarks.random_model import SIZES, save_random_model
from learner.algorithms.advantages import batch_advantages
from learner.loop.ranks import Ranks
from learner.loop.updater import Updater
from learner.models import token_scores as scoring
from learner.models.network import Network
from learner.models.policy import shard
from learner.packing import MicroBatch, attention_mask

RESULTS = Path(__file__).parent / "results" / "learner_step"
MATRIX_SIZE = 8192


def make_batch(groups: int, group_size: int, prompt: int, mean: int, longest: int, vocab: int) -> Batch:
    """Return a batch of random tokens and rewards, with lognormal answer lengths of coefficient of variation 1."""
    rng = np.random.default_rng(0)
    sigma = np.log(2) ** 0.5
    made = []
    for index in range(groups):
        rows = []
        for _ in range(group_size):
            length = int(np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), 1, longest))
            rows.append(
                Row(
                    tokens=rng.integers(3, vocab, length).astype(np.int32),
                    logprobs=rng.normal(-np.log(vocab), 0.1, length).astype(np.float32),
                    versions=np.zeros(length, np.int32), mask=np.ones(length, bool), reward=float(rng.random()),
                    finish_reason="stop",
                )
            )  # fmt: skip
        made.append(
            Group(
                group_id=index, prompt_index=index, start_version=0, temperature=1.0,
                prompt_tokens=rng.integers(3, vocab, int(rng.integers(prompt // 2, prompt + 1))).astype(np.int32),
                rows=tuple(rows), duration_s=1.0,
            )
        )  # fmt: skip
    return Batch(version=0, groups=tuple(made), finished_versions=(0,) * groups)


class Plain(Network):
    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        model = config.model
        lm = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=torch.float32, attn_implementation=model.attn_implementation
        )
        super().__init__(lm.eval().to(device), dtype)
        shard(self, Ranks(init_device_mesh(device.type, (dist.get_world_size(),))), LearnerConfig())

    def forward(self, micro: MicroBatch, is_lean: bool) -> torch.Tensor:
        """Return the loss, summed over the tokens of a micro-batch; if `is_lean`, from logits at the response alone."""
        fed = micro.inputs
        mask = None if fed.segments is None else attention_mask(fed.segments, self.compute_dtype)
        inputs = {"attention_mask": mask, "position_ids": fed.positions, "use_cache": False}
        if is_lean:
            states = self.lm.base_model(fed.tokens, **inputs).last_hidden_state
            logits = self.lm.lm_head(states.flatten(0, 1)[fed.where])
        else:
            logits = self.lm(fed.tokens, **inputs).logits.flatten(0, 1)[fed.where]
        return functional.cross_entropy(logits.float(), fed.targets, reduction="sum")

    def step(self, micro_batches: list[MicroBatch], is_lean: bool = False) -> None:
        for micro in micro_batches:
            self(micro, is_lean).backward()
        self.zero_grad(set_to_none=True)


class Memory:
    """Measures peak memory: `peak` returns the bytes above what this process used when `start` was called."""

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


def measure(config: Config, batch: Batch, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time the sides (step, plain, lean, checkpointed) in turn; return each one's seconds and peak bytes, and counts.

    The counts are of micro-batches, and of their tokens: all that are fed, those that are not padding, those trained.
    """
    updater = Updater(config, device)
    plain = Plain(config, device, updater.policy.compute_dtype)
    checkpointed = Updater(
        dataclasses.replace(config, learner=dataclasses.replace(config.learner, gradient_checkpointing=True)), device
    )
    (minibatch,) = updater.pack(batch, batch_advantages(config, batch))
    packed = list(minibatch.micro_batches)
    sides: dict[str, Callable[[], Any]] = {
        "step": lambda: updater.update(batch),
        "plain": lambda: plain.step(packed),
        "lean": lambda: plain.step(packed, is_lean=True),
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
    fed = [micro.inputs for micro in packed]
    real = sum(int((m.tokens != 0 if m.segments is None else m.segments[0] >= 0).sum()) for m in fed)
    return {
        "seconds": seconds, "peak_bytes": peaks, "micro_batches": len(packed),
        "fed_tokens": sum(m.tokens.numel() for m in fed),
        "real_tokens": real, "trained_tokens": minibatch.num_tokens,
    }  # fmt: skip


def matmul_flops(device: torch.device) -> float:
    """Return the FLOP/s of a large bfloat16 matrix product. The values are random, because zeros would run faster."""
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(13):
        start_s = _clock(device)
        left @ right
        seconds.append(_clock(device) - start_s)
    return 2 * MATRIX_SIZE**3 / statistics.median(seconds[3:])


def utilisation(found: dict[str, Any], parameters: int, ceiling_flops: float) -> dict[str, float]:
    flops = 6 * parameters * found["real_tokens"]
    return {side: flops / statistics.median(times) / ceiling_flops for side, times in found["seconds"].items()}


def _clock(device: torch.device) -> float:
    """Return a clock's reading in seconds: CPU time of this process or, for a GPU, wall-clock after its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def report(found: dict[str, Any], header: str) -> str:
    """Return the Markdown page of `found`, and add to `found`, by side, the `ratio` of the step's speed to that side's.
    """
    seconds, tokens = found["seconds"], found["trained_tokens"]
    found["ratio"], lines = {}, []
    for side, times in seconds.items():
        ratios = [plain / step for plain, step in zip(times, seconds["step"], strict=True)]
        found["ratio"][side] = statistics.median(ratios)
        lines.append([
            side, f"{tokens / statistics.median(times):.0f}",
            f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})",
            f"{found['peak_bytes'][side] / 2**20:.0f} MiB",
            f"{found['ratio'][side]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{found['mfu'][side]:.1%}" if "mfu" in found else "-",
        ])  # fmt: skip
    columns = (
        "side", "trained tokens/s", "seconds a step (range)", "peak memory above start", "speed of the step over it",
        "MFU",
    )  # fmt: skip
    table = Table(columns, lines).markdown()
    return (
        f"{header} {tokens} trained tokens a step, in {found['micro_batches']} micro-batches of together "
        f"{found['fed_tokens']} tokens, {found['real_tokens'] / found['fed_tokens']:.0%} not padding.\n\n{table}\n"
        f"```\n{__doc__}```\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="Hugging Face folder (default: a random model)")
    parser.add_argument("--size", choices=list(SIZES), default="3m", help="size of the random model")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="longest prompt; the shortest is half")
    parser.add_argument("--mean", type=int, default=48, help="mean tokens of a row")
    parser.add_argument("--longest", type=int, default=256, help="most tokens of a row")
    parser.add_argument("--max-tokens", type=int, default=2048, help="learner.max_tokens_per_microbatch")
    parser.add_argument("--logits-mib", type=float, help="LOGITS_BYTES of learner.models.token_scores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; one is disturbed least by other processes")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--out", type=Path, default=RESULTS, help="writes OUT.md and OUT.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    if arguments.logits_mib:
        scoring.LOGITS_BYTES |= dict.fromkeys(scoring.LOGITS_BYTES, int(arguments.logits_mib * 2**20))
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or folder
        if not arguments.model:
            save_random_model(arguments.size, Path(folder))
        config = Config(
            model=ModelConfig(path=path, dtype=arguments.dtype, attn_implementation=arguments.attention),
            task=TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=arguments.prompt),
            rollout=RolloutConfig(group_size=arguments.rows, max_response_tokens=arguments.longest),
            learner=LearnerConfig(
                prompts_per_step=arguments.groups, lr=1e-6, max_tokens_per_microbatch=arguments.max_tokens
            ),
            staleness=StalenessConfig(max=2),
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        lm = AutoModelForCausalLM.from_pretrained(path)
        parameters, vocab = sum(p.numel() for p in lm.parameters()), lm.config.vocab_size
        del lm
        batch = make_batch(
            arguments.groups, arguments.rows, arguments.prompt, arguments.mean, arguments.longest, vocab
        )
        found = measure(config, batch, arguments.rounds, device)
        if device.type == "cuda":
            found["matmul_tflops"] = matmul_flops(device) / 1e12
            found["mfu"] = utilisation(found, parameters, 1e12 * found["matmul_tflops"])
        dist.destroy_process_group()
    command = shlex.join(["python", "-m", "benchmarks.learner_step", *sys.argv[1:]])
    header = f"`{command}`, {machine_text()}. {parameters / 1e6:.0f} M parameters;"
    found = {"command": command, "machine": describe_machine(), **found}
    write_page(arguments.out, report(found, header), found)


if __name__ == "__main__":
    main()
