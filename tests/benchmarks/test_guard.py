"""The worth of the guard: of runs by hand, and of the recorded ones, whose page says what the guard decides today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rl.guard.signals import SIGNALS
from benchmarks.guard import (
    CONFIG,
    JUDGED,
    TUNING,
    RecordedRun,
    curve_of,
    findings,
    first_trouble,
    made,
    page_of,
    read_records,
    signal_versions,
    trained,
    verdicts,
    write_records,
)
from benchmarks.over_optimised_letters import (
    END,
    EVERY,
    PADDING,
    LettersRun,
    Record,
    gold_reward,
    letters_of,
    mask_of,
    sample,
    supervised,
    token_logprobs,
)
from tests.kit.documents import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def run(gold: Sequence[float], hacked_from: int = 1000) -> RecordedRun:
    """A run with these gold rewards, of variance 1, every EVERY steps; its KL and its reward jump at a step."""
    records: list[Record] = []
    for number, value in enumerate(gold):
        version = number * EVERY
        for step in range(version - EVERY + 1, version + 1):
            if step > 0:
                is_hacked = step >= hacked_from
                records.append({
                    "step": step, "batch/episodes": 96.0, "kl/reference": 1.5 if is_hacked else 0.1,
                    "response/length_mean": 10.0, "reward/mean": 4.0 if is_hacked else 0.0, "reward/std": 1.0,
                })  # fmt: skip
        records.append({
            "step": version, "true/gold": value, "true/kl": number * 2.0, "eval/gold": value,
            "eval/gold_squared": value**2 + 1, "eval/gold_labels": 64.0, "eval/proxy": 0.0, "eval/proxy_squared": 1.0,
            "eval/gold_times_proxy": 0.5,
        })  # fmt: skip
    return made(LettersRun("by hand", 0), records)


FALLS = run([0, 1, 2, 3, 3, 1, -1], hacked_from=13)
STAYS = run([0, 1, 2, 3, 3, 3, 3], hacked_from=21)


def test_a_run_that_loses_its_gain_is_told_from_one_that_does_not() -> None:
    # means over neighbours: 0.5 1 2 2.67 2.33 1 0
    assert FALLS.is_over_optimised and FALLS.gain == pytest.approx(13 / 6)
    assert FALLS.kept(12) == 1 and FALLS.kept(24) == pytest.approx(-0.5 / (13 / 6)) and FALLS.falls_at == 16
    assert not STAYS.is_over_optimised and STAYS.falls_at == 24


def test_the_guard_goes_back_by_gold_rewards_or_by_two_kinds_of_signals() -> None:
    # 2.33 is 4.6 standard errors of 192 labels below 2.67, which is that of versions 8, 12 and 16
    with_gold = findings(FALLS.records, CONFIG, has_gold=True)
    found = first_trouble(with_gold)
    assert found and (found.version, found.back_to, found.beyond) == (20, 12, ("gold_fall",))
    found = first_trouble(findings(FALLS.records, CONFIG, has_gold=False))
    assert found and (found.version, found.back_to) == (16, 4)
    assert signal_versions(with_gold) == {"kl": 16, "kl_per_token": 16, "proxy": 16, "gold_fall": 20}
    assert first_trouble(findings(STAYS.records, CONFIG, has_gold=True)) is None


def test_what_is_kept_and_false_alarms_are_counted() -> None:
    with_gold, without = (verdicts([FALLS, STAYS], CONFIG, has_gold) for has_gold in (True, False))
    assert (with_gold.kept, with_gold.good, with_gold.sound, with_gold.false_alarms) == ([1.0], 1, 1, 0)
    assert without.kept == [pytest.approx(0.5 / (13 / 6))]
    assert (without.good, without.sound, without.false_alarms) == (0, 1, 1)


def test_records_that_are_read_again_give_the_same_page(tmp_path: Path) -> None:
    write_records([FALLS, STAYS], tmp_path / "records.json")
    assert page_of(read_records(tmp_path / "records.json"), CONFIG) == page_of([FALLS, STAYS], CONFIG)


def test_a_curve_has_the_true_kl_and_gold_of_each_evaluation() -> None:
    curve = curve_of(FALLS)
    assert curve.kl.tolist() == [0, 2, 4, 6, 8, 10, 12] and curve.proxy.tolist() == [0] * 7
    assert curve.gold.tolist() == [0, 1, 2, 3, 3, 1, -1] and curve.kind == "no penalty"


def test_the_gold_reward_of_letters_is_that_of_their_rule() -> None:
    answers = [
        [0, 0, 1, 1, 2, 2, 3, 3],  # each good letter twice
        [0, 0, 0, 0, 8],  # 2 - 0.5 * 2, and a letter that is neither
        [*[8] * 10, 4],  # one bad letter, and three too many
        [4, 5, 8],  # of the other class: two good letters and a bad one
    ]
    tokens = torch.tensor([[([*answer, END] + [PADDING] * 16)[:16] for answer in answers]])
    assert mask_of(tokens).sum(2).tolist() == [[9, 6, 12, 4]]
    assert gold_reward(torch.tensor([[0, 0, 0, 1]]), letters_of(tokens))[0].tolist() == pytest.approx([8, 1, -1.9, 1])


def test_logprobs_are_those_by_which_answers_are_sampled() -> None:
    rng = torch.Generator().manual_seed(0)
    policy = supervised(steps=3)
    answers = sample(policy, torch.zeros(1, 4000, dtype=torch.long), rng)
    assert (answers[0, :, 0] < END).all(), "an answer has a letter at least"
    logprobs = token_logprobs(policy, torch.zeros(1, 4000, dtype=torch.long), answers)[0, :, 0].exp()
    for letter in range(3):
        is_first = answers[0, :, 0] == letter
        assert is_first.float().mean().item() == pytest.approx(logprobs[is_first][0].item(), abs=0.02)


def test_runs_of_letters_have_all_that_the_guard_reads() -> None:
    setting = LettersRun("short", 3, comparisons=16, beta=0.1, steps=EVERY)
    first, second = trained([(setting, 2)])
    assert (first.setting.seed, second.setting.seed) == (3, 4) and first.gold != second.gold
    assert [int(record["step"]) for record in first.records] == [0, *range(1, EVERY + 1), EVERY]
    (found,) = findings(first.records, CONFIG, has_gold=False)
    assert set(found.values) == {name for name, signal in SIGNALS.items() if signal.kind != "gold"}
    curve = curve_of(first)
    assert curve.kl[0] == 0 and curve.kl[1] != 0 and curve.proxy[0] == pytest.approx(0, abs=0.5)


def test_the_recorded_runs_have_other_settings_and_seeds_than_those_of_tuning() -> None:
    runs = read_records(RESULTS / "guard_records.json")
    assert [each.setting for each in runs] == [
        replace(first, seed=first.seed + number) for first, count in JUDGED for number in range(count)
    ]  # fmt: skip
    over = sum(each.is_over_optimised for each in runs)
    assert over >= 10 and len(runs) - over >= 10
    tuned = {(each.comparisons, each.lr, each.beta, each.is_gold) for each, _ in TUNING}
    assert not tuned & {(each.comparisons, each.lr, each.beta, each.is_gold) for each, _ in JUDGED}
    assert not {each.seed + n for each, count in TUNING for n in range(count)} & {each.setting.seed for each in runs}


def test_the_committed_page_says_what_the_guard_decides_today() -> None:
    runs = read_records(RESULTS / "guard_records.json")
    assert page_of(runs, CONFIG) in (RESULTS / "guard.md").read_text()
    found = verdicts(runs, CONFIG, has_gold=True)
    assert found.good >= 0.8 * len(found.kept) and found.false_alarms <= 0.1 * found.sound
