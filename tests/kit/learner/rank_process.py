"""The work of a learner rank in a test, in a process of its own or in the test's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from async_rl.base.config import (
    AlgorithmConfig,
    CorrectionConfig,
    KlConfig,
    LearnerConfig,
    LearnerPlacement,
    LoraConfig,
    MasksConfig,
    ModelConfig,
    PlacementConfig,
    RewardModelConfig,
    RolloutPlacement,
)
from learner.algorithms.advantages import batch_advantages
from learner.algorithms.diagnostics import MetricAccumulator
from learner.loop.batches import NoBatch, share_taken
from learner.loop.updater import Updater
from learner.models.policy import full_parameters, save_policy
from tests.kit.configs import learner_config
from tests.kit.forked import start_ranks
from tests.kit.learner.batches import make_batch, make_episode_batch, make_routed_batch, with_supports
from tests.kit.routing import CHOSEN, COUNT

ALGORITHMS = {
    "token_mean": AlgorithmConfig(advantage="gae", whiten=True),
    "sequence_mean": AlgorithmConfig(
        loss="gspo",
        aggregation="sequence_mean",
        correction=CorrectionConfig(kind="geometric_tis", masks=MasksConfig(geometric=(0.5, 1.5))),
    ),
    "constant": AlgorithmConfig(
        advantage="reinforce_pp",
        kl=KlConfig(kind="k1_reward", coef=0.1),
        aggregation="constant",
        correction=CorrectionConfig(kind="sequence_tis", batch_normalised=True, masks=MasksConfig(m2po=0.5, opsm=0.5)),
        entropy_coef=0.01,
    ),
    "text": AlgorithmConfig(ptx_coef=0.7),
}


EPISODE_ALGORITHMS = {
    "episodes, sequence_mean": AlgorithmConfig(aggregation="sequence_mean"),
    "episodes, gae": AlgorithmConfig(advantage="gae", whiten=True),
}
"""The cases that train on episodes of several turns and rows."""
EXPERT_ALGORITHMS = {
    "experts": AlgorithmConfig(advantage="gae", kl=KlConfig(kind="k2_loss", coef=0.1), router_aux_coef=0.5),
}
"""The cases with a mixture of experts, whose routing is replayed; all but the whole batch with checkpointed layers."""

WITH_SUPPORTS = ("constant", "episodes, gae")
"""The cases whose logprobs are over recorded ids, the reference's too."""


class Case(NamedTuple):
    """The work of a rank, and how the ranks divide it."""

    algorithm: str
    max_tokens: int
    """The most tokens in a forward pass of the ranks that share its rows."""
    sharding: Literal["full", "hybrid"] = "full"
    slices: int = 1
    """The ranks that share a row."""
    untied: bool = False
    """Whether the policy has a head of its own."""

    def model(self, folder: Path) -> Path:
        if self.algorithm in EXPERT_ALGORITHMS:
            return folder / "experts"
        return folder / "untied" if self.untied else folder / "model"


