"""Pushes in which each learner rank shares its buckets with the server of its own GPU; here, in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kit.engines.mapping_servers import DIES_AT, mapping_servers
from tests.kit.learner.rank_pushes import run_pushes


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "servers"), [(2, 2), *(pytest.param(4, servers, marks=pytest.mark.nightly) for servers in (4, 3))]
)
def test_each_rank_gives_all_weights_to_its_own_server(
    ranks: int, servers: int, tiny_model_path: Path, tmp_path: Path
) -> None:
    """The server of rank 1 dies in the second push, and another one is filled in its place before the third."""
    with mapping_servers(servers + 1, tmp_path) as urls:
        found = run_pushes(ranks, servers, tiny_model_path, urls, tmp_path)
    assert [rank["lost"] for rank in found] == [[[], ["rollout/1"], []], *[[[], [], []]] * (ranks - 1)]
    assert found[0]["filled"] == [[[f"rollout/{server}", 1] for server in range(servers)], [["rollout/1", 2]]]
    for version, weights in enumerate(found[0]["weights"]):
        assert version == 0 or found[0]["bytes"][version - 1] == sum(tensor.nbytes for tensor in weights.values())
        for server in range(servers):
            index = servers if server == 1 and version >= DIES_AT else server
            served = torch.load(tmp_path / f"{index}-{version}.pt", weights_only=True)
            assert served["pids"] == [found[server]["pid"]]
            assert served["weights"].keys() == weights.keys()
            assert all(torch.equal(served["weights"][name], tensor) for name, tensor in weights.items())
    assert not (tmp_path / f"1-{DIES_AT}.pt").exists()
