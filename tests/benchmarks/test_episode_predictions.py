"""Predictions for runs of episodes of several turns: what is read from journals, and what is simulated from it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.episode_times import measure_episodes
from benchmarks.late_policies import caution, policies_of_rows
from benchmarks.prediction import compare
from benchmarks.results import read_runs, rows_of
from benchmarks.simulate import Workload, simulate
from benchmarks.simulated_rollout import EpisodeTimes, GroupTimes
from buffer.journal.journal import FILE_NAME
from tests.benchmarks.episode_runs import make_episode_sweep, write_journal
from tests.benchmarks.test_plan import plan


def heavy_tails(num_groups: int, seed: int) -> tuple[GroupTimes, ...]:
    """Groups of 4 episodes: up to 30 turns by a Pareto distribution, tools of lognormal times, as `chain` has."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(num_groups):
        turns = int(min(30, 1 + rng.pareto(1.1)))
        tools_s = 0.1 * turns * rng.lognormal(-0.5, 1.0, 4)
        groups.append(GroupTimes(tuple(EpisodeTimes(turns, 0.05 * turns, tool_s) for tool_s in tools_s)))
    return tuple(groups)


TAILS = Workload(
    concurrency=64, prompts_per_step=8, train_s=1.2, train_cv=0.2, sync_s=0.02, group_mean_s=0.15, load_s=0.08,
    groups=heavy_tails(400, 0),
)  # fmt: skip
STEPS = 40


@pytest.fixture(scope="module")
def tails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_episode_sweep(tmp_path_factory.mktemp("tails"), TAILS, (0, 1, 4), STEPS, late_s=0.5)


def test_the_load_of_overlapping_groups_is_found_in_the_journal(tmp_path: Path) -> None:
    """A group alone samples its 10 tokens in 1 s, two at once take 2 s each: the engine is full."""
    alone, both = [(1, 1.0, 1.0, 10)], [(1, 2.0, 2.0, 10)]
    write_journal(tmp_path, [(0, 0.0, 1.5, alone), (1, 5.0, 2.0, both), (2, 5.0, 2.0, both)])
    found = measure_episodes(tmp_path)
    assert found is not None
    assert (found.alone_s, found.load_s) == pytest.approx((1.0, 1.0))
    times = GroupTimes((EpisodeTimes(1, 1.0, 0.0),))
    for group, rest_s in zip(found.groups, (0.5, 0.0, 0.0), strict=True):
        assert group.episodes[0].generate_s == pytest.approx(times.episodes[0].generate_s)
        assert group.rest_s == pytest.approx(rest_s)


def test_an_episode_that_is_alone_at_its_end_has_sampled_most_then(tmp_path: Path) -> None:
    """Four groups share a full engine until three short ones end, after 4 s; the long one goes on for 3 s, alone."""
    short, long = [(1, 4.0, 4.0, 10)], [(1, 7.0, 7.0, 40)]
    write_journal(tmp_path, [(0, 0.0, 4.0, short), (1, 0.0, 4.0, short), (2, 0.0, 4.0, short), (3, 0.0, 7.0, long)])
    found = measure_episodes(tmp_path)
    assert found is not None
    assert [group.duration_s for group in found.groups] == pytest.approx([1.0, 1.0, 1.0, 4.0], rel=1e-3)
    assert (found.alone_s, found.load_s) == pytest.approx((1.75, 1.75), rel=1e-3)


def test_turns_that_begin_together_take_most_of_the_time_of_sampling(tmp_path: Path) -> None:
    """Four groups share a full engine in their first turn, for 4 s. Each takes 1 s for its second one, alone, after
    tools of other times. A fifth group is alone in its only turn.
    """
    together = [(number, 0.0, 15.0 - 3 * number, [(2, 5.0, 15.0 - 3 * number, 20)]) for number in range(4)]
    write_journal(tmp_path, [*together, (4, 50.0, 1.0, [(1, 1.0, 1.0, 10)])])
    found = measure_episodes(tmp_path)
    assert found is not None
    assert [group.generate_s for group in found.groups] == pytest.approx([2.0, 2.0, 2.0, 2.0, 1.0], rel=0.02)


