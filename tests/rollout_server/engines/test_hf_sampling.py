from __future__ import annotations

import numpy as np
import torch

from rollout_server.engines.hf.batch import sample_tokens, uniforms


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
    tokens, logprobs = sample_tokens(logits, torch.ones(6, 1), None, drawn)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 3]
    expected = np.log([0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-6)


def test_logprobs_are_those_at_the_temperature() -> None:
    # Logits (ln 4, 0) at temperature 2 are (ln 2, 0): probabilities 2/3, 1/3.
    logits = torch.tensor([[np.log(4.0), 0.0]] * 2)
    drawn = torch.tensor([[0.66], [0.67]], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, torch.full((2, 1), 2.0), None, drawn)
    assert tokens.tolist() == [0, 1]
    np.testing.assert_allclose(logprobs.numpy(), np.log([2 / 3, 1 / 3]), atol=1e-6)


def test_top_p_narrows_the_choice_and_leaves_the_logprobs() -> None:
    # Probabilities .1 .6 .3 with top_p .8: the nucleus is {1, 2}, renormalised 2/3, 1/3.
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]])).repeat(3, 1)
    drawn = torch.tensor([[0.0], [0.66], [0.67]], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, torch.ones(3, 1), torch.full((3, 1), 0.8), drawn)
    assert tokens.tolist() == [1, 1, 2]
    np.testing.assert_allclose(logprobs.numpy(), np.log([0.6, 0.6, 0.3]), atol=1e-6)


def test_a_token_of_zero_probability_is_never_sampled() -> None:
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf")]]).repeat(2, 1)
    drawn = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    tokens, _ = sample_tokens(logits, torch.ones(2, 1), None, drawn)
    assert tokens.tolist() == [1, 1]
