"""The update against a plain reference written here: one sequence at a time, no sharding, no batching."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from async_rl.base.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    LearnerConfig,
    ModelConfig,
    RunConfig,
    StalenessConfig,
)
from async_rl.base.types import Batch
from learner.loop.updater import Updater
from learner.models.token_scores import LOGITS_BYTES
from tests.kit.configs import learner_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import reference_logprobs, values_of, weights_of
from tests.kit.models import VOCAB

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")


def reference_step(lm: Any, optimizer: torch.optim.Optimizer, batch: Batch, proximal: list[Tensor]) -> float:
    """One step of decoupled PPO-clip with token TIS and GRPO advantages, in place; returns the loss."""
    total, tokens, index = torch.zeros(()), 0, 0
    for group in batch.groups:
        rewards = [row.reward for row in group.rows]
        mean = sum(rewards) / len(rewards)
        std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
        for row in group.rows:
            logprobs = reference_logprobs(lm, group.prompt_tokens, row.tokens, group.temperature)
            advantage = (row.reward - mean) / (std + 1e-6)
            for t in range(len(row.tokens)):
                if row.mask[t]:
                    ratio = (logprobs[t] - proximal[index][t]).exp()
                    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                    if advantage < 0:
                        surrogate = torch.max(surrogate, torch.tensor(3.0 * advantage))
                    weight = min(float(np.exp(float(proximal[index][t]) - float(row.logprobs[t]))), 2.0)
                    total = total - weight * surrogate
                    tokens += 1
            index += 1
    loss = total / tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("max_tokens", [4096, 40])
def test_an_update_gives_the_loss_and_weights_of_the_plain_reference(
    tiny_model_path: Path, one_rank: None, epochs: int, max_tokens: int
) -> None:
    config = learner_config(
        tiny_model_path,
        algorithm=AlgorithmConfig(epochs=epochs),
        learner=LearnerConfig(prompts_per_step=3, lr=1e-3, max_tokens_per_microbatch=max_tokens),
    )
    batch = make_batch()
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    with torch.no_grad():
        proximal = [
            reference_logprobs(lm, group.prompt_tokens, row.tokens, group.temperature)
            for group in batch.groups
            for row in group.rows
        ]
    losses = [reference_step(lm, optimizer, batch, proximal) for _ in range(epochs)]

    updater = Updater(config, CPU)
    metrics = values_of(updater.update(batch))

    assert metrics["policy/loss"] == pytest.approx(sum(losses) / epochs, rel=1e-5, abs=2e-6)
    expected = dict(lm.named_parameters())
    for name, tensor in weights_of(updater).items():
        if (
            "k_proj.bias" not in name
        ):  # softmax ignores it: its gradient is rounding noise, which Adam blows up
            torch.testing.assert_close(
                tensor, expected[name].detach(), atol=2e-5, rtol=0, msg=lambda m, n=name: n + m
            )


def test_training_lowers_the_loss_of_bad_answers_and_raises_the_good(
    tiny_model_path: Path, one_rank: None
) -> None:
    config = learner_config(
        tiny_model_path,
        staleness=StalenessConfig(max=0),
        learner=LearnerConfig(prompts_per_step=1, lr=3e-3, max_tokens_per_microbatch=4096),
    )
    updater = Updater(config, CPU)
    good, bad = [7, 8, 2], [9, 10, 2]

    def probe(row: list[int]) -> float:
        return sum(updater.probe_logprobs([4, 5, *row])[1:])

    before = probe(good), probe(bad)
    for version in range(5):
        logprobs = [updater.probe_logprobs([4, 5, *row])[1:] for row in (good, bad)]
        rows = [make_row(good, logprobs[0], 1.0, version), make_row(bad, logprobs[1], 0.0, version)]
        metrics = values_of(updater.update(batch_of(make_group(0, [4, 5], rows, version), version=version)))
        assert metrics["parity/precision/mean_abs"] < 1e-5
        assert metrics["offpolicy/ess"] == pytest.approx(1.0, abs=1e-6)
    assert probe(good) > before[0] + 0.1
    assert probe(bad) < before[1] - 0.1


def critic_batch(version: int) -> Batch:
    """The reward is in the prompt: 1 after token 5, 0 after token 6."""
    groups = [
        make_group(
            g,
            [4, 5 if g % 2 else 6],
            [make_row([8, 9, 2], [-3.0] * 3, float(g % 2), version)] * 2,
            version,
        )
        for g in range(4)
    ]
    return batch_of(*groups, version=version)


def ppo_config(path: Path, **critic: Any) -> Config:
    algorithm = AlgorithmConfig(advantage="gae", gae_lambda=1.0)
    return learner_config(path, algorithm=algorithm, critic=CriticConfig(**{"lr": 1e-2, **critic}))


def test_the_critic_learns_the_value_of_a_toy_prompt_while_the_policy_warms_up(
    tiny_model_path: Path, one_rank: None
) -> None:
    updater = Updater(ppo_config(tiny_model_path, warmup_steps=30), CPU)
    before = weights_of(updater)
    first = values_of(updater.update(critic_batch(0)))
    # V = 0 everywhere, so with lambda = gamma = 1 the loss is the mean of reward^2 / 2 over tokens
    assert first["critic/loss"] == pytest.approx(0.25, abs=1e-6)
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    for version in range(1, 30):
        last = values_of(updater.update(critic_batch(version)))
    assert last["critic/explained_variance"] > 0.9
    assert "policy/grad_norm" not in last
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(updater).items())
    moved = values_of(updater.update(critic_batch(30)))
    assert moved["policy/grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_of(updater).items())


def test_several_steps_per_batch_keep_the_values_and_logprobs_of_step_start(
    tiny_model_path: Path, one_rank: None
) -> None:
    algorithm = AlgorithmConfig(advantage="gae", epochs=2, num_minibatches=2)
    config = dataclasses.replace(ppo_config(tiny_model_path), algorithm=algorithm)
    batch = make_batch()
    once = Updater(ppo_config(tiny_model_path), CPU).update(batch)
    several = Updater(config, CPU).update(batch)
    keys = [
        key
        for key in values_of(once)
        if key.startswith(("offpolicy/is", "offpolicy/kl_behaviour", "offpolicy/ess", "offpolicy/chi2"))
    ]
    assert len(keys) == 10
    for key in keys:
        assert values_of(several)[key] == pytest.approx(values_of(once)[key], rel=1e-5)


def test_the_value_clip_holds_to_the_values_of_step_start_over_all_epochs(
    tiny_model_path: Path, one_rank: None
) -> None:
    algorithm = AlgorithmConfig(advantage="gae", gae_lambda=1.0, epochs=2)
    losses = []
    for value_clip in (1e-6, 0.0):
        config = dataclasses.replace(ppo_config(tiny_model_path, value_clip=value_clip), algorithm=algorithm)
        losses.append(values_of(Updater(config, CPU).update(critic_batch(0)))["critic/loss"])
    # both epochs cost 0.25, as at V = 0, when V may not leave 0; else the second epoch costs less
    assert losses[0] >= 0.25 - 1e-5
    assert losses[1] < 0.25 - 1e-3


def test_the_learning_rate_warms_up_linearly(tiny_model_path: Path, one_rank: None) -> None:
    learner = LearnerConfig(prompts_per_step=3, lr=1e-3, warmup_steps=4, max_tokens_per_microbatch=4096)
    updater = Updater(learner_config(tiny_model_path, learner=learner), CPU)
    rates = [values_of(updater.update(make_batch()))["policy/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_learning_rates_go_to_zero_over_the_last_part_of_the_run(tiny_model_path: Path, one_rank: None) -> None:
    learner = LearnerConfig(prompts_per_step=3, lr=1e-3, lr_decay_fraction=0.4, max_tokens_per_microbatch=4096)
    algorithm = AlgorithmConfig(advantage="gae", num_minibatches=2)
    config = learner_config(
        tiny_model_path, run=RunConfig(steps=10), learner=learner, algorithm=algorithm, critic=CriticConfig(lr=1e-2)
    )
    updater = Updater(config, CPU)
    metrics = [values_of(updater.update(make_batch(version=version))) for version in range(10)]
    shares = [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [step["policy/lr"] for step in metrics] == pytest.approx([1e-3 * share for share in shares])
    assert [step["critic/lr"] for step in metrics] == pytest.approx([1e-2 * share for share in shares])


def test_bfloat16_compute_keeps_float32_master_weights_and_comes_close(
    tiny_model_path: Path, one_rank: None
) -> None:
    config = learner_config(tiny_model_path, model=ModelConfig(path=str(tiny_model_path), dtype="bfloat16"))
    updater = Updater(config, CPU)
    assert {parameter.dtype for parameter in updater.policy.parameters()} == {torch.float32}
    masters = weights_of(updater)
    updater.probe_logprobs([3, 4, 5])  # leaves the root's parameters gathered, in bfloat16
    assert all(torch.equal(tensor, masters[name]) for name, tensor in weights_of(updater).items())
    exact = values_of(Updater(learner_config(tiny_model_path), CPU).update(make_batch()))
    rough = values_of(updater.update(make_batch()))
    assert rough["policy/entropy"] == pytest.approx(exact["policy/entropy"], rel=0.02)
    assert rough["policy/grad_norm"] != exact["policy/grad_norm"]


def test_chunked_logits_give_the_same_update(
    tiny_model_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Updater(learner_config(tiny_model_path), CPU)
    expected = values_of(whole.update(make_batch()))
    monkeypatch.setitem(LOGITS_BYTES, "cpu", 4 * VOCAB * 7)
    chunked = Updater(learner_config(tiny_model_path), CPU)
    assert values_of(chunked.update(make_batch())) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_each_group_is_scored_at_the_temperature_it_logged(tiny_model_path: Path, one_rank: None) -> None:
    config = learner_config(tiny_model_path, staleness=StalenessConfig(max=0))
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    groups = []
    for index, temperature in enumerate((0.5, 1.0, 1.7)):
        prompt, row = np.array([4, 5, 6]), np.array([7, 8, 9, 2])
        with torch.no_grad():
            logprobs = reference_logprobs(lm, prompt, row, temperature).tolist()
        rows = [make_row(row.tolist(), logprobs, reward) for reward in (0.0, 1.0)]
        groups.append(make_group(index, prompt.tolist(), rows, temperature=temperature))
    batch = batch_of(*groups)
    assert values_of(Updater(config, CPU).update(batch))["parity/precision/mean_abs"] < 1e-6


def test_a_llama_with_an_untied_head_scores_like_transformers_and_pushes_its_head(
    tmp_path: Path, one_rank: None
) -> None:
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, initializer_range=0.3, **shape)
    )
    lm.save_pretrained(tmp_path / "llama")
    updater = Updater(learner_config(tmp_path / "llama"), CPU)
    tokens = [3, 9, 4, 1, 20]
    expected = reference_logprobs(lm, np.array(tokens[:1]), np.array(tokens[1:]), 1.0)
    assert updater.probe_logprobs(tokens) == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
    pushed = weights_of(updater)
    assert set(pushed) == set(lm.state_dict())
    assert all(torch.equal(tensor, pushed[name]) for name, tensor in lm.state_dict().items())


def test_eager_attention_gives_the_same_update(tiny_model_path: Path, one_rank: None) -> None:
    expected = values_of(Updater(learner_config(tiny_model_path), CPU).update(make_batch()))
    eager = ModelConfig(path=str(tiny_model_path), attn_implementation="eager")
    metrics = values_of(Updater(learner_config(tiny_model_path, model=eager), CPU).update(make_batch()))
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_update_of_the_cpu(tiny_model_path: Path) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exact = ModelConfig(path=str(tiny_model_path), dtype="float32")
        expected = values_of(Updater(learner_config(tiny_model_path, model=exact), CPU).update(make_batch()))
        for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.05)):
            model = dataclasses.replace(exact, dtype=dtype)
            metrics = values_of(
                Updater(learner_config(tiny_model_path, model=model), torch.device("cuda")).update(make_batch())
            )
            for key in ("policy/entropy", "policy/grad_norm", "offpolicy/is_weight_mean"):
                assert metrics[key] == pytest.approx(expected[key], rel=tolerance)
    finally:
        dist.destroy_process_group()
