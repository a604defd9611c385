"""The charts in a real browser: axes with labels that differ, constant metrics as flat lines, gaps in the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.view.chromium import needs_chromium, open_page
from tests.kit.view.run_dirs import make_run, metrics_of
from tests.kit.view.server import ViewServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.processes, needs_chromium]
AXES = """() => Bokeh.documents.map((document) => document.roots()[0]).map((figure) => ({
  labels: [...figure.left[0].major_label_overrides.values()], low: figure.y_range.start, high: figure.y_range.end,
}))"""
LINES = """() => Bokeh.documents.map((document) => document.roots()[0]).map((figure) =>
  figure.renderers.map((each) => each.data_source.data).filter((data) => data.smooth)
    .map((data) => [...data.smooth].map((value) => (Number.isFinite(value) ? value : null))))"""


def charts_js(page: Page, code: str, argument: Any) -> Any:
    """Return what JavaScript `code` makes of the module `charts` and the argument `x`."""
    program = f"async (x) => {{ const charts = await import('/static/charts.js'); return {code}; }}"
    return page.evaluate(program, argument)


LABELS = [
    ((0.9992, 0.99999, "%"), ["99.92 %", "99.94 %", "99.96 %", "99.98 %"]),
    ((0.0, 1.0, "%"), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
    ((5.94608, 5.94632, ""), ["5.94610", "5.94615", "5.94620", "5.94625", "5.94630"]),
    ((-0.00001, 0.00051, ""), ["0", "1e-4", "2e-4", "3e-4", "4e-4", "5e-4"]),
    ((0.99e-7, 2.6e-7, ""), ["1.0e-7", "1.5e-7", "2.0e-7", "2.5e-7"]),
    ((-0.09, 0.11, ""), ["-0.05", "0.00", "0.05", "0.10"]),
    ((12_339.9, 12_350.1, ""), ["12.340k", "12.342k", "12.344k", "12.346k", "12.348k", "12.350k"]),
    ((-1.0, 2.6e7, ""), ["0M", "5M", "10M", "15M", "20M", "25M"]),
]


def test_labels_of_an_axis_have_digits_enough_to_differ(page: Page) -> None:
    open_page(page, "/run/overview")
    found = charts_js(
        page, "x.map(([low, high, unit]) => charts.axisLabels(charts.axisTicks(low, high), unit))",
        [list(arguments) for arguments, _ in LABELS],
    )  # fmt: skip
    assert found == [labels for _, labels in LABELS]


def test_rounding_errors_of_a_constant_metric_do_not_fill_its_chart(page: Page) -> None:
    open_page(page, "/run/overview")
    values = [0.0, 1.0, 1234.0, -7.5, 1e-9]
    series = [[value, value * (1 + 1e-15), value, None] for value in values]
    for value, (low, high) in zip(values, charts_js(page, "x.map(charts.axisRange)", series), strict=True):
        assert low < value < high
        assert high - low >= 1e-3 * abs(value)


def test_axes_of_the_overview_have_labels_that_differ(page: Page) -> None:
    """The metrics of this run are constant but for the reward, and some were not measured."""
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "warning" else None)
    open_page(page, "/run/overview")
    axes = page.evaluate(AXES)
    assert len(axes) == 9
    for axis in axes:
        assert len(axis["labels"]) > 1 and len(set(axis["labels"])) == len(axis["labels"]), axis
        assert axis["high"] - axis["low"] > 5e-4 * abs(axis["high"]), axis
    assert problems == []  # such as "could not set initial ranges"


def test_a_step_without_rollouts_of_a_staleness_is_a_gap_in_its_line(browser: Browser, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "gaps", steps=0, groups=0)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 31):
            missing = {"by_staleness/2/reward"} if 3 < step < 22 and step != 10 else set()
            file.write(json.dumps({key: v for key, v in metrics_of(step).items() if key not in missing}) + "\n")
    server = ViewServer(run_dir)
    page = browser.new_context(base_url=server.url).new_page()
    open_page(page, "/run/staleness")
    lines = next(figure for figure in page.evaluate(LINES) if len(figure) > 1)
    server.close()
    joined = [[value is not None for value in line] for line in lines]
    assert [True] * 30 in joined
    assert [True] * 3 + [False, True, False] + [True] * 9 in joined


def test_charts_of_more_metrics_than_one_request_may_name_are_all_drawn(browser: Browser, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "many", steps=0, groups=0)
    rewards = {"reward/a": 0.5, "reward/b": 0.5}
    names = ("reward", "ess", "kl_behaviour_proximal_k3", "response_length", *rewards)
    more = rewards | {f"by_staleness/{n}/{name}": 0.5 for n in range(11) for name in names}
    with (run_dir / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(metrics_of(step) | more) + "\n" for step in (1, 2))
    server = ViewServer(run_dir)
    page = browser.new_context(base_url=server.url).new_page()
    open_page(page, "/run/staleness")
    read = page.locator(".readout").all_inner_texts()
    server.close()
    assert [text.count("staleness") for text in read] == [11] * len(names)
