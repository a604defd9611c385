"""Computes the metrics of a step: sums over tokens by staleness, added up over ranks, and statistics of the batch.

`offpolicy/...` and `policy/...` cover all trained tokens, `by_staleness/<n>/...` tokens of staleness n, and
`by_length/<n>/...` tokens in episodes of n to 2n - 1 tokens, where n is a power of two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.base.telemetry.metrics import EPISODES, TOKENS, Metric
from async_rl.base.types import Batch, Row, Support
from learner.algorithms.losses import TokenMetric, bounded_exp, kl_k1, kl_k3, sum_by_row
from learner.packing import ResponseTokens, rows_by_episode, tokens_by_episode

Totals = dict[str, npt.NDArray[np.float64]]
BUCKETS = 11
"""Number of buckets by staleness: 0..9, and 10 or more."""
LENGTHS = 21
"""Number of buckets by length: 1, 2..3, 4..7 and so on, up to 2**20 tokens and more."""
_BY_LENGTH = "by_length/"


class MetricAccumulator:
    """Keeps sums and maxima by name on this rank's device during a step, until `reduce` combines all ranks.

    A value is a scalar or a vector; every rank must use the same names and sizes.

    Args:
        copies: how many ranks add the same values. Sums over all ranks are divided by it.
    """

    def __init__(self, copies: int = 1) -> None:
        self._copies = copies
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self.of_loss: dict[str, Metric] = {}
        """[key] the declaration of each metric of the loss, without its value."""

    def add(self, **values: Tensor) -> None:
        """Add each keyword argument, a tensor, to the sum of that name. A new name starts at 0."""
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def peak(self, **values: Tensor) -> None:
        """Keep the largest value so far of each keyword argument, a tensor, element by element."""
        for name, value in values.items():
            value = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def add_by_staleness(self, staleness: Tensor, trained: Tensor, **values: Tensor) -> None:
        """Add tensors [N], one number per token, to sums [BUCKETS] by name: one sum for the tokens of each staleness.

        Only tokens in the mask `trained` [N] count. The last sum has all tokens of staleness BUCKETS - 1 or more.
        """
        self._add_by(staleness.clamp(max=BUCKETS - 1), BUCKETS, trained, values)

    def add_by_length(self, lengths: Tensor, trained: Tensor, **values: Tensor) -> None:
        """Add tensors [N], one number per token, to sums [LENGTHS] by name: one sum for each range of episode lengths.

        Only tokens in the mask `trained` [N] count.

        Args:
            lengths: [N] number of tokens in the episode of each token.
        """
        buckets = torch.frexp(lengths.double()).exponent.long() - 1  # floor(log2), exactly
        self._add_by(buckets.clamp(0, LENGTHS - 1), LENGTHS, trained, values)

    def _add_by(self, buckets: Tensor, count: int, trained: Tensor, values: Mapping[str, Tensor]) -> None:
        names = sorted(values)
        columns = torch.stack([values[name].detach().double() for name in names], -1)  # [N, names]
        columns = torch.where(trained[:, None], columns, 0.0)
        sums = columns.new_zeros(count, len(names)).index_add(0, buckets, columns)
        self.add(**dict(zip(names, sums.unbind(-1), strict=True)))

    def reduce(self) -> Totals:
        """Return the sums and maxima over all ranks, by name; a scalar is an array of shape (). Collective."""
        totals: Totals = {}
        for values, operation, copies in (
            (self._sums, dist.ReduceOp.SUM, self._copies), (self._maxima, dist.ReduceOp.MAX, 1)
        ):
            if values:
                names = sorted(values)
                flat = torch.cat([values[name].reshape(-1) for name in names])
                dist.all_reduce(flat, op=operation)
                parts = flat.div_(copies).cpu().split([values[name].numel() for name in names])
                totals.update({n: p.reshape(values[n].shape).numpy() for n, p in zip(names, parts, strict=True)})
        return totals


def add_offpolicy(
    sums: MetricAccumulator, response: ResponseTokens, log_rho: Tensor, weights: Tensor, truncated: Tensor,
    dropped: Tensor,
) -> None:
    """Add to `sums` how far the data is from the policy at step start, and what the correction changed.

    Args:
        log_rho: [N] proximal - behaviour logprobs.
        weights: [N] importance weights of the loss.
        truncated: [N] bool: the correction's weight is outside [floor, cap].
        dropped: [N] bool: a mask leaves the token out of the loss.
    """
    trained = response.trained
    rho = bounded_exp(log_rho).double()
    weights = torch.where(dropped, 0.0, weights.double())
    sums.add_by_staleness(
        response.staleness, trained,
        tokens=torch.ones_like(rho), rho=rho, rho_squared=rho.square(),
        weight=weights, weight_squared=weights.square(),
        truncated=truncated, dropped=dropped,
        k1=-log_rho, k3=kl_k3(torch.zeros_like(log_rho), log_rho),
    )
    sums.add_by_length(
        response.counted[response.rows], trained,
        **{
            _BY_LENGTH + "tokens": torch.ones_like(rho), _BY_LENGTH + "staleness": response.staleness,
            _BY_LENGTH + "rho": rho, _BY_LENGTH + "rho_squared": rho.square(), _BY_LENGTH + "truncated": truncated,
            _BY_LENGTH + "k3": kl_k3(torch.zeros_like(log_rho), log_rho),
        },
    )
    sums.peak(rho_max=torch.zeros(BUCKETS, dtype=torch.float64, device=rho.device).scatter_reduce(
        0, response.staleness.clamp(max=BUCKETS - 1), rho * trained, "amax"
    ))
    count = len(response.lengths)
    products = bounded_exp(sum_by_row(log_rho, response.rows, count)).double()
    exist = sum_by_row(trained.double(), response.rows, count) > 0
    sums.add(
        rows=exist.sum(), product=(products * exist).sum(), product_squared=(products.square() * exist).sum(),
    )


def add_policy(
    sums: MetricAccumulator, response: ResponseTokens, logprobs: Tensor, proximal: Tensor, entropy: Tensor,
    advantages: Tensor, clipped: Tensor,
) -> None:
    """Add to `sums` the entropy, how far the learner moved since step start, and clipping by the sign of the advantage.

    All tensors are [N], one number for each response token of the micro-batch; only trained tokens count.

    Args:
        logprobs, proximal: learner logprobs now, and at step start.
        clipped: bool, as in LossOutput.
    """
    positive, negative = advantages > 0, advantages < 0
    sums.add_by_staleness(
        response.staleness, response.trained,
        policy_tokens=torch.ones_like(entropy), entropy=entropy,
        moved_k1=kl_k1(proximal, logprobs), moved_k3=kl_k3(proximal, logprobs),
        positive=positive, negative=negative, clipped_positive=clipped & positive, clipped_negative=clipped & negative,
    )


def add_loss_metrics(
    sums: MetricAccumulator, metrics: Mapping[str, Tensor | TokenMetric], trained: Tensor
) -> None:
    """Add to `sums` the `metrics` that a loss returned, [N] each by name. Only trained tokens count."""
    for name, given in metrics.items():
        each = given if isinstance(given, TokenMetric) else TokenMetric(given)
        key = f"loss/{name}"
        sums.of_loss[key] = Metric(key, math.nan, each.reduce, over_steps=each.over_steps, by=each.by, unit=each.unit)
        if each.reduce == "max":
            sums.peak(**{key: torch.where(trained, each.values, -math.inf).max()})
        else:
            sums.add(**{key: torch.where(trained, each.values, 0.0).sum()})


def loss_metrics(sums: MetricAccumulator, totals: Totals) -> list[Metric]:
    """Return the metrics `loss/<name>`, from the sums of `add_loss_metrics` over all ranks."""
    tokens = float(totals["policy_tokens"].sum())
    values = {key: float(totals[key]) for key in sums.of_loss}
    return [
        replace(each, value=ratio(values[key], tokens) if each.reduce == "mean" else values[key])
        for key, each in sums.of_loss.items()
    ]


def token_metrics(totals: Totals) -> list[Metric]:
    """Return the metrics of `add_offpolicy` and `add_policy`, over all tokens, by staleness and by length.

    The importance weight of a token is rho = proximal / behaviour, without correction. ESS/N = (sum w)^2 / (N sum w^2)
    of rho shows the tail that truncation hides. `ess_truncated` uses the weights as applied, 0 for tokens that a mask
    drops. chi2, which is mean(rho^2) - 1, may be negative in small samples. A clip fraction is a share of the tokens
    with that sign of advantage, over all passes over the batch; so is its weight in a mean over steps.
    """
    peaks = totals["rho_max"]
    by_bucket = {name: values for name, values in totals.items() if values.shape == (BUCKETS,) and name != "rho_max"}
    overall = {name: float(values.sum()) for name, values in by_bucket.items()}
    metrics = _token_values("offpolicy", overall, float(peaks.max()), TOKENS)
    entropy = ratio(overall["entropy"], overall["policy_tokens"])
    metrics.append(Metric("policy/entropy", entropy, by=TOKENS, unit="nats"))
    rows, product, squared = (float(totals[name]) for name in ("rows", "product", "product_squared"))
    metrics.append(Metric("offpolicy/ess_sequence", ratio(product**2, rows * squared), by=EPISODES))
    metrics.append(Metric("offpolicy/chi2_sequence", ratio(squared, rows) - 1, by=EPISODES))
    for bucket in range(BUCKETS):
        cell = {name: float(values[bucket]) for name, values in by_bucket.items()}
        if cell["tokens"]:
            path = f"by_staleness/{bucket}"
            tokens = Metric(f"{path}/tokens", cell["tokens"], "sum", unit="tokens")
            metrics += [tokens, *_token_values(path, cell, float(peaks[bucket]), tokens.key)]
            entropy = ratio(cell["entropy"], cell["policy_tokens"])
            metrics.append(Metric(f"{path}/entropy", entropy, by=tokens.key, unit="nats"))
    return metrics + _length_metrics(totals)


def _length_metrics(totals: Totals) -> list[Metric]:
    """Return metrics by episode length that say how off-policy the tokens are: staleness, KL, ESS, truncated share."""
    metrics = []
    for bucket in range(LENGTHS):
        t = {name[len(_BY_LENGTH) :]: float(x[bucket]) for name, x in totals.items() if name.startswith(_BY_LENGTH)}
        if n := t["tokens"]:
            path = f"{_BY_LENGTH}{2**bucket}"
            tokens = Metric(f"{path}/tokens", n, "sum", unit="tokens")
            metrics += [
                tokens,
                Metric(f"{path}/staleness", t["staleness"] / n, by=tokens.key, unit="versions"),
                Metric(f"{path}/kl_behaviour_proximal_k3", t["k3"] / n, by=tokens.key, unit="nats"),
                Metric(f"{path}/ess", ratio(t["rho"] ** 2, n * t["rho_squared"]), by=tokens.key, unit="share"),
                Metric(f"{path}/truncated_fraction", t["truncated"] / n, by=tokens.key, unit="share"),
            ]
    return metrics


def _token_values(path: str, t: Mapping[str, float], rho_max: float, by: str) -> list[Metric]:
    """Return metrics named `path`/... of the tokens whose sums are in `t`.

    Args:
        by: name of the metric that weighs each step in a mean over steps. A clip fraction has its own.
    """
    n, policy_tokens = max(t["tokens"], 1.0), t["policy_tokens"]
    mean = t["rho"] / n
    variance = max(t["rho_squared"] / n - mean**2, 0.0)
    means = {
        "is_weight_mean": mean,
        "chi2": t["rho_squared"] / n - 1,
    }
    shares = {
        "ess": ratio(t["rho"] ** 2, n * t["rho_squared"]),
        "ess_truncated": ratio(t["weight"] ** 2, n * t["weight_squared"]),
        "truncated_fraction": t["truncated"] / n,
        "masked_fraction": t["dropped"] / n,
    }
    divergences = {
        "kl_behaviour_proximal": t["k1"] / n,
        "kl_behaviour_proximal_k3": t["k3"] / n,
        "kl_proximal_learner": ratio(t["moved_k1"], policy_tokens),
        "kl_proximal_learner_k3": ratio(t["moved_k3"], policy_tokens),
    }
    units = ((means, ""), (shares, "share"), (divergences, "nats"))
    of_signs = []
    for sign in ("positive", "negative"):
        tokens = Metric(f"{path}/tokens_{sign}", t[sign], "sum", unit="tokens")
        clipped = ratio(t[f"clipped_{sign}"], t[sign])
        of_signs += [tokens, Metric(f"{path}/clip_fraction_{sign}", clipped, by=tokens.key, unit="share")]
    return [
        Metric(f"{path}/is_weight_max", rho_max, "max"),
        # A few steps with very large weights would dominate a mean.
        Metric(f"{path}/is_weight_var", variance, over_steps="median"),
        *(Metric(f"{path}/{name}", x, by=by, unit=unit) for values, unit in units for name, x in values.items()),
        *of_signs,
    ]


def add_critic(sums: MetricAccumulator, values: Tensor, returns: Tensor, trained: Tensor) -> None:
    """Add to `sums` returns, returns - values, and the squares of both, over trained tokens. All tensors are [N]."""
    returns = torch.where(trained, returns, 0.0).double()
    residual = torch.where(trained, returns - values, 0.0).double()
    sums.add(
        critic_tokens=trained.sum(), returns=returns.sum(), returns_squared=returns.square().sum(),
        residual=residual.sum(), residual_squared=residual.square().sum(),
    )


def explained_variance(totals: Totals) -> float:
    """Return the critic's 1 - Var(returns - values) / Var(returns), from the sums of add_critic over all ranks.

    It is 0 if all returns are equal.
    """
    n = max(float(totals["critic_tokens"]), 1.0)
    unexplained = totals["residual_squared"] / n - (totals["residual"] / n) ** 2
    variance = totals["returns_squared"] / n - (totals["returns"] / n) ** 2
    return float(1.0 - unexplained / variance) if variance > 1e-12 else 0.0


def rule_metrics(by_rule: Batch, by_model: Batch, *, is_gold: bool) -> list[Metric]:
    """Return the mean reward of a batch by the task's rule, and its correlation with the rewards of a reward model.

    Args:
        by_rule, by_model: the batch with the rewards of the rule, and with the model's.
        is_gold: the rule is only a yardstick. Otherwise it is also trained on, and there is no correlation. There is
            none either if one of the two gives all answers the same reward.
    """
    rule, model = (
        np.array([reward for group in batch.groups for reward in group.episode_rewards])
        for batch in (by_rule, by_model)
    )
    metrics = [Metric("reward/rule_mean", float(rule.mean()), by=EPISODES)]
    if is_gold and rule.std() > 0 and model.std() > 0:
        correlation = float(np.corrcoef(rule, model)[0, 1])
        metrics.append(Metric("reward/rule_correlation", correlation, by=EPISODES))
    return metrics


def _support_metrics(supports: Sequence[Support]) -> list[Metric]:
    """Return how many ids the tokens were drawn from (their supports), on average and at most; [] if none are recorded.
    """
    if not supports:
        return []
    sizes = np.concatenate([support.sizes[support.sizes > 0] for support in supports])
    return [
        Metric("support/ids_mean", float(sizes.mean()), by=TOKENS, unit="ids"),
        Metric("support/ids_max", float(sizes.max()), "max", unit="ids"),
    ]


def batch_metrics(batch: Batch) -> list[Metric]:
    """Return metrics of a batch: reward, staleness and length of its episodes, and the buffer's counters.

    The staleness of an episode is the staleness of its oldest trained token. It is the sum of `in_flight` (versions
    that passed during generation) and `in_queue` (versions that passed in the buffer). Episodes without trained tokens
    have no staleness. The length of an episode is the number of tokens that the model sampled in it.
    """
    episodes = [[group.rows[row] for row in rows] for group in batch.groups for rows in rows_by_episode(group)]
    rewards = np.array([reward for group in batch.groups for reward in group.episode_rewards])
    lengths = np.array([tokens for group in batch.groups for tokens in tokens_by_episode(group)])
    finish_reasons = [rows[-1].finish_reason for rows in episodes]
    def of_episodes(key: str, value: float | np.floating, unit: str = "") -> Metric:
        return Metric(key, float(value), by=EPISODES, unit=unit)

    metrics = [
        of_episodes("reward/mean", rewards.mean()),
        of_episodes("reward/std", rewards.std()),
        Metric(EPISODES, float(len(episodes)), "sum", unit="episodes"),
        Metric(TOKENS, float(lengths.sum()), "sum", unit="tokens"),
        of_episodes("response/length_mean", lengths.mean(), "tokens"),
        Metric("response/length_max", float(lengths.max()), "max", unit="tokens"),
        of_episodes("response/truncated_fraction", finish_reasons.count("length") / len(episodes), "share"),
        of_episodes("response/distinct_fraction", np.mean([distinct_fraction(rows) for rows in episodes]), "share"),
        *(Metric(key, value, "last") for key, value in batch.counters.items()),
        *(Metric(key, value) for key, value in batch.gauges.items()),
    ]
    metrics += _support_metrics([row.support for rows in episodes for row in rows if row.support is not None])
    if (repeated := repeated_fraction(batch)) is not None:
        metrics.append(of_episodes("response/repeated_fraction", repeated, "share"))
    if any(group.episodes for group in batch.groups):
        timeouts = finish_reasons.count("timeout") / len(episodes)
        metrics.append(of_episodes("response/timeout_fraction", timeouts, "share"))
        metrics.append(of_episodes("episode/rows", sum(map(len, episodes)) / len(episodes), "rows"))
    named = [rows[0].rewards for rows in episodes]
    metrics += [of_episodes(f"reward/{name}", mean) for name, mean in _means(named).items()]
    powers = np.clip(np.frexp(lengths)[1] - 1, 0, LENGTHS - 1)
    for power in np.unique(powers):
        cell = powers == power
        path = f"{_BY_LENGTH}{2**power}"
        counted = Metric(f"{path}/episodes", float(cell.sum()), "sum", unit="episodes")
        metrics += [counted, Metric(f"{path}/reward", float(rewards[cell].mean()), by=counted.key)]
    of_trained = [np.concatenate([row.versions[row.mask] for row in rows]) for rows in episodes]
    trained = np.array([versions.size > 0 for versions in of_trained])
    if trained.any():
        finished = np.repeat(batch.finished_versions, [len(group.episode_rows) for group in batch.groups])[trained]
        oldest = np.array([int(versions.min()) for versions in of_trained if versions.size])
        staleness = batch.version - oldest
        metrics += [
            of_episodes("staleness/mean", staleness.mean(), "versions"),
            Metric("staleness/max", float(staleness.max()), "max", unit="versions"),
            of_episodes("staleness/in_flight", (finished - oldest).mean(), "versions"),
            of_episodes("staleness/in_queue", (batch.version - finished).mean(), "versions"),
        ]
        metrics += [
            Metric(f"staleness/episodes_{age}", float(count), "sum", unit="episodes")
            for age, count in enumerate(np.bincount(staleness)) if count
        ]
        buckets = np.minimum(staleness, BUCKETS - 1)
        for bucket in np.unique(buckets):
            cell = buckets == bucket
            path = f"by_staleness/{bucket}"
            counted = Metric(f"{path}/episodes", float(cell.sum()), "sum", unit="episodes")
            length = float(lengths[trained][cell].mean())
            of_bucket = _means([named[number] for number in np.flatnonzero(trained)[cell]])
            metrics += [
                counted,
                Metric(f"{path}/reward", float(rewards[trained][cell].mean()), by=counted.key),
                Metric(f"{path}/response_length", length, by=counted.key, unit="tokens"),
                *(Metric(f"{path}/reward/{name}", mean, by=counted.key) for name, mean in of_bucket.items()),
            ]
    return metrics


def _means(named: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return for each name its mean over the mappings that have this name."""
    found: dict[str, list[float]] = {}
    for each in named:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def ratio(numerator: float, denominator: float) -> float:
    """Return numerator / denominator, or 0 if the denominator is 0."""
    return numerator / denominator if denominator else 0.0


