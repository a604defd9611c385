"""The judgement on runs that collapse: its rules by hand, its committed records replayed, and a run of three steps."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from async_rl.config.alarms import AlarmsConfig
from benchmarks.collapse import (
    KEPT,
    WordsRecord,
    all_findings,
    findings,
    first_steps,
    read_records,
    timing,
    verdict,
    write_records,
)
from benchmarks.collapse_settings import JUDGED, TUNING, mechanism
from benchmarks.collapsing_runs import WordsRun, train
from tests.kit.documents import DOCUMENTS
from tests.kit.models import save_tiny_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "collapse"
SETTING = {"name": "x", "seed": 0, "lr": 1e-3, "staleness": 0}


def record_of(rewards: list[float], seen: list[float] | None = None) -> WordsRecord:
    """A run with these true rewards, of which the alarms see others, or the same."""
    records = [
        {"step": step, "true/reward": true, "reward/mean": reward, "reward/std": 0.2, "staleness/mean": 0.0}
        for step, (true, reward) in enumerate(zip(rewards, seen or rewards, strict=True), 1)
    ]
    return WordsRecord(SETTING, records)


def test_a_run_collapses_if_it_ends_with_less_than_half_of_its_gain() -> None:
    # the median of the five steps around each is the reward itself, but for a step alone
    record = record_of([0.2] * 5 + [0.8] * 7 + [0.0] * 5)
    assert record.rewards == [0.2] * 5 + [0.8] * 7 + [0.0] * 5
    assert record_of([0.5, 0.5, 0.0, 0.5, 0.5]).rewards == [0.5] * 5
    assert (record.best, record.kind) == (6, "collapsed") and record.gain == pytest.approx(0.6)
    assert record.half_lost == 13
    assert record.kept(9) == pytest.approx(1.0) and record.kept(0) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0.3] * 5 + [0.8] * 10 + [0.3] * 5, "collapsed"),
        ([0.5] * 10 + [0.1] * 10, "fell"),  # it has gained nothing, and lost more than half of its start
        ([0.5] * 20, "sound"),
        ([0.5] * 10 + [0.3] * 10, "sound"),
        ([0.5] * 6 + [0.0] * 6 + [0.8] * 8, "recovered"),
        ([0.2] * 6 + [0.8] * 6 + [0.2] * 6 + [0.8] * 6, "recovered"),
    ],
)
def test_runs_are_sound_collapsed_fell_or_recovered(rewards: list[float], kind: str) -> None:
    assert record_of(rewards).kind == kind


def test_a_collapse_is_noticed_by_an_alarm_before_half_of_the_gain_is_lost() -> None:
    true, config = [0.2] * 5 + [0.8] * 10 + [0.0] * 10, AlarmsConfig(window_steps=1)
    early = record_of(true, [0.8, 0.2, *true[2:]])
    in_time = record_of(true)
    late = record_of(true, [0.2] * 5 + [0.8] * 15 + [0.0] * 5)
    assert [record.half_lost for record in (early, in_time, late)] == [16, 16, 16]
    assert [first_steps(record, config) for record in (early, in_time, late)] == [
        {"reward": 2}, {"reward": 16}, {"reward": 21}
    ]
    assert [timing(record, config) for record in (early, in_time, late)] == ["too early", "at the same step", "late"]
    sooner = record_of(true, [*true[:14], 0.4, *true[15:]])
    assert timing(sooner, config) == "before"
    assert [timing(record_of(reward), config) for reward in ([0.5] * 9, true[:15])] == ["never", "never"]
    sound = [record_of([0.5] * 9), record_of([0.5, 0.5, 0.2] + [0.5] * 9)]
    found = verdict([early, sooner, in_time, late, *sound], config)
    keys = ("collapses", "noticed", "at the same step", "late", "too early", "sound", "false")
    assert [found[key] for key in keys] == [4, 1, 1, 1, 1, 2, 1]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    setting = WordsRun("x", 3, 1e-3)
    records = [{"step": float(step), **dict.fromkeys(KEPT, step / 3)} for step in (1, 2)]
    write_records([(setting, records)], tmp_path / "some.json")
    (found,) = read_records(tmp_path / "some.json")
    assert found.setting["name"] == "x" and found.setting["seed"] == 3
    assert [each["step"] for each in found.records] == [1.0, 2.0]
    assert [each["policy/entropy"] for each in found.records] == [0.3333, 0.6667]


def test_a_run_in_one_process_has_the_metrics_and_the_staleness(tmp_path: Path) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    torch.set_num_threads(1)
    records = list(train(WordsRun("x", 0, 1e-3, staleness=1, steps=3), tmp_path / "model"))
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(set(KEPT) <= record.keys() for record in records)
    # the second batch was sampled by version 0, too, and trained by version 1
    assert [record["staleness/mean"] for record in records] == [0.0, 1.0, 1.0]


def test_the_quoted_figures_are_those_of_the_committed_records() -> None:
    numbers = json.loads((RESULTS / "alarms.json").read_text())
    page = " ".join(DOCUMENTS["docs/not-learning.md"].split())
    for name, found in numbers.items():
        assert found == pytest.approx(verdict(read_records(RESULTS / f"{name}.json"), AlarmsConfig()))
    rows = {name: mechanism_rows(name) for name in numbers}
    for words, found in {
        "of the 94: all": numbers["tuning"], "of the 36: all": numbers["judged"],
        "of these, a rate that is raised at once": rows["judged"]["raised"],
        "of these, a rate that grows by 3% to 12% a step": rows["judged"]["growing"],
        "of these, a rate that rises to 8e-3 by its schedule": rows["judged"]["rising"],
        "of these, advantages of the wrong sign": rows["judged"]["wrong sign"],
        "of these, six passes without any clip": rows["judged"]["no clip"],
    }.items():
        keys = ("collapses", "noticed", "at the same step", "late", "too early")
        assert f"| {words} | {' | '.join(str(int(found[key])) for key in keys)} |" in page
    tuning, judged = numbers["tuning"], numbers["judged"]
    assert f"sound runs: {tuning['false']} of {tuning['sound']}, and {judged['false']} of {judged['sound']} of" in page
    assert quoted(page, r"goes back has ([\d.]+) of .*?, and ([\d.]+) over the") == [
        pytest.approx(each["kept"], abs=0.005) for each in (tuning, judged)
    ]
    assert (len(TUNING), len(JUDGED)) == (94, 36)


def mechanism_rows(name: str) -> dict[str, dict[str, float]]:
    """The verdict on the runs that collapse in each way, by its name."""
    records = read_records(RESULTS / f"{name}.json")
    ways = {mechanism(record.setting["name"]) for record in records}
    return {
        way: verdict([each for each in records if mechanism(each.setting["name"]) == way], AlarmsConfig())
        for way in ways
    }


def test_the_quoted_strides_and_delays_are_those_of_the_records() -> None:
    page = " ".join(DOCUMENTS["docs/not-learning.md"].split())
    tuning, judged = (read_records(RESULTS / f"{name}.json") for name in ("tuning", "judged"))

    def longest(record: WordsRecord) -> float:
        return max(each.measured["stride"].value for each in all_findings(record, AlarmsConfig()))

    def of(*ways: str) -> list[WordsRecord]:
        return [each for each in (*tuning, *judged) if mechanism(each.setting["name"]) in ways]

    assert min(map(longest, of("raised"))) == pytest.approx(3.6, abs=0.05) and "at least 3.6 times as far as" in page
    sound = [each for each in tuning + judged if each.kind == "sound"]
    strides = {each.setting["name"]: longest(each) for each in sound if "advantages" not in each.setting["name"]}
    assert max(strides.values()) == pytest.approx(2.6, abs=0.05)
    others = [value for name, value in strides.items() if "rising" not in name]
    assert max(others) == pytest.approx(1.4, abs=0.05) and "at most 2.6 times" in page and "else 1.4 times" in page

    def delays(*ways: str) -> list[int]:
        collapses = [each for each in of(*ways) if each.kind == "collapsed"]
        return [next(findings(each, AlarmsConfig())).version - (each.half_lost or 0) for each in collapses]

    growing = delays("growing")
    early, late = [delay for delay in growing if delay < 0], [delay for delay in growing if delay > 0]
    assert (-max(early), -min(early), len(early), len(growing)) == (2, 8, 7, 10) and (min(late), max(late)) == (3, 6)
    assert "2 to 8 steps before half is lost in 7 of 10 collapses, and 3 to 6 steps after" in page
    slow = delays("wrong sign")
    assert (min(slow), max(slow)) == (1, 4) and "is noticed 1 to 4 steps after half is lost" in page
    false = verdict(tuning, AlarmsConfig(reward_limit=0.35))["false"]
    assert false == 12 and "0.35 twelve of the 43 sound runs" in page


def test_no_two_runs_have_a_seed_and_the_judged_ones_collapse_in_several_ways() -> None:
    assert len({run.seed for run in (*TUNING, *JUDGED)}) == len(TUNING) + len(JUDGED)
    assert len({mechanism(run.name) for run in JUDGED}) >= 7
    assert [mechanism(name) for name in ("no clip, growing by 1%", "3e-4")] == ["no clip", "a constant rate"]


def quoted(page: str, pattern: str) -> list[float]:
    found = re.search(pattern, page)
    assert found, pattern
    return [float(text) for text in found.groups()]


def test_the_quoted_steps_of_the_alarms_are_those_of_the_committed_records() -> None:
    page = " ".join(DOCUMENTS["docs/not-learning.md"].split())
    collapses = [each for each in read_records(RESULTS / "tuning.json") if each.kind == "collapsed"]
    config, without = AlarmsConfig(), AlarmsConfig(jump_limit=math.inf)
    late: dict[int, set[int]] = {}
    for record in collapses:
        if mechanism(record.setting["name"]) == "raised" and record.half_lost is not None:
            steps = first_steps(record, without)["reward"] - record.half_lost
            late.setdefault(record.setting["staleness"], set()).add(steps)
    assert late == {0: {0, 1}, 2: {3}, 3: {3}, 4: {4}, 8: {8}}
    assert "is 0 or 1 step late where" in page and "At staleness 2 to 8 it is up to 8 steps late" in page
    firsts = [first_steps(record, config) for record in collapses]
    gaps = [first["gradient"] - first["reward"] for first in firsts if "gradient" in first]
    assert quoted(page, r"`gradient` follows (\d+) to (\d+) steps") == [min(gaps), max(gaps)]


def test_the_quoted_rewards_and_entropies_are_those_of_the_committed_records() -> None:
    page = " ".join(DOCUMENTS["docs/not-learning.md"].split())
    records = read_records(RESULTS / "tuning.json")

    def named(*names: str) -> list[WordsRecord]:
        return [record for record in records if record.setting["name"] in names]

    def ends(runs: list[WordsRecord]) -> list[float]:
        return [round(record.rewards[-1], 2) for record in runs]

    plain = ends(named("2e-4", "3e-4"))
    assert quoted(page, r"all runs learn \(reward ([\d.]+) to ([\d.]+) after 80 steps") == [min(plain), max(plain)]
    assert quoted(page, r"3e-4 and 5e-4 reach ([\d.]+) and ([\d.]+) after 60") == ends(
        named("four epochs, 3e-4", "four epochs, 5e-4")
    )
    rising = [each for each in records if re.search("four epochs, rising to [48]e-3", each.setting["name"])]
    assert len(rising) == 7 and set(ends(rising)) == {0.0} and "at 0 in seven of seven runs" in page
    (adapters,), (rank_4,) = named("adapters, 3e-3"), named("adapters, two epochs, 2e-3")
    for record, pattern in (
        (adapters, r"more slowly, from ([\d.]+) to ([\d.]+) at its best"),
        (rank_4, r"rank 4 goes from ([\d.]+) to ([\d.]+)\."),
    ):
        assert quoted(page, pattern) == [round(record.start, 2), round(record.rewards[record.best - 1], 2)]

    def entropies(runs: list[WordsRecord], step: int) -> list[float]:
        return [record.records[step]["policy/entropy"] for record in runs]

    sound = [each for each in records if each.kind == "sound" and "bonus" not in each.setting["name"]]
    first, last = entropies(sound, 0), entropies(sound, -1)
    assert quoted(page, r"falls from ([\d.]+) to ([\d.]+) nats a token to ([\d.]+) to ([\d.]+)\.") == [
        round(end, 1) for end in (min(first), max(first), min(last), max(last))
    ]
    small, large = named("entropy bonus of 0.05", "entropy bonus of 0.1")
    assert quoted(page, r"it ends at ([\d.]+) and the reward is ([\d.]+), as") == [
        round(entropies([small], -1)[0], 2), *ends([small])
    ]
    assert quoted(page, r"rises to ([\d.]+) half-way, and the reward ends at ([\d.]+)\.") == [
        round(entropies([large], len(large.records) // 2)[0], 1), *ends([large])
    ]
    lost = entropies([each for each in records if each.kind == "collapsed"], -1)
    assert quoted(page, r"it ends between ([\d.]+) and ([\d.]+)\.") == [round(min(lost), 1), round(max(lost), 1)]
