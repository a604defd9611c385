"""Tokens that were drawn from a part of the vocabulary have a ratio of 1 at equal weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.base.config.check import SettingsError
from async_rl.base.types import Batch, Row
from learner.algorithms.advantages import batch_advantages
from learner.loop.updater import Updater
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.batch import DecodingBatch, OpenRequest
from tests.kit.configs import learner_config
from tests.kit.engines.replies import SUPPORT_TOLERANCE, request_for
from tests.kit.groups import batch_of, make_group
from tests.kit.learner.updates import gradients
from tests.kit.models import VOCAB, load_model

RULES: list[dict[str, float]] = [{"top_p": 0.8}, {"top_k": 12}, {"min_p": 0.2}]


def sampled(model: Path, *, wants_support: bool, of_ids: bool = False, **rules: float) -> Batch:
    """A batch of answers by the model, sampled by the hf engine; `of_ids`: with the logprobs of all ids."""
    lm = load_model(model)
    wanted = {"wants_support": wants_support, "wants_support_logprobs": of_ids}
    asked: dict[str, Any] = {"temperature": 0.8, "max_tokens": 9, **wanted, **rules}
    requests = [OpenRequest(in_vocabulary(request_for(index, **asked))) for index in range(3)]
    with torch.inference_mode():
        decoding = DecodingBatch(lm, frozenset([2]))
        decoding.add(requests, 0)
        while len(decoding):
            decoding.step(0)
    return batch_of(*(
        make_group(index, each.request.prompt.tokens, rows_of(each.replies), temperature=0.8)
        for index, each in enumerate(requests)
    ))


def in_vocabulary(request: GenerationRequest) -> GenerationRequest:
    prompt = request.prompt
    return dataclasses.replace(request, prompt=dataclasses.replace(prompt, tokens=prompt.tokens % VOCAB))


def rows_of(replies: Sequence[SampledReply]) -> list[Row]:
    return [
        Row(
            tokens=reply.tokens, logprobs=reply.logprobs, versions=reply.versions,
            mask=np.ones(len(reply.tokens), np.bool_), reward=float(number), finish_reason=reply.finish_reason,
            support=reply.support,
        )
        for number, reply in enumerate(replies)
    ]


def log_ratios(model: Path, batch: Batch) -> torch.Tensor:
    """Learner less behaviour logprob of each trained token."""
    config = learner_config(model)
    updater = Updater(config, torch.device("cpu"))
    packed = updater.pack(batch, batch_advantages(config, batch))
    with torch.no_grad():
        return torch.cat([
            (updater.policy(micro.inputs)[0] - micro.response.behaviour)[micro.response.trained]
            for part in packed for micro in part.micro_batches
        ])


@pytest.mark.parametrize("rules", RULES)
def test_at_equal_weights_every_ratio_is_1_over_the_supports_and_below_without(
    rules: dict[str, float], tiny_model_path: Path, one_rank: None
) -> None:
    replayed = log_ratios(tiny_model_path, sampled(tiny_model_path, wants_support=True, **rules))
    assert replayed.abs().max() < SUPPORT_TOLERANCE
    assert float(replayed.exp().mean()) == pytest.approx(1, abs=1e-5)
    narrowed = sampled(tiny_model_path, wants_support=True, **rules)
    whole = dataclasses.replace(narrowed, groups=tuple(
        dataclasses.replace(group, rows=tuple(dataclasses.replace(row, support=None) for row in group.rows))
        for group in narrowed.groups
    ))
    kept = log_ratios(tiny_model_path, whole).exp()  # the mass of the ids that each token was drawn from
    assert float(kept.max()) < 1 + 1e-5 and float(kept.mean()) < 0.99



def gradient(model: Path, batch: Batch, **algorithm: Any) -> torch.Tensor:
    """The gradient of the policy's loss, of all weights together."""
    config = learner_config(model, algorithm={"old_logprobs": "rollout", **algorithm}, rollout={"top_k": 12})
    found = gradients(Updater(config, torch.device("cpu")), batch)
    return torch.cat([gradient.flatten() for gradient in found.values()])


def test_score_centering_is_the_policy_gradient_only_at_equal_weights(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    """At equal weights sum_v p_v grad log p_v = 0 is all that is subtracted."""
    batch = sampled(tiny_model_path, wants_support=True, of_ids=True, top_k=12)
    cispo = {"loss": "cispo", "clip": {"low": 1.0, "high": 1.0}}
    plain, centered = (gradient(tiny_model_path, batch, **each) for each in (cispo, {"loss": "score_centering"}))
    assert plain.norm() > 0.01
    assert (plain - centered).norm() < 1e-3 * plain.norm()
    moved = load_model(tiny_model_path)
    with torch.no_grad():
        for number, parameter in enumerate(moved.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter += 0.05 * parameter.std() * noise
    moved.save_pretrained(tmp_path / "moved")
    plain, centered = (gradient(tmp_path / "moved", batch, **each) for each in (cispo, {"loss": "score_centering"}))
    assert (plain - centered).norm() > 0.01 * plain.norm()


@pytest.mark.parametrize(
    ("algorithm", "rollout"),
    [
        ({"old_logprobs": "rollout"}, {}), ({}, {"top_k": 12}),
        ({"old_logprobs": "rollout", "support": "ignore"}, {"top_k": 12}),
    ],
)  # fmt: skip
def test_score_centering_needs_supports_and_the_coupled_ratio(
    algorithm: dict[str, Any], rollout: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError):
        learner_config(algorithm={"loss": "score_centering", **algorithm}, rollout=rollout)
