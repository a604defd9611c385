"""Which weight transports a configuration takes follows from who may share a GPU, and from the form of the weights."""

from __future__ import annotations

import pytest

from async_rl.base.config.check import SettingsError
from async_rl.base.config.loading import load_config
from async_rl.base.seams import TransportEntry

OWN_GPUS = TransportEntry(open="no_module:publisher", delivers="folder", devices=("cuda",), needs_own_gpus=True)
BASE = ("model.path=m", "task.name=reasoning_gym/x")
OWN = f"{__name__}:OWN_GPUS"
TRANSPORTS = ("nccl", "gloo", "cuda_ipc", "disk", OWN)
PAIRS = "placement={colocated: true, learner: {gpus_per_node: 2}, rollout: {servers: 2}}"
PAIRS_OF_TWO_ENGINES = (
    "placement={colocated: true, learner: {gpus_per_node: 2}, rollout: {servers: 2, engines: [sglang, vllm]}}"
)
PAIRS_ON_TWO_HOSTS = "placement={colocated: true, learner: {nodes: 2, gpus_per_node: 2}, rollout: {servers: 4}}"
MORE_SERVERS_THAN_RANKS = "placement={colocated: true, learner: {gpus_per_node: 2}, rollout: {servers: 4}}"
SPARSE = ["weight_sync.delta=true", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("overrides", "taken"),
    [
        ([], [*TRANSPORTS]),
        ([PAIRS], ["gloo", "cuda_ipc", "disk"]),
        (["placement.colocated=true"], ["gloo", "cuda_ipc", "disk"]),
        ([PAIRS, "rollout.engine=hf"], ["gloo", "disk"]),
        ([PAIRS_OF_TWO_ENGINES], ["gloo", "cuda_ipc", "disk"]),
        ([PAIRS_ON_TWO_HOSTS], ["gloo", "disk"]),
        ([MORE_SERVERS_THAN_RANKS], ["gloo", "disk"]),
        (["placement.learner.gpus_per_node=2"], ["nccl", "gloo", "disk", OWN]),
        (["placement.learner.gpus_per_node=2", "placement.rollout.servers=2"], ["nccl", "gloo", "disk", OWN]),
        (["placement.rollout.nodes=1"], ["nccl", "gloo", "disk", OWN]),
        (["placement.rollout.tp=2"], ["nccl", "gloo", "disk", OWN]),
        (["network={host: 10.0.0.1, insecure: true}"], ["nccl", "gloo", "disk", OWN]),
        # the GPU of a server at a URL is not known
        (["placement.colocated=true", "rollout.server_urls=[http://127.0.0.1:30000]"], [*TRANSPORTS]),
    ],
)
def test_a_transport_is_taken_exactly_where_the_placement_leaves_room_for_it(
    overrides: list[str], taken: list[str]
) -> None:
    assert refused(*overrides) == {each: "weight_sync.transport" for each in TRANSPORTS if each not in taken}


@pytest.mark.parametrize("placement", ["placement.learner.gpus_per_node=1", PAIRS])
def test_weights_in_a_form_that_a_transport_does_not_carry_are_refused(placement: str) -> None:
    not_here = {"nccl": "weight_sync.transport", OWN: "weight_sync.transport"} if placement == PAIRS else {}
    staged = refused("staleness.max=1", placement, "weight_sync.double_buffer=host")
    assert staged == {**dict.fromkeys(("cuda_ipc", "disk", OWN), "weight_sync.double_buffer"), **not_here}
    sparse = refused("staleness.max=1", placement, *SPARSE)
    assert sparse == {**dict.fromkeys(("cuda_ipc", OWN), "weight_sync.delta"), **not_here}


def refused(*overrides: str) -> dict[str, str]:
    """The transports that are refused with these settings, and at which key."""
    found = {}
    for transport in TRANSPORTS:
        try:
            load_config(None, [*BASE, *overrides, f"weight_sync.transport={transport}"])
        except SettingsError as error:
            (found[transport],) = (problem.key for problem in error.problems)
    return found
