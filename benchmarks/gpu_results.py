"""What the steps of the GPU suite found: at most eight files, easy to carry away, and to take up on another machine."""

from __future__ import annotations

import json
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import SWEEP
from benchmarks.machine import describe_machine

PLOTS = ("trade_off", "utilisation", "accuracy_by_time", "staleness")
"""Of the sweep, the most telling ones."""
CELL_FILES = ("cell.json", "config.yaml", "summary.json", "metrics.jsonl", "logs/*.log")
"""What a report needs of a cell, and what went wrong in it; not its weights and answers."""
LOG_BYTES = 200_000
"""Kept of each step's log, from its end."""


def write_results(out: Path, folder: Path, outcomes: list[dict[str, Any]]) -> None:
    """suite.json, suite.log, suite.png, the sweep's plots and sweep-cells.tar.gz in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": describe_machine(), "steps": outcomes}
    for file in sorted(folder.glob("*.json")):
        if file.stem != "outcomes":
            with suppress(ValueError):  # cut short
                found[file.stem] = json.loads(file.read_text())
    if (file := folder / "measured.jsonl").is_file():
        found["logprobs"] = [json.loads(line) for line in file.read_text().splitlines()]
    if (file := SWEEP / "table.md").is_file():
        found["sweep"] = file.read_text()
    (out / "suite.json").write_text(json.dumps(found, indent=1) + "\n")
    with (out / "suite.log").open("wb") as log:
        for file in sorted(folder.rglob("*.log")):  # of the steps, and of the servers they started
            if file.resolve().is_relative_to(out.resolve()):
                continue
            name = file.relative_to(folder).with_suffix("")
            log.write(f"==== {name}\n".encode() + file.read_bytes()[-LOG_BYTES:] + b"\n")
    draw(found, out / "suite.png")
    for plot in PLOTS:
        if (file := SWEEP / "plots" / f"{plot}.png").is_file():
            shutil.copy(file, out / f"sweep-{plot}.png")
    if (SWEEP / "cells").is_dir():
        with tarfile.open(out / "sweep-cells.tar.gz", "w:gz") as archive:
            for pattern in ("sweep.json", "logs/*.log", *(f"cells/*/{name}" for name in CELL_FILES)):
                for file in sorted(SWEEP.glob(pattern)):
                    archive.add(file, file.relative_to(SWEEP))


def take_up(results: Path, folder: Path) -> None:
    """Put what `write_results` wrote on another machine where this one's steps put theirs."""
    found = json.loads((results / "suite.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) + "\n" for line in found.pop("logprobs", [])]
    (folder / "measured.jsonl").write_text("".join(lines))
    (folder / "outcomes.json").write_text(json.dumps(found.pop("steps")))
    for name in found.keys() - {"machine", "sweep"}:
        (folder / f"{name}.json").write_text(json.dumps(found[name]))
    if (file := results / "sweep-cells.tar.gz").is_file():
        with tarfile.open(file) as archive:
            archive.extractall(SWEEP, filter="data")


def draw(found: dict[str, Any], target: Path) -> None:
    """Differences of logprobs on the left, shares of what is possible on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    lines = found.get("logprobs", [])
    labels = [f"{line['what']}, {line.get('dtype', '')}" for line in lines]
    left.barh(labels, [line["p99_abs"] for line in lines], color="tab:gray", label="p99")
    left.barh(labels, [line["mean_abs"] for line in lines], color="tab:blue", label="mean")
    if lines:
        left.set_xscale("log")
        left.legend()
    left.set_title("|difference of logprobs|")
    shares = _shares(found)
    right.barh(list(shares), list(shares.values()))
    right.set_title("share of what is possible")
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def _shares(found: dict[str, Any]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for name, result in found.items():
        if name.startswith("learner-") and "mfu" in result:
            shares[f"{name}: MFU of the step"] = result["mfu"]["step"]
        if name.startswith("push-"):
            shares |= {f"{name} {row['transport']}: of a copy": row["of_copy"] for row in result["rows"]}
    if "generation" in found:
        shares["generation: of bare requests"] = found["generation"]["ratio"]
        shares["generation: of SGLang's bench"] = found["generation"].get("ratio_to_sglang_bench", 0.0)
    return shares
