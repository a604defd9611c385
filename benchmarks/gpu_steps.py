"""The steps of the GPU suite (benchmarks/gpu_suite.py) in the order in which they run, the most informative first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.base.config.loading import load_config
from benchmarks.under_mps import CONTROL

CONFIG, QUICKSTART = "configs/sweep_gpu.yaml", "configs/quickstart.yaml"
TRITON = {"attention-backend": "triton", "sampling-backend": "pytorch"}
SERVER_ARGS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({}, ("sglang", "sgl_kernel/flash_ops")),
    (TRITON | {"disable-prefill-cuda-graph": True}, ("sglang",)),
    (TRITON | {"disable-cuda-graph": True}, ("sglang",)),
)
"""Pairs of SGLang's arguments and the packages they need, tried in order until SGLang starts and takes weights."""
CELL_SECONDS = 150
CELL_MINUTES = 4.0
"""The expected duration of a cell of the sweep, start-up included."""
BOUNDS = "0,1,2,4,8,10"
MODEL, RANDOM_MODEL = "models/SmolLM2-135M-Instruct", "models/random-1b"
SWEEP, MPS_SWEEP = Path("runs/sweep-gpu-sweep"), Path("runs/sweep-gpu-mps")

MakeCommand = Callable[[Path, dict[str, Any], float], list[str]]
"""Takes (folder for results, server arguments that work, minutes left); returns the command of a step."""


@dataclass(frozen=True, slots=True)
class SuiteStep:
    name: str
    minutes: float
    """The expected duration. The step is not started with less time left, and is ended after three times as long."""
    command: MakeCommand
    needs: tuple[str, ...] = ()
    """Conditions: a package, a file of a package (package/start of the file's name), a program (`program NAME`), the
    name of a step that must have succeeded, or `server` for any one of the sglang steps."""
    continues: bool = False
    """The step uses all the time that is left, and every call of the suite continues it."""


def _python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def _tests(*files: str) -> MakeCommand:
    """Return the MakeCommand of a step that runs the `gpu` tests in `files`; their servers' logs go to `folder`."""
    return lambda folder, server, left: _python(
        "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", "--basetemp", str(folder / Path(files[0]).stem),
        *files,
    )


def _learner(size: str, max_tokens: int) -> MakeCommand:
    return lambda folder, server, left: _python(
        "benchmarks.learner_step", "--size", size, "--groups", "32", "--answers", "8", "--prompt", "128",
        "--mean", "256", "--longest", "1024", "--max-tokens", str(max_tokens), "--rounds", "5",
        "--out", str(folder / f"learner-{size}"),
    )  # fmt: skip


def _push(size: str, server: dict[str, Any], out: Path, rounds: int) -> list[str]:
    return _python(
        "benchmarks.weight_push", "--sglang", size, "--rounds", str(rounds), "--server-args", json.dumps(server),
        "--out", str(out),
    )  # fmt: skip


def _start_server(number: int) -> SuiteStep:
    arguments, needs = SERVER_ARGS[number]
    return SuiteStep(
        f"sglang-{number}", 1.5, lambda folder, server, left: _push("0.1b", arguments, folder / f"sglang-{number}", 1),
        needs,
    )  # fmt: skip


def _server_args(server: dict[str, Any]) -> str:
    return f"rollout.server_args={json.dumps(load_config(CONFIG, []).rollout.server_args | server)}"


def _generation(folder: Path, server: dict[str, Any], left: float) -> list[str]:
    return _python(
        "benchmarks.generation", CONFIG, "--random", "0.1b", "--groups", "128", "--rounds", "2",
        "--sglang-bench", "--out", str(folder / "generation.json"), _server_args(server),
        "rollout.max_response_tokens=256",
    )  # fmt: skip


def _run(config: str, *settings: str) -> MakeCommand:
    """Return the MakeCommand of a step that trains."""
    return lambda folder, server, left: _python(
        "async_rl.cli", "train", config, _server_args(server), f"run.dir={folder / 'runs'}", "logging.wandb=disabled",
        *settings,
    )  # fmt: skip


