"""Writes the page, the JSON and the plot of benchmarks/exact_grid.py and exact_ratios.py from their CSV files.

    python -m benchmarks.exact_grid_page
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.tools.sweeps.efficiency import SynchronousCurve, efficiency, per_seed
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.plots import OKABE_ITO
from async_rl.tools.sweeps.statistics import estimate
from async_rl.tools.sweeps.tables import Table
from benchmarks import exact_grid, exact_ratios
from benchmarks.exact_grid import LR, STEPS, ExactCell
from benchmarks.page import machine_text, write_page

Rows = Sequence[Mapping[str, str]]
Runs = dict[ExactCell, Rows]
LAGS = (0, 1, 2, 4, 8)
ROUTING = {"sampled": "replayed", "ignore": "its own"}
PAGE = """# Exact lags, with and without replay of experts and supports

A Qwen3-MoE of 0.6 M parameters (3 layers, 2 of 16 experts) spells five-letter words backward: {steps} steps of 16
prompts with 8 answers, learning rate 5e-4, from one supervised start. The hf engine samples, in bfloat16 unless
said; the learner computes in float32. {machine}. Cells trained, of two seeds: {coverage}.

![Accuracy by lag with five corrections, with and without supports, and ratios by lag](exact_grid.png)

## What it says

The lead was: replay takes the variance of the ratios down eight- to ninefold with SGLang in bfloat16 at equal
weights (in a toy by half), but by 11 to 14 % at lag 2 and by 8 to 9 % at lag 8. It mends precision, not staleness.

- **Equal weights: confirmed.** With SGLang in bfloat16 replay takes the variance of the ratios down 7.8 times for a
  random model with 4 of 32 experts, and 3 times for the policies of this grid, whose experts differ for 0.8 % of
  (token, layer) only. In float32 no experts differ, and all ratios are 1 to 1e-6.
- **Old weights: confirmed that the gain shrinks, refuted that it is precision alone.** Replay takes 31 to 35 % off
  the KL between engine and learner at lag 2, and 21 to 38 % at lag 8. It does so with an engine in float32 as well,
  where no precision is to be mended. Why it is more than in the lead was not tested. A token uses 2 experts here
  and 8 there, so one that changes may weigh more. The variance of w at lag 8 follows a few tokens: between
  policies its quotient differs by factors. The KL and the mean of |log w| are steadier.
- **Learning: no gain from replay was seen.** The differences of accuracy between replayed and own experts are
  within two standard errors at every lag.
- **Learning, other columns.** TIS and centering together are above TIS alone at lags 4 and 8, and below it at lag 1;
  centering alone is below TIS at lag 0. Supports are above no supports from lag 2 on, but only at lag 4 by more than
  two standard errors, of four pairs. These are 20 comparisons, of which one in 20 would look so by chance.
- **One version in an answer: the engine's routing is each token's own.** In all batches of one version that were
  looked at, the record of the sampling forward passes had the same experts for every token and layer as the
  engine's weights choose for the whole answer afterwards.
- **Two versions in an answer, with retraction:** they differ. The record as sampled has less variance over all
  tokens; the one as returned is nearer for the tokens of the new version, whose context was computed anew.
- **Supports:** the table of TRL#7269 comes out in kind. Over the whole vocabulary the mean ratio is the mass that
  the rule keeps, over the recorded support it is 1.000 for every rule, and what is left are the ratios of the
  control.
- **Collapse of marin#8955: in part.** With four times the learning rate, plain PPO at lag 1 loses nearly all
  accuracy in 24 steps, and at lag 0 it does not. As there, clipping at the behaviour policy keeps more. But here
  TIS does not help, and most answers become wrong, not long: the limit of 8 tokens cuts off 16 % of them.

## What a cell learns

Held-out accuracy after {steps} steps, then what a step is worth in synchronous steps (of all cells at lag 0 with
the same sampling), mean ± standard error over seeds (number of seeds).

{grid}

Cells that differ in one setting only, paired by seed and all other settings. Accuracy is the mean over the
evaluations of a run. In brackets is the number of pairs.

