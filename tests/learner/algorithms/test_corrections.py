"""Importance weights, masks and interpolated logprobs against reference vectors and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config import MasksConfig
from async_rl.base.config.algorithm import ClipConfig
from async_rl.base.seams import CORRECTIONS
from learner.algorithms.losses import (
    LossInputs,
    beyond_m2po,
    dropped_tokens,
    interpolated_proximal,
    log_ratios,
    m2po_limit,
    mean_by_row,
    ppo_clip_loss,
    sum_by_row,
)
from tests.kit.learner.batches import make_minibatch


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


class Case:
    """Rows of log ratios as the tokens of rows, all of one advantage."""

    def __init__(
        self, log_ratio: list[list[float]], mask: list[list[float]] | None = None, adv: float = 1.0,
        behaviour: float | list[float] = -1.0,
    ) -> None:
        self.log_ratio = tensor(log_ratio)
        self.trained = torch.ones_like(self.log_ratio).bool() if mask is None else tensor(mask).bool()
        self.log_rho = (self.log_ratio * self.trained).flatten()
        self.count = len(log_ratio)
        self.rows = torch.arange(self.count).repeat_interleave(self.log_ratio.shape[1])
        self.advantages = torch.full_like(self.log_rho, adv)
        self.behaviour = torch.where(self.trained.flatten(), tensor(behaviour), 0.0)

    def weights(self, kind: str) -> Tensor:
        """[rows, T], 0 where not trained."""
        weigh = CORRECTIONS[kind].load()
        flat = weigh(self.log_rho, self.advantages, self.trained.flatten(), self.rows, self.count)
        return flat.reshape(self.log_ratio.shape) * self.trained

    def dropped(self, **masks: Any) -> list[list[bool]]:
        flat = dropped_tokens(
            MasksConfig(**masks), self.log_rho, self.behaviour, self.advantages, self.trained.flatten(), self.rows,
            self.count,
        )  # fmt: skip
        return flat.reshape(self.log_ratio.shape).tolist()


def dropped_by_m2po(log_rho: Tensor, tau: float) -> list[bool]:
    places = torch.arange(len(log_rho))
    return beyond_m2po(log_rho, places, m2po_limit(log_rho.square(), places, tau)).tolist()


def test_weights_and_masks_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for vector in vectors["is_weights"]:
        case = Case(vector["log_ratio"], vector["mask"])
        cap, bounds = vector["cap"], tuple(vector["bounds"])
        kept = ~torch.tensor(case.dropped(token=bounds))
        tis = case.weights("token_tis").clamp(max=cap)
        close(case.weights("token_tis"), vector["rho"])
        close(tis, vector["token_tis"])
        close(case.weights("token_tis") * kept, vector["icepop"])
        close(case.weights("sequence_tis")[:, 0], vector["seq_ratio"])
        close(case.weights("sequence_tis")[:, 0].clamp(max=cap), vector["seq_tis"])
        close(case.weights("geometric_tis")[:, 0], vector["geo_ratio"])
        keeps = [not row[0] for row in case.dropped(sequence=bounds)]
        assert keeps == vector["seq_mis_keep"]
        assert float((~kept & case.trained).sum() / case.trained.sum()) == pytest.approx(vector["icepop_masked_frac"])


def test_decoupled_losses_with_their_weights_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    modes = set()
    for vector in vectors["decoupled_ppo_tis"]:
        modes.add(vector["mode"])
        proximal, behaviour = tensor(vector["prox_logp"]), tensor(vector["behav_logp"])
        case = Case([log_ratios(proximal, behaviour, torch.ones_like(proximal).bool()).tolist()])
        close(case.weights("token_tis")[0], vector["rho"])
        threshold = vector["threshold"]
        if vector["mode"] == "truncate":
            weights = case.weights("token_tis")[0].clamp(max=threshold)
        else:
            bounds = (0.0, threshold) if vector["mode"] == "mask_upper" else tuple(threshold)
            weights = case.weights("token_tis")[0] * ~torch.tensor(case.dropped(token=bounds)[0])
        close(weights, vector["weight"])
        logprobs = tensor(vector["logp"])
        close((logprobs - proximal).exp(), vector["ratio"])
        clip = ClipConfig(low=vector["eps"], high=vector["eps"], dual=0.0)
        x = LossInputs(
            logprobs=logprobs, centre=proximal, advantages=tensor(vector["adv"]), trained=case.trained.flatten(),
            rows=case.rows, count=1, clip=clip,
        )
        loss = ppo_clip_loss(x).loss
        close(weights * loss, vector["token_loss"])
        close((weights * loss).sum() / len(loss), vector["loss_mean_original_denominator"])
    assert modes == {"truncate", "mask_upper", "icepop"}


def test_m2po_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for vector in vectors["m2po_mask"]:
        case = Case([vector["log_ratio"]])
        dropped = dropped_by_m2po(case.log_rho, vector["tau"])
        assert [float(not d) for d in dropped] == vector["keep"]
        assert sum(dropped) == vector["masked"]
        assert float(case.log_rho.square().mean()) == pytest.approx(vector["m2"], rel=1e-5)


def test_m2po_drops_some_of_the_tokens_with_equal_squares() -> None:
    """Five squares of 0.01 and one of 0.5 have a mean of 0.092, below 0.1; with a second it is 0.15."""
    squares = tensor([0.5] * 5 + [0.01] * 5)
    log_rho = squares.sqrt() * tensor([1.0, -1.0] * 5)
    assert dropped_by_m2po(log_rho, 0.1) == [False] + [True] * 4 + [False] * 5
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))  # another split of the same batch
    limit = m2po_limit(log_rho.square()[order], torch.arange(10)[order], 0.1)
    assert beyond_m2po(log_rho, torch.arange(10), limit).tolist() == dropped_by_m2po(log_rho, 0.1)


def test_opsm_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for vector in vectors["opsm_keep"]:
        log_rho = (tensor(vector["logp"]) - tensor(vector["behav_logp"])).tolist()
        assert -sum(log_rho) / len(log_rho) == pytest.approx(vector["seq_kl"], rel=1e-6, abs=1e-6)
        case = Case([log_rho], adv=vector["adv"])
        assert case.dropped(opsm=vector["delta"])[0] == [not vector["keep"]] * len(log_rho)


def test_kpop_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for vector in vectors["divergence_masks"]:
        log_rho = (tensor(vector["logp"]) - tensor(vector["logq"])).tolist()
        case = Case([log_rho], behaviour=vector["logq"])
        dropped = case.dropped(kpop=vector["kpop_limit"])[0]
        assert dropped == [not keeps for keeps in vector["kpop_keeps"]] and any(dropped)


def test_kpop_looks_in_both_directions_and_only_at_trained_tokens() -> None:
    """Of 0.5 and 0.25 the binary KLs are 0.1438 and 0.1308: the larger counts, whichever policy has which."""
    half, twice = math.log(0.5), math.log(2.0)
    up, down = Case([[twice, twice]], [[1, 0]], behaviour=math.log(0.25)), Case([[-twice, -twice]], behaviour=half)
    assert up.dropped(kpop=0.137) == [[True, False]] and down.dropped(kpop=0.137) == [[True, True]]
    assert up.dropped(kpop=0.15) == [[False, False]] and down.dropped(kpop=0.15) == [[False, False]]
    rare = Case([[twice]], behaviour=math.log(1e-3))  # as far by its ratio, but hardly by its probability
    assert rare.dropped(kpop=0.1) == [[False]] and rare.dropped(token=(0.5, 1.9)) == [[True]]


def test_topr_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for vector in vectors["topr"]:
        case = Case([vector["log_ratio"]], adv=vector["reward"])
        close(case.weights("topr")[0], [vector["weight"]] * 2)
        close(case.weights("sequence_tis")[0], [vector["seq_ratio"]] * 2)


def test_interpolated_proximal_logprobs_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for vector in vectors["a3po_prox"]:
        staleness = vector["v_prox"] - vector["v_behav"]
        assert vector["v_theta"] == vector["v_prox"] + 1
        assert staleness / (staleness + 1) == vector["alpha"]
        learner = tensor([vector["logp"]]).requires_grad_()
        got = interpolated_proximal(learner, tensor([vector["behav_logp"]]), torch.tensor([staleness]))
        close(got, [vector["prox_logp_loglinear"]])
        assert not got.requires_grad
        linear = 0.2 * math.exp(vector["behav_logp"]) + 0.8 * math.exp(vector["logp"])
        assert math.log(linear) == pytest.approx(vector["prox_logp_linear"])


def test_one_token_below_the_veto_drops_its_whole_answer_and_no_other() -> None:
    case = Case([[0.0, -9.3, 0.1], [0.0, -9.1, 0.0]])
    assert case.dropped(veto=1e-4) == [[True] * 3, [False] * 3]
    case = Case([[0.0, -9.3, 0.1]], [[1, 0, 1]])
    assert case.dropped(veto=1e-4) == [[False] * 3]


def test_the_geometric_mask_looks_at_the_mean_of_an_answer() -> None:
    case = Case([[0.3, -0.3, 0.0], [0.02, 0.02, 0.02]])
    assert case.dropped(geometric=(0.99, 1.01)) == [[False] * 3, [True] * 3]


def test_masks_that_are_set_together_all_apply() -> None:
    case = Case([[0.8, 0.0, 0.0], [0.0, 0.0, -9.9]])
    assert case.dropped(token=(0.5, 2.0), veto=1e-4) == [[True, False, False], [True] * 3]


def test_without_masks_nothing_is_dropped_not_even_what_is_not_a_number() -> None:
    assert Case([[20.0, -90.0, 0.0]]).dropped() == [[False] * 3]
    assert Case([[math.nan, 0.0, 0.0]]).dropped(token=(0.5, 2.0), veto=0.1, kpop=0.1) == [[False] * 3]
    assert dropped_by_m2po(tensor([math.nan, 0.0, 0.0]), 0.1) == [False] * 3
    off = make_minibatch().m2po_limit
    assert beyond_m2po(tensor([-math.inf, math.nan, 0.0]), torch.arange(3), off).tolist() == [False] * 3


def test_long_answers_do_not_overflow_sequence_weights() -> None:
    weights = Case([[5.0] * 1000, [-5.0] * 1000]).weights("sequence_tis")
    assert torch.isfinite(weights).all() and float(weights.min()) > 0


def test_sums_and_means_stay_within_answers_and_leave_out_untrained_tokens() -> None:
    values, trained = tensor([1.0, 2.0, 4.0, 7.0]), torch.tensor([True, True, True, False])
    rows = torch.tensor([0, 0, 1, 2])
    assert sum_by_row(values, rows, 3).tolist() == [3.0, 4.0, 7.0]
    assert mean_by_row(values, trained, rows, 3).tolist() == [1.5, 4.0, 0.0]
