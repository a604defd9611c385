"""Measures whole training runs side by side: each rollout engine, and TRL's synchronous trainer.

    python -m benchmarks.engines configs/quickstart.yaml --engines vllm,sglang,hf,trl --tokens 6,64,256 --rounds 3

All train the same random model on the same prompts, with the same number of answers a step and the same length of
answers. They take turns, each for --seconds a round, without the time of the start. TRL needs
`pip install -r benchmarks/requirements.txt`. A command that ended early, e.g. by --max-cells, goes on when it is
repeated, until all rounds are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.base.errors import AsyncRLError
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from benchmarks.random_model import save_random_model

RESULTS = Path(__file__).parent / "results" / "engines"
TRL = "trl"
STEPS = 10_000
"""More steps than a run takes in its time."""
TIMEOUT_S = 900.0
"""The time limit for one run, with its start."""


def train(engine: str, config: str, overrides: Sequence[str], seconds: float, folder: Path) -> dict[str, float]:
    """Train for `seconds` with an engine or TRL; return its rates {episodes_per_s, tokens_per_s, pause_ms (not TRL)}.

    Raises:
        AsyncRLError: the run failed; the message has the end of its output.
    """
    name = "engines-" + engine.replace(":", "-")
    if engine == TRL:
        result = folder / "trl.json"
        words = ["benchmarks.against_trl", config, f"--steps={STEPS}", f"--seconds={seconds}", f"--out={result}"]
    else:
        result = folder / name / "summary.json"
        words = ["async_rl.cli", "train", config, f"rollout.engine={engine}", f"run.steps={STEPS}"]
        words += [f"run.seconds={seconds}", f"run.dir={folder}", f"run.name={name}", "checkpoint.every_steps=0"]
    done = subprocess.run(
        [sys.executable, "-m", *words, "eval.num_prompts=0", "logging.wandb=disabled", *overrides],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-3000:]
        raise AsyncRLError(f"the run with {engine} ended with exit code {done.returncode}. Its output ends:\n{output}")
    found = json.loads(result.read_text())
    return {key: found[key] for key in ("episodes_per_s", "tokens_per_s", "pause_ms") if key in found}


def comparison(cells: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the measured rates (medians over the rounds), a line for each answer length and engine."""
    header = ("answers, tokens", "engine", "rounds", "episodes/s", "least to most", "tokens/s", "push pause, ms")
    rows = []
    for tokens, engine in dict.fromkeys((cell["tokens"], cell["engine"]) for cell in cells):
        mine = [cell for cell in cells if (cell["tokens"], cell["engine"]) == (tokens, engine)]
        rates = [cell["episodes_per_s"] for cell in mine]
        pauses = [cell["pause_ms"] for cell in mine if "pause_ms" in cell]
        rows.append([
            str(tokens), engine, str(len(mine)), f"{statistics.median(rates):.1f}",
            f"{min(rates):.1f} to {max(rates):.1f}", f"{statistics.median(c['tokens_per_s'] for c in mine):.0f}",
            f"{statistics.median(pauses):.0f}" if pauses else "-",
        ])
    return Table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--engines", default=f"vllm,sglang,hf,{TRL}")
    parser.add_argument("--tokens", default="6,64,256", help="lengths of the answers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="training time of each run")
    parser.add_argument("--max-cells", type=int, help="stop after so many runs; the same command continues")
    parser.add_argument("--out", type=Path, default=RESULTS, help="adds to OUT.json and writes OUT.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    file = arguments.out.with_name(f"{arguments.out.name}.json")
    cells = json.loads(file.read_text())["cells"] if file.exists() else []
    lengths, engines = map(int, arguments.tokens.split(",")), arguments.engines.split(",")
    wanted = itertools.product(range(arguments.rounds), lengths, engines)
    known = {(cell["round"], cell["tokens"], cell["engine"]) for cell in cells}
    for number, tokens, engine in [cell for cell in wanted if cell not in known][: arguments.max_cells]:
        with tempfile.TemporaryDirectory() as folder:
            save_random_model("1m", Path(folder) / "model")
            overrides = [f"model.path={folder}/model", f"rollout.max_response_tokens={tokens}", *arguments.overrides]
            rates = train(engine, arguments.config, overrides, arguments.seconds, Path(folder))
        load = round(os.getloadavg()[0], 1)
        cells.append({"round": number, "tokens": tokens, "engine": engine, "load": load, **rates})
        command = shlex.join(["python", "-m", "benchmarks.engines", *sys.argv[1:]])
        page = f"{machine_text()}. Medians over the rounds.\n\n{comparison(cells).markdown()}\n`{command}`\n"
        write_page(arguments.out, page, {"machine": describe_machine(), "cells": cells})


if __name__ == "__main__":
    main()
