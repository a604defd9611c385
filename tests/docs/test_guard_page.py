"""The page on the guard: its example is a configuration that works, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from async_rl.config.loading import load_config
from async_rl.guard.signals import SIGNALS
from benchmarks.guard import CONFIG, read_records, signal_table, verdicts
from tests.kit.documents import DOCUMENTS, ROOT, blocks

PAGE = DOCUMENTS["docs/guard.md"]


def test_the_example_of_the_page_is_a_configuration_that_rolls_back(tmp_path: Path) -> None:
    (example,) = blocks(PAGE, "yaml")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": {"path": "x"}, **yaml.safe_load(example)}))
    config = load_config(tmp_path / "run.yaml")
    assert config.guard_action == "rollback" and config.eval.gold_reward == "my_rewards:is_right"


def test_the_page_names_each_signal_and_its_limit() -> None:
    assert set(re.findall(r"`guard/(\w+)`", PAGE)) == set(SIGNALS)
    assert set(re.findall(r"`guard\.(\w+)_limit`", PAGE)) == set(SIGNALS)


def test_the_page_quotes_what_the_guard_decides_on_the_recorded_runs() -> None:
    runs = read_records(ROOT / "benchmarks" / "results" / "guard_records.json")
    for words, has_gold in (("64 gold labels every 4 steps", True), ("no gold labels", False)):
        found = verdicts(runs, CONFIG, has_gold)
        numbers = f"{found.good} of {len(found.kept)} | {found.mean_kept:.2f} | {found.false_alarms} of {found.sound}"
        assert f"| {words} | {numbers} |" in PAGE
    tuning = (ROOT / "benchmarks" / "results" / "guard_tuning.md").read_text()
    shares = re.findall(r"(\d+ of \d+) over-optimised runs keep .*; (\d+) false alarms in (\d+ sound runs)\.", tuning)
    (with_gold, few, sound), (without, more, _) = shares
    said = f"there {with_gold} keep 0.9 with gold labels, and {without} without, with {few} and {more} false alarms in"
    assert f"{said} {sound}" in " ".join(PAGE.split())
    over = [run for run in runs if run.is_over_optimised]
    assert f"end at {sum(run.kept(run.versions[-1]) for run in over) / len(over):.2f} of their gain" in PAGE
    rows = {row[0]: row for row in signal_table(runs, CONFIG).rows}
    late = {name: int(row[-1]) for name, row in rows.items() if name != "shorter"}  # which one run alone meets, early
    assert late == {
        "kl_per_token": 4, "gold_correlation": 4, "gold_fall": 8, "kl": 8, "cut": 8, "repetition": 12, "proxy": 12,
        "longer": 16,
    }  # fmt: skip
    assert rows["kl_per_token"][4] == "10 of 20"