{effects}

## The ratios of the same tokens

Each batch was scored twice before the step, with the experts replayed and with the learner's own. Medians over
batches, and geometric means of the quotients replayed / own ± standard error over batches.

{ratios}

## Answers of two versions

The first three tokens of an answer are of the old version, the others of the newest, on KV that it has computed
anew.

{versions}

## Real engines at equal and at old weights

Three policies of the grid, of other seeds, at version 24 and 0, 2 or 8 versions before. Medians over the policies,
and the geometric mean of the quotients (± one standard error). `random` has 6 layers with 4 of 32 experts, and
answers of 64 tokens.

{engines}

## Rules that leave tokens out

Equal weights, engine in bfloat16, one policy, experts replayed. The engine's probability is over the support. The
learner's is over the whole vocabulary or over the support.

{rules}

## PPO without correction at lag 1

24 steps, own experts, top_p 1, larger learning rates. Truncated is the share of answers in the last batch that was
looked at; ESS is a median over batches.

{collapse}

## Small print

- Accuracy is the probability of a right answer under the sampling rule of the cell, summed exactly over 128
  held-out prompts. So rows of top_p 1 and of 0.9 are not to be compared with each other.
- "No support" is `algorithm.support: ignore`: engine and learner both score over the whole vocabulary, so that
  ratios are 1 at equal weights, and over samples of old weights they are biased. Score centering needs supports: at
  top_p 1 the support is the whole vocabulary (`top_k` of its size).
- "Centering" has weights of 1 (`params.cap=0`), "both" has min(π/μ, 2).
- The learning rate is near the edge where this model becomes unstable. So single runs with stale data can fall far
  below their start, and two seeds seldom tell two columns apart.
- Rows at the same lag share seeds, prompts and start. So their pairs are not quite independent, nor are the batches
  of a run.
- Not trained: with the second seed, centering and both at lags 1 and 4 and at top_p 0.9 of lag 2. Only two seeds, not
  five: the machine had other work. Answers of two versions were trained at lag 8 only, float32 at lags 0 and 8.
- The kept mass in the table of rules is of a policy that is sure of most letters: top_p 0.8 keeps 0.93.

## Commands

The first takes 20 processor seconds a cell, and continues where it was stopped.

```
{commands}
```
"""
COMMANDS = """python -m benchmarks.exact_grid train --seeds 0,1
python -m benchmarks.exact_grid collapse --seeds 0,1 --steps 24 --every 4 --out benchmarks/results/exact_collapse
python -m benchmarks.exact_ratios versions
python -m benchmarks.exact_ratios lags --engine hf --prompts 200
python -m benchmarks.exact_ratios lags --engine sglang --prompts 200
python -m benchmarks.exact_ratios rules --engine hf --dtypes bfloat16 --prompts 200
python -m benchmarks.exact_ratios rules --engine sglang --dtypes bfloat16 --prompts 200
python -m benchmarks.exact_grid_page"""


def runs_of(rows: Rows) -> Runs:
    runs: dict[ExactCell, list[Mapping[str, str]]] = {}
    for row in rows:
        cell = ExactCell(
            int(row["seed"]), int(row["lag"]), row["sampling"], row["correction"], row["routing"], row["engine"],
            row["versions"], float(row["lr"]),
        )
        runs.setdefault(cell, []).append(row)
    return dict(runs)


def chosen(runs: Runs, **wanted: Any) -> dict[ExactCell, Rows]:
    """Return the cells whose fields have these values; engine, versions and lr are the grid's unless given."""
    wanted = {"engine": "bfloat16", "versions": "one", "lr": LR} | wanted
    return {cell: rows for cell, rows in runs.items() if all(getattr(cell, k) == v for k, v in wanted.items())}


def evaluations(rows: Rows) -> list[tuple[float, float]]:
    return [(float(row["version"]), float(row["accuracy"])) for row in rows]


