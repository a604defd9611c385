"""Verification of a push against a real server, with equal and with different weights."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config, ModelConfig
from async_rl.base.errors import WeightSyncError
from async_rl.base.weights.checkpoint_names import to_checkpoint
from async_rl.base.weights.publisher import PushReport, Tolerance, WeightPublisher, open_publisher
from async_rl.base.weights.servers import Member
from async_rl.base.weights.sums import value_sums
from learner.loop.pushes import VERIFY_TOKENS, VERIFY_TOLERANCE
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import changed, server_config
from tests.kit.engines.replies import with_engine
from tests.kit.publishers import CONFIG, OBJECT_ENGINE, AnyServer, fill, publisher_for, url_of
from tests.kit.tiny_moe import moe_model, save_moe

TOKENS = np.random.default_rng(0).integers(4, 100, size=VERIFY_TOKENS).tolist()


def logprobs_of(model: PreTrainedModel) -> list[float]:
    """Compute logprobs as the learner does: logits in the compute type, their softmax in float32."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


def verify(config: Config, learner_logprobs: list[float], dtype: torch.dtype) -> None:
    async def use(engine: HFEngine) -> None:
        publisher = open_publisher(config, [engine.url], 0, torch.device("cpu"))
        await asyncio.to_thread(publisher.verify, TOKENS, learner_logprobs, VERIFY_TOLERANCE[dtype])
        publisher.close()

    with_engine(config, use)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_pass_and_one_changed_matrix_does_not(dtype: torch.dtype, model_folder: Path) -> None:
    name = str(dtype).removeprefix("torch.")
    config = dataclasses.replace(
        server_config("hf", model_folder), model=ModelConfig(path=str(model_folder), dtype=name)  # type: ignore[arg-type]
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
    equal = logprobs_of(model)
    verify(config, equal, dtype)
    matrix = model.model.layers[1].mlp.down_proj.weight
    torch.manual_seed(0)
    with torch.no_grad():
        matrix.copy_(matrix.std() * torch.randn_like(matrix))
    with pytest.raises(WeightSyncError, match="rollout/0"):
        verify(config, logprobs_of(model), dtype)
    with pytest.raises(WeightSyncError, match="nan"):
        verify(config, [*equal[:-1], float("nan")], dtype)


class ScoringServer:
    """A server that gives a probe text the same logprob at each token, or can't, or has died."""

    def __init__(self, logprob: float | None, *, is_alive: bool = True) -> None:
        self.logprob, self.is_alive = logprob, is_alive

    def is_ready(self) -> bool:
        return self.is_alive

    def score_tokens(self, tokens: list[int]) -> list[float]:
        if self.logprob is None:
            raise WeightSyncError("connection refused")
        return [self.logprob] * (len(tokens) - 1)


DEAD = ScoringServer(None, is_alive=False)


def publisher_of(*servers: ScoringServer) -> WeightPublisher:
    config = changed(CONFIG, rollout={"engine": OBJECT_ENGINE})
    publisher = publisher_for(config, [url_of(server) for server in servers])
    publisher.lost_within_s = 0.1
    return publisher


def compare(*servers: ScoringServer) -> bool:
    return publisher_of(*servers).verify([1, 2, 3], [-0.5, -0.5], Tolerance(0.0, 0.0))


def test_a_server_that_died_after_the_push_is_left_out_and_the_others_are_compared() -> None:
    assert compare(DEAD, ScoringServer(-0.5), DEAD)
    assert not compare(DEAD)
    with pytest.raises(WeightSyncError, match="rollout/1"):
        compare(DEAD, ScoringServer(-0.75))


def test_a_live_server_that_can_not_score_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="rollout/0"):
        compare(ScoringServer(None))


def test_a_live_server_that_can_not_score_differs_where_others_need_not_wait_for_it() -> None:
    publisher = publisher_of(ScoringServer(None))
    publisher.outlives_servers = True
    found = publisher.compare([1, 2, 3], [-0.5, -0.5], Tolerance(0.0, 0.0))
    assert [name for name, difference in found.items() if difference] == ["rollout/0"]


