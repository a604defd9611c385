"""Draw the figures of README and docs from committed results: python -m benchmarks.docs_figures

Two of them show single runs. `--runs FOLDER` first writes their data into benchmarks/results/pictures, from the runs
quickstart and sync (configs/quickstart.yaml at staleness.max 2 and 0, eval.every_steps=50), lanes-0 and lanes-1
(configs/sweep_cpu.yaml at staleness.max 0 and 1, run.steps=40 eval.every_steps=0 eval.num_prompts=0).

Each is 8.3 inches wide: at the 832 pixels that GitHub gives a picture, its text is about 11 points.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from async_rl.tools.sweeps.statistics import estimate

RESULTS, IMAGES = Path("benchmarks/results"), Path("docs/images")
PICTURES = RESULTS / "pictures"
STEPS = 6
"""Steps whose lanes are drawn: the fastest in a row, which other work on the machine has slowed least."""
CAP = 2.0
"""The default of algorithm.correction.cap."""
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#b8bec6"
LANE_COLORS = {"busy": BLUE, "sync": ORANGE}
LANE_NAMES = {"busy": "working", "sync": "new weights"}
ERRORS = "large: mean ± standard error; small: one run each"


def rows(file: str) -> list[dict[str, str]]:
    with (RESULTS / file).open() as lines:
        return list(csv.DictReader(lines))


def grouped(table: Iterable[Mapping[str, str]], by: str, key: str) -> dict[str, list[float]]:
    """Return {value of `by`: the values of `key`}, one for each seed."""
    found: dict[str, list[float]] = {}
    for row in table:
        found.setdefault(row[by], []).append(float(row[key]))
    return found


def draw(axes: Axes, values: Mapping[str, Sequence[float]], color: str, label: str = "", shift: float = 0.0) -> None:
    """Draw settings side by side: a dot for each run, and a line through the means with their standard errors."""
    places = [i + shift for i in range(len(values))]
    for place, each in zip(places, values.values(), strict=True):
        axes.plot([place] * len(each), each, "o", color=color, alpha=0.35, markersize=4)
    found = [estimate(each) for each in values.values()]
    means, errors = [each.mean for each in found], [each.error for each in found]
    axes.errorbar(places, means, errors, fmt="o-", color=color, capsize=3, markersize=6, label=label)
    axes.set_xticks(range(len(values)), ["0\n(synchronous)" if name == "0" else name for name in values])


def canvas(panels: int, height: float = 3.3, **kinds: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8.3, height), dpi=200, layout="constrained")
    found = list(figure.subplots(1, panels, squeeze=False, **kinds)[0])
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.tick_params(labelsize=11)
    return figure, found


def name(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.set_title(title, fontsize=12, loc="left")


def note(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=11, color="#555555", x=0.99, ha="right")


def trade_off() -> Figure:
    figure, (left, right) = canvas(2, 3.5)
    bounds = ("0", "1", "2", "4", "8")
    speed = grouped(rows("sweep_cpu_grid/runs.csv"), "staleness", "steps_per_minute")
    accuracy = grouped(rows("sweep_cpu_grid/runs.csv"), "staleness", "accuracy_end")
    draw(left, {bound: speed[bound] for bound in bounds}, BLUE)
    draw(right, {bound: accuracy[bound] for bound in bounds}, BLUE)
    left.set_ylim(0)
    right.set_ylim(0, 0.9)
    name(left, "staleness.max", "training steps per minute", "Overlap is faster ...")
    name(right, "staleness.max", "held-out accuracy after 30 s", "... but stale data teach less")
    note(figure, f"0.3 M parameters, two CPU cores, 5 seeds; {ERRORS}")
    return figure


def corrections() -> Figure:
    figure, (axes,) = canvas(1, 3.9)
    kinds = {"decoupled_tis": (BLUE, "truncated importance sampling, the default"),
             "coupled": (ORANGE, "clipping alone"), "none": (GREEN, "no correction")}  # fmt: skip
    runs = rows("exact/runs.csv")
    for place, (kind, (color, label)) in enumerate(kinds.items()):
        of_kind = [row for row in runs if row["correction"] == kind]
        draw(axes, grouped(of_kind, "staleness", "efficiency"), color, label, shift=0.14 * (place - 1))
    axes.set_ylim(0, 1.1)
    axes.legend(fontsize=11, frameon=False, loc="lower left")
    name(axes, "exact staleness of every token, in training steps", "worth of a step, in synchronous steps")
    note(figure, f"0.3 M parameters, 90 runs of 120 steps, 5 seeds; {ERRORS}")
    return figure


def learning() -> Figure:
    figure, (axes,) = canvas(1, 3.6)
    for bound, color in (("0", BLUE), ("1", ORANGE), ("10", GREEN)):
        points = [row for row in rows("sweep_cpu/evals.csv") if row["staleness"] == bound]
        seeds = sorted({row["seed"] for row in points})
        for seed in seeds:
            curve = [row for row in points if row["seed"] == seed]
            label = f"staleness.max = {bound}" if seed == seeds[0] else ""
            xs, ys = ([float(row[key]) for row in curve] for key in ("seconds", "accuracy"))
            axes.plot(xs, ys, "o-", color=color, markersize=4, linewidth=1.3, label=label)
    axes.legend(fontsize=11, frameon=False, loc="lower right")
    name(axes, "seconds since the first step", "held-out accuracy")
    note(figure, "0.3 M parameters, two CPU cores, 120 steps; a line for each of 3 seeds")
    return figure


def depths() -> Figure:
    figure, (axes,) = canvas(1, 4.0)
    speed = grouped(rows("sweep_agent_grid/runs.csv"), "staleness", "steps_per_minute")
    accuracy = grouped(rows("sweep_agent_grid/runs.csv"), "staleness", "accuracy_end")
    places = {"0": (8, -4), "1": (8, -14), "2": (-4, 12), "4": (6, 16), "8": (8, 4),
              "1/8": (-26, -18), "1.25/8": (-48, -16), "1.5/8": (-2, 14), "2/8": (8, -14)}  # fmt: skip
    for setting, offset in places.items():
        xs, ys = speed[setting], accuracy[setting]
        is_depth = "/" in setting
        color = ORANGE if is_depth else BLUE
        axes.plot(xs, ys, "o", color=color, alpha=0.25, markersize=4)
        x, y = estimate(xs), estimate(ys)
        axes.errorbar([x.mean], [y.mean], [y.error], [x.error], fmt="o", color=color, capsize=3, markersize=6)
        axes.annotate(setting, (x.mean, y.mean), offset, textcoords="offset points", fontsize=11, color=color)
    axes.plot([], [], "o", color=BLUE, label="staleness.max")
    axes.plot([], [], "o", color=ORANGE, label="staleness.depth below max 8")
    axes.legend(fontsize=11, frameon=False, loc="lower left")
    name(axes, "training steps per minute", "held-out accuracy after 60 s")
    note(figure, f"episodes with long tails, 5 seeds; {ERRORS}")
    return figure


def quickstart() -> Figure:
    figure, (axes,) = canvas(1, 3.2)
    for bound, color in (("2", BLUE), ("0", ORANGE)):
        points = [row for row in rows("pictures/quickstart.csv") if row["staleness"] == bound]
        xs, ys = ([float(row[key]) for row in points] for key in ("step", "accuracy"))
        axes.plot(xs, ys, "o-", color=color, markersize=5, label=f"staleness.max = {bound}")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=11, frameon=False, loc="lower right")
    name(axes, "training step", "held-out accuracy")
    note(figure, "configs/quickstart.yaml, one run each, evaluated every 50 steps on 1024 answers")
    return figure


def lanes() -> Figure:
    figure = Figure(figsize=(8.3, 3.6), dpi=200, layout="constrained")
    panels = list(figure.subplots(2, 1, sharex=True))
    table = rows("pictures/lanes.csv")
    for axes, bound in zip(panels, ("0", "1"), strict=True):
        spans = [row for row in table if row["staleness"] == bound]
        ends = [float(row["end_s"]) for row in spans if row["state"] == "step"]
        for place, pool in enumerate(("learner", "rollout")):
            axes.barh(place, ends[-1], height=0.7, color=GREY, alpha=0.5, linewidth=0)
            for row in sorted(spans, key=lambda row: row["state"]):  # new weights over work
                if row["pool"] == pool and row["state"] in LANE_COLORS:
                    start, end = float(row["start_s"]), float(row["end_s"])
                    axes.barh(place, end - start, left=start, height=0.7, color=LANE_COLORS[row["state"]], linewidth=0)
        for end in ends:
            axes.axvline(end, color="black", linewidth=0.7, linestyle=":")
        axes.set_yticks([0, 1], ["trainer", "rollout server"], fontsize=11)
        axes.invert_yaxis()
        axes.set_title(f"staleness.max = {bound}", fontsize=12, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=11)
    panels[1].set_xlabel("seconds, one run each; a dotted line ends one of six training steps", fontsize=11)
    handles = [Patch(color=color, label=LANE_NAMES[state]) for state, color in LANE_COLORS.items()]
    handles.append(Patch(color=GREY, alpha=0.5, label="waiting"))
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=11, frameon=False)
    return figure


def ratios() -> Figure:
    figure, (left, right) = canvas(2, 3.5)
    left.plot([0, 4], [0, 4], linestyle="--", color=GREY, label="importance ratio itself")
    left.plot([0, CAP, 4], [0, CAP, CAP], color=BLUE, linewidth=2, label=f"truncated at {CAP:.0f}")
    left.legend(fontsize=11, frameon=False, loc="upper left")
    name(left, "importance ratio of a token", "its weight in the loss", "The correction")
    runs = [row for row in rows("exact/runs.csv") if row["correction"] == "decoupled_tis"]
    draw(right, grouped(runs, "staleness", "is_variance"), BLUE)
    right.set_ylim(0)
    name(right, "exact staleness, in training steps", "variance of the ratios", "Older data, wider spread")
    note(figure, f"right: 0.3 M parameters, 5 seeds of 120 steps; {ERRORS}")
    return figure


def extract(runs: Path) -> None:
    """Write what the figures of single runs need."""
    PICTURES.mkdir(exist_ok=True)
    write("quickstart.csv", ("staleness", "step", "accuracy"), [
        (bound, line["step"], line["eval/accuracy"]) for bound, run in (("0", "sync"), ("2", "quickstart"))
        for line in logged(runs / run) if "eval/accuracy" in line
    ])  # fmt: skip
    columns = ("staleness", "pool", "state", "start_s", "end_s")
    write("lanes.csv", columns, [(bound, *span) for bound in ("0", "1") for span in spans_of(runs / f"lanes-{bound}")])


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def spans_of(run: Path) -> list[tuple[str, str, float, float]]:
    """Return (pool, state, start, end) of the spans in the fastest STEPS and of these steps, in seconds."""
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    pools = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [
        (pools[event["pid"]].partition("/")[0], event["cat"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events if event["ph"] == "X"
    ]  # fmt: skip
    steps = [span[3] for span in spans if span[:2] == ("learner", "sync")]
    first_end = min(range(5, len(steps) - STEPS), key=lambda i: steps[i + STEPS] - steps[i])
    start, ends = steps[first_end], steps[first_end + 1 : first_end + 1 + STEPS]
    spans += [("learner", "step", before, end) for before, end in zip([start, *ends], ends, strict=False)]
    return [
        (pool, state, round(max(first, start) - start, 3), round(min(last, ends[-1]) - start, 3))
        for pool, state, first, last in spans if last > start and first < ends[-1]
    ]  # fmt: skip


def write(file: str, columns: Sequence[str], table: Iterable[Sequence[object]]) -> None:
    with (PICTURES / file).open("w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([columns, *table])


FIGURES: dict[str, Callable[[], Figure]] = {
    "trade_off": trade_off, "corrections": corrections, "learning": learning, "depths": depths,
    "quickstart": quickstart, "lanes": lanes, "ratios": ratios,
}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder with the runs above")
    if folder := parser.parse_args().runs:
        extract(folder)
    for title, figure in FIGURES.items():
        figure().savefig(IMAGES / f"{title}.png")