def worth(runs: Runs, of: Mapping[ExactCell, Rows]) -> list[float]:
    """Return what a step is worth in the cells `of`, which differ only in their seeds, as `per_seed` has it.

    The synchronous curve is that of all cells at lag 0 with the same sampling, whatever their correction and routing.
    """
    sampling = next(iter(of)).sampling.replace("no support", "support")
    synchronous = {cell: rows for cell, rows in chosen(runs, lag=0).items() if cell.sampling == sampling}
    seeds = sorted({cell.seed for cell in of})

    def statistic(without: str | None) -> np.ndarray:
        base = [evaluations(rows) for cell, rows in synchronous.items() if str(cell.seed) != without]
        kept = [evaluations(rows) for cell, rows in of.items() if str(cell.seed) != without]
        return np.array([efficiency(kept, SynchronousCurve(base))])

    return [float(x) for x in per_seed(statistic, [*map(str, seeds)])[:, 0]]


def text(values: Sequence[float], form: str = "{:.3f}") -> str:
    values = [value for value in values if not math.isnan(value)]
    return f"{estimate(values).text(form)} ({len(values)})" if values else "-"


def grid_table(runs: Runs) -> Table:
    rows = []
    for sampling, correction, routing in itertools.product(
        exact_grid.SAMPLING, ("TIS", "centering", "both"), ROUTING
    ):
        of_lag = [
            chosen(runs, lag=lag, sampling=sampling, correction=correction, routing=routing) for lag in LAGS
        ]
        if any(of_lag):
            last = [[float(rows[-1]["accuracy"]) for rows in of.values()] for of in of_lag]
            steps = [worth(runs, of) if of and lag else [] for lag, of in zip(LAGS, of_lag, strict=True)]
            rows.append([
                sampling, correction, ROUTING[routing],
                *(f"{text(a)}; {text(e, '{:.2f}')}" if e else text(a) for a, e in zip(last, steps, strict=True)),
            ])
    return Table(("top_p", "correction", "experts", *(f"lag {lag}" for lag in LAGS)), rows)


def coverage(runs: Runs) -> str:
    """Return how many of the cells of two seeds have been trained, by lag."""
    wanted = [*exact_grid.cells((0, 1))]
    counts = [(sum(c in runs for c in wanted if c.lag == lag), sum(c.lag == lag for c in wanted)) for lag in LAGS]
    return ", ".join(f"lag {lag} {done} of {all_cells}" for lag, (done, all_cells) in zip(LAGS, counts, strict=True))


def effect(runs: Runs, name: str, other: str, **same: Any) -> list[float]:
    """Return, for each pair of cells that differ only in the field `name`, accuracy with `same[name]` less `other`.

    Accuracies are means over the evaluations after the start.
    """
    found = []
    for cell, rows in chosen(runs, **same).items():
        twin = ExactCell(**cell._asdict() | {name: other})
        if twin in runs:
            found.append(mean_accuracy(rows) - mean_accuracy(runs[twin]))
    return found


def mean_accuracy(rows: Rows) -> float:
    return float(np.mean([accuracy for version, accuracy in evaluations(rows) if version]))


def effects_table(runs: Runs) -> Table:
    """Return the paired differences of accuracy, over all cells of the grid that have a twin."""
    kinds: list[tuple[str, str, dict[str, Any], str]] = [
        ("replayed less own experts", "routing", {"routing": "sampled"}, "ignore"),
        ("centering less TIS", "correction", {"correction": "centering"}, "TIS"),
        ("both less TIS", "correction", {"correction": "both"}, "TIS"),
        ("support less no support", "sampling", {"sampling": "0.9, support", "correction": "TIS"}, "0.9, no support"),
    ]
    rows = [
        [title, *(text(effect(runs, name, other, **same, lag=lag), "{:+.3f}") for lag in LAGS)]
        for title, name, same, other in kinds
    ]
    return Table(("difference of accuracy", *(f"lag {lag}" for lag in LAGS)), rows)


def number(row: Mapping[str, str], name: str) -> float:
    return float(row[name]) if row.get(name) else math.nan


def looks(cells: Mapping[ExactCell, Rows]) -> list[Mapping[str, str]]:
    """Return the batches that were scored, but those of the first versions, before the lag is reached."""
    return [
        row for cell, rows in cells.items() for row in rows
        if row["staleness"] and int(row["version"]) > 0 and float(row["staleness"]) == cell.lag
    ]


