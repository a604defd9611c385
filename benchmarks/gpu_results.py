"""What the steps of the GPU suite found: one JSON file, one log and a few plots, easy to carry away."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import SWEEP
from benchmarks.machine import describe_machine

MAX_PLOTS = 5
LOG_BYTES = 200_000
"""Kept of each step's log, from its end."""


def write_results(out: Path, folder: Path, outcomes: list[dict[str, Any]]) -> None:
    """suite.json, suite.log, suite.png and the sweep's plots in `out`."""
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
        for file in sorted(folder.glob("*.log")):
            log.write(f"==== {file.stem}\n".encode() + file.read_bytes()[-LOG_BYTES:] + b"\n")
    draw(found, out / "suite.png")
    for plot in sorted(SWEEP.glob("plots/*.png"))[:MAX_PLOTS]:
        shutil.copy(plot, out / f"sweep-{plot.name}")


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
