"""Given experts are used with the weights of the model's own routers, and with the gradient of these weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.routing import Routing
from learner.loop.updater import Updater
from learner.packing import Layout, make_pieces
from tests.kit.configs import learner_config
from tests.kit.groups import make_group, make_row
from tests.kit.learner.batches import make_routed_batch
from tests.kit.learner.updates import reference_logprobs
from tests.kit.routing import CHOSEN, COUNT, FAMILIES, blocks_of, experts_in, tiny_experts, written_out

pytestmark = pytest.mark.processes  # together they compute for long
TOKENS = torch.arange(3, 23).view(2, 10)


def foreign_choice(layers: int, tokens: int = TOKENS.numel(), seed: int = 0) -> torch.Tensor:
    """Experts that no router chose, [tokens, layers, k], all different for a token and layer."""
    make = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, COUNT, generator=make).argsort(-1)[..., :CHOSEN]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_with_given_experts_are_those_of_the_familys_formula(family: str) -> None:
    lm = tiny_experts(family).double()
    lm.set_experts_implementation("eager")  # the default has no float64
    choice = foreign_choice(len(blocks_of(lm)))

    def gradients() -> dict[str, torch.Tensor]:
        lm.zero_grad()
        logits = lm(TOKENS, use_cache=False).logits
        (logits.log_softmax(-1) * torch.arange(logits.numel()).view_as(logits).cos()).sum().backward()
        found = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
        return found | {"logits": logits.detach()}

    with written_out(family, lm, choice):
        expected = gradients()
    routing = Routing(lm, experts_in(lm))
    own = gradients()
    with routing.replaying(choice):
        found = gradients()
    assert found.keys() == expected.keys() >= {name for name, _ in lm.named_parameters() if "gate.weight" in name}
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        # norms, softmax and DeepSeek's router round to float32 in the models' own code
        torch.testing.assert_close(found[name], tensor, atol=2e-5 * scale, rtol=0)
    assert float((own["logits"] - found["logits"]).abs().max()) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_without_given_experts_choose_as_without_replay(family: str) -> None:
    lm = tiny_experts(family)
    routing = Routing(lm, experts_in(lm))
    routing.self_test(lambda: lm(TOKENS, use_cache=False).logits.log_softmax(-1))
    with torch.no_grad(), routing.recording() as chosen:
        lm(TOKENS, use_cache=False)
    own, some = chosen(), foreign_choice(len(blocks_of(lm)))
    is_free = torch.arange(TOKENS.numel()) % 3 == 0
    some[is_free] = -1
    with torch.no_grad(), routing.replaying(some), routing.recording() as chosen:
        lm(TOKENS, use_cache=False)
    used = chosen()
    assert torch.equal(used[~is_free], some[~is_free])
    assert torch.equal(used[is_free][:, 0], own[is_free][:, 0])  # in later layers the tokens before have moved them
    assert (used[is_free].sort(-1).values.diff(dim=-1) > 0).all()
    replayed, changed = map(int, routing.take_counts())
    assert replayed == int((~is_free).sum()) * own.shape[1]
    differs = (used.sort(-1).values != own.sort(-1).values).any(-1)[~is_free]
    assert replayed >= changed >= int(differs[:, 0].sum()) > 0


def test_answers_share_a_prompt_that_went_through_the_same_experts() -> None:
    batch = make_routed_batch(2, COUNT, CHOSEN)
    pairs = [(g, i) for g in range(3) for i in range(4)]
    pieces = make_pieces(batch.groups, pairs, 4096, 12, Layout(masked=True, sparse=True))
    assert [(piece.group, piece.rows) for piece in pieces] == [
        (0, (0, 1, 2, 3)), (1, (0,)), (1, (1,)), (1, (2, 3)), (2, (0, 1, 2, 3))
    ]


def test_a_family_whose_choice_is_not_seen_is_refused_at_the_start() -> None:
    lm = tiny_experts("Phimoe")
    with pytest.raises(ConfigError, match=r"rollout\.routing"):
        Routing(lm, experts_in(lm)).self_test(lambda: lm(TOKENS, use_cache=False).logits)
    lm = tiny_experts("Qwen3Moe")
    with pytest.raises(ConfigError, match=r"rollout\.routing"):
        Routing(lm, replace(experts_in(lm), layers=(0,)))
    with pytest.raises(ConfigError, match=r"rollout\.routing"):
        routing = Routing(lm, replace(experts_in(lm), per_token=1))
        routing.self_test(lambda: lm(TOKENS, use_cache=False).logits)


@pytest.mark.parametrize(("checkpointing", "rank"), [(False, 0), (True, 0), (True, 2)])
def test_packs_have_the_logprobs_of_each_row_alone_with_its_experts(
    checkpointing: bool, rank: int, tmp_path: Path, one_rank: None
) -> None:
    """Rows of one question share a pack and their prompt, unless the prompt went through other experts."""
    lm = tiny_experts("Qwen3Moe")
    lm.save_pretrained(tmp_path / "model")
    config = learner_config(
        tmp_path / "model", model={"lora": {"rank": rank}}, learner={"gradient_checkpointing": checkpointing},
        algorithm={"advantage": "gae", "kl": {"kind": "k2_loss", "coef": 0.1}},
    )
    updater, batch = Updater(config, torch.device("cpu")), make_routed_batch(2, COUNT, CHOSEN)
    advantages = [[row.logprobs for row in group.rows] for group in batch.groups]
    minibatches = updater.at_step_start(updater.pack(batch, advantages))
    (micro,) = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
    assert micro.inputs.tokens.shape[0] > 1 or micro.inputs.segments is not None
    logprobs, _ = updater.policy(micro.inputs)
    logprobs.sum().backward()
    routers = [p for name, p in updater.policy.lm.named_parameters() if "gate.weight" in name]
    assert [p.grad is None for p in routers] == [rank > 0] * 2
    assert micro.reference is not None
    parts = zip(
        micro.rows, logprobs.split(micro.response.lengths), micro.reference.split(micro.response.lengths), strict=True
    )
    for (g, i), found, of_reference in parts:
        group, row = batch.groups[g], batch.groups[g].rows[i]
        assert row.routing is not None
        choice = torch.from_numpy(row.routing[[*range(len(row.routing)), -1]]).long()  # the last token predicts nothing
        with torch.no_grad(), written_out("Qwen3Moe", lm, choice):
            expected = reference_logprobs(lm, group.prompt_tokens, row.tokens, 0.8)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        with torch.no_grad():
            own = reference_logprobs(lm, group.prompt_tokens, row.tokens, 0.8)
        mask = torch.from_numpy(row.mask)
        torch.testing.assert_close(of_reference, torch.where(mask, own, 0.0), atol=2e-5, rtol=0)


def test_tokens_whose_context_keeps_older_experts_are_not_compared_with_the_engine() -> None:
    row = make_row(4, versions=np.array([2, 2, 3, 3], np.int32))
    group = make_group(0, rows=[row], version=1)
    routed = replace(row, routing=np.zeros((5, 2, 2), np.uint8))
    assert group.old_kv(row).tolist() == [False] * 4  # its KV was computed again by the new weights
    assert group.old_kv(routed).tolist() == [False, False, True, True]
    assert replace(group, keeps_kv=True).old_kv(routed).tolist() == [True] * 4  # the prompt's KV may be of version 1
