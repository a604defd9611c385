"""Confidence intervals of held-out accuracies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from async_rl.base.telemetry.metrics import Metric, reduce_metrics

SQUARED = "eval/accuracy_squared"
"""The beginning of metrics that only the intervals need."""
Z = 1.96
"""Half the width of a 95 % interval, in standard errors."""


def with_intervals(
    values: Mapping[str, float], reduce: Callable[[Sequence[Metric]], dict[str, float]] = reduce_metrics
) -> dict[str, float]:
    """Return the metrics of an evaluation with the 95 % interval of each accuracy.

    The mean squares, which only the intervals need, are left out.

    Args:
        reduce: also keeps the declarations of the new metrics, if the metrics are those of a run.
    """
    kept = {key: value for key, value in values.items() if not key.startswith(SQUARED)}
    return kept | reduce(list(accuracy_intervals(values)))


def accuracy_intervals(values: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the ends of the 95 % interval of each accuracy in the metrics of an evaluation.

    The prompts are the sample, so several answers to one prompt don't narrow the interval as several prompts would.
    Two right and two wrong prompts are added to them, so the interval has a width even if all answers are right.
    Source: Agresti and Coull 1998, "Approximate is better than exact", for one answer to each prompt.
    """
    for key in [key for key in values if key == "eval/prompts" or key.startswith("eval/prompts/")]:
        of = key.removeprefix("eval/prompts")
        mean, squared = values.get(f"eval/accuracy{of}"), values.get(f"{SQUARED}{of}")
        if mean is not None and squared is not None:
            prompts = values[key]
            count = prompts + 4
            centre = (prompts * mean + 2) / count
            variance = max(0.0, (prompts * squared + 2) / count - centre**2)
            half = Z * math.sqrt(variance / count)
            for end, value in (("low", centre - half), ("high", centre + half)):
                yield Metric(f"eval/accuracy_{end}{of}", min(1.0, max(0.0, value)), over_steps="last")