def quotient(rows: Iterable[Mapping[str, str]], name: str, over: str) -> tuple[float, float, int]:
    """Return the geometric mean of row[name] / row[over], its standard error as a factor, and the number of rows."""
    logs = [math.log(number(row, name) / number(row, over)) for row in rows if number(row, over) > 0]
    if not logs:
        return math.nan, math.nan, 0
    of_logs = estimate(logs)
    return math.exp(of_logs.mean), of_logs.error, len(logs)


def ratios_table(runs: Runs) -> Table:
    rows = []
    for engine, lag in itertools.product(("bfloat16", "float32"), LAGS):
        seen = looks(chosen(runs, lag=lag, engine=engine))
        if not seen or (engine == "float32" and lag == 0):
            continue
        medians = {
            name: float(np.median([number(row, name) for row in seen]))
            for name in ("ignore_var", "sampled_var", "ignore_k3", "sampled_k3", "ignore_abs", "sampled_abs")
        }
        quotients = []
        for which in ("var", "k3", "abs"):
            mean, error, _ = quotient(seen, f"sampled_{which}", f"ignore_{which}")
            quotients.append(f"{mean:.2f} ± {mean * error:.2f}")
        flips = np.mean([number(row, "sampled_changed") for row in seen])
        rows.append([
            engine, str(lag), str(len(seen)), f"{100 * flips:.1f} %",
            f"{medians['ignore_var']:.2g} / {medians['sampled_var']:.2g}", quotients[0],
            f"{medians['ignore_k3']:.2g} / {medians['sampled_k3']:.2g}", quotients[1],
            f"{medians['ignore_abs']:.2g} / {medians['sampled_abs']:.2g}", quotients[2],
        ])
    return Table((
        "engine", "lag", "batches", "experts differ", "var w: own / replayed", "quotient", "k3: own / replayed",
        "quotient", "mean abs log w: own / replayed", "quotient",
    ), rows)  # fmt: skip


def versions_table(runs: Runs) -> Table:
    """Return the cells of two versions: three treatments of routing."""
    rows = []
    for lag in LAGS[1:]:
        cells = chosen(runs, lag=lag, versions="two")
        if not cells:
            continue
        seen = looks(cells)
        for routing, title in (("ignore", "its own"), ("returned", "the engine's, as returned"),
                               ("sampled", "each token's own")):  # fmt: skip
            accuracies = [mean_accuracy(rows) for cell, rows in cells.items() if cell.routing == routing]
            medians = [
                np.median([number(row, f"{routing}_{name}") for row in seen]) for name in ("var", "k3", "new_abs")
            ]
            var, error, _ = quotient(seen, f"{routing}_var", "ignore_var")
            rows.append([
                str(lag), title, text(accuracies), *(f"{x:.2g}" for x in medians[:2]),
                "1" if routing == "ignore" else f"{var:.2f} ± {var * error:.2f}", f"{medians[2]:.2g}",
            ])
    return Table((
        "lag", "experts", "mean accuracy", "var w", "k3", "var over that with own experts",
        "mean abs log w of the new tokens",
    ), rows)  # fmt: skip


def pairs_of(
    rows: Rows, model: str, engine: str, dtype: str, lag: int
) -> list[tuple[Mapping[str, str], Mapping[str, str]]]:
    """Return, for each policy, the numbers with the learner's own experts and those with replayed ones."""
    wanted = {"model": model, "engine": engine, "dtype": dtype, "lag": str(lag), "rule": "top_p=1"}
    fitting = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    own, replayed = ([row for row in fitting if row["routing"] == kind] for kind in ("ignore", "sampled"))
    return [*zip(own, replayed, strict=True)]


