"""How far the logprobs of engine and learner differ for tokens of equal version: sums, and the metrics `parity/...`.

    d = learner's logprob - engine's logprob,  w = exp(d),  n tokens of one axis

If q is the engine's true sampling distribution, the mean of w is 1, whatever the learner's p. If q leaves out tokens
that p has, the mean of w is the mass that q has kept. An engine at temperature T (1 + e) instead of T has
d = e (log q + H) + O(e^2), where H is the entropy of the token's distribution p: so e is the slope of d over log q + H.
If the tokens were really sampled from q, the mean of w (log p + H) is 0, whatever p. It is above 0 for an engine that
leaves out unlikely tokens.

Standard errors are those without an error in the engine. Then w - 1 and w (log p + H) have mean 0 for each token, given
all tokens before it. So they are uncorrelated, and the variance of their sum is the sum of their squares. Products of d
and log q + H may be correlated along a row. So the error of the slope takes the sum of a row as one observation.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from async_rl.base.config import Sampling
from async_rl.base.telemetry.metrics import Metric
from learner.algorithms.diagnostics import MetricAccumulator, Totals
from learner.algorithms.losses import bounded_exp, sum_by_row
from learner.packing import ResponseTokens

AXES = ("precision", "old_kv")
"""Two kinds of tokens. precision: the whole context has KV of the token's version. old_kv: sampled after a push in
place, so the context may have KV of older weights, while the learner computes the context with its own weights."""
MASS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""[compute type] how much the learner's and the engine's probability of a support (the ids drawn from) may differ."""
_SMALLEST, _BINS_A_DECADE, _DECADES = 1e-9, 20, 11
"""|d| is counted in bins from 1e-9 to 100 nats, each 12 % wider than the one before."""


def add_parity(
    sums: MetricAccumulator, response: ResponseTokens,
    log_rho: Tensor,  # [N] learner's - engine's logprobs
    entropy: Tensor,  # [N] of the learner's distributions, whose logprobs are in log_rho
) -> None:
    """Add to `sums` the terms of `parity_metrics` for the tokens of a micro-batch of whole rows."""
    d, x = log_rho.double(), (response.behaviour + entropy.detach()).double()
    w = bounded_exp(d)
    s = w * (x + d)
    columns = torch.stack(
        [torch.ones_like(d), d.abs(), d.square(), w, w.square(), x.square(), x * d, s, s.square()], -1
    )
    for axis, chosen in (("precision", response.comparable), ("old_kv", response.old_kv)):
        counts = chosen & response.trained
        of_rows = sum_by_row(torch.where(counts, x * d, 0.0), response.rows, len(response.lengths))
        sums.add(**{
            f"parity_{axis}": torch.where(counts[:, None], columns, 0.0).sum(0),
            f"parity_{axis}_rows": of_rows.square().sum(),
            f"parity_{axis}_bins": _histogram(d, counts),
        })  # fmt: skip
        sums.peak(**{f"parity_{axis}_max": torch.where(counts, d.abs(), 0.0).max() if len(d) else d.new_zeros(())})


def _histogram(d: Tensor, counts: Tensor) -> Tensor:
    """Return how many of the tokens that count have |d| in each bin."""
    bins = ((d.abs().clamp(min=_SMALLEST).log10() - math.log10(_SMALLEST)) * _BINS_A_DECADE).nan_to_num().long()
    bins = bins.clamp(max=_BINS_A_DECADE * _DECADES)
    return d.new_zeros(_BINS_A_DECADE * _DECADES + 1).index_add(0, bins, counts.double())


def _p99(counts: np.ndarray, n: float) -> float:
    """Return the upper end of the bin with the 99th percentile of |d|, where `counts` has n tokens."""
    return _SMALLEST * 10 ** ((int(np.searchsorted(counts.cumsum(), 0.99 * n - 1e-9)) + 1) / _BINS_A_DECADE)


