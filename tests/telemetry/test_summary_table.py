"""The table that is printed at the end of a run."""

from async_rl.base.telemetry.metrics_logger import format_summary


def rows(text: str) -> list[list[str]]:
    return [line.rsplit("  ", 1) for line in text.splitlines() if line]


def test_the_summary_is_a_table_of_what_was_measured_with_the_alarms_below() -> None:
    text = format_summary({
        "accuracy_end": 0.8124, "eval_reward_end": 0.9, "staleness_max": 2.0, "push_ms": None, "tokens_per_s": 12345.6,
        "alarms": "reward",
    })  # fmt: skip
    *table, alarms = rows(text)
    assert [value for _, value in table] == ["0.812", "0.900", "2", "12,346"] and alarms == ["reward"]
    assert len(set(map(len, text.splitlines()[1:5]))) == 1, "values stand below each other"


def test_the_results_on_each_held_out_source_and_of_each_reward_stand_in_the_table() -> None:
    text = format_summary({
        "steps": 5, "held_out": {
            "accuracy on gsm8k": {"start": 0.25, "end": 0.5}, "reward short": {"start": 0.1, "end": None},
        },
    })  # fmt: skip
    assert [(name.strip(), value.strip()) for name, value in rows(text)] == [
        ("steps", "5"), ("held-out accuracy on gsm8k, start", "0.250"), ("held-out accuracy on gsm8k, end", "0.500"),
        ("held-out reward short, start", "0.100"),
    ]


def test_the_end_of_a_run_shows_an_answer_before_and_after_and_what_to_type_next() -> None:
    example = {
        "question": "Spell\nabc backward", "before": "", "after": "c" * 1000, "reward_before": 0.25,
        "reward_after": 1.0, "chosen_from": 7,
    }  # fmt: skip
    compare = "async-rl train a.yaml --staleness 0 run.name=a-sync"
    text = format_summary({"steps": 5, "run_dir": "runs/a", "example": example}, compare)
    assert "Spell abc backward" in text and "of 7" in text and "0.25" in text
    assert max(map(len, text.splitlines())) < 250
    commands = [line.strip() for line in text.splitlines() if line.startswith("  async-rl ")]
    assert commands == ["async-rl view runs/a", compare, "async-rl init"]