def test_the_rounding_of_bfloat16_alone_takes_at_most_a_third_of_the_tolerance(model_folder: Path) -> None:
    """The same bfloat16 weights: all arithmetic in bfloat16, or all in float32, which kernels lie between."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    rounded, exact = logprobs_of(model), logprobs_of(model.float())
    differences = [abs(a - b) for a, b in zip(rounded, exact, strict=True)]
    tolerance = VERIFY_TOLERANCE[torch.bfloat16]
    assert 0 < sum(differences) / len(differences) < tolerance.mean / 3
    assert max(differences) < tolerance.largest / 3


def test_one_token_may_differ_by_the_rounding_of_a_large_bfloat16_logit(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rounded = logprobs_of(model)
    rounded[7] += 0.5
    verify(server_config("hf", model_folder), rounded, torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"5\.00e-01"):
        verify(server_config("hf", model_folder), rounded, torch.float32)


def test_sums_of_weights_are_those_of_fused_ones_and_show_one_empty_expert() -> None:
    """The sizes of 1, -2, 3, -4 add up to 10 and the values to -2, whatever the shapes, types and padding."""
    q, k = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, -4.0]])
    fused = torch.cat([q, k, torch.zeros(3, 2)]).T
    assert value_sums([q, k]) == value_sums([fused]) == value_sums([fused.bfloat16(), torch.arange(9)]) == (-2.0, 10.0)
    torch.manual_seed(0)
    experts = torch.randn(8, 300, 500)  # more than one chunk
    values, sizes = value_sums([experts])
    assert values == pytest.approx(float(experts.double().sum()), abs=1e-11 * sizes)
    shuffled = value_sums(experts[torch.randperm(8)].transpose(1, 2).unbind(0))
    assert shuffled == pytest.approx((values, sizes), abs=1e-11 * sizes)
    experts[3] = 0
    assert abs(value_sums([experts])[1] - sizes) > 0.1 * sizes


def push_to(publisher: WeightPublisher, *, compares: bool) -> PushReport:
    return publisher.push(iter([("w", torch.tensor([1.0, -2.0]))]), 1, compares=compares)


def weighing(*servers: AnyServer, rank: int = 0, **weight_sync: Any) -> WeightPublisher:
    lora = {"rank": rank}
    config = changed(CONFIG, rollout={"engine": OBJECT_ENGINE}, weight_sync=weight_sync, model={"lora": lora})
    return publisher_for(config, [url_of(server) for server in servers])


def test_a_server_that_comes_to_hold_other_weights_is_named_and_left_out() -> None:
    good, bad = AnyServer(sums=(-1.0, 3.0)), AnyServer(sums=(-1.0, 3.0))
    publisher = weighing(good, bad)
    assert push_to(publisher, compares=True).num_compared == 2
    bad.sums = (-1.0, 3.0 + 1e-9)
    assert push_to(publisher, compares=False).num_compared == 0
    report = push_to(publisher, compares=True)
    assert [member.name for member in report.lost] == ["rollout/1"] and report.num_unequal == 1
    assert report.has_failed and "rollout/1" in report.cause and "rollout/0" not in report.cause
    again = push_to(publisher, compares=True)
    assert not again.has_failed and again.num_compared == 1 and publisher.members.names == ("rollout/0",)


def test_a_server_that_keeps_weights_in_another_form_is_not_compared() -> None:
    publisher = weighing(AnyServer(sums=(0.5, 1.5)), AnyServer(sums=(-1.0, 3.0)))
    assert [push_to(publisher, compares=True).num_compared for _ in range(2)] == [1, 1]
    assert not push_to(publisher, compares=True).lost


def test_a_server_that_joins_is_compared_in_its_first_push() -> None:
    publisher = weighing(AnyServer(sums=(-1.0, 3.0)))
    assert push_to(publisher, compares=True).num_compared == 1
    # its own model folder is another one
    publisher.members.replace([Member("rollout/0", url_of(AnyServer(sums=(-2.0, 3.0))), 2)])
    report = push_to(publisher, compares=False)
    assert [member.name for member in report.lost] == ["rollout/0"]


def test_a_server_that_was_compared_in_a_fill_is_not_compared_in_the_next_push() -> None:
    good, joiner = AnyServer(sums=(-1.0, 3.0)), AnyServer(sums=(-1.0, 3.0))
    publisher = weighing(good, transport="cuda_ipc")
    assert push_to(publisher, compares=True).num_compared == 1
    member, tensors = Member("rollout/1", url_of(joiner), 1), [("w", torch.tensor([1.0, -2.0]))]
    assert fill(publisher, [member], tensors, 1, compares=True).num_compared == 1
    assert push_to(publisher, compares=False).num_compared == 0
    assert publisher.members.names == ("rollout/0", "rollout/1")


def test_an_expert_that_the_hf_engine_does_not_load_is_found_when_verified(tmp_path: Path) -> None:
    """The expert is empty: no weight is NaN, and no token of the text need go to it."""
    config = server_config("hf", save_moe(tmp_path / "model"))
    config = changed(config, run={"dir": tmp_path}, weight_sync={"transport": "disk"})

    async def use(engine: HFEngine) -> None:
        publisher = open_publisher(config, [engine.url], 0, torch.device("cpu"))

        def push(version: int) -> PushReport:
            model = moe_model(version)
            tensors = to_checkpoint(model, model.named_parameters())
            return publisher.push(tensors, version, erases=version == 1, compares=True)

        assert (await asyncio.to_thread(push, 1)).num_compared == 1
        load = engine.load_weights

        async def load_all_but_one(tensors: dict[str, torch.Tensor], version: int) -> None:
            tensors["model.layers.1.mlp.experts.down_proj"][0] = 0
            await load(tensors, version)

        engine.load_weights = load_all_but_one  # type: ignore[method-assign]
        report = await asyncio.to_thread(push, 2)
        assert [member.name for member in report.lost] == ["rollout/0"] and report.num_unequal == 1
        publisher.close()

    with_engine(config, use)
