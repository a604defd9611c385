"""A weight transport that the placement leaves no GPUs for is refused, and messages name only transports that fit."""

from __future__ import annotations

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.seams import TransportEntry

HERE = "tests.config.test_transports"
OWN_GPUS = TransportEntry(open="no_module:publisher", delivers="folder", devices=("cuda",), needs_own_gpus=True)
PAIRS = "placement={colocated: true, learner: {gpus_per_node: 2}, rollout: {servers: 2}}"
PAIRS_OF_TWO_ENGINES = (
    "placement={colocated: true, learner: {gpus_per_node: 2}, rollout: {servers: 2, engines: [sglang, vllm]}}"
)
PAIRS_ON_TWO_HOSTS = "placement={colocated: true, learner: {nodes: 2, gpus_per_node: 2}, rollout: {servers: 4}}"
MORE_SERVERS_THAN_RANKS = "placement={colocated: true, learner: {gpus_per_node: 2}, rollout: {servers: 4}}"


def load(*overrides: str) -> Config:
    return load_config(None, ["model.path=m", "task.name=reasoning_gym/x", *overrides])


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        ([PAIRS], "auto, cuda_ipc or disk"),
        (["placement.colocated=true"], "auto, cuda_ipc or disk"),
        ([PAIRS, "rollout.engine=hf"], "auto or disk"),
        ([PAIRS_OF_TWO_ENGINES], "auto, cuda_ipc or disk"),
        ([PAIRS_ON_TWO_HOSTS], "auto or disk"),
    ],
)
@pytest.mark.parametrize("transport", ["nccl", f"{HERE}:OWN_GPUS"])
def test_a_transport_that_shares_no_gpu_is_refused_where_ranks_and_servers_do(
    overrides: list[str], allowed: str, transport: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"weight_sync.transport={transport}", *overrides)
    assert str(caught.value) == (
        f"weight_sync.transport must be {allowed} with placement.colocated, got '{transport}' (command line). It needs "
        "a GPU for each learner rank and each server that no other uses. Or set placement.colocated: false."
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["placement.learner.gpus_per_node=2", "placement.rollout.servers=2"],
        ["placement.colocated=true", "rollout.server_url=http://127.0.0.1:30000"],
    ],
)
@pytest.mark.parametrize("transport", ["nccl", f"{HERE}:OWN_GPUS"])
def test_a_transport_that_shares_no_gpu_is_taken_where_none_may_be_shared(
    overrides: list[str], transport: str
) -> None:
    """The GPU of a server at a URL is not known."""
    assert load(f"weight_sync.transport={transport}", *overrides).weight_sync.transport == transport


@pytest.mark.parametrize(
    ("placement", "allowed"),
    [("placement.learner.gpus_per_node=2", "auto, nccl or disk"), (MORE_SERVERS_THAN_RANKS, "auto or disk")],
)
def test_mapped_memory_is_refused_with_the_transports_that_work_instead(placement: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("weight_sync.transport=cuda_ipc", placement)
    assert f"weight_sync.transport must be {allowed} but for servers of one GPU each on one host" in str(caught.value)


@pytest.mark.parametrize(
    ("placement", "staged", "compact"),
    [
        ("placement.learner.gpus_per_node=1", "Others: nccl.", "Others: nccl or disk."),
        (
            PAIRS, "The others do not work where learner ranks and servers share GPUs: set placement.colocated: false",
            "Others: disk.",
        ),
    ],
)
def test_weights_that_a_transport_does_not_carry_name_others_that_work_there(
    placement: str, staged: str, compact: str
) -> None:
    forms = (["weight_sync.staging=host"], staged), (["weight_sync.delta=true", "model.dtype=bfloat16"], compact)
    for form, hint in forms:
        with pytest.raises(ConfigError) as caught:
            load("weight_sync.transport=cuda_ipc", "staleness.max=1", placement, *form)
        assert "with weight_sync.transport cuda_ipc" in str(caught.value) and hint in str(caught.value)
