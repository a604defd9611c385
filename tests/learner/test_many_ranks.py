"""Several ranks, however the model is split over them, train as one rank does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.kit.learner.rank_process import ALGORITHMS, EPISODE_ALGORITHMS, Case, measure, measure_roles, run_ranks

pytestmark = pytest.mark.processes


def test_two_ranks_with_four_micro_batches_give_the_gradient_and_metrics_of_one(
    tiny_model_path: Path, one_rank: None, two_ranks: list[dict[str, Any]]
) -> None:
    results = two_ranks[0]["results"]
    # with 24 tokens one rank has a micro-batch less
    assert [share.count(0) for share in results[Case("token_mean", 24)]["num_trained"]] == [0, 1]
    assert Case("token_mean", 26, "hybrid") in results
    for (algorithm, budget, *_), split in results.items():
        num_micro_batches = [len(share) for share in split["num_trained"]]
        if algorithm in EPISODE_ALGORITHMS:
            assert len(num_micro_batches) == 2 and num_micro_batches[0] > 1
        else:
            assert budget == 24 or num_micro_batches == [4, 4]
    check_equal(tiny_model_path, results)
    for rank in two_ranks:
        check_equal_roles(tiny_model_path, rank["roles"])


def test_a_save_that_fails_on_the_rank_that_writes_leaves_the_others_in_step(two_ranks: list[dict[str, Any]]) -> None:
    assert ["Not a directory" in rank["save"] for rank in two_ranks] == [True, False]
    assert two_ranks[0]["frames"] == two_ranks[1]["frames"] == ["header", "", "frame two"]


@pytest.mark.nightly
def test_four_ranks_on_two_nodes_give_the_gradient_and_weights_of_one_rank(
    tiny_model_path: Path, one_rank: None, tmp_path: Path
) -> None:
    for rank in run_ranks(4, tiny_model_path, tmp_path, [Case(algorithm, 26, "hybrid") for algorithm in ALGORITHMS]):
        check_equal(tiny_model_path, rank["results"])
        check_equal_roles(tiny_model_path, rank["roles"])


def test_two_ranks_that_split_every_row_give_the_gradient_and_metrics_of_one(
    tiny_model_path: Path, one_rank: None, two_slices: list[dict[str, Any]]
) -> None:
    for rank in two_slices:
        check_equal(tiny_model_path, rank["results"])
        check_equal_roles(tiny_model_path, rank["roles"])
    assert "Not a directory" in two_slices[0]["save"] and not two_slices[1]["save"]


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["full", "hybrid"])
@pytest.mark.parametrize("slices", [2, 4])  # with 4 the reward model has too few heads: its keys are gathered
def test_four_ranks_that_split_rows_give_the_gradient_and_weights_of_one_rank(
    slices: int, sharding: Literal["full", "hybrid"], tiny_model_path: Path, one_rank: None, tmp_path: Path
) -> None:
    if slices == 4 and sharding == "hybrid":
        pytest.skip("the ranks that split a row are on one node")
    cases = [Case(algorithm, 28, sharding, slices) for algorithm in ALGORITHMS]
    for rank in run_ranks(4, tiny_model_path, tmp_path, [Case("token_mean", 28, sharding, slices, True), *cases]):
        check_equal(tiny_model_path, rank["results"])
        check_equal_roles(tiny_model_path, rank["roles"])


def check_equal(model: Path, results: dict[Case, dict[str, Any]]) -> None:
    """Loss, gradients and metrics of an update are those of one rank with one micro-batch."""
    for found, split in results.items():
        whole = measured_once(model, _of_one_rank(*found))
        assert [len(share) for share in whole["num_trained"]] == [1]
        assert split["loss"] == pytest.approx(whole["loss"], rel=1e-5, abs=1e-6)
        for network in whole.keys() & {"policy", "critic"}:
            for parameter, gradient in whole[network].items():
                torch.testing.assert_close(split[network][parameter], gradient, atol=2e-6, rtol=1e-4)
        assert split["metrics"] == pytest.approx(whole["metrics"], rel=1e-5, abs=1e-5)


def check_equal_roles(model: Path, roles: dict[str, Any]) -> None:
    """Metrics of two updates of policy, critic, reference and reward model, and the weights after them."""
    whole = roles_measured_once(model)
    assert whole["metrics"][1]["kl/reference"] > 0 == whole["metrics"][0]["kl/reference"]
    assert whole["metrics"][0]["reward/mean"] != whole["metrics"][0]["reward/rule_mean"]
    for split, expected in zip(roles["metrics"], whole["metrics"], strict=True):
        assert split == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, tensor in whole["weights"].items():
        torch.testing.assert_close(roles["weights"][name], tensor, atol=1e-4, rtol=0)
        assert torch.equal(roles["narrow"][name], roles["weights"][name].to(torch.bfloat16))


@cache
def measured_once(model: Path, case: Case) -> dict[str, Any]:
    return measure(model, case)


@cache
def roles_measured_once(model: Path) -> dict[str, Any]:
    return measure_roles(model, Case("token_mean", 4096))


def _of_one_rank(algorithm: str, max_tokens: int, sharding: str, slices: int, untied: bool) -> Case:
    return Case(algorithm, 4096, untied=untied)
