"""Episodes of several turns and rows: numbers by hand, and what does not depend on how an episode is split."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.base.config import AlgorithmConfig, Config, CorrectionConfig, StalenessConfig, TaskConfig
from async_rl.base.types import Batch
from learner.algorithms.advantages import batch_advantages, critic_advantages, gae, vtrace
from learner.algorithms.diagnostics import MetricAccumulator, batch_metrics
from learner.algorithms.objective import Objective
from learner.loop.batches import check_bound, check_staleness
from learner.loop.updater import Updater
from learner.packing import MicroBatch, Piece, collate, reward_at_tokens, rows_by_episode, tokens_by_episode
from tests.kit.configs import learner_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_episode_batch, make_episodes, make_minibatch, make_turns_row

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")
FORKED = (make_turns_row(".rR.rR", [0.25, 0.5], 1.75), make_turns_row("..R", [1.0], 1.75))
"""The two rows of an episode, with five trained tokens and three turns."""
PLAIN = make_turns_row("..rR", [0.25], 0.25)
"""The row of an episode of one turn."""


def hand_batch() -> Batch:
    group = dataclasses.replace(make_group(0, [3, 4], [*FORKED, PLAIN]), episodes=make_episodes([2, 1]))
    return batch_of(group)


def config_of(**algorithm: Any) -> Config:
    task = TaskConfig(env="my_envs:Env", max_prompt_tokens=12)
    return learner_config(task=task, algorithm=algorithm)


def row_by_row(batch: Batch, advantages: list[list[np.ndarray]] | None = None) -> list[MicroBatch]:
    """One micro-batch for each row."""
    zeros = [[np.zeros(len(r.tokens), np.float32) for r in group.rows] for group in batch.groups]
    pairs = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rows))]
    return [collate(batch, [[Piece(g, (i,), 64)]], advantages or zeros, CPU) for g, i in pairs]


def test_the_rows_and_sampled_tokens_of_each_episode_by_hand() -> None:
    (group,) = hand_batch().groups
    assert rows_by_episode(group) == [range(2), range(2, 3)]
    assert tokens_by_episode(group) == [5, 2]
    assert rows_by_episode(dataclasses.replace(group, episodes=())) == [range(1), range(1, 2), range(2, 3)]


def test_a_turn_is_rewarded_at_its_end_and_a_row_for_the_later_rows_too() -> None:
    (group,) = hand_batch().groups
    placed = [of_row.tolist() for of_row in reward_at_tokens(group)]
    assert placed == [[0, 0, 0.25, 0, 0, 0.5 + 1.0], [0, 0, 1.0], [0, 0, 0, 0.25]]


def test_an_answer_to_a_question_is_rewarded_at_its_last_trained_token() -> None:
    row = make_row([5, 6, 7], [-1.0] * 3, 0.5)
    none = dataclasses.replace(row, mask=np.zeros(3, bool))
    placed = reward_at_tokens(make_group(0, [3], [row, none]))
    assert [of_row.tolist() for of_row in placed] == [[0, 0, 0.5], [0, 0, 0]]


@pytest.mark.parametrize(
    ("advantage", "of_first"),
    [("grpo", 0.75 / (1.5 / 2**0.5 + 1e-6)), ("dr_grpo", 0.75), ("rloo", 1.5), ("maxrl", 0.75)],
)
def test_rewards_are_compared_between_episodes_whatever_their_rows(advantage: str, of_first: float) -> None:
    """The rewards 1.75 and 0.25 have the mean 1; the mean over rows would be 1.25."""
    ((first, second, plain),) = batch_advantages(config_of(advantage=advantage), hand_batch())
    assert first.tolist() == pytest.approx([0, of_first, of_first, 0, of_first, of_first])
    assert second.tolist() == pytest.approx([0, 0, of_first])
    assert plain.tolist() == pytest.approx([0, 0, -of_first, -of_first])


def test_any_advantage_is_whitened_on_request() -> None:
    whitened, expected, plain = (
        np.concatenate(batch_advantages(config_of(**algorithm), hand_batch())[0])
        for algorithm in (
            {"advantage": "dr_grpo", "whiten": True}, {"advantage": "reinforce_pp_baseline"}, {"advantage": "dr_grpo"}
        )
    )
    assert np.array_equal(whitened, expected) and not np.array_equal(whitened, plain)


def test_the_length_of_an_episode_is_that_of_all_its_rows() -> None:
    """The rewards 1.75 and 0.25 of 5 and 2 sampled tokens have the baseline (8.75 + 0.5) / 7."""
    ((first, second, plain),) = batch_advantages(config_of(advantage="opo"), hand_batch())
    assert [first[1], second[2], plain[3]] == pytest.approx([1.75 - 9.25 / 7, 1.75 - 9.25 / 7, 0.25 - 9.25 / 7])


def test_a_greedy_baseline_is_taken_off_each_episode_once(tmp_path: Path) -> None:
    batch = hand_batch()
    group = dataclasses.replace(batch.groups[0], baseline_reward=0.5)
    config = learner_config(tmp_path / "none", algorithm=AlgorithmConfig(advantage="remax"))
    ((first, second, plain),) = batch_advantages(config, dataclasses.replace(batch, groups=(group,)))
    assert [float(first[1]), float(second[2]), float(plain[3])] == [1.25, 1.25, -0.25]


def test_discounted_returns_of_turns_by_hand() -> None:
    config = config_of(advantage="reinforce_pp", gamma=0.5)
    got = np.concatenate(batch_advantages(config, hand_batch())[0])
    first, second, plain = [0, 0.3125, 0.625, 0, 0.75, 1.5], [0, 0, 1.0], [0, 0, 0.125, 0.25]
    returns = np.array([*first, *second, *plain])
    kept = returns[returns != 0]
    assert len(kept) == 7
    expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    assert got[returns != 0] == pytest.approx(expected, abs=1e-6) and not got[returns == 0].any()


@pytest.mark.parametrize("function", [gae, vtrace])
def test_advantages_of_a_critic_with_rewards_of_turns_by_hand(function: Any) -> None:
    """With lambda 1/2: deltas 0.1, 0.35, 0.1, 1.1. V-trace on data of the policy itself is GAE."""
    config = config_of(advantage="gae", gamma=1.0, gae_lambda=0.5)
    micro = row_by_row(hand_batch())[0]
    values, zeros = torch.tensor([9, 0.1, 0.2, 9, 0.3, 0.4]), torch.zeros(6)
    advantages, targets = critic_advantages(config, function, micro.response, values, zeros, zeros)
    assert advantages.tolist() == pytest.approx([0, 0.4375, 0.675, 0, 0.65, 1.1])
    assert targets.tolist() == pytest.approx([0, 0.5375, 0.875, 0, 0.95, 1.5])


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    # 7 tokens; two episodes of 5 and 2 tokens; two episodes of at most 12 + 9 tokens
    [("token_mean", (7, 7)), ("sequence_mean", (2 * 5, 2 * 2)), ("constant", (2 * 21, 2 * 21))],
)
@pytest.mark.parametrize("masks_first_row", [False, True])
def test_aggregations_over_rows_in_separate_micro_batches_by_hand(
    aggregation: Any, divisors: tuple[int, int], masks_first_row: bool, one_rank: None
) -> None:
    """With ratios of 1 and advantages of 1 the gradient of a token is -1 / divisor, also if others are too old."""
    batch = hand_batch()
    if masks_first_row:
        (group,) = batch.groups
        hidden = dataclasses.replace(FORKED[0], mask=np.zeros(6, bool), too_old=FORKED[0].mask)
        batch = dataclasses.replace(batch, groups=(dataclasses.replace(group, rows=(hidden, *group.rows[1:])),))
    objective = Objective(config_of(aggregation=aggregation, correction=CorrectionConfig(kind="none")))
    normaliser = objective.normaliser(batch.groups, [(0, 2), (0, 1), (0, 0)])
    ones = [[np.ones(len(r.tokens), np.float32) for r in batch.groups[0].rows]]
    for row, micro in enumerate(row_by_row(batch, ones)):
        logprobs = micro.response.behaviour.clone().requires_grad_()
        zeros = torch.zeros_like(logprobs)
        loss = objective.losses(make_minibatch(micro), micro, logprobs, zeros, None).policy
        (gradient,) = torch.autograd.grad(loss / normaliser, logprobs)
        expected = batch.groups[0].rows[row].mask / -divisors[0 if row < 2 else 1]
        assert gradient.tolist() == pytest.approx(expected.tolist())


@given(st.integers(0, 999), st.sampled_from(["grpo", "rloo", "maxrl", "opo", "reinforce_pp", "reinforce_pp_baseline"]))
def test_splitting_an_episode_into_rows_keeps_the_advantages_of_its_tokens(seed: int, advantage: str) -> None:
    config = config_of(advantage=advantage)
    found = []
    for is_split in (False, True):
        batch = make_episode_batch(seed, is_split)
        found.append([
            np.concatenate([of_group[row][group.rows[row].mask] for row in rows])
            for group, of_group in zip(batch.groups, batch_advantages(config, batch), strict=True)
            for rows in rows_by_episode(group)
        ])  # fmt: skip
    for whole, split in zip(*found, strict=True):
        np.testing.assert_allclose(split, whole, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 999), st.sampled_from([gae, vtrace]))
def test_splitting_keeps_a_critics_advantages_where_nothing_is_discounted(seed: int, function: Any) -> None:
    config = config_of(advantage="gae", gamma=1.0, gae_lambda=1.0)
    found = []
    for is_split in (False, True):
        of_rows = []
        for micro in row_by_row(make_episode_batch(seed, is_split)):
            values = micro.response.behaviour * 0.1  # equal for a token in both cases
            zeros = torch.zeros_like(values)
            both = critic_advantages(config, function, micro.response, values, zeros, zeros)
            of_rows.append(torch.stack(both)[:, micro.response.trained])
        found.append(torch.cat(of_rows, 1))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def gradients_of(config: Config, batch: Batch) -> dict[str, Tensor]:
    """The gradients of policy and critic."""
    updater = Updater(config, CPU)
    packed = updater.pack(batch, batch_advantages(config, batch))
    (minibatch,) = updater.objective.prepare(updater.at_step_start(packed))
    networks: dict[str, Any] = {"policy": updater.policy.lm}
    if updater.critic is not None:
        networks["critic"] = updater.critic.lm
        torch.nn.init.constant_(updater.critic.lm.score.weight.to_local(), 0.1)
    updater.forward_backward(minibatch, MetricAccumulator(), trains_policy=True, is_first_epoch=True)
    return {
        f"{name}.{key}": parameter.grad.full_tensor()
        for name, module in networks.items() for key, parameter in module.named_parameters()
    }  # fmt: skip


@pytest.mark.parametrize("max_tokens", [4096, 24])
@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(),
        AlgorithmConfig(aggregation="sequence_mean"),
        AlgorithmConfig(aggregation="constant", advantage="reinforce_pp"),
        AlgorithmConfig(advantage="gae", gae_lambda=1.0),
    ],
    ids=["token_mean", "sequence_mean", "constant", "gae"],
)
def test_the_gradient_of_an_episode_is_the_same_in_one_row_and_in_several(
    tiny_model_path: Path, one_rank: None, algorithm: AlgorithmConfig, max_tokens: int
) -> None:
    task = TaskConfig(env="my_envs:Env", max_prompt_tokens=12)
    config = learner_config(tiny_model_path, task=task, algorithm=algorithm)
    learner = dataclasses.replace(config.learner, max_tokens_per_microbatch=max_tokens)
    whole = gradients_of(config, make_episode_batch(is_split=False))
    split = gradients_of(dataclasses.replace(config, learner=learner), make_episode_batch(is_split=True))
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=3e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_logprobs_of_rows_with_and_without_a_prompt_are_those_of_the_plain_model(
    tiny_model_path: Path, one_rank: None
) -> None:
    batch = make_episode_batch()
    updater = Updater(learner_config(tiny_model_path), CPU)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    (minibatch,) = updater.pack(batch, batch_advantages(updater.config, batch))
    num_compared = 0
    for micro in minibatch.micro_batches:
        found = updater.policy(micro.inputs)[0].split(list(micro.response.lengths))
        for logprobs, (g, i) in zip(found, micro.rows, strict=True):
            group, row = batch.groups[g], batch.groups[g].rows[i]
            tokens = torch.tensor([*group.prompt_tokens.tolist(), *row.tokens.tolist()])
            logits = lm(tokens[None]).logits[0, :-1] / group.temperature
            expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[-len(row.tokens) :, 0]
            trained = torch.from_numpy(row.mask)
            torch.testing.assert_close(logprobs[trained], expected[trained[-len(expected) :]], atol=1e-5, rtol=1e-5)
            num_compared += int(trained.sum())
    assert num_compared == sum(group.num_tokens for group in batch.groups)


def test_metrics_of_a_batch_count_episodes_by_hand() -> None:
    first, second = (dataclasses.replace(row, versions=row.versions + v) for row, v in zip(FORKED, (3, 4), strict=True))
    second.versions[:2] = 1  # tokens that another row trains
    cut = dataclasses.replace(PLAIN, versions=PLAIN.versions + 4, finish_reason="timeout")
    group = dataclasses.replace(make_group(0, [3], [first, second, cut], version=3), episodes=make_episodes([2, 1]))
    batch = batch_of(group, version=5, finished_versions=(4,))
    got = {metric.key: metric.value for metric in batch_metrics(batch)}
    expected = {
        "reward/mean": 1.0, "reward/std": 0.75, "batch/episodes": 2, "batch/response_tokens": 7,
        "response/length_mean": 3.5, "response/length_max": 5, "response/truncated_fraction": 0.0,
        "response/distinct_fraction": 0.9,  # 4 of 5 and 2 of 2
        "response/timeout_fraction": 0.5, "episode/rows": 1.5,
        "staleness/mean": 1.5, "staleness/max": 2, "staleness/in_flight": 0.5, "staleness/in_queue": 1.0,
        "staleness/episodes_1": 1, "staleness/episodes_2": 1,
        "by_staleness/1/episodes": 1, "by_staleness/2/episodes": 1,
        "by_staleness/1/reward": 0.25, "by_staleness/1/response_length": 2,
        "by_staleness/2/reward": 1.75, "by_staleness/2/response_length": 5,
        "by_length/2/episodes": 1, "by_length/2/reward": 0.25, "by_length/4/episodes": 1, "by_length/4/reward": 1.75,
    }  # fmt: skip
    assert got == pytest.approx(expected)


def test_too_old_turns_are_masked_and_counted_and_what_is_not_sampled_is_not() -> None:
    """At version 5 with a bound of 1 the first turn of the first row is too old, and the first row of the second."""
    first, second = FORKED
    first = dataclasses.replace(first, versions=np.array([3, 3, 3, 3, 4, 5], np.int32))
    second = dataclasses.replace(second, versions=np.array([3, 3, 5], np.int32))  # its old tokens are not trained
    old = dataclasses.replace(PLAIN, versions=np.array([1, 1, 2, 2], np.int32))
    group = dataclasses.replace(make_group(0, [3], [first, second, old], version=2), episodes=make_episodes([2, 1]))
    batch = batch_of(group, version=5)
    masked, metrics = check_staleness(batch, 5, StalenessConfig(max=1, on_late="mask"))
    rows = masked.groups[0].rows
    assert [row.mask.nonzero()[0].tolist() for row in rows] == [[4, 5], [2], []]
    assert [int(row.sampled.sum() - row.mask.sum()) for row in rows] == [2, 0, 2]
    values = {metric.key: metric.value for metric in metrics}
    assert values["episode/masked_turns"] == 2 and values["staleness/masked_fraction"] == pytest.approx(4 / 7)
    assert (values["staleness/before_mask_mean"], values["staleness/before_mask_max"]) == (2.5, 3)
    assert tokens_by_episode(masked.groups[0]) == [5, 2]
    placed = [of_row.tolist() for of_row in reward_at_tokens(masked.groups[0])]
    assert placed == [[0, 0, 0, 0, 0, 1.5], [0, 0, 1.0], [0, 0, 0, 0]]
    check_bound(masked, 5, 1)
    in_time = dataclasses.replace(group, rows=(dataclasses.replace(first, mask=first.versions >= 4), second))
    check_bound(batch_of(in_time, version=5), 5, 1)
