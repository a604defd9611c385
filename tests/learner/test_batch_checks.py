"""The learner masks or refuses tokens that are too old, depending on staleness.on_late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.base.config import AlgorithmConfig, StalenessConfig
from async_rl.base.errors import StalenessError
from async_rl.base.types import Batch
from learner.algorithms.objective import Objective
from learner.loop.batches import check_bound, check_staleness
from learner.loop.updater import Updater
from learner.packing import Piece, collate
from tests.kit.configs import learner_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_batch, make_minibatch

MASK = StalenessConfig(max=1, on_late="mask")


def aged_batch() -> Batch:
    """Return a batch of version 5. Its first answer is of versions 2..5, the second of version 2, the others of 5."""
    batch = make_batch(seed=0, version=5)
    first, second, *others = batch.groups[0].rows
    spanning = np.sort(np.resize(np.array([2, 4, 5], np.int32), len(first.versions)))
    rows = (
        replace(first, versions=spanning), replace(second, versions=np.full_like(second.versions, 2)),
        *(replace(r, versions=np.full_like(r.versions, 5)) for r in others),
    )
    rest = [
        replace(g, rows=tuple(replace(r, versions=np.full_like(r.versions, 5)) for r in g.rows))
        for g in batch.groups[1:]
    ]
    return replace(batch, groups=(replace(batch.groups[0], rows=rows), *rest))


def test_tokens_over_the_bound_are_masked_and_the_rest_is_trained_on() -> None:
    batch = aged_batch()
    masked, metrics = check_staleness(batch, 5, MASK)
    first, second, *others = masked.groups[0].rows
    before = batch.groups[0].rows
    assert first.mask.tolist() == (before[0].mask & (first.versions >= 4)).tolist()
    assert not second.mask.any()
    assert all(np.array_equal(r.mask, b.mask) for r, b in zip(others, before[2:], strict=True))
    values = {metric.key: metric.value for metric in metrics}
    assert values["staleness/before_mask_max"] == 3
    assert 0 < values["staleness/masked_fraction"] < 1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_masking_old_tokens_does_not_amplify_the_young_ones(tiny_model_path: Path, aggregation: str) -> None:
    """The gradient at a young token is the same as without a mask; at an old token it is zero."""
    algorithm = AlgorithmConfig(aggregation=aggregation)  # type: ignore[arg-type]
    config = learner_config(tiny_model_path, algorithm=algorithm)
    batch = aged_batch()
    advantages = [[np.ones(len(r.tokens), np.float32) for r in group.rows] for group in batch.groups]
    pairs = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rows))]
    gradients, trained = [], []
    for of_batch in (batch, check_staleness(batch, 5, MASK)[0]):
        rows = [[Piece(g, (i,), 64)] for g, i in pairs]
        micro = collate(of_batch, rows, advantages, torch.device("cpu"))
        logprobs = torch.cat([torch.tensor(batch.groups[g].rows[i].logprobs) for g, i in pairs]).requires_grad_()
        zeros = torch.zeros_like(logprobs)
        loss = Objective(config).losses(make_minibatch(micro), micro, logprobs, zeros, None).policy
        loss.backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad / Objective(config).normaliser(of_batch.groups, pairs))
        trained.append(micro.response.trained)
    whole, masked = gradients
    young = trained[1]
    assert 0 < young.sum() < trained[0].sum()
    torch.testing.assert_close(masked[young], whole[young])
    assert (whole[trained[0]] != 0).all() and (masked[~young] == 0).all()


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_without_mask_such_a_batch_is_refused(late: str) -> None:
    with pytest.raises(StalenessError, match=r"version 2.* version 5"):
        check_staleness(aged_batch(), 5, StalenessConfig(max=1, on_late=late))  # type: ignore[arg-type]


def test_a_future_token_is_refused_with_mask_too() -> None:
    with pytest.raises(StalenessError, match=r"version 5.* version 4"):
        check_staleness(aged_batch(), 4, MASK)
    with pytest.raises(StalenessError, match=r"version 5.* version 4"):
        check_staleness(replace(aged_batch(), version=4), 4, MASK)


@pytest.mark.usefixtures("one_rank")
def test_an_answer_without_a_young_token_trains_nothing_and_counts_in_the_reward(tiny_model_path: Path) -> None:
    masked, _ = check_staleness(aged_batch(), 5, MASK)
    config = learner_config(tiny_model_path, staleness=MASK)
    values = {m.key: m.value for m in Updater(config, torch.device("cpu")).update(masked)}
    assert values["staleness/max"] <= 1
    assert values["batch/episodes"] == 12 and np.isfinite(values["policy/loss"])


def batch_with_versions(versions: list[int], version: int) -> Batch:
    row = make_row([5] * len(versions), [-1.0] * len(versions), 1.0)
    row.versions[:] = np.array(versions)
    return batch_of(make_group(7, [3], [row], versions[0]), version=version)


@pytest.mark.parametrize("versions", [[3, 4, 5], [5], [3]])
def test_tokens_within_the_bound_pass(versions: list[int]) -> None:
    check_bound(batch_with_versions(versions, 5), 5, 2)


def test_one_token_too_old_is_enough_and_the_error_names_group_versions_and_bound() -> None:
    with pytest.raises(StalenessError, match=r"group 7 .*version 2,.* version 5.*staleness\.max is 2"):
        check_bound(batch_with_versions([2, 5, 5, 5], 5), 5, 2)
