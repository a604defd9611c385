"""Learner ranks, each in a process of its own, that push a sharded policy to servers of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_rl.base.config import LearnerPlacement, PlacementConfig, RolloutPlacement
from learner.loop.pushes import open_pushers
from learner.loop.updater import Updater
from learner.models.policy import full_parameters
from tests.kit.configs import learner_config
from tests.kit.forked import start_ranks
from tests.kit.learner.batches import make_batch


def rank_main(rank: int, ranks: int, servers: int, model: str, out: str, urls: list[str]) -> None:
    """Fill the servers with version 0, and push versions 1, 2 and 3; write what the rank saw to `out`.

    Before version 3 another server in place of rollout/1 is filled. It has the last of `urls`, one more than `servers`.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{out}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    placement = PlacementConfig(
        learner=LearnerPlacement(ranks=ranks), rollout=RolloutPlacement(servers=servers), colocated=True
    )
    config = learner_config(
        Path(model), placement=placement, rollout={"engine": "vllm"}, timeouts={"push_s": 30.0},
        weight_sync={"transport": "cuda_ipc", "bucket_bytes": 4_000, "verify_every": 0},  # they know no sums
    )
    updater = Updater(config, torch.device("cpu"))
    pusher = open_pushers(config, updater, rank)["rollout"]
    found: dict[str, Any] = {"pid": os.getpid(), "filled": [], "lost": [], "bytes": [], "weights": []}

    def join(number: int, url: str, start: int) -> None:
        if rank == 0:
            pusher.members.join(f"rollout/{number}", url, start)

    def fill(version: int) -> None:
        _, events = pusher.fill(version)
        found["filled"].append([list(server) for event in events for server in event.servers])

    def note_weights() -> None:
        gathered = full_parameters(updater.policy, torch.float32)
        found["weights"].append({name: tensor.clone() for name, tensor in gathered})

    for number, url in enumerate(urls[:servers]):
        join(number, url, 1)
    fill(0)
    note_weights()
    for version in (1, 2, 3):
        if version == 3:
            join(1, urls[servers], 2)
            fill(2)
        updater.update(make_batch(version, version))
        report, lost = pusher.push(version)
        found["lost"].append([name for each in lost for name, _ in each.servers])
        found["bytes"].append(report.num_bytes)
        note_weights()
    torch.save(found, f"{out}/rank-{rank}.pt")
    dist.destroy_process_group()


def run_pushes(ranks: int, servers: int, model: Path, urls: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the ranks, and return for each of them the dictionary that `rank_main` writes."""
    start_ranks(rank_main, ranks, ranks, servers, str(model), str(out), urls)
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]
