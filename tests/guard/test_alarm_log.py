from __future__ import annotations

from async_rl.config.alarms import AlarmsConfig
from async_rl.guard.alarm_log import AlarmLog, alarm_texts

SOUND = {"reward/mean": 0.9, "reward/std": 0.5, "response/truncated_fraction": 0.0, "alarm/kl": 0.0}


def new_log() -> AlarmLog:
    return AlarmLog(AlarmsConfig(window_steps=1), right_above=1.0)


def test_a_run_without_alarms_has_no_sentence() -> None:
    log = new_log()
    states = {"alarm/reward": 0.0, "alarm/cut": 0.0, "alarm/all_cut": 0.0}
    assert [log.add(version, SOUND) for version in (1, 2)] == [states, states]
    assert log.sentence() == "" and log.take_new() == log.take_over() == []


def test_the_sentence_tells_the_alarms_that_are_on_and_those_that_were() -> None:
    log = new_log()
    cut, far = {"response/truncated_fraction": 1.0}, {"alarm/kl": 1.0}
    for version, step in enumerate(({}, far, {}, far, {"reward/mean": 0.1}, {"reward/mean": 0.05} | cut), 1):
        states = log.add(version, SOUND | step)
    assert states == {"alarm/reward": 1.0, "alarm/cut": 1.0, "alarm/all_cut": 1.0}
    assert log.sentence() == (
        "The run has stopped learning: the mean reward has fallen from 0.9 to 0.05; 100% of the "
        "answers are cut off, 0% at the start. 100% of the answers are cut off, 0% at the start, and rewards are low. "
        "Alarms: kl at 2 steps, the last was 4, reward since step 5, cut since step 6, all_cut since step 6 "
        "(docs/not-learning.md)"
    )
    log.add(7, SOUND)
    assert log.sentence() == (
        "Alarms: kl at 2 steps, the last was 4, reward at 2 steps, the last was 6, cut at 1 step, the last was 6, "
        "all_cut at 1 step, the last was 6 (docs/not-learning.md)"
    )


def test_a_new_alarm_has_a_line_that_says_what_to_change() -> None:
    log = new_log()
    for version, reward in enumerate((0.9, 0.1, 0.1), 1):
        log.add(version, SOUND | {"reward/mean": reward})
    (found,) = log.take_new()
    (text,) = alarm_texts(found)
    assert text.startswith("ALARM at step 2: the mean reward has fallen from 0.9 to 0.1. The")
    assert "learner.lr" in text and log.take_new() == []


def test_an_alarm_is_over_once_it_is_measured_and_back_in_its_range() -> None:
    log, far = new_log(), {"alarm/kl": 1.0}
    told = []
    for version, step in enumerate(({}, far, far, {}, {}, far, {"reward/mean": 0.1}, {}), 1):
        values = SOUND | step
        if version == 4:
            del values["alarm/kl"]
        log.add(version, values)
        told.append(log.take_over())
    assert told == [
        [], [], [], [], ["step 5: the alarm kl, on since step 2, is over"], [],
        ["step 7: the alarm kl, on since step 6, is over"], ["step 8: the alarm reward, on since step 7, is over"],
    ]


def test_a_caution_has_no_sentence_that_the_run_has_stopped_learning() -> None:
    log = new_log()
    log.add(1, {"reward/mean": 0.1, "response/truncated_fraction": 1.0})
    assert log.sentence() == (
        "100% of the answers are cut off, 100% at the start, and rewards are low. Alarms: all_cut since step 1 "
        "(docs/not-learning.md)"
    )
