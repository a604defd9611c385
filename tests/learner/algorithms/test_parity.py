"""The numbers of the parity of engine and learner, against numpy, and against distributions with a known error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.base.config import Sampling
from learner.algorithms.diagnostics import MetricAccumulator
from learner.algorithms.parity import add_parity, add_supports, parity_metrics
from tests.kit.learner.batches import make_response

Values = dict[str, float]


def parity(
    d: Tensor, behaviour: Tensor, entropy: Tensor, sizes: tuple[int, ...], row: int = 1, **response: Tensor
) -> Values:
    """Metrics of tokens that come in micro-batches of these sizes, and in rows of `row` tokens."""
    sums = MetricAccumulator()
    for part in torch.arange(len(d)).split(list(sizes)):
        given = {name: values[part] for name, values in response.items()}
        of_part = make_response((row,) * (len(part) // row) or (0,), behaviour=behaviour[part], **given)
        add_parity(sums, of_part, d[part], entropy[part])
    return {metric.key: metric.value for metric in parity_metrics(sums.reduce(), torch.bfloat16)}


@pytest.mark.parametrize("sizes", [(1000,), (20, 380, 600)])
def test_the_numbers_are_those_of_numpy_whatever_the_micro_batches(sizes: tuple[int, ...], one_rank: None) -> None:
    generator = torch.Generator().manual_seed(0)
    d, behaviour, entropy = torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    d = 0.01 * d + 0.002 * (behaviour + entropy)
    comparable, trained = torch.rand(2, 1000, generator=generator) > 0.2
    old_kv = ~comparable
    got = parity(d, behaviour, entropy, sizes, row=20, comparable=comparable, trained=trained, old_kv=old_kv)
    assert got.pop("parity/precision/bits") == 16
    for axis, chosen in (("precision", comparable), ("old_kv", old_kv)):
        mine = (chosen & trained).numpy()
        x, y = (behaviour + entropy).numpy()[mine], d.numpy()[mine]
        slope = np.linalg.lstsq(x[:, None], y, rcond=None)[0][0]
        rest = y - slope * x
        s = np.exp(y) * (x + y)
        of_rows = np.bincount(np.arange(1000)[mine] // 20, x * y)
        expected = {
            "tokens": mine.sum(), "mean_abs": np.abs(y).mean(), "max_abs": np.abs(y).max(),
            "ratio_mean": np.exp(y).mean(), "ratio_var": np.exp(y).var(), "surprise": s.mean(),
            "surprise_var": (s * s).mean(), "slope": slope, "explained": 1 - (rest**2).sum() / (y**2).sum(),
            "slope_var": (of_rows**2).sum() / (x**2).sum() ** 2 * len(x),
        }
        found = {name: got.pop(f"parity/{axis}/{name}") for name in expected}
        assert found == pytest.approx(expected, rel=1e-6)
        p99 = np.percentile(np.abs(y), 99)
        assert p99 * 0.97 < got.pop(f"parity/{axis}/p99_abs") < p99 * 1.15
    assert not got


def test_an_axis_without_tokens_has_no_numbers_and_equal_logprobs_no_difference(one_rank: None) -> None:
    zeros, some = torch.zeros(4), torch.full((4,), -1.0)
    got = parity(zeros, some, -some, (4,), comparable=torch.ones(4).bool())
    assert not any(key.startswith("parity/old_kv") for key in got)
    assert {got[f"parity/precision/{name}"] for name in ("mean_abs", "p99_abs", "max_abs", "slope", "explained")} == {0}
    assert got["parity/precision/ratio_mean"] == 1.0
    nothing = parity(zeros[:0], some[:0], some[:0], (0,))
    assert not any(key.endswith("/tokens") for key in nothing)


def drawn(q: Tensor, count: int = 20_000) -> Tensor:
    """Tokens [count] of distributions [N, V]: token i is of distribution i modulo N."""
    rows = q[torch.arange(count) % len(q)]
    return torch.multinomial(rows, 1, generator=torch.Generator().manual_seed(1))[:, 0]


def of_sampler(p: Tensor, q: Tensor, sampled: Tensor | None = None) -> Values:
    """Numbers of a learner p [N, V] and an engine that records q and samples from it, or from `sampled`."""
    tokens = drawn(q if sampled is None else sampled)
    which = torch.arange(len(tokens)) % len(q)
    log_p, log_q = p[which, tokens].log(), q[which, tokens].log()
    entropy = torch.special.entr(p).sum(-1)[which]
    values = parity(log_p - log_q, log_q, entropy, (len(tokens),), comparable=torch.ones(len(tokens)).bool())
    return {key.removeprefix("parity/precision/"): value for key, value in values.items()}


def error(values: Values, name: str) -> float:
    return math.sqrt(values[f"{name}_var"] / values["tokens"])


def test_the_mean_ratio_is_the_mass_an_engine_kept_and_the_slope_its_temperature(one_rank: None) -> None:
    logits = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = logits.softmax(-1)
    cut = torch.where(p > 0.02, p, 0.0)
    kept = float(cut.sum(-1).mean())
    filtered = of_sampler(p, cut / cut.sum(-1, keepdim=True))
    assert filtered["ratio_mean"] == pytest.approx(kept, abs=0.01) and kept < 0.95
    hidden = of_sampler(p, p, cut)  # the engine records whole distributions, and samples from a part of them
    assert hidden["mean_abs"] == 0 and hidden["surprise"] > 10 * error(hidden, "surprise")
    hotter = of_sampler(p, (logits / 1.02).softmax(-1))
    assert hotter["slope"] == pytest.approx(0.02, rel=0.05) and hotter["explained"] > 0.95
    for sound in (of_sampler(p, p), hotter):
        assert abs(sound["surprise"]) < 4 * error(sound, "surprise")
        assert abs(sound["ratio_mean"] - 1) < 4 * error(sound, "ratio") + 1e-9


@pytest.mark.parametrize(
    ("rule", "kept_by", "wrong"),
    [
        ({"top_p": 0.8}, {"top_p": 0.8}, False), ({"top_p": 0.8}, {"top_p": 0.7}, True),
        ({"top_p": 0.8}, {"top_p": 0.9}, True), ({"top_k": 5}, {"top_k": 5}, False), ({"top_k": 5}, {"top_k": 4}, True),
        ({"top_k": 50}, {"top_k": 40}, False), ({"top_p": 0.8, "min_p": 0.2}, {"min_p": 0.2}, False),
    ],
)
def test_supports_are_wrong_where_another_top_p_or_top_k_has_made_them(
    rule: dict[str, float], kept_by: dict[str, float], wrong: bool, one_rank: None
) -> None:
    """Of 50 distributions over 40 ids; with top_k 50 all are kept, with min_p 0.2 less than top_p 0.8."""
    logits = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1).sort(-1, descending=True).values
    before = p.cumsum(-1) - p
    keep = (before < kept_by.get("top_p", 1.0)) & (p >= kept_by.get("min_p", 0.0) * p[:, :1])
    keep &= torch.arange(40) < kept_by.get("top_k", 40)
    sizes = keep.sum(-1)
    mass = (p * keep).sum(-1)
    without_least = mass - p.gather(-1, sizes[:, None] - 1)[:, 0]
    response = make_response((50,), comparable=torch.arange(50) < 40)
    sums = MetricAccumulator()
    add_supports(sums, response, torch.stack([mass, without_least]), sizes, Sampling(1.0, **rule), 1e-4)
    got = {metric.key: metric.value for metric in parity_metrics(sums.reduce(), torch.float32)}
    assert got["parity/support/tokens"] == 40 and got["parity/support/mass"] == pytest.approx(float(mass[:40].mean()))
    assert (got["parity/support/wrong"] > 0.3) == wrong and (wrong or got["parity/support/wrong"] == 0)
    kept = mass[:40].numpy().astype(float)  # without supports the ratio is the mass that was kept
    sizes_of_log = np.sort(np.abs(np.log(kept)))
    assert got["parity/support/mean_abs"] == pytest.approx(sizes_of_log.mean(), abs=1e-8)
    assert got["parity/support/ratio_var"] == pytest.approx(kept.var(), abs=1e-7)
    assert sizes_of_log[-1] <= got["parity/support/p99_abs"] <= max(1.122 * sizes_of_log[-1], 2e-7)  # 99 % of 40 is 40
