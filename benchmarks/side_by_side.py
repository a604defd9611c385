"""The same run at several staleness bounds, one column each.

    python -m benchmarks.side_by_side configs/quickstart.yaml --staleness 0,4 run.steps=100

Prints the table and writes it, with the summaries it was made from, to runs/<name>-side-by-side.{md,json}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from async_rl.configfile import load_config
from async_rl.pipeline import run

ROWS = (
    ("held-out accuracy, start", "accuracy_start", "{:.3f}"),
    ("held-out accuracy, end", "accuracy_end", "{:.3f}"),
    ("staleness, mean", "staleness_mean", "{:.2f}"),
    ("staleness, max", "staleness_max", "{:.0f}"),
    ("utilisation of the learner", "utilisation/learner", "{:.1%}"),
    ("utilisation of the rollout pool", "utilisation/rollout", "{:.1%}"),
    ("utilisation, total", "utilisation/total", "{:.1%}"),
    ("rollouts/s", "rollouts_per_s", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("seconds for the steps after the first", "seconds", "{:.1f}"),
)


def table(columns: dict[int, dict[str, Any]]) -> str:
    """Markdown, one column per staleness bound; what a run did not measure is `-`."""
    lines = [
        "| staleness.max | " + " | ".join(str(k) for k in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for label, key, form in ROWS:
        cells = [form.format(c[key]) if c.get(key) is not None else "-" for c in columns.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--staleness", default="0,4", help="bounds, comma separated (default: 0,4)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    columns: dict[int, dict[str, Any]] = {}
    name = load_config(arguments.config, arguments.overrides).run.name
    for bound in [int(text) for text in arguments.staleness.split(",")]:
        overrides = [*arguments.overrides, f"staleness.max={bound}", f"run.name={name}-staleness-{bound}"]
        config = load_config(arguments.config, overrides)
        columns[bound] = run(config)
    text = table(columns)
    target = Path(config.run.dir) / f"{name}-side-by-side"
    target.with_suffix(".md").write_text(text)
    target.with_suffix(".json").write_text(json.dumps(columns, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
