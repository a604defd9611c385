"""The checks of a verified push: each server has loaded all weights, and gives a text the learner's logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from async_rl.errors import WeightSyncError
from async_rl.weights.push_report import Tolerance


def check_logprobs(name: str, served: Sequence[float], learners: Sequence[float], tolerance: Tolerance) -> None:
    """Check that the logprobs of a text that the server `name` computed agree with the learner's.

    Raises:
        WeightSyncError: they differ by more than `tolerance`.
    """
    if len(served) != len(learners):
        raise WeightSyncError(
            f"weight verification: {name} returned {len(served)} logprobs, the learner {len(learners)} for the same "
            "tokens: they must be as many"
        )
    differences = [abs(a - b) for a, b in zip(served, learners, strict=True)]
    mean, largest = sum(differences) / len(differences), max(differences)
    if not (mean <= tolerance.mean and largest <= tolerance.largest):
        raise WeightSyncError(
            f"weight verification: after the push {name} gives logprobs that differ from the learner's by "
            f"{mean:.2e} in the mean (allowed {tolerance.mean:.0e}) and up to {largest:.2e} (allowed "
            f"{tolerance.largest:.0e}): it does not serve the learner's weights, or rounds far more than "
            "other models in bfloat16. Check that model.path holds the same model on its host and the learner's; if it "
            "does, set another weight_sync.transport, or weight_sync.verify: false."
        )


def check_loaded(unloaded: Mapping[str, Sequence[str]]) -> None:
    """Check that no server has `unloaded` weights, {name of a server: names of weights}: all were NaN before the push.

    Raises:
        WeightSyncError: one has.
    """
    for name, weights in unloaded.items():
        if weights:
            raise WeightSyncError(
                f"weight verification: the push did not reach {len(weights)} weights of {name}, which would stay "
                f"as they were for the whole run: {', '.join(weights[:3])}. Its server does not load this model's "
                "weights under the names of its folder. Set another rollout.engine; if you know that training "
                "never changes these weights, set weight_sync.verify: false"
            )
