"""What a step says about itself: additive token statistics, reduced over ranks, and batch metrics."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.metrics import Metric, Reduction
from async_rl.types import Batch
from learner.losses import kl_k1, kl_k3


class Tally:
    """Sums and maxima by name, kept on the device until `reduce` adds up all micro-batches of all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        """Add scalars to sums. Every rank must use the same names."""
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def peak(self, **values: Tensor) -> None:
        """Raise maxima to scalars that are at least 0."""
        for name, value in values.items():
            value = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduce(self) -> dict[str, float]:
        """Totals over all ranks; collective."""
        totals: dict[str, float] = {}
        for values, operation in ((self._sums, dist.ReduceOp.SUM), (self._maxima, dist.ReduceOp.MAX)):
            if values:
                names = sorted(values)
                stacked = torch.stack([values[name] for name in names])
                dist.all_reduce(stacked, op=operation)
                totals.update(zip(names, stacked.tolist(), strict=True))
        return totals


def tally_offpolicy(
    tally: Tally,
    proximal: Tensor,  # [N]
    behaviour: Tensor,  # [N]
    weights: Tensor,  # [N] importance weights, not truncated
    trained: Tensor,  # [N] bool
    comparable: Tensor,  # [N] bool: sampled by the weights being trained, from their own KV
    cap: float,
) -> None:
    """How far the data is from the policy at step start, over the trained tokens."""
    kept = torch.where(trained, weights, 0.0)
    difference = torch.where(trained & comparable, (behaviour - proximal).abs(), 0.0)
    tally.add(
        tokens=trained.sum(),
        weight=kept.double().sum(),
        weight_squared=kept.double().square().sum(),
        truncated=(kept > cap).sum(),
        k1=torch.where(trained, kl_k1(behaviour, proximal), 0.0).double().sum(),
        k3=torch.where(trained, kl_k3(behaviour, proximal), 0.0).double().sum(),
        comparable=(trained & comparable).sum(),
        mismatch=difference.double().sum(),
    )
    tally.peak(weight_max=kept.max())


def offpolicy_metrics(totals: dict[str, float]) -> list[Metric]:
    """Metrics of `tally_offpolicy`; ESS/N = (sum w)^2 / (N sum w^2) is raw: truncation hides the tail.

    The mismatch is left out where no token is comparable.
    """
    n = max(totals["tokens"], 1.0)
    mean = totals["weight"] / n
    values = {
        "offpolicy/is_weight_mean": mean,
        "offpolicy/is_weight_var": max(totals["weight_squared"] / n - mean**2, 0.0),
        "offpolicy/is_weight_max": totals["weight_max"],
        "offpolicy/ess": ratio(totals["weight"] ** 2, n * totals["weight_squared"]),
        "offpolicy/truncated_fraction": totals["truncated"] / n,
        "offpolicy/kl_behaviour_proximal": totals["k1"] / n,
        "offpolicy/kl_behaviour_proximal_k3": totals["k3"] / n,
    }
    if totals["comparable"]:
        values["mismatch/mean_abs"] = totals["mismatch"] / totals["comparable"]
    return [Metric(key, value, _reduction(key)) for key, value in values.items()]


def tally_policy(
    tally: Tally,
    entropy: Tensor,  # [N]
    advantages: Tensor,  # [N]
    clipped: Tensor,  # [N] bool
    trained: Tensor,  # [N] bool
) -> None:
    """Entropy, and how often the clip took the gradient of a token away, by the sign of its advantage."""
    positive, negative = trained & (advantages > 0), trained & (advantages < 0)
    tally.add(
        policy_tokens=trained.sum(),
        entropy=torch.where(trained, entropy, 0.0).sum(),
        positive=positive.sum(),
        negative=negative.sum(),
        clipped_positive=(clipped & positive).sum(),
        clipped_negative=(clipped & negative).sum(),
    )


def policy_metrics(totals: dict[str, float]) -> list[Metric]:
    """Metrics of `tally_policy`; a clip fraction is a share of the tokens with that sign."""
    return [
        Metric("policy/entropy", ratio(totals["entropy"], totals["policy_tokens"])),
        Metric("offpolicy/clip_fraction_positive", ratio(totals["clipped_positive"], totals["positive"])),
        Metric("offpolicy/clip_fraction_negative", ratio(totals["clipped_negative"], totals["negative"])),
    ]


def tally_critic(
    tally: Tally,
    values: Tensor,  # [N]
    returns: Tensor,  # [N]
    trained: Tensor,  # [N] bool
) -> None:
    """Moments from which `explained_variance` follows."""
    returns = torch.where(trained, returns, 0.0).double()
    residual = torch.where(trained, returns - values, 0.0).double()
    tally.add(
        critic_tokens=trained.sum(),
        returns=returns.sum(),
        returns_squared=returns.square().sum(),
        residual=residual.sum(),
        residual_squared=residual.square().sum(),
    )


def explained_variance(totals: dict[str, float]) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary."""
    n = max(totals["critic_tokens"], 1.0)
    unexplained = totals["residual_squared"] / n - (totals["residual"] / n) ** 2
    variance = totals["returns_squared"] / n - (totals["returns"] / n) ** 2
    return 1.0 - unexplained / variance if variance > 1e-12 else 0.0


def batch_metrics(batch: Batch) -> list[Metric]:
    """Reward, staleness and length metrics, and the buffer's counters as they came.

    Staleness of a rollout is that of its oldest token; `in_flight` is the part it aged while it was
    generated, `in_queue` the part it aged in the buffer, and they add up.
    """
    rollouts = [r for group in batch.groups for r in group.rollouts]
    rewards = np.array([r.reward for r in rollouts])
    lengths = np.array([len(r.tokens) for r in rollouts])
    oldest = np.array([int(r.versions.min()) for r in rollouts])
    finished = np.repeat(batch.finished_versions, [len(group.rollouts) for group in batch.groups])
    staleness = batch.version - oldest
    values = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "staleness/mean": staleness.mean(),
        "staleness/max": staleness.max(),
        "staleness/in_flight": (finished - oldest).mean(),
        "staleness/in_queue": (batch.version - finished).mean(),
        "batch/rollouts": len(rollouts),
        "batch/response_tokens": lengths.sum(),
        "response/length_mean": lengths.mean(),
        "response/length_max": lengths.max(),
        "response/truncated_fraction": np.mean([r.finish_reason == "length" for r in rollouts]),
        **batch.counters,
    }
    counts = enumerate(np.bincount(staleness))
    at_staleness = [Metric(f"staleness/rollouts_{k}", float(count), "sum") for k, count in counts if count]
    return [Metric(key, float(value), _reduction(key)) for key, value in values.items()] + at_staleness


def _reduction(key: str) -> Reduction:
    return "max" if key.endswith("max") else "mean"


def ratio(numerator: float, denominator: float) -> float:
    """numerator / denominator, 0 where there is nothing to divide by."""
    return numerator / denominator if denominator else 0.0
