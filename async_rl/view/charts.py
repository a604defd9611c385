"""The charts of the pages: which metrics stand in which chart, and in which unit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from async_rl.telemetry.figures import LAST_BUCKET, staleness_counted


@dataclass(frozen=True, slots=True)
class Chart:
    """Describes one chart of metrics over the steps: title, keys and unit. The page asks for the values separately."""

    title: str
    keys: tuple[tuple[str, str], ...]
    """The key of each metric and its name in the legend."""
    unit: str = ""
    """`%` for shares; else it is written behind the values."""
    note: str = ""
    each_step: bool = False
    """Whether a step without a value is a gap in the line. Otherwise points at their usual distance are joined."""

    def json(self) -> dict[str, object]:
        return {"title": self.title, "keys": self.keys, "unit": self.unit, "each_step": self.each_step}


OVERVIEW_CHARTS = (
    Chart(
        "Reward and held-out accuracy", (("reward/mean", "reward, mean"), ("eval/accuracy", "held-out accuracy")),
        note="Reward of the answers in the batch; accuracy on held-out prompts.",
    ),
    Chart(
        "Staleness", (("staleness/mean", "mean"), ("staleness/max", "max"), ("staleness/in_queue", "in queue")),
        "versions", "Versions between the oldest token of an episode and the learner that trains on it.",
    ),
    Chart(
        "Utilisation", (("utilisation/learner", "learner"), ("utilisation/rollout", "rollout"),
                        ("occupancy/rollout", "occupied slots")),
        "%", "Share of the step that a pool does useful work.",
    ),
    Chart(
        "Effective sample size", (("offpolicy/ess", "ESS / tokens"), ("offpolicy/ess_truncated", "after truncation")),
        "%", "1 is on-policy; below 30 % the data is too stale.",
    ),
    Chart(
        "KL divergence", (("offpolicy/kl_behaviour_proximal_k3", "behaviour → proximal"),
                          ("offpolicy/kl_proximal_learner_k3", "proximal → learner")),
        "nats a token", "How far the policy moved since it sampled, and within the step (k3).",
    ),
    Chart(
        "Throughput", (("throughput/trained_tokens_per_s", "trained tokens"),), "tokens/s",
        "Response tokens trained on, per second.",
    ),
    Chart(
        "Time of a step", (("time/step_s", "whole step"), ("time/wait_data_s", "waits for a batch"),
                           ("time/train_s", "update"), ("time/sync_s", "push")),
        "s", "What the learner's step is made of.",
    ),
    Chart(
        "Length of answers", (("response/length_mean", "mean"), ("response/length_max", "max")), "tokens",
        "Response tokens of the answers in the batch.",
    ),
    Chart("Entropy", (("policy/entropy", "entropy"),), "nats a token", "Entropy of the policy that is trained."),
)  # fmt: skip

EPISODE_CHARTS = (
    Chart(
        "Turns and tool calls", (("episode/turns", "turns"), ("episode/tool_calls", "tool calls"),
                                 ("episode/failed_tool_calls", "failed tool calls")),
        note="Means of an episode that ended in the step.",
    ),
    Chart(
        "Time of an episode", (("episode/duration_s", "whole"), ("episode/generate_s", "replies"),
                               ("episode/tool_s", "tool calls")),
        "s", "The rest is spent in environments and agents.",
    ),
    Chart(
        "How episodes end", (("episode/end_done", "done"), ("episode/end_length", "length"),
                             ("episode/end_turns", "turns"), ("episode/end_timeout", "timeout"),
                             ("episode/end_error", "error"), ("episode/end_failed", "failed")),
        "%", "By the environment or agent, a limit on tokens, turns or time, an agent's error, or a fault.",
    ),
)  # fmt: skip
"""The charts of runs with environments, tools or agents."""

_WHOLE_REWARDS = ("mean", "std", "rule_mean")
"""The metrics reward/... that are not of one of several rewards."""

_BY_STALENESS = (
    ("reward", "Reward by staleness", ""), ("ess", "ESS by staleness", "%"),
    ("kl_behaviour_proximal_k3", "KL behaviour → proximal by staleness", "nats a token"),
    ("response_length", "Length of answers by staleness", "tokens"),
)  # fmt: skip
_BY_LENGTH = (
    ("reward", "Reward by length", ""), ("ess", "ESS by length", "%"),
    ("kl_behaviour_proximal_k3", "KL behaviour → proximal by length", "nats a token"),
    ("staleness", "Staleness by length", "versions"),
)  # fmt: skip


def reward_names(keys: Iterable[str]) -> list[str]:
    """Return the names of the rewards, and of their metrics as <reward>/<metric>, that `keys` has."""
    found = (key.removeprefix("reward/") for key in keys if key.startswith("reward/"))
    return sorted(name for name in found if name not in _WHOLE_REWARDS)


def reward_charts(keys: Iterable[str]) -> list[Chart]:
    """Return a chart of the scores of the named rewards, and one of their metrics, where `keys` has any."""
    names = reward_names(keys)
    parts = (
        ("Rewards by name", "Mean score of the answers in the batch, before its weight.", lambda name: "/" not in name),
        ("Metrics of rewards", "Means over the answers in the batch.", lambda name: "/" in name),
    )
    charts = []
    for title, note, is_shown in parts:
        if lines := tuple((f"reward/{name}", name) for name in names if is_shown(name)):
            charts.append(Chart(title, lines, note=note))
    return charts


def staleness_buckets(keys: Iterable[str]) -> list[int]:
    """Return, in ascending order, the staleness values N for which `keys` has a metric `staleness/episodes_N`."""
    return sorted(staleness for key in keys if (staleness := staleness_counted(key)) is not None)


def staleness_charts(keys: Iterable[str]) -> list[Chart]:
    """Return charts of reward, ESS, KL and answer length, each with a line for every staleness that `keys` has.

    Rewards that have names have charts of their own. After them come charts of reward, ESS, KL and staleness with a
    line for every length, in powers of two.
    """
    keys = set(keys)
    charts = []
    of_rewards = [(f"reward/{name}", f"Reward {name} by staleness", "") for name in reward_names(keys)]
    for name, title, unit in (*_BY_STALENESS, *of_rewards):
        buckets = [n for n in range(LAST_BUCKET + 1) if f"by_staleness/{n}/{name}" in keys]
        lines = tuple((f"by_staleness/{n}/{name}", _staleness_text(n)) for n in buckets)
        if lines:
            charts.append(Chart(title, lines, unit, each_step=True))
    lengths = sorted(int(key.split("/")[1]) for key in keys if re.fullmatch(r"by_length/\d+/episodes", key))
    for name, title, unit in _BY_LENGTH:
        lines = tuple((f"by_length/{n}/{name}", _tokens_text(n)) for n in lengths if f"by_length/{n}/{name}" in keys)
        if lines:
            charts.append(Chart(title, lines, unit, each_step=True))
    return charts


def _staleness_text(bucket: int) -> str:
    return f"staleness {bucket}" + (" or more" if bucket == LAST_BUCKET else "")


def _tokens_text(least: int) -> str:
    return f"{least}..{2 * least - 1} tokens" if least > 1 else "1 token"
