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
)
from async_rl.base.types import Batch
from learner.loop.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import batch_logprobs, reference_logprobs, values_of, weights_of
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
    temperatures = zip(batch.groups, (0.5, 0.8, 1.7), strict=True)
    groups = tuple(dataclasses.replace(group, temperature=logged) for group, logged in temperatures)
    batch = dataclasses.replace(batch, groups=groups)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    proximal = list(batch_logprobs(lm, batch).values())
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


def test_learning_rates_warm_up_by_steps_and_go_to_zero_over_the_last_part(
    tiny_model_path: Path, one_rank: None
) -> None:
    learner = LearnerConfig(
        prompts_per_step=3, lr=1e-3, warmup_steps=5, lr_decay_fraction=0.4, max_tokens_per_microbatch=4096
    )
    algorithm = AlgorithmConfig(advantage="gae", num_minibatches=2)
    config = learner_config(
        tiny_model_path, run=RunConfig(steps=10), learner=learner, algorithm=algorithm, critic=CriticConfig(lr=1e-2)
    )
    updater = Updater(config, CPU)
    metrics = [values_of(updater.update(make_batch(version=version))) for version in range(10)]
    shares = [0.4, 0.8, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]  # of the second optimizer step of each batch
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


@pytest.mark.parametrize("rank", [0, 4])
def test_offloading_changes_no_weight_and_no_metric(tiny_model_path: Path, one_rank: None, rank: int) -> None:
    found = {}
    for offload in ("none", "moments", "all"):
        config = learner_config(
            tiny_model_path, model={"lora": {"rank": rank}}, learner={"offload": offload},
            algorithm={"advantage": "gae"},
        )  # fmt: skip
        updater = Updater(config, CPU)
        metrics = [values_of(updater.update(make_batch(seed, seed))) for seed in range(3)]
        found[offload] = metrics, weights_of(updater)
        moments = [updater.optimizers["policy"].state_of(p)["exp_avg"] for p in updater.policy.parameters()
                   if p.requires_grad]  # fmt: skip
        assert all(moment.device.type == "cpu" for moment in moments) and any(moment.any() for moment in moments)
    for offload in ("moments", "all"):
        assert found[offload][0] == found["none"][0]
        for name, weight in found["none"][1].items():
            assert torch.equal(found[offload][1][name], weight), name


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