def distinct_fraction(rows: Sequence[Row]) -> float:
    """Return the share of distinct tokens among the sampled tokens of an episode; 1 if there are none."""
    tokens = _sampled(rows)
    return len(np.unique(tokens)) / len(tokens) if len(tokens) else 1.0


def repeated_fraction(batch: Batch) -> float | None:
    """Return how much the prompts of a batch get the same answer; None if it has fewer than two different prompts.

        max over a of  (sum over p of s_p(a)  -  max over p of s_p(a)) / (P - 1)

    s_p(a) is the share of the answers to prompt p that equal a, token for token. P is the number of prompts. Too old
    answers count, empty ones don't. The result is 0 if no two prompts share an answer, and 1 if all prompts get only
    one answer. It is about 1/2 if half of the prompts are answered by yes and the others by no.
    """
    answers: dict[bytes, list[bytes]] = {}
    for group in batch.groups:
        of_prompt = answers.setdefault(group.prompt_tokens.tobytes(), [])
        sampled = (_sampled([group.rows[row] for row in rows]) for rows in rows_by_episode(group))
        of_prompt += [tokens.tobytes() for tokens in sampled if len(tokens)]
    return _largest_overlap([_shares(of_prompt) for of_prompt in answers.values()])


def _largest_overlap(shares: Sequence[Mapping[bytes, float]]) -> float | None:
    if len(shares) < 2:
        return None
    totals: dict[bytes, float] = {}
    largest: dict[bytes, float] = {}
    for of_prompt in shares:
        for answer, share in of_prompt.items():
            totals[answer] = totals.get(answer, 0.0) + share
            largest[answer] = max(largest.get(answer, 0.0), share)
    return max((totals[answer] - largest[answer] for answer in totals), default=0.0) / (len(shares) - 1)


def _shares(answers: Sequence[bytes]) -> dict[bytes, float]:
    return {answer: count / len(answers) for answer, count in Counter(answers).items()}


def _sampled(rows: Iterable[Row]) -> np.ndarray:
    return np.concatenate([row.tokens[row.sampled] for row in rows])
