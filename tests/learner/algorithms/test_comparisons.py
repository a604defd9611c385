"""Numbers of /work/shared/rewards/bt_vectors.py, which derives them with the standard library alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from learner.algorithms.losses import bradley_terry, comparison_metrics

CHOSEN, REJECTED, HALF = torch.tensor([1.0, 0.5]), torch.tensor([0.2, 0.9]), torch.tensor([0.5, 0.5])
SCORES = [2.0, 1.0, 0.5, -1.0]
"""The scores of a ranking of four answers, the best first."""


def of_ranking(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The loss of a ranking, and its gradient for each score."""
    scores = torch.tensor(SCORES, requires_grad=True)
    preferred, other = (scores[list(side)] for side in zip(*pairs, strict=True))
    zeros = torch.zeros(len(pairs))
    loss = bradley_terry(preferred, other, zeros, torch.full((len(pairs),), 1 / len(pairs)), 0.0)
    loss.backward()
    assert scores.grad is not None
    return loss, scores.grad


def test_pairs_with_margin_and_centering() -> None:
    zeros = torch.zeros(2)
    assert bradley_terry(CHOSEN, REJECTED, zeros, HALF, 0.0).item() == pytest.approx(0.6420580, abs=1e-6)
    assert bradley_terry(CHOSEN, REJECTED, HALF, HALF, 0.0).item() == pytest.approx(0.8977546, abs=1e-6)
    centred = bradley_terry(CHOSEN, REJECTED, zeros, HALF, 0.01).item()
    assert centred == pytest.approx(0.6420580 + 0.017, abs=1e-6)  # 0.01 * (1.2^2 + 1.4^2) / 2


def test_a_ranking_is_the_mean_of_its_pairs_and_a_tie_is_none() -> None:
    loss, gradient = of_ranking(list(itertools.combinations(range(4), 2)))
    assert loss.item() == pytest.approx(0.2276134, abs=1e-6)
    assert gradient.tolist() == pytest.approx([-0.0831321, -0.0379670, 0.0629234, 0.0581757], abs=1e-6)
    tied, _ = of_ranking([(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)])
    assert tied.item() == pytest.approx(0.1783207, abs=1e-6)


def test_accuracy_margin_and_calibration() -> None:
    found = comparison_metrics(CHOSEN, REJECTED, torch.ones(2))
    assert found["accuracy"] == 0.5 and found["margin"] == pytest.approx(0.2)
    assert found["loss"] == pytest.approx(0.6420580, abs=1e-6)
    # sigmoid(.8) = .68997 is right, in bin 3; sigmoid(.4) = .59869 is wrong, in bin 1
    expected = ((1 - 1 / (1 + math.exp(-0.8))) + 1 / (1 + math.exp(-0.4))) / 2
    assert found["calibration_error"] == pytest.approx(expected, abs=1e-6)
    # four pairs of one confidence, of which three are right: .75 - sigmoid(1.0986) = .75 - .75
    d = math.log(3) * torch.tensor([1.0, 1.0, 1.0, -1.0])
    assert comparison_metrics(d, torch.zeros(4), torch.ones(4))["calibration_error"] == pytest.approx(0, abs=1e-6)


def test_weights_and_equal_rewards() -> None:
    found = comparison_metrics(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.25, 0.75]))
    assert found["accuracy"] == pytest.approx(0.25 + 0.75 / 2)  # equal rewards count half
    assert found["margin"] == pytest.approx(0.25)
