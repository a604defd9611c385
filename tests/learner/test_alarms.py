from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from async_rl.config import AlgorithmConfig, Config, CorrectionConfig, RunConfig
from async_rl.config.loading import load_config
from async_rl.driver.run_log import RunLog
from async_rl.errors import ConfigError
from async_rl.messages.reports import StepDone
from async_rl.telemetry.metrics import Metric
from learner.alarms import Alarms, rules_for
from tests.kit.configs import learner_config
from tests.kit.learner.fakes import FakePublisher, open_learner

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
BAD = {
    "offpolicy/ess": 0.29,
    "offpolicy/kl_behaviour_proximal": -0.11,
    "offpolicy/truncated_fraction": 0.06,
    "mismatch/mean_abs": 0.02,
    "vtrace/reach": 0.4,
    "policy/skipped_steps": 1.0,
    "critic/skipped_steps": 1.0,
}
GOOD = {**dict.fromkeys(BAD, 0.0), "offpolicy/ess": 0.9, "vtrace/reach": 0.9}


def metrics_of(values: dict[str, float]) -> list[Metric]:
    return [Metric(key, value) for key, value in values.items()]


def new_alarms() -> Alarms:
    return Alarms(rules_for(torch.float32))


@pytest.mark.parametrize("key", BAD)
def test_each_alarm_names_the_metric_its_value_the_threshold_and_a_knob_that_exists(key: str) -> None:
    (text,), states = new_alarms().check(7, metrics_of({**GOOD, key: BAD[key]}))
    (rule,) = [rule for rule in rules_for(torch.float32) if rule.key == key]
    assert f"step 7: {key} is {BAD[key]:.3g}," in text and f" {rule.limit:g}:" in text
    assert [m.key for m in states if m.value] == [f"alarm/{rule.name}"]
    knobs = re.findall(r"\b[a-z_]+\.[a-z_.]*[a-z_]", text.split(":", 2)[2])
    assert knobs
    for knob in knobs:
        with pytest.raises(ConfigError) as caught:
            load_config(QUICKSTART, [f"{knob}=[[]]"])
        assert "unknown key" not in str(caught.value)


def test_no_alarm_fires_within_its_limit_or_at_it() -> None:
    at = {rule.key: rule.limit for rule in rules_for(torch.float32)}
    for values in (GOOD, at):
        texts, states = new_alarms().check(1, metrics_of(values))
        assert texts == () and {metric.value for metric in states} == {0.0}


def test_an_alarm_fires_once_until_its_condition_clears_and_then_again() -> None:
    alarms = new_alarms()
    fired = []
    for step, ess in enumerate((0.9, 0.2, 0.1, None, 0.2, 0.5, 0.25, math.nan)):
        texts, states = alarms.check(step, [] if ess is None else [Metric("offpolicy/ess", ess)])
        fired.append(len(texts))
        assert [metric.value for metric in states] == ([] if ess is None else [float(not ess >= 0.3)])
    assert fired == [0, 1, 0, 0, 0, 0, 1, 0]


def test_the_mismatch_of_bfloat16_has_more_room() -> None:
    texts, _ = Alarms(rules_for(torch.bfloat16)).check(1, [Metric("mismatch/mean_abs", 0.05)])
    assert texts == ()


@pytest.mark.parametrize(("kind", "is_watched"), [("token_tis", True), ("none", False)])
def test_truncated_weights_are_watched_only_where_the_loss_has_weights(
    kind: str, is_watched: bool, tiny_model_path: Path, tmp_path: Path, publisher: FakePublisher, fake_buffer: None
) -> None:
    """Without them the share of ratios beyond the cap is a measure of staleness, whatever the cap is."""
    algorithm = AlgorithmConfig(correction=CorrectionConfig(kind=kind))
    learner = open_learner(tiny_model_path, run=RunConfig(steps=1, dir=str(tmp_path)), algorithm=algorithm)
    (report,) = learner.run()
    keys = {metric.key for metric in report.metrics}
    assert "offpolicy/truncated_fraction" in keys
    assert ("alarm/truncated" in keys, "alarm/kl" in keys) == (is_watched, True)


def test_an_alarm_reaches_the_console_and_wandb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts: list[str] = []

    class Wandb:
        def log(self, record: dict[str, float], completions: object, figures: object) -> None: ...

        def close(self) -> None: ...

        def alert(self, text: str) -> None:
            alerts.append(text)

    def open_fake(config: Config, run_dir: Path, note: object) -> Wandb:
        return Wandb()

    monkeypatch.setattr("async_rl.telemetry.metrics.open_wandb_run", open_fake)
    log = RunLog(learner_config(tmp_path / "none"))
    log.add("learner/0", StepDone(version=1, alarms=("ALARM at step 1: too stale",)))
    log.close()
    assert alerts == ["ALARM at step 1: too stale"]
    assert "ALARM at step 1: too stale" in capsys.readouterr().out
