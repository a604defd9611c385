"""The comparison of commits by their losses finds a number that differs in its last bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from benchmarks.equal_losses import CASES, compare, report, write_inputs


def test_a_loss_that_differs_in_its_last_bit_is_found() -> None:
    old = {1: {"policy/loss": 0.1, "time/step_s": 1.0}, 2: {"policy/loss": 0.3, "kl/reference": 0.0}}
    new = {1: {"policy/loss": 0.1, "time/step_s": 2.0}, 2: {"policy/loss": 0.3, "policy/lr": 1.0}, 3: {}}
    same = compare(old, new, same_weights=True)
    assert same.are_equal and (same.steps, same.numbers) == (2, 2)
    assert same.only_in_one == ("kl/reference", "policy/lr")
    new[2]["policy/loss"] = math.nextafter(0.3, 1.0)
    other = compare(old, new, same_weights=True)
    assert not other.are_equal and other.different == ("2: policy/loss",)
    assert not compare(old, old, same_weights=False).are_equal
    page = report({("a", "GRPO"): other}, "b", "Made here.", "Rounding.")
    assert "| a | GRPO | 2 | 2 | 1 | yes |" in page and "- a, GRPO: 2: policy/loss\n\nRounding." in page


@pytest.mark.parametrize("case", CASES)
def test_the_settings_of_each_case_are_a_configuration(case: str, tmp_path: Path) -> None:
    assert load_config(write_inputs(tmp_path, 20), CASES[case]).staleness.max == 0