def add_supports(
    sums: MetricAccumulator, response: ResponseTokens,
    masses: Tensor,  # [2, N] the learner's probability of each token's support, and without its least probable id
    sizes: Tensor,  # [N] ids of each token's support
    sampling: Sampling, tolerance: float,
) -> None:
    """Add to `sums` how many tokens of equal version were drawn from ids that rollout.top_p and top_k don't explain.

    top_p keeps the most probable ids until their probability reaches top_p. So a support without its least probable id
    has less than top_p, and the whole support has at least top_p, unless top_k or min_p leave more out. With top_k
    alone a support has top_k ids.

    Args:
        sampling: the run's temperature, top_p, top_k and min_p.
        tolerance: how much the learner's probability of a support may differ, from MASS_TOLERANCE.
    """
    counts = response.comparable & response.trained & (sizes > 0)
    mass, without_least = masses
    wrong = torch.zeros_like(counts)
    if sampling.top_p < 1:
        wrong |= without_least > sampling.top_p + tolerance
        if not (sampling.top_k or sampling.min_p):
            wrong |= mass < sampling.top_p - tolerance
    elif sampling.top_k and not sampling.min_p:
        wrong |= (sizes != sampling.top_k) & (mass < 1 - tolerance)  # it may be more than the vocabulary
    worth = mass.double().clamp(min=_SMALLEST).log()
    columns = torch.stack([torch.ones_like(mass), wrong, mass, mass.square(), worth.abs()], -1).double()
    sums.add(
        parity_support=torch.where(counts[:, None], columns, 0.0).sum(0),
        parity_support_bins=_histogram(worth, counts),
    )


def parity_metrics(totals: Totals, dtype: torch.dtype) -> list[Metric]:
    """Return the metrics `parity/<axis>/...` from the sums of all ranks, for each axis with tokens.

    mean_abs, p99_abs, max_abs: of |d|, in nats; p99_abs is the upper end of its bin. ratio_mean: the mean of w.
    surprise: the mean of w (log p + H) in nats. slope: the least-squares slope of d over log q + H, through 0.
    ratio_var, surprise_var, slope_var: the standard error of each is sqrt(its variance / tokens), in a step and, by the
    means of its variances over steps, in a run. explained: the share of the squares of d that this slope explains.
    parity/support/...: `wrong` is the share of tokens counted by `add_supports`, `mass` the mean probability of a
    support. The log of that probability is d of the same token without its support; mean_abs, p99_abs and ratio_var
    are of that. parity/precision/bits: bits of `dtype`, the learner's compute type. Limits follow from it.
    """
    metrics = [Metric("parity/precision/bits", 8.0 * dtype.itemsize, "last", unit="bits")]
    for axis in AXES:
        if f"parity_{axis}" not in totals or not (n := float(totals[f"parity_{axis}"][0])):
            continue
        size, d_squared, w, w_squared, x_squared, xd, surprise, surprise_var = (
            float(s) / n for s in totals[f"parity_{axis}"][1:]
        )
        p99 = _p99(totals[f"parity_{axis}_bins"], n)
        largest = float(totals[f"parity_{axis}_max"])
        slope = xd / x_squared if x_squared > 1e-12 else 0.0
        path = f"parity/{axis}"
        tokens = Metric(f"{path}/tokens", n, "sum", unit="tokens")
        means = {
            "ratio_mean": w, "ratio_var": max(w_squared - w * w, 0.0), "slope": slope,
            "surprise": surprise, "surprise_var": surprise_var,
            "slope_var": float(totals[f"parity_{axis}_rows"]) / n / x_squared**2 if x_squared > 1e-12 else 0.0,
            "explained": slope * xd / d_squared if d_squared > 0 else 0.0,
        }  # fmt: skip
        metrics += [
            tokens, Metric(f"{path}/mean_abs", size, by=tokens.key, unit="nats"),
            Metric(f"{path}/p99_abs", min(p99, largest), by=tokens.key, unit="nats"),
            Metric(f"{path}/max_abs", largest, "max", unit="nats"),
            *(Metric(f"{path}/{name}", value, by=tokens.key) for name, value in means.items()),
        ]
    if "parity_support" in totals and (n := float(totals["parity_support"][0])):
        tokens = Metric("parity/support/tokens", n, "sum", unit="tokens")
        wrong, mass, mass_squared, size = (float(value) / n for value in totals["parity_support"][1:])
        of_supports = {
            "wrong": (wrong, "share"), "mass": (mass, "share"), "mean_abs": (size, "nats"),
            "p99_abs": (_p99(totals["parity_support_bins"], n), "nats"),
            "ratio_var": (max(mass_squared - mass * mass, 0.0), ""),
        }
        metrics.append(tokens)
        metrics += [Metric(f"parity/support/{k}", v, by=tokens.key, unit=unit) for k, (v, unit) in of_supports.items()]
    return metrics