def _model(folder: Path, server: dict[str, Any], left: float) -> list[str]:
    return _python("benchmarks.smollm2", MODEL)


def _sweep(folder: Path, server: dict[str, Any], left: float) -> list[str]:
    return _python(
        "async_rl.cli", "sweep", CONFIG, _server_args(server), "--staleness", BOUNDS, "--seeds", "1",
        "--seconds", str(CELL_SECONDS), "--max-cells", str(max(1, int(left / CELL_MINUTES))),
    )  # fmt: skip


def _sweep_under_mps(folder: Path, server: dict[str, Any], left: float) -> list[str]:
    """Return the command of two cells of the sweep in which learner and server compute on the GPU at the same time."""
    return _python(
        "benchmarks.under_mps", sys.executable, "-m", "async_rl.cli", "sweep", CONFIG, _server_args(server),
        "--staleness", "0,2", "--seeds", "1", "--seconds", str(CELL_SECONDS), "--name", MPS_SWEEP.name,
    )  # fmt: skip


RANDOM = (f"model.path={RANDOM_MODEL}", "eval.num_prompts=0", "checkpoint.every_steps=0", "run.steps=12")
STEPS = (
    *(_start_server(number) for number in range(len(SERVER_ARGS))),
    SuiteStep("quickstart-sft", 1.0, lambda folder, server, left: _python("async_rl.cli", "sft", QUICKSTART)),
    *(SuiteStep(
        f"run-{bound}", 3.0, _run(QUICKSTART, f"staleness.max={bound}", f"run.name=run-{bound}", "run.steps=40"),
        ("server", "ray", "quickstart-sft")) for bound in (2, 0)),
    SuiteStep("packing", 2.0, _tests(
        "tests/gpu/test_packing.py", "tests/learner/test_efficiency.py", "tests/learner/test_updater.py",
        "tests/learner/test_reward_training.py")),
    SuiteStep("parity", 4.0, _tests("tests/gpu/test_parity.py"), ("server",)),
    SuiteStep("offload", 1.0, _tests("tests/gpu/test_offload.py")),
    SuiteStep("pushes", 4.0, _tests("tests/gpu/test_pushes.py"), ("server",)),
    SuiteStep("split-rows", 2.0, _tests("tests/gpu/test_split_rows.py")),  # skipped on one GPU
    SuiteStep("learner-0.1b", 1.5, _learner("0.1b", 32768)),
    SuiteStep("push-1b", 2.0, lambda folder, server, left: _push("1b", server, folder / "push-1b", 5), ("server",)),
    SuiteStep("learner-1b", 3.0, _learner("1b", 16384)),
    SuiteStep("generation", 3.0, _generation, ("server",)),
    SuiteStep("deterministic", 4.0, _tests("tests/gpu/test_deterministic.py"), ("server", "ray")),
    SuiteStep("vllm", 6.0, _tests("tests/gpu/test_vllm.py")),  # skipped where vLLM has no environment
    SuiteStep("random-1b", 1.0, lambda folder, server, left: _python("benchmarks.random_model", "1b", RANDOM_MODEL)),
    *(SuiteStep(
        f"run-1b-{bound}", 4.0, _run(CONFIG, f"staleness.max={bound}", f"run.name=run-1b-{bound}", *RANDOM),
        ("server", "ray", "random-1b")) for bound in (2, 0)),
    SuiteStep("model", 1.0, _model),
    SuiteStep("sft", 1.0, lambda folder, server, left: _python("async_rl.cli", "sft", CONFIG), ("model",)),
    SuiteStep("mps", 2 * CELL_MINUTES, _sweep_under_mps, ("server", "ray", "sft", f"program {CONTROL}")),
    SuiteStep("sweep", CELL_MINUTES, _sweep, ("server", "ray", "sft"), continues=True),
)  # fmt: skip
