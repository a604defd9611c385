from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from learner.memory.passes import LiveBytes
from learner.models import token_scores as scoring
from learner.models.token_scores import TokenSupports, score_supports, score_tokens


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    head = torch.randn(11, 5, dtype=dtype, requires_grad=True)
    return states, head, torch.randint(11, (7,)), torch.linspace(0.5, 1.7, 7, dtype=dtype)


def plain(states: Tensor, head: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    distribution = torch.distributions.Categorical(logits=states @ head.T / temperature[:, None])
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("rows_at_once", [100, 3])
def test_scores_and_gradients_are_those_of_torch_distributions_whole_or_in_chunks(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scoring.LOGITS_BYTES, "cpu", 4 * 11 * rows_at_once)
    expected = inputs()
    given = inputs()
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    for function, arguments in ((plain, expected), (score_tokens, given)):
        logprobs, entropy = function(*arguments)
        (logprobs * weights + 0.3 * entropy * weights.flip(0)).sum().backward()
    for ours, theirs in zip(score_tokens(*given), plain(*expected), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(given[0].grad, expected[0].grad)
    torch.testing.assert_close(given[1].grad, expected[1].grad)


def test_a_frozen_head_gets_no_gradient_and_scores_of_bfloat16_are_float32() -> None:
    states, head, targets, temperature = inputs(torch.bfloat16)
    frozen = head.detach()
    logprobs, entropy = score_tokens(states, frozen, targets, temperature.float())
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert states.grad is not None and states.grad.dtype == torch.bfloat16
    exact, _ = plain(states.detach().float(), frozen.float(), targets, temperature.float())
    torch.testing.assert_close(logprobs.detach(), exact, atol=0.05, rtol=0.02)


def test_the_heads_gradient_of_many_chunks_is_as_good_as_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    states, head = torch.randn(640, 16, dtype=torch.bfloat16) + 0.5, torch.randn(50, 16, dtype=torch.bfloat16)
    targets, temperature = torch.randint(50, (640,)), torch.ones(640)

    def gradient(dtype: torch.dtype, chunks: int) -> Tensor:
        monkeypatch.setitem(scoring.LOGITS_BYTES, "cpu", 4 * 50 * (640 // chunks))
        trained = head.to(dtype, copy=True).requires_grad_()
        score_tokens(states.to(dtype), trained, targets, temperature.to(dtype))[0].sum().backward()
        assert trained.grad is not None and trained.grad.dtype == dtype
        return trained.grad.double()

    exact = gradient(torch.float64, 1)
    errors = {n: float((gradient(torch.bfloat16, n) - exact).norm() / exact.norm()) for n in (1, 40)}
    assert errors[40] < 1.2 * errors[1] < 0.01


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.3), (torch.bfloat16, 1.55)])
def test_beside_the_heads_gradient_little_more_than_a_chunk_of_logits_exists(
    dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, hidden, limit = 4096, 2, 4 * 4096 * 64
    monkeypatch.setitem(scoring.LOGITS_BYTES, "cpu", limit)
    torch.manual_seed(0)
    states = torch.randn(200, hidden, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    with LiveBytes() as forward:
        logprobs, entropy = score_tokens(states, head, torch.randint(vocab, (200,)), torch.ones(200))
        loss = logprobs.sum() + entropy.sum()
    with LiveBytes() as backward:
        loss.backward()
    assert limit < forward.peak < most * limit
    assert limit < backward.peak - 8 * head.numel() < most * limit


@pytest.mark.parametrize("rows_at_once", [100, 3])
def test_forbidden_tokens_are_left_out_of_the_distributions(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scoring.LOGITS_BYTES, "cpu", 4 * 11 * rows_at_once)
    forbidden, allowed = torch.tensor([0, 4, 10]), torch.tensor([1, 2, 3, 5, 6, 7, 8, 9])
    states, head, _, temperature = inputs()
    targets = allowed[torch.arange(7)]
    logprobs, entropy = score_tokens(states, head, targets, temperature, forbidden)
    (logprobs + 0.3 * entropy).sum().backward()
    others, small, _, _ = inputs()
    expected = plain(others, small[allowed], torch.arange(7), temperature)
    (expected[0] + 0.3 * expected[1]).sum().backward()
    torch.testing.assert_close((logprobs, entropy), expected)
    torch.testing.assert_close(states.grad, others.grad)
    torch.testing.assert_close(head.grad, small.grad)


def test_a_forbidden_target_has_logprob_0_and_finite_gradients() -> None:
    states, head, _, temperature = inputs()
    logprobs, _ = score_tokens(states, head, torch.full((7,), 4), temperature, torch.tensor([4]))
    assert logprobs.tolist() == [0.0] * 7
    torch.where(torch.zeros(7, dtype=torch.bool), logprobs.exp(), 0.0).sum().backward()
    assert states.grad is not None and states.grad.abs().sum() == 0


SETS: list[list[int]] = [[3, 7, 9], [], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5], [2, 10], [], [0, 4, 8, 9]]
"""The support of each token of `inputs`; none: the whole vocabulary."""


def supported() -> tuple[Tensor, TokenSupports]:
    """Targets, each in its support, and the supports."""
    targets = torch.tensor([9, 6, 3, 5, 2, 1, 0])
    offsets = torch.tensor([0, *(len(each) for each in SETS)]).cumsum(0)
    return targets, TokenSupports(torch.tensor([token for each in SETS for token in each]), offsets)


def over_supports(states: Tensor, head: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The scores by a mask over the whole vocabulary, which the learner never makes."""
    logits = states @ head.T / temperature[:, None]
    is_out = torch.ones(7, 11, dtype=torch.bool)
    for token, ids in enumerate(SETS):
        is_out[token, ids or list(range(11))] = False
    inside = torch.distributions.Categorical(logits=logits.masked_fill(is_out, torch.finfo(logits.dtype).min))
    return inside.log_prob(targets), inside.entropy()


@pytest.mark.parametrize("rows_at_once", [100, 3])
def test_scores_are_over_each_tokens_support(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scoring.LOGITS_BYTES, "cpu", 4 * 11 * rows_at_once)
    targets, supports = supported()
    (states, head, _, temperature), (others, same, *_) = inputs(), inputs()
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    found = score_supports(states, head, targets, temperature, None, supports)[:2]
    expected = over_supports(others, same, targets, temperature)
    for logprobs, entropy in (found, expected):
        (logprobs * weights + 0.3 * entropy * weights.flip(0)).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(states.grad, others.grad)
    torch.testing.assert_close(head.grad, same.grad)


@pytest.mark.parametrize("rows_at_once", [100, 2])
def test_logprobs_of_all_ids_are_those_of_a_mask_with_gradients_that_fit(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scoring.LOGITS_BYTES, "cpu", 4 * 11 * rows_at_once)
    targets, supports = supported()
    states, head, _, temperature = inputs()
    supports = dataclasses.replace(supports, behaviour=torch.zeros(len(supports.ids)))
    logprobs, _, masses, of_ids = score_supports(states, head, targets, temperature, None, supports)
    logits = (states @ head.T / temperature[:, None]).detach()
    expected = [logits[token, ids].log_softmax(0) for token, ids in enumerate(SETS) if ids]
    torch.testing.assert_close(of_ids.detach(), torch.cat(expected))
    is_target = supports.ids == targets[supports.owners]
    torch.testing.assert_close(of_ids.detach()[is_target], logprobs.detach()[supports.sizes > 0])
    shares = [logits[token].softmax(0)[ids].sort().values for token, ids in enumerate(SETS) if ids]
    assert not masses.requires_grad
    torch.testing.assert_close(
        masses[:, supports.sizes > 0], torch.stack([torch.stack([p.sum(), p[1:].sum()]) for p in shares], 1)
    )
    for outputs in ((0, 1, 3), (3,)):  # all gradients together, and those of the ids alone
        assert torch.autograd.gradcheck(
            lambda *of, outputs=outputs: tuple(
                score_supports(*of, targets, temperature, None, supports)[output] for output in outputs
            ),
            (states, head),
        )  # fmt: skip
    assert len(score_supports(states, head, targets, temperature, None, supported()[1])[3]) == 0


def test_a_support_without_the_most_probable_tokens_has_finite_logprobs() -> None:
    """A policy that has moved away gives what was sampled then no float32 probability."""
    head = torch.tensor([[200.0], [0.0], [-1.0]], requires_grad=True)
    supports = TokenSupports(torch.tensor([1, 2]), torch.tensor([0, 2]))
    logprobs, *_ = score_supports(torch.ones(1, 1), head, torch.tensor([1]), torch.ones(1), None, supports)
    logprobs.sum().backward()
    inside = torch.log_softmax(torch.tensor([0.0, -1.0]), 0)
    torch.testing.assert_close(logprobs, inside[:1], atol=1e-4, rtol=0)
    p = inside.exp()
    torch.testing.assert_close(head.grad, torch.tensor([[0.0], [1 - p[0]], [-p[1]]]), atol=1e-4, rtol=0)
