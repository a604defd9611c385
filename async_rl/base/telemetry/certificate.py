"""The certificate of a run: on which axes the logprobs of engine and learner are exact, bounded or broken, and why.

It reads the metrics `parity/...`, which learner/algorithms/parity.py defines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Values = Mapping[str, float]
State = Literal["exact", "bounded", "broken", "not measured"]
CERTIFYING = (
    "run.name=certificate", "run.steps=4", "staleness.max=0", "staleness.depth=max",
    "weight_sync.verify_every=1", "weight_sync.every_steps=1", "algorithm.filter_zero_variance=false",
    "eval.every_steps=0", "checkpoint.every_steps=0",
)
"""Settings for the run of `async-rl certify`: no token is stale, and every push is verified."""
ERRORS = 4.0
"""A mean or a slope counts as beyond its limit only if it exceeds the limit by this many standard errors of the run."""
UNSEEN = 35.0
"""The least standard error, in nats, of a run's summed surprise. A policy that is almost sure samples an unlikely token
once in a while, with up to 30 nats. If a run has none by chance, the variance of its tokens is far too small."""
WRONG_SUPPORTS = 0.01
"""The largest allowed share of tokens with a wrong support; engine and learner round differently at the border of
top_p."""
CHANGED_EXPERTS = {32: 1e-3, 16: 0.25}
"""The largest allowed share of expert choices that differ at equal weights (ties; near ties in bfloat16), by bits
of the learner's type."""
EXPLAINED = 0.25
"""A slope counts as one of the temperature if it explains at least this share of the variance of d."""


@dataclass(frozen=True, slots=True)
class ParityLimits:
    """The largest differences that sound runs have. They are in nats, except ratio and slope."""

    mean: float
    p99: float
    largest: float
    ratio: float
    """The limit for |mean ratio - 1|."""
    slope: float


LIMITS = {
    32: ParityLimits(mean=2e-5, p99=2e-5, largest=1e-4, ratio=2e-5, slope=1e-5),
    16: ParityLimits(mean=0.02, p99=0.1, largest=math.inf, ratio=2e-3, slope=1e-3),
}
"""The limits by bits of the learner's compute type. Sound tiny models with SGLang and transformers on CPUs reach
a tenth to a half of them."""


@dataclass(frozen=True, slots=True)
class ParityAxis:
    """The finding on one possible difference between engine and learner."""

    name: str
    state: State
    finding: str


def certificate(figures: Values) -> list[ParityAxis]:
    """Return the findings on all axes.

    Args:
        figures: the figures of the run's metrics, by key.
    """
    return [_weights(figures), _precision(figures), _support(figures), _routing(figures), _old_kv(figures)]


def _weights(figures: Values) -> ParityAxis:
    compared, unequal = (figures.get(f"parity/weights/{name}", 0.0) for name in ("compared", "unequal"))
    if unequal:
        found = f"{unequal:.0f} times a server held other weights than the learner; it was restarted"
        return ParityAxis("weights", "broken", found)
    if not compared:
        return ParityAxis("weights", "not measured", "no server's weights were compared by their sums")
    return ParityAxis("weights", "exact", f"{compared:.0f} times the weights of a server had the learner's sums")


def _precision(figures: Values) -> ParityAxis:
    if not figures.get("parity/precision/tokens"):
        return ParityAxis("precision", "not measured", "no token was trained by the version that sampled it")
    bits = int(figures["parity/precision/bits"])
    if fault := find_fault(figures, LIMITS[bits]):
        return ParityAxis("precision", "broken", f"{fault}: {_numbers(figures, 'precision')}")
    return ParityAxis("precision", "exact" if bits == 32 else "bounded", _numbers(figures, "precision"))


def find_fault(figures: Values, limits: ParityLimits) -> str:
    """Return a description of what is wrong on the axis `precision`; "" if all figures are within the limits."""
    f = {name: figures[f"parity/precision/{name}"] for name in _NAMES}
    is_far = f["mean_abs"] > limits.mean or f["p99_abs"] > limits.p99 or f["max_abs"] > limits.largest
    if is_far and _routing(figures).state == "broken":
        return "routing: the learner replays experts that were not chosen with its weights"
    if 1 - f["ratio_mean"] > limits.ratio + ERRORS * standard_error(figures, "ratio"):
        return (
            f"support: the server samples from tokens that have {f['ratio_mean']:.4f} of the learner's probability; "
            "its top_p, top_k, min_p or banned tokens are not the learner's"
        )
    surprise_error = math.hypot(standard_error(figures, "surprise"), UNSEEN / figures["parity/precision/tokens"])
    if f["surprise"] > ERRORS * surprise_error and not _is_selected(figures):
        return (
            f"support: the sampled tokens are more likely than the recorded distributions say, by {f['surprise']:.3f} "
            "nats; the server's top_p, top_k, min_p or temperature is not the learner's"
        )
    has_slope = abs(f["slope"]) > limits.slope + ERRORS * standard_error(figures, "slope")
    if has_slope and f["explained"] > EXPLAINED:
        return f"temperature: the server samples at {1 + f['slope']:.4f} times the learner's temperature"
    if not (is_far or has_slope):
        return ""
    if figures.get("parity/weights/compared") and not figures.get("parity/weights/unequal"):
        return "context: weights are equal, so the server reads KV of older weights (a stale prefix cache)"
    return "weights: the server computes with other weights, or reads KV of older ones (a stale prefix cache)"


