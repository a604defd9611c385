from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines.hf.batch import Narrowing, sample_tokens, token_sets, uniforms


def test_random_numbers_depend_on_seed_prompt_and_sample_but_not_on_their_count() -> None:
    stream = uniforms(seed=3, prompt_index=5, sample=7, count=50)
    assert np.array_equal(stream, uniforms(seed=3, prompt_index=5, sample=7, count=400)[:50])
    for other in ((4, 5, 7), (3, 6, 7), (3, 5, 8), (5, 3, 7)):
        assert not np.any(stream == uniforms(*other, count=50))
    assert abs(uniforms(0, 0, 0, 100_000).mean() - 0.5) < 0.005  # standard error 0.0009


def test_sampling_inverts_the_cumulative_distribution() -> None:
    # Probabilities .5 .25 .125 .125: the cumulative distribution is .5, .75, .875, 1.
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).repeat(6, 1)
    drawn = torch.tensor([[0.0], [0.499], [0.501], [0.749], [0.76], [0.999]], dtype=torch.float64)
    tokens, logprobs, _ = sample_tokens(logits, torch.ones(6, 1), None, drawn)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 3]
    expected = np.log([0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-6)


def narrowing(rows: int, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, recorded: bool) -> Narrowing:
    values = (top_p, top_k, min_p, recorded)
    return Narrowing(*(torch.full((rows, 1), value) for value in values))


@pytest.mark.parametrize(("recorded", "of_token"), [(True, [2 / 3, 2 / 3, 1 / 3]), (False, [0.6, 0.6, 0.3])])
@pytest.mark.parametrize("rule", [{"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.4}])
def test_a_rule_narrows_the_choice_and_logprobs_are_over_it_where_it_is_recorded(
    rule: dict[str, Any], recorded: bool, of_token: list[float]
) -> None:
    # Probabilities .1 .6 .3: all three rules keep {1, 2}, renormalised 2/3, 1/3.
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]])).repeat(3, 1)
    drawn = torch.tensor([[0.0], [0.66], [0.67]], dtype=torch.float64)
    tokens, logprobs, kept = sample_tokens(
        logits, torch.ones(3, 1), narrowing(3, recorded=recorded, **rule), drawn
    )
    assert tokens.tolist() == [1, 1, 2]
    np.testing.assert_allclose(logprobs.numpy(), np.log(of_token), atol=1e-6)
    assert [ids.tolist() for ids, _ in token_sets(kept)] == [[1, 2]] * 3
    for _, of_ids in token_sets(kept):
        np.testing.assert_allclose(of_ids, np.log([2 / 3, 1 / 3]), atol=1e-6)


def test_each_row_is_narrowed_by_its_own_rules_and_all_of_them() -> None:
    # Probabilities .1 .4 .3 .2: top_p .65 keeps 1, 2; top_k 3 leaves 0 out; min_p .6 keeps 1, 2; none keeps all.
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]])).repeat(4, 1)
    rules = Narrowing(
        torch.tensor([[0.65], [1.0], [0.95], [1.0]]), torch.tensor([[0], [3], [3], [0]]),
        torch.tensor([[0.0], [0.0], [0.6], [0.0]]), torch.tensor([[True]] * 4),
    )
    _, _, kept = sample_tokens(logits, torch.ones(4, 1), rules, torch.zeros(4, 1, dtype=torch.float64))
    assert [ids.tolist() for ids, _ in token_sets(kept)] == [[1, 2], [1, 2, 3], [1, 2], [0, 1, 2, 3]]


def test_a_token_of_zero_probability_is_never_sampled() -> None:
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf")]]).repeat(2, 1)
    drawn = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    tokens, *_ = sample_tokens(logits, torch.ones(2, 1), None, drawn)
    assert tokens.tolist() == [1, 1]