def rank_main(rank: int, ranks: int, store_file: str, model: str, cases: list[Case], out: str) -> None:
    """Each rank writes to `out` what `measure` gives for each case, what all roles give, what a save to an impossible
    place ends in, and rank 0's frames after it.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store_file, ranks), rank=rank, world_size=ranks)
    results = {tuple(case): measure(Path(model), case) for case in cases}
    roles = measure_roles(Path(model), cases[-1]._replace(max_tokens=26))
    save = failed_save(Path(model), rank)
    frames = share_taken([b"header", b"", b"frame two"] if rank == 0 else None)
    assert not isinstance(frames, NoBatch)
    found = {"frames": [bytes(frame).decode() for frame in frames], "results": results, "roles": roles, "save": save}
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def failed_save(model: Path, rank: int) -> str:
    policy = Updater(learner_config(model), torch.device("cpu")).policy
    try:
        save_policy(policy, model, Path("/dev/null/model"), is_writer=rank == 0)
    except OSError as error:
        return str(error)
    return ""


def placed(case: Case) -> PlacementConfig:
    """Hybrid: half of the ranks on each of two nodes."""
    if case.sharding == "full":
        return PlacementConfig(learner=LearnerPlacement(ranks=dist.get_world_size()))
    learner = LearnerPlacement(nodes=2, ranks=dist.get_world_size())
    return PlacementConfig(learner=learner, rollout=RolloutPlacement(servers=2))


def learner_of(case: Case, lr: float = 1e-6, **changes: Any) -> LearnerConfig:
    return LearnerConfig(**{
        "prompts_per_step": 3, "lr": lr, "max_tokens_per_microbatch": case.max_tokens // case.slices,
        "sharding": case.sharding, "sequence_parallel": case.slices, "gradient_checkpointing": False, **changes,
    })


def measure(model: Path, case: Case) -> dict[str, Any]:
    """Loss and gradients on a batch, trained tokens [rank][micro-batch], metrics of an update."""
    algorithm, model = case.algorithm, case.model(model.parent)
    settings = {**ALGORITHMS, **EPISODE_ALGORITHMS, **EXPERT_ALGORITHMS}[algorithm]
    checkpoints = algorithm in EXPERT_ALGORITHMS and case.max_tokens < 4096
    learner = learner_of(case, lr=1e-3, gradient_checkpointing=checkpoints)
    config = learner_config(
        model, algorithm=settings, learner=learner, placement=placed(case),
        task={"pretrain_path": model.parent / "texts.jsonl"} if settings.ptx_coef else {},
    )
    updater = Updater(config, torch.device("cpu"))
    networks = {"policy": updater.policy.lm}
    if updater.critic is not None:
        networks["critic"] = updater.critic.lm
        torch.nn.init.constant_(updater.critic.lm.score.weight.to_local(), 0.1)
    batch = make_episode_batch() if algorithm in EPISODE_ALGORITHMS else make_batch()
    if algorithm in WITH_SUPPORTS:
        batch = with_supports(batch)
    if algorithm in EXPERT_ALGORITHMS:
        batch = make_routed_batch(layers=2, experts=COUNT, chosen=CHOSEN)
    packed = updater.pack(batch, batch_advantages(config, batch))
    (minibatch,) = updater.objective.prepare(updater.at_step_start(packed))
    losses, _ = updater.forward_backward(minibatch, MetricAccumulator(), trains_policy=True, is_first_epoch=True)
    loss = losses["policy"] / case.slices
    dist.all_reduce(loss)
    result: dict[str, Any] = {"loss": float(loss)}
    for name, module in networks.items():
        result[name] = {}
        for key, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            result[name][key] = parameter.grad.full_tensor()
            parameter.grad = None
    result["num_trained"] = [None] * dist.get_world_size()
    dist.all_gather_object(
        result["num_trained"], [int(micro.response.trained.sum()) for micro in minibatch.micro_batches]
    )
    result["metrics"] = {metric.key: metric.value for metric in updater.update(batch)}
    return result


def measure_roles(model: Path, case: Case) -> dict[str, Any]:
    """All four roles at once, the policy with adapters: metrics of two updates, and the weights to push, in two types.
    """
    offload: dict[int, Literal["none", "moments", "all"]] = {1: "none", 2: "all", 4: "moments"}
    config = learner_config(
        model,
        model=ModelConfig(path=str(model), lora=LoraConfig(rank=4)),
        algorithm=AlgorithmConfig(advantage="gae", kl=KlConfig(kind="k2_loss", coef=0.1)),
        reward_model=RewardModelConfig(path=str(model.parent / "reward-model")),
        learner=learner_of(case, lr=1e-2, gradient_checkpointing=True, offload=offload[dist.get_world_size()]),
        placement=placed(case),
    )
    updater = Updater(config, torch.device("cpu"))
    batches = make_batch(0, 0), with_supports(make_batch(1, 1))
    metrics = [{m.key: m.value for m in updater.update(batch)} for batch in batches]
    types = {"weights": torch.float32, "narrow": torch.bfloat16}
    return {"metrics": metrics, **{key: dict(full_parameters(updater.policy, dtype)) for key, dtype in types.items()}}


def run_ranks(ranks: int, model: Path, out: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """Results of `rank_main` on each rank."""
    start_ranks(rank_main, ranks, ranks, str(out / "store"), str(model), cases, str(out))
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