def standard_error(figures: Values, name: str) -> float:
    """Return the standard error of a run's mean ratio, surprise or slope.

    It is sqrt(sum of n_t var_t) / n for steps of n_t tokens, together n. The figure of var_t is its mean by tokens.

    Args:
        name: ratio, surprise or slope.
    """
    return math.sqrt(figures[f"parity/precision/{name}_var"] / figures["parity/precision/tokens"])


def _is_selected(figures: Values) -> bool:
    """Return whether some groups were dropped or came before others, which would favour answers with likely tokens."""
    drops = [key for key in figures if key.startswith("buffer/dropped_") and key.count("/") == 1]
    return any(figures[key] > 0 for key in drops) or figures.get("staleness/max") != 0


def _support(figures: Values) -> ParityAxis:
    if not (n := figures.get("parity/support/tokens", 0.0)):
        return ParityAxis("support", "not measured", "no token of equal version has a recorded support")
    f = {name: figures[f"parity/support/{name}"] for name in ("wrong", "mass", "mean_abs", "p99_abs", "ratio_var")}
    wrong = f["wrong"]
    found = (
        f"{n:,.0f} tokens, drawn from ids that have {f['mass']:.4f} of the learner's probability in the mean; without "
        f"supports |log ratio| would be {f['mean_abs']:.1e} in the mean, 99 % below {f['p99_abs']:.1e}, the ratio's "
        f"variance {f['ratio_var']:.1e}"
    )
    if wrong > WRONG_SUPPORTS + ERRORS * math.sqrt(WRONG_SUPPORTS / n):
        fault = f"{wrong:.1%} of the tokens were drawn from other ids than rollout.top_p and top_k keep"
        return ParityAxis("support", "broken", f"{fault}: {found}")
    return ParityAxis("support", "exact" if figures["parity/precision/bits"] == 32 else "bounded", found)


def _routing(figures: Values) -> ParityAxis:
    if (changed := figures.get("routing/changed_fraction")) is None:
        return ParityAxis("routing", "not measured", "no experts of an engine are replayed")
    found = f"the learner's own choice of experts differs for {changed:.2%} of (token, layer)"
    if figures.get("staleness/max"):
        return ParityAxis("routing", "bounded", f"replayed; {found}, also because the weights have moved")
    bits = int(figures["parity/precision/bits"])
    if changed > CHANGED_EXPERTS[bits]:
        return ParityAxis("routing", "broken", f"{found}: the engine's record is of other weights or other tokens")
    return ParityAxis("routing", "exact" if bits == 32 else "bounded", f"replayed; {found}")


def _old_kv(figures: Values) -> ParityAxis:
    if not figures.get("parity/old_kv/tokens"):
        return ParityAxis("age of KV", "not measured", "no token of the learner's version read KV of an older one")
    return ParityAxis("age of KV", "bounded", f"no limit; {_numbers(figures, 'old_kv')}")


_NAMES = (
    "mean_abs", "p99_abs", "max_abs", "ratio_mean", "ratio_var", "slope", "slope_var", "explained", "surprise",
    "surprise_var",
)


def _numbers(figures: Values, axis: str) -> str:
    f = {name: figures[f"parity/{axis}/{name}"] for name in (*_NAMES, "tokens")}
    return (
        f"{f['tokens']:,.0f} tokens, |log ratio| {f['mean_abs']:.1e} in the mean, 99 % below {f['p99_abs']:.1e}, at "
        f"most {f['max_abs']:.1e}; ratio {f['ratio_mean']:.5f}, variance {f['ratio_var']:.1e}; slope {f['slope']:+.1e}"
    )


def is_broken(axes: list[ParityAxis]) -> bool:
    return any(axis.state == "broken" for axis in axes)


def format_certificate(axes: list[ParityAxis]) -> str:
    """Return the certificate as text, with a line for each axis."""
    width = max(len(axis.name) for axis in axes)
    lines = [f"{axis.name:<{width}}  {axis.state:<12}  {axis.finding}\n" for axis in axes]
    return "certificate: logprobs of engine and learner at equal weights\n" + "".join(lines)