def engines_table(rows: Rows) -> Table:
    lines = []
    for model, engine, dtype, lag in itertools.product(
        ("grid", "random"), ("sglang", "hf"), ("bfloat16", "float32"), exact_ratios.LAGS
    ):
        if not (pairs := pairs_of(rows, model, engine, dtype, lag)):
            continue
        cells = []
        for name in ("w_var", "w_k3", "w_abs"):
            own, replayed = ([float(row[name]) for row in each] for each in zip(*pairs, strict=True))
            logs = estimate([math.log(a / b) for a, b in zip(own, replayed, strict=True)])
            times = f"{math.exp(logs.mean):.2f}"
            if len(pairs) > 1:
                times += f" ({math.exp(logs.mean - logs.error):.2f} to {math.exp(logs.mean + logs.error):.2f})"
            cells += [f"{np.median(own):.2g} / {np.median(replayed):.2g}", times]
        tokens = sum(int(float(row["tokens"])) for _, row in pairs)
        flips = np.mean([float(row["changed"]) for _, row in pairs])
        lines.append([model, engine, dtype, str(lag), str(tokens), f"{100 * flips:.1f} %", *cells])
    return Table((
        "model", "engine", "type", "lag", "tokens", "experts differ", "var w: own / replayed", "times less",
        "k3: own / replayed", "times less", "mean abs log w", "times less",
    ), lines)  # fmt: skip


def rules_table(rows: Rows) -> Table:
    lines = []
    keyed = {(row["engine"], row["rule"], row["support"]): row for row in rows if row["routing"] == "sampled"
             and row["lag"] == "0" and row["model"] == "grid" and row["dtype"] == "bfloat16"
             and row["seed"] == str(exact_ratios.SEEDS[0])}  # fmt: skip
    for engine, rule in itertools.product(("sglang", "hf"), (*exact_ratios.RULES, "top_p=1")):
        if rule == "top_p=1" and (control := keyed.get((engine, rule, "none"))):
            lines.append([engine, "nothing left out", control["tokens"], *three(control), "-"])
        elif (engine, rule, "support") in keyed:
            within, without = keyed[engine, rule, "support"], keyed[engine, rule, "vocabulary"]
            lines.append([engine, rule, within["tokens"], *three(without), " / ".join(three(within))])
    return Table((
        "engine", "rule", "tokens", "vocabulary: mean ratio", "median", "outside [0.9, 1.1]",
        "support: mean / median / outside",
    ), lines)  # fmt: skip


def three(row: Mapping[str, str]) -> list[str]:
    mean, median, outside = (float(row[name]) for name in ("w_mean", "w_median", "w_outside"))
    return [f"{mean:.3f}", f"{median:.3f}", f"{100 * outside:.1f} %"]


def collapse_table(runs: Runs) -> Table:
    rows = []
    corrections = {
        (0, "none"): "none", (1, "none"): "none", (1, "TIS"): "TIS", (1, "coupled"): "clipped at the behaviour policy"
    }  # fmt: skip
    for lr, (lag, correction) in itertools.product(sorted({cell.lr for cell in runs}), corrections):
        if not (cells := chosen(runs, lag=lag, sampling="1", correction=correction, routing="ignore", lr=lr)):
            continue
        ends = list(cells.values())
        rows.append([
            f"{lr:g}", str(lag), corrections[lag, correction], text([float(of[0]["accuracy"]) for of in ends]),
            text([min(float(row["accuracy"]) for row in of) for of in ends]),
            text([float(of[-1]["accuracy"]) for of in ends]), text([float(of[-2]["truncated"]) for of in ends]),
            f"{np.median([number(row, 'ignore_ess') for row in looks(cells)]):.3f}",
        ])
    return Table((
        "learning rate", "lag", "correction", "accuracy, start", "lowest", "end", "truncated answers", "ESS / tokens"
    ), rows)  # fmt: skip


