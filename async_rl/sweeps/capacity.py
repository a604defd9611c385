"""Tells which part of the pipeline is full first when rollout servers are added: `async-rl plan --servers 1000`.

The costs are those that `python -m benchmarks.scale` measured (benchmarks/results/scale.md) on two virtual cores; the
models' speeds are assumptions, which the answer prints.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.sweeps.tables import Table

BUFFER_S_PER_GROUP, BUFFER_S_PER_TOKEN = 300e-6, 0.01e-6
"""CPU time of the buffer's process, with journal. Of its threads one does nearly all."""
WORKER_S_PER_GROUP, WORKER_S_PER_TOKEN = 1400e-6, 0.21e-6
DRIVER_S_PER_REPORT = 0.73e-3
"""CPU time of the driver for a worker's report: 0.13 ms for its log, and 0.6 ms for Ray's stream, of which only the
sentence in scale.md is kept."""
REPORTS_PER_S, MOST_REPORTS_PER_S = 2.0, 200.0
"""The reports of one worker, and of all together (rollout_server/eval_worker.py)."""
BYTES_PER_TOKEN = 13.0
"""Token, logprob, version and mask of a trained token in a group's message."""


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """A model on rollout servers of usual hardware, as assumed."""

    name: str
    server: str
    tokens_per_s: float
    """Sampled by a full server."""


MODELS = (
    ModelSpeed("7B", "1 GPU of 80 GB", 10_000.0), ModelSpeed("70B", "8 GPUs of 80 GB, tensor-parallel", 8_000.0),
)


@dataclass(frozen=True, slots=True)
class PartLoad:
    """How much of one part is used, and the number of servers at which it is full."""

    part: str
    used: float
    servers: float


def loads(model: ModelSpeed, servers: int, tokens: float, group_size: int, link_gbps: float) -> list[PartLoad]:
    """Return how much of each part `servers` full servers use, the fullest first.

    Args:
        tokens: the mean length of an answer.
        link_gbps: the network of the buffer's node, over which groups come and batches go.
    """
    per_group = tokens * group_size
    groups_per_s = model.tokens_per_s / per_group
    bits_per_s = model.tokens_per_s * BYTES_PER_TOKEN * 8
    of_one = {
        "buffer, one core": groups_per_s * (BUFFER_S_PER_GROUP + BUFFER_S_PER_TOKEN * per_group),
        "network of the buffer's node": 2 * bits_per_s / (link_gbps * 1e9),
    }
    found = [PartLoad(part, servers * used, 1 / used) for part, used in of_one.items()]
    worker = groups_per_s * (WORKER_S_PER_GROUP + WORKER_S_PER_TOKEN * per_group)
    found.append(PartLoad("each rollout worker, one core", worker, float("inf")))
    reports_per_s = min(servers * REPORTS_PER_S, MOST_REPORTS_PER_S)
    found.append(PartLoad("driver, one core", reports_per_s * DRIVER_S_PER_REPORT, float("inf")))
    return sorted(found, key=lambda load: -load.used)


def describe_capacity(servers: int, tokens: float, group_size: int, link_gbps: float) -> str:
    lines = [
        f"{servers:,} rollout servers that are always full, groups of {group_size} answers of {tokens:,.0f} tokens, "
        f"{link_gbps:g} Gb/s of network a node. Costs of the pipeline's own parts as measured by benchmarks.scale; "
        "training and weight pushes (--params) are not in it.",
    ]
    for model in MODELS:
        found = loads(model, servers, tokens, group_size, link_gbps)
        rows = [
            [load.part, f"{load.used:.1%}", "-" if load.servers == float("inf") else f"{load.servers:,.0f}"]
            for load in found
        ]
        first = min(found, key=lambda load: load.servers)
        groups_per_s = servers * model.tokens_per_s / tokens / group_size
        lines += [
            "", f"A {model.name} model, {model.tokens_per_s:,.0f} tokens/s a server ({model.server}; assumed): "
            f"{groups_per_s:,.0f} groups/s.", "", Table(("part", "used", "full at servers"), rows).markdown(),
            f"Full first: {first.part}, at {first.servers:,.0f} servers.",
        ]
    return "\n".join(lines)
