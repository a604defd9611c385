"""The section alarms of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from async_rl.config.check import check
from async_rl.config.outputs import CheckpointConfig
from async_rl.config.section import Unbounded, section

Share = Annotated[Unbounded, Field(gt=0)]


@section("alarms")
class AlarmsConfig:
    """The alarms for a run that stops learning or loses what it has learned: their limits, and what an alarm does. The
    limits are those of docs/not-learning.md, which says how they were found."""

    action: Literal["note", "stop"] = "note"
    """note: an alarm has a line on the console, and a sentence at the end of the run. stop: the first one also ends the
    run, and its model is that of the checkpoint before the trouble, which is kept."""
    window_steps: PositiveInt = 5
    """Learner steps over which the metrics are means. The first such steps are the start of the run."""
    reward_limit: Share = 0.5
    """How far the mean reward of a window may fall below its best: as a share of what it has gained since the start, or
    of half of its standard deviation at the start where that is more. The newest n steps alone may fall by
    sqrt(window_steps / n) times as much. .inf: no alarm."""
    jump_limit: Share = 0.4
    """How much policy/entropy and the KL of a step, offpolicy/kl_behaviour_proximal_k3 and
    offpolicy/kl_proximal_learner_k3, all in nats a token, may rise together above their mean over the window before: as
    a share of that mean, or of 0.25 where that is more. .inf: no alarm."""
    stride_limit: Share = 2.8
    """How many times as far as usual a step may move the weights, policy/weight_change. Usual is the median of all
    steps before. .inf: no alarm."""
    cut_limit: Share = 0.5
    """How far the share of answers that are cut off may rise above its start. .inf: no alarm."""
    all_cut_limit: Share = 0.9
    """How large the share of answers that are cut off may be, from the first window on, where the mean reward is below
    half of eval.right_above. A caution, which never ends the run. .inf: no alarm."""
    repeated_limit: Share = 0.4
    """How far response/repeated_fraction, the share of prompts that get one and the same answer, may rise above its
    start. .inf: no alarm."""
    entropy_limit: NonNegativeFloat = 1e-3
    """The smallest entropy, in nats a token, of a policy that is not at its best reward. 0: no alarm."""
    gradient_limit: NonNegativeFloat = 1e-3
    """The smallest gradient norm, as a share of that at the start, of a policy that is not at its best reward. 0: no
    alarm."""


def check_alarms(alarms: AlarmsConfig, checkpoint: CheckpointConfig) -> None:
    """Check that a run which its alarms end writes checkpoints, of which it keeps the best."""
    check(
        alarms.action != "stop" or checkpoint.every_steps > 0, "checkpoint.every_steps", checkpoint.every_steps,
        "above 0 with alarms.action stop", "The run ends with the model of a checkpoint before the trouble.",
    )