def plot(runs: Runs, engines: Rows, file: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["font.size"] = 11
    figure = Figure(figsize=(8.32, 6.6), layout="constrained")
    panels = list(figure.subplots(2, 2).flat)
    lines = [("TIS", "sampled"), ("TIS", "ignore"), ("centering", "sampled"), ("both", "sampled"), ("both", "ignore")]
    for axes, sampling in zip(panels, ("1", "0.9, support"), strict=False):
        for place, (correction, routing) in enumerate(lines):
            label = f"{correction}, {'replay' if routing == 'sampled' else 'own experts'}"
            points = [chosen(runs, lag=lag, sampling=sampling, correction=correction, routing=routing)
                      for lag in LAGS]  # fmt: skip
            draw(axes, [[mean_accuracy(rows) for rows in of.values()] for of in points], place, len(lines), label)
        axes.set_title(f"top_p {sampling}")
        axes.set_ylabel("held-out accuracy,\nmean over the run")
        axes.set_xlabel("lag, versions")
    panels[2].set_ylabel("held-out accuracy,\nmean over the run")
    panels[2].set_title("top_p 0.9, TIS, replay")
    panels[2].set_xlabel("lag, versions")
    for place, sampling in enumerate(("0.9, support", "0.9, no support")):
        points = [chosen(runs, lag=lag, sampling=sampling, correction="TIS", routing="sampled") for lag in LAGS]
        label = sampling.removeprefix("0.9, ")
        draw(panels[2], [[mean_accuracy(rows) for rows in of.values()] for of in points], place + 5, 7, label)
    panels[2].legend(frameon=False, fontsize=10)
    for place, (engine, dtype) in enumerate(itertools.product(("sglang", "hf"), ("bfloat16", "float32"))):
        quotients = [
            [] if lag == 0 and dtype == "float32" else [
                float(own["w_k3"]) / float(replayed["w_k3"])
                for own, replayed in pairs_of(engines, "grid", engine, dtype, lag)
            ]
            for lag in LAGS
        ]
        if any(quotients):
            draw(panels[3], quotients, place + 1, 5, f"{engine}, {dtype}", is_geometric=True)
    panels[3].axhline(1, color="gray", linewidth=0.8)
    panels[3].set_yscale("log")
    panels[3].set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    panels[3].set_title("same answers, three policies")
    panels[3].set_ylabel("KL of engine and learner: own\nexperts over replayed ones")
    panels[3].set_xlabel("lag, versions")
    panels[3].legend(frameon=False, fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    for axes in panels:
        axes.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=200)


def draw(
    axes: Any, values: Sequence[Sequence[float]], place: int, count: int, label: str, is_geometric: bool = False
) -> None:
    """Draw dots, and the means joined by a line; values are by lag, and lags without any are left out."""
    color = OKABE_ITO[place % len(OKABE_ITO)]
    shift = 0.12 * (place % 5 - (min(count, 5) - 1) / 2)
    xs = [x + shift for x, of in enumerate(values) if of]
    means = [math.exp(np.mean(np.log(of))) if is_geometric else float(np.mean(of)) for of in values if of]
    axes.plot(xs, means, color=color, linewidth=1.3, label=label)
    for x, of in zip(xs, filter(None, values), strict=True):
        axes.plot([x] * len(of), of, ".", color=color, alpha=0.6, markersize=7)


def main() -> None:
    out = exact_grid.RESULTS
    runs = runs_of(exact_grid.read(out.with_name(f"{out.name}.csv")))
    collapsed = runs_of(exact_grid.read(out.with_name("exact_collapse.csv")))
    engines = exact_grid.read(exact_ratios.RESULTS.with_name("exact_ratios.csv"))
    tables = {
        "grid": grid_table(runs), "effects": effects_table(runs), "ratios": ratios_table(runs),
        "versions": versions_table(runs), "engines": engines_table(engines), "rules": rules_table(engines),
        "collapse": collapse_table(collapsed),
    }  # fmt: skip
    plot(runs, engines, out.with_name(f"{out.name}.png"))
    page = PAGE
    for name, table in tables.items():
        page = page.replace("{" + name + "}", table.markdown().rstrip("\n"))
    page = page.replace("{commands}", COMMANDS).replace("{coverage}", coverage(runs))
    page = page.replace("{machine}", machine_text()).replace("{steps}", str(STEPS))
    write_page(out, page, {
        "machine": describe_machine(),
        "tables": {name: {"header": table.header, "rows": table.rows} for name, table in tables.items()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
