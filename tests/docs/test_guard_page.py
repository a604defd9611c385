"""The page on the guard: its example is a configuration that works, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from async_rl.config.loading import load_config
from async_rl.guard.signals import SIGNALS
from benchmarks.guard import CONFIG, read_records, signal_table, verdicts
from benchmarks.over_optimisation import WITH_GOLD, WITHOUT, gone_back, read_curves
from benchmarks.reward_curves import by_kind
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


def test_the_page_quotes_what_the_guard_found_in_runs_of_three_stages() -> None:
    kinds = by_kind(read_curves(ROOT / "benchmarks" / "results" / "over_optimisation.json"))
    words = " ".join(PAGE.split())

    def found(kind: str, name: str) -> tuple[int, int, int]:
        """How many runs had trouble, and how many of these a version with 0.9 of the gain to go back to; all runs."""
        shares = [gone_back(each, each.troubles[name][1]) for each in kinds[kind] if name in each.troubles]
        return len(shares), sum(share >= 0.9 for share in shares), len(kinds[kind])

    acted, good, runs = found("no penalty, guard", WITH_GOLD)
    assert f"went back in {acted} of {runs} runs without a penalty, in {good} of them to a version with" in words
    (acted, good, _), (without, few, _) = (found("no penalty", name) for name in (WITH_GOLD, WITHOUT))
    assert f"it finds trouble in {acted} of {runs}, and such a version in {good}; without gold labels trouble" in words
    assert f"without gold labels trouble in {without} of {runs}, and such a version in {few}." in words
    (alarmed,) = (each for each in kinds["ppo.yaml"] if each.troubles)
    assert set(alarmed.troubles) == {WITH_GOLD, WITHOUT} and alarmed.gold[-1] < alarmed.gold[0] + 0.1
    assert f"it finds trouble in 1 of {len(kinds['ppo.yaml'])} runs, either way" in words


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
