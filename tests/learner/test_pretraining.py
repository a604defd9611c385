"""The pretraining term against plain transformers, and which text each step learns."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.config.check import SettingsError
from async_rl.base.errors import ConfigError
from async_rl.base.types import Batch
from learner.algorithms.diagnostics import MetricAccumulator
from learner.loop.updater import Updater
from learner.models.tiny_model import character_tokenizer
from learner.stages.pretraining import PretrainingTerm, read_texts
from tests.kit.configs import learner_config
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.updates import values_of
from tests.kit.models import save_tiny_model

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")
TOKENIZER = character_tokenizer()
TEXTS = ["a quick brown fox", "1", "over the lazy dog, twice"]
"""21 tokens are the longest row: so these are cut into 1, 1 and 2 rows."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretraining")
    save_tiny_model("tiny-qwen2", folder / "model", seed=0)
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return folder / "model"


def config_of(model: Path, max_tokens: int = 4096, minibatches: int = 1, lr: float = 1e-3, **algorithm: Any) -> Config:
    settings = {"ptx_coef": 0.5, **algorithm}
    return learner_config(
        model, algorithm={"num_minibatches": minibatches, **settings},
        task={"pretrain_path": model.parent / "texts.jsonl"} if settings["ptx_coef"] else {},
        learner={"max_tokens_per_microbatch": max_tokens, "lr": lr},
    )


def term_of(updater: Updater) -> PretrainingTerm:
    assert updater.pretraining is not None
    return updater.pretraining


def gradients(updater: Updater) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in updater.policy.lm.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.full_tensor()
    return found


def batch(version: int = 0) -> Batch:
    """12 answers, of which half are better."""
    rows = [make_row(TOKENIZER("abc")["input_ids"], [-2.0] * 3, float(i % 2)) for i in range(4)]
    groups = [make_group(number, TOKENIZER("1+1")["input_ids"], rows, version) for number in range(3)]
    return batch_of(*groups, version=version)


@pytest.mark.parametrize("max_tokens", [4096, 21])
def test_the_term_is_the_mean_cross_entropy_of_plain_transformers(
    model: Path, one_rank: None, max_tokens: int
) -> None:
    updater = Updater(config_of(model, max_tokens), CPU)
    term, sums = term_of(updater), MetricAccumulator()
    found = term.backward(0, sums)
    rows = [read_texts(updater.config)[index].tolist() for index in term.rows(0)]
    assert len(rows) == 12  # one for each episode
    lm, total, count = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), torch.zeros(()), 0
    for row in rows:
        logprobs = lm(torch.tensor([row])).logits[0].log_softmax(-1)
        total = total - logprobs[torch.arange(len(row) - 1), torch.tensor(row[1:])].sum()
        count += len(row) - 1
    expected = 0.5 * total / count
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    totals = sums.reduce()
    assert (totals["ptx_tokens"], totals["ptx_nll"]) == (count, pytest.approx(total.item(), rel=1e-5))
    for name, gradient in gradients(updater).items():
        torch.testing.assert_close(gradient, lm.get_parameter(name).grad, atol=1e-6, rtol=1e-4)


def test_an_update_adds_both_gradients_before_its_step(model: Path, one_rank: None) -> None:
    both = Updater(config_of(model, lr=1e-9), CPU)
    found = values_of(both.update(batch()))["policy/grad_norm"]
    alone = Updater(config_of(model, ptx_coef=0.0), CPU)
    minibatch, *_ = alone.objective.prepare(alone.at_step_start(alone.pack(batch(), [
        [torch.tensor([-1.0, 1.0][i % 2]).expand(3).numpy() * 0.8660253 for i in range(4)] for _ in range(3)
    ])))
    alone.forward_backward(minibatch, MetricAccumulator(), trains_policy=True, is_first_epoch=True)
    text = Updater(config_of(model), CPU)
    term_of(text).backward(0, MetricAccumulator())
    of_both = [a + b for a, b in zip(gradients(alone).values(), gradients(text).values(), strict=True)]
    assert found == pytest.approx(float(torch.nn.utils.get_total_norm(of_both)), rel=1e-3)


def test_every_row_of_text_is_learned_once_before_one_is_learned_again(model: Path, one_rank: None) -> None:
    config = config_of(model, num_minibatches=2, epochs=2, ptx_rows=2)
    term = term_of(Updater(config, CPU))
    steps = [term.rows(step) for step in range(8)]
    assert [len(step) for step in steps] == [12] * 8  # 2 for each of the 6 episodes of a minibatch
    assert Counter(index for step in steps for index in step) == dict.fromkeys(range(4), 24)
    places = [index for step in steps for index in step]
    epochs = [places[start : start + 4] for start in range(0, 96, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs) and len(set(map(tuple, epochs))) > 5
    assert term_of(Updater(config, CPU)).rows(6) == steps[6]  # a resumed run goes on there


def test_texts_end_with_the_eos_token_and_long_ones_are_cut(model: Path, tmp_path: Path) -> None:
    rows = [TOKENIZER.decode(row) for row in read_texts(config_of(model))]
    assert rows == ["a quick brown fox<eos>", "1<eos>", "over the lazy dog, tw", "ice<eos>"]
    file = tmp_path / "texts.jsonl"
    config = learner_config(model, algorithm={"ptx_coef": 1.0}, task={"pretrain_path": file})
    for line, got in {'{"content": "a"}': "content", '{"text": 3}': "got 3", '{"text": ""}': "got 1 rows"}.items():
        file.write_text(line)
        with pytest.raises(ConfigError, match=f"{file}.*{got}"):
            read_texts(config)


@pytest.mark.parametrize(("coef", "path"), [(0.5, ""), (0.0, "texts.jsonl")])
def test_coefficient_and_text_need_each_other(coef: float, path: str) -> None:
    with pytest.raises(SettingsError, match=r"^task\.pretrain_path .* algorithm\.ptx_coef"):
        learner_config(algorithm={"ptx_coef": coef}, task={"pretrain_path": path})
