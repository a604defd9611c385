"""The table that is printed at the end of a run."""

from async_rl.telemetry.summary_table import format_summary


def test_the_summary_is_a_table_of_what_was_measured() -> None:
    text = format_summary(
        {"accuracy_end": 0.8124, "eval_reward_end": 0.9, "staleness_max": 2.0, "push_ms": None, "tokens_per_s": 12345.6}
    )
    assert text.splitlines() == [
        "",
        "held-out accuracy, end   0.812",
        "held-out reward, end     0.900",
        "staleness, max               2",
        "tokens/s                12,346",
    ]


def test_the_results_on_each_held_out_source_and_of_each_reward_stand_in_the_table() -> None:
    text = format_summary({
        "steps": 5, "held_out": {
            "accuracy on gsm8k": {"start": 0.25, "end": 0.5}, "reward short": {"start": 0.1, "end": None},
        },
    })  # fmt: skip
    assert text.splitlines() == [
        "",
        "steps                                  5",
        "held-out accuracy on gsm8k, start  0.250",
        "held-out accuracy on gsm8k, end    0.500",
        "held-out reward short, start       0.100",
    ]


def test_the_alarms_of_a_run_stand_below_the_table() -> None:
    text = format_summary({"steps": 5, "alarms": "The run has stopped learning: the mean reward has fallen."})
    assert text.splitlines() == ["", "steps  5", "", "The run has stopped learning: the mean reward has fallen."]
