"""Held-out results by name: in a step's line, and in the summary of a run."""

from __future__ import annotations

from async_rl.base.telemetry.metrics_logger import format_step

VALUES = {
    "eval/accuracy": 0.5, "eval/accuracy/math": 0.25, "eval/accuracy/openai/gsm8k": 0.75,
    "eval/reward": 0.6, "eval/reward_on/math": 0.4, "eval/reward_on/openai/gsm8k": 0.8,
    "eval/reward/right": 0.5, "eval/reward/short": 0.2, "eval/reward/short/letters": 7.0, "eval/reward_of_right": 1.0,
}  # fmt: skip


def test_the_console_shows_results_on_each_source_and_of_each_reward() -> None:
    line = format_step(3, 9, VALUES)
    assert "0.500 (math 0.250, openai/gsm8k 0.750)" in line
    assert "0.600 (math 0.400, openai/gsm8k 0.800) (right 0.500, short 0.200)" in line
