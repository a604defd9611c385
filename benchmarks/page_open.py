"""Measures whether a run trains more slowly while its page is open: pairs of runs, one without and one with the page.

    python -m benchmarks.page_open configs/quickstart.yaml --pairs 5 run.steps=100 eval.size=0

Beside every second run `async-rl view` serves the page, and a client does what a browser with the overview open does:
it follows the events and asks again for all that the page shows whenever a file has changed. The order within a pair
changes from pair to pair. The speed of a run is counted from the end of its first step to the end of its last one.
The same command goes on after the pairs that OUT.json holds.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlencode

import psutil

from async_rl.errors import AsyncRLError
from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.statistics import CONFIDENCE, estimate, p_value, ratio_interval
from async_rl.sweeps.tables import Table, write_page
from async_rl.telemetry.metrics import read_metrics
from benchmarks.marked_command import MarkedCommand, wait_until

RUN_LIMIT_S = 1800.0
START_LIMIT_S = 300.0
REQUEST_LIMIT_S = 30.0
PARTS = ("/run/header", "/run/overview/live")
"""The parts of the overview, besides its series, that a browser asks for again when metrics or status change."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one run, and what its page did meanwhile; 0 without a page."""

    steps_per_s: float
    refreshes: int
    """How often the client asked for all parts of the page."""
    page_cpu: float
    """The share of one core that the page's process used."""


class Follower:
    """Asks for the page of a run in a thread, as a browser with the overview open does, until `close`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.refreshes = 0
        self.error = ""
        """Why it ended early; empty if it did not."""
        self._closing = threading.Event()
        with urllib.request.urlopen(f"{url}/run/overview", timeout=REQUEST_LIMIT_S) as answer:
            charts = re.findall(r"data-chart='([^']*)'", answer.read().decode())
        keys = {key for chart in charts for key, _ in json.loads(html.unescape(chart))["keys"]}
        self._keys = sorted(keys)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            lines = 0
            with urllib.request.urlopen(f"{self._url}/run/events", timeout=REQUEST_LIMIT_S) as events:
                for line in events:
                    if self._closing.is_set():
                        return
                    if line.startswith(b"data:") and {"metrics", "status"} & set(json.loads(line[5:])):
                        lines = self._refresh(lines)
        except (OSError, ValueError) as error:
            if not self._closing.is_set():
                self.error = str(error)

    def _refresh(self, after: int) -> int:
        for path in PARTS:
            self._get(path)
        query = urlencode([("after", after), *(("key", key) for key in self._keys)])
        self.refreshes += 1
        return int(json.loads(self._get(f"/run/data/series?{query}"))["lines"])

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=REQUEST_LIMIT_S) as answer:
            return bytes(answer.read())

    def close(self) -> None:
        self._closing.set()


def measure_run(config: str, overrides: list[str], folder: Path, name: str, is_shown: bool) -> Speed:
    """Make a run, with its page open or without, and return its speed.

    Raises:
        AsyncRLError: the run failed, or its page did not serve the client until the end.
    """
    run_dir = folder / name
    run = MarkedCommand(["train", config, *overrides, f"run.dir={folder}", f"run.name={name}"], folder / f"{name}.log")
    page: MarkedCommand | None = None
    follower: Follower | None = None
    cpu_s = wall_s = 0.0
    try:
        if is_shown:
            wait_until((run_dir / "metrics.jsonl").exists, START_LIMIT_S, "the run's files")
            page = MarkedCommand(["view", str(run_dir), "--port", "0"], folder / f"{name}-page.log")
            wait_until(lambda: "http://" in page.text(), START_LIMIT_S, "the page")
            found = re.search(r"http://localhost:\d+", page.text())
            assert found
            follower = Follower(found[0])
        code = run.wait(RUN_LIMIT_S)
        if follower:
            follower.close()
        if page:
            with suppress(psutil.Error):
                (process,) = page.processes()
                cpu_s, wall_s = sum(process.cpu_times()[:2]), time.time() - process.create_time()
    finally:
        for command in (run, page):
            if command:
                command.kill()
    if code or (follower and follower.error):
        page_error = follower.error if follower else ""
        raise AsyncRLError(
            f"the run {name} ended with exit code {code}, the client of its page with the error {page_error!r}. The "
            f"run's output ends:\n{run.text()[-3000:]}"
        )
    ends_s = [r["time/since_first_step_s"] for r in read_metrics(run_dir / "metrics.jsonl") if "time/step_s" in r]
    duration_s = float(ends_s[-1] or 0.0)
    refreshes = follower.refreshes if follower else 0
    return Speed((len(ends_s) - 1) / duration_s, refreshes, cpu_s / wall_s if wall_s else 0.0)


def report(command: str, pairs: list[tuple[Speed, Speed]]) -> str:
    a, b = [shown.steps_per_s for _, shown in pairs], [without.steps_per_s for without, _ in pairs]
    low, high = ratio_interval(a, b)
    rows = [
        [
            str(number + 1), f"{plain.steps_per_s:.3f}", f"{shown.steps_per_s:.3f}",
            f"{shown.steps_per_s / plain.steps_per_s:.3f}", str(shown.refreshes), f"{shown.page_cpu:.1%}",
        ]
        for number, (plain, shown) in enumerate(pairs)
    ]  # fmt: skip
    header = ("pair", "steps/s without", "with the page", "ratio", "refreshes", "page's CPU, of one core")
    return f"""# Training speed with and without the page of the run

Command: `{command}`, {machine_text()}.

{Table(header, rows).markdown()}
Without the page {estimate(b).text("{:.3f}")} steps/s, with it {estimate(a).text("{:.3f}")} (means over {len(a)} runs,
with their standard errors): {estimate(a).mean / estimate(b).mean:.3f} times, {CONFIDENCE:.0%} interval {low:.3f} to
{high:.3f}, p = {p_value(a, b):.2f} for no difference.
"""


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/page_open"), help="writes OUT.md and OUT.json")
    args, overrides = parser.parse_known_args()
    words = ["python -m benchmarks.page_open", args.config, f"--pairs {args.pairs}", f"--out {args.out}", *overrides]
    command = " ".join(words)
    pairs = read_pairs(args.out.with_name(f"{args.out.name}.json"), command)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(pairs), args.pairs):
            speeds: dict[bool, Speed] = {}
            for is_shown in (False, True) if number % 2 == 0 else (True, False):
                name = f"{number}-{'page' if is_shown else 'plain'}"
                speeds[is_shown] = measure_run(args.config, overrides, Path(folder), name, is_shown)
            pairs.append((speeds[False], speeds[True]))
            saved = [{"without": asdict(without), "with_page": asdict(shown)} for without, shown in pairs]
            write_page(args.out, report(command, pairs), {"command": command, "pairs": saved})


def read_pairs(file: Path, command: str) -> list[tuple[Speed, Speed]]:
    """Return the pairs (speed without, speed with the page) that earlier calls of the same command have saved."""
    saved = json.loads(file.read_text()) if file.is_file() else {}
    if saved.get("command") != command:
        return []
    return [(Speed(**pair["without"]), Speed(**pair["with_page"])) for pair in saved["pairs"]]


if __name__ == "__main__":
    main()