def test_an_engine_with_the_same_load_all_the_time_counts_as_full(tmp_path: Path) -> None:
    """Waves of eight groups, whose answers have other lengths, sample for 4 s each."""
    waves = [(number, 10.0 * (number // 8), 4.0, [(1, 4.0, 4.0, 10 + number % 5)]) for number in range(40)]
    write_journal(tmp_path, waves)
    found = measure_episodes(tmp_path)
    assert found is not None
    assert (found.alone_s, found.load_s) == pytest.approx((0.5, 0.5))


def test_an_engine_with_room_takes_as_long_under_load(tmp_path: Path) -> None:
    """Two episodes sample 1 and 3 s in 1 and 3 turns; the other 2 s of the second are for tools. Groups overlap."""
    episodes = [(1, 1.0, 1.0, 10), (3, 3.0, 5.0, 30)]
    write_journal(tmp_path, [(number, granted_s, 5.0, episodes) for number, granted_s in enumerate((0.0, 7.0, 7.5))])
    found = measure_episodes(tmp_path)
    assert found is not None
    assert (found.alone_s, found.load_s) == pytest.approx((2.0, 0.0), abs=1e-9)
    assert [group.duration_s for group in found.groups] == pytest.approx([5.0] * 3)


def test_a_run_without_episodes_or_journal_measures_none(tmp_path: Path) -> None:
    assert measure_episodes(tmp_path) is None
    write_journal(tmp_path, [])
    assert measure_episodes(tmp_path) is None
    write_journal(tmp_path, [(0, 0.0, 1.0, [(1, 1.0, 1.0, 10)])])
    assert measure_episodes(tmp_path) is not None
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("PRAGMA user_version = 1")
    assert measure_episodes(tmp_path) is None


def test_utilisation_with_long_tails_is_predicted_within_5_points(tails: Path) -> None:
    """The runs come from the simulator. Their journals have only what a worker measures, under the load there was."""
    found = compare(rows_of(read_runs(tails)))
    for measured in found:
        assert measured.predicted is not None
        assert measured.predicted.utilisation == pytest.approx(measured.learner, abs=0.05)
        assert measured.predicted.rollout == pytest.approx(measured.rollout, abs=0.05)
    assert found[2].learner > 1.5 * found[0].learner


def test_the_caution_says_what_other_policies_would_have_brought(tails: Path) -> None:
    text = caution(tails / "cells" / "staleness-1.seed-0")
    share = 0.5 * (STEPS - 1) / float(read_runs(tails)[1].summary["seconds"])
    assert text.startswith(
        f"caution: the learner waited for late episodes for {share:.0%} of its time (staleness.late: wait). Simulated "
        "with this run's durations, wait gives "
    )
    truth = simulate(TAILS, 1, STEPS).utilisation
    said = [int(word.rstrip("%;.")) for word in text.split() if word.rstrip(";.").endswith("%")]
    assert said[1] == pytest.approx(100 * truth, abs=5)
    assert "; drop gives " in text and "of the groups, " in text and "; mask gives " in text
    assert text.endswith("% of the tokens.") and text.count("steps a minute with the learner at") == 3


def test_a_run_that_hardly_waits_for_late_groups_is_not_cautioned(tails: Path, tmp_path: Path) -> None:
    cell = tails / "cells" / "staleness-1.seed-0"
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.yaml", "summary.json", FILE_NAME):
        (copy / name).write_bytes((cell / name).read_bytes())
    metrics = (cell / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(metrics.replace('late_s": 0.5', 'late_s": 0.01'))
    assert caution(copy) == ""
    (copy / "metrics.jsonl").write_text(metrics)
    assert caution(copy) != ""
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("late: wait", "late: drop"))
    assert caution(copy) == ""
    assert caution(tmp_path) == "", "there is no run"


def test_a_sweeps_report_and_its_plan_show_all_policies(tails: Path) -> None:
    table = policies_of_rows(rows_of(read_runs(tails)))
    assert table is not None
    assert [row[:2] for row in table.rows] == [[b, late] for b in "14" for late in ("wait", "drop", "mask")]
    text = plan("--staleness 0,1", tails)
    assert "400 measured groups" not in text and "measured groups are replayed" in text
    assert "Late groups: predicted with each policy" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 1 | ")]
    assert [row[1] for row in rows if row[1] in ("wait", "drop", "mask")] == ["wait", "drop", "mask"]
