"""Finds the results of an evaluation that have a name: results on a source of held-out prompts, and results of a
reward."""

from __future__ import annotations

from collections.abc import Mapping

_ON_SOURCE = {"eval/accuracy": "eval/accuracy/", "eval/reward": "eval/reward_on/"}
_OF_REWARD = "eval/reward/"
SHOWN = 8
"""The most names that a line of the console shows."""


def on_sources(values: Mapping[str, float], key: str) -> dict[str, float]:
    """Return the results on each source of held-out prompts, by its name, of the metric `key`; {} if it has none."""
    prefix = _ON_SOURCE.get(key, "\n")
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def of_rewards(values: Mapping[str, float]) -> dict[str, float]:
    """Return the mean held-out score of each of task.rewards by its name, without what they log besides."""
    named = {key.removeprefix(_OF_REWARD): value for key, value in values.items() if key.startswith(_OF_REWARD)}
    return {name: value for name, value in named.items() if "/" not in name}


def by_name(values: Mapping[str, float], key: str) -> str:
    """Return the results by name that belong to the metric `key` as ` (a 0.500, b 0.250)`, or nothing."""
    parts = [on_sources(values, key), of_rewards(values) if key == "eval/reward" else {}]
    told = ""
    for part in filter(None, parts):
        shown = [f"{name} {value:.3f}" for name, value in sorted(part.items())]
        shown[SHOWN:] = [f"{len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
        told += f" ({', '.join(shown)})"
    return told


def named_results(values: Mapping[str, float]) -> dict[str, float]:
    """Return all results by name, each under its words in a summary, such as `accuracy on gsm8k`."""
    found = {f"accuracy on {name}": value for name, value in on_sources(values, "eval/accuracy").items()}
    found |= {f"reward on {name}": value for name, value in on_sources(values, "eval/reward").items()}
    return found | {f"reward {name}": value for name, value in of_rewards(values).items()}
