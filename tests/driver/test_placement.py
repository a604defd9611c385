from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import (
    Config,
    LearnerPlacement,
    NetworkConfig,
    RolloutConfig,
    RolloutPlacement,
)
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import ConfigError
from async_rl.base.network import api_key, authorization
from async_rl.cli import main
from async_rl.run.processes.placement import (
    Host,
    HostDemand,
    assign,
    decide_placement,
    host_demands,
    servers_per_gpu,
)
from async_rl.run.processes.reservation import reserve
from async_rl.run.processes.signals import StopSignals
from buffer.keys import new_keys
from tests.kit.configs import changed
from tests.kit.models import save_tiny_model
from tests.kit.placements import TWO_NODES, TWO_PAIRS, placed_on

ROOT = Path(__file__).parents[2]


def test_learner_and_servers_get_nodes_of_their_own() -> None:
    learner, rollout = host_demands(TWO_NODES)
    assert list(learner.gpus_of) == ["buffer", *(f"learner/{r}" for r in range(8))]
    assert (learner.gpus, learner.cpus) == (8, 8)
    assert dict(rollout.gpus_of) == {"rollout/0": 4, "rollout/1": 4}
    assert (rollout.gpus, rollout.cpus) == (8, 2)


def test_a_run_whose_servers_may_join_is_placed_with_the_fewest() -> None:
    (demand,) = host_demands(placed_on(rollout=RolloutPlacement(servers={"min": 1, "max": 8})), 2)
    assert dict(demand.gpus_of) == {"buffer": 0, "rollout/0": 1, "learner/0": 1}
    hosts = host_demands(placed_on(rollout=RolloutPlacement(nodes=4, servers={"min": 2, "max": 8})))
    assert [list(host.gpus_of) for host in hosts] == [["buffer", "learner/0"], ["rollout/0"], ["rollout/1"]]


@pytest.mark.parametrize(
    ("gpus", "each", "total"), [(0, 0.0, 0.0), (1, 0.5, 1.0), (2, 1.0, 2.0), (8, 1.0, 2.0)]
)
def test_available_gpus_are_used_or_shared_by_default(gpus: int, each: float, total: float) -> None:
    (demand,) = host_demands(placed_on(), gpus)
    assert (demand.gpus_of["learner/0"], demand.gpus_of["rollout/0"], demand.gpus) == (each, each, total)


def test_each_pair_that_shares_a_gpu_is_a_bundle_of_its_own() -> None:
    (demand,) = host_demands(TWO_PAIRS)
    assert [list(part.gpus_of) for part in demand.per_gpu()] == [
        ["buffer", "rollout/0", "learner/0"], ["rollout/1", "learner/1"],
    ]
    (alone,) = host_demands(placed_on(LearnerPlacement(gpus_per_node=2), RolloutPlacement(servers=1), colocated=True))
    assert [list(part.gpus_of) for part in alone.per_gpu()][1] == ["learner/1"]
    for whole in (*host_demands(TWO_NODES), *host_demands(placed_on(colocated=True)), *host_demands(placed_on(), 1)):
        assert whole.per_gpu() == [whole]


class Where:
    def gpus(self) -> list[int]:
        import ray

        found: list[int] = ray.get_gpu_ids()
        return found


@pytest.mark.nightly
@pytest.mark.e2e
def test_ray_puts_a_learner_rank_and_a_server_on_each_gpu() -> None:
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=4, num_gpus=2, log_to_driver=False)
    try:
        reservation = reserve(TWO_PAIRS, StopSignals())
        where: Any = ray.remote(Where)
        names = [f"{kind}/{index}" for kind in ("rollout", "learner") for index in range(2)]
        actors = {name: where.options(**reservation.options(name)).remote() for name in names}
        gpus = {name: ray.get(actor.gpus.remote(), timeout=240) for name, actor in actors.items()}
        assert gpus["rollout/0"] == gpus["learner/0"] != gpus["rollout/1"] == gpus["learner/1"]
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        (placed_on(rollout=RolloutPlacement(servers=2)), 2), (placed_on(LearnerPlacement(ranks=2)), 1),
        (placed_on(rollout=RolloutPlacement(tp=2)), 1),
        (placed_on(LearnerPlacement(ranks=2), RolloutPlacement(servers=2), colocated=True), 1),
        (placed_on(LearnerPlacement(nodes=1), RolloutPlacement(nodes=1, servers=2)), 2),  # several hosts
        (placed_on(rollout=RolloutPlacement(servers={"min": 1, "max": 2})), 1),  # which a second server would share
    ],
)
def test_gpus_that_are_too_few_and_cannot_be_shared_are_refused(asked: Config, gpus: int) -> None:
    """Three processes would get 0.66 of two GPUs each, and the third would never be placed."""
    with pytest.raises(ConfigError, match=r"^placement"):
        host_demands(asked, gpus)
    assert not any(demand.gpus for demand in host_demands(asked, 0))
    shares = [gpus for demand in host_demands(asked, 8) for name, gpus in demand.gpus_of.items() if name != "buffer"]
    assert set(shares) <= {0.5, 1.0, 2.0}


def test_a_placement_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    small = [Host(name="10.0.0.1", cpus=64, gpus=8), Host(name="10.0.0.2", cpus=64, gpus=4)]
    with pytest.raises(ConfigError, match=r"16 GPUs wanted, 12 there"):
        assign(host_demands(TWO_NODES), small)
    with pytest.raises(ConfigError, match="2 hosts wanted, 1 there"):
        assign(host_demands(TWO_NODES), [Host(name="10.0.0.1", cpus=64, gpus=16)])


def test_hosts_are_chosen_so_that_all_fit() -> None:
    hosts = [Host(name="10.0.0.1", cpus=9, gpus=8), Host(name="10.0.0.2", cpus=9, gpus=2)]
    wanted = [HostDemand(gpus_of={"a": 1.0}, gpus=1), HostDemand(gpus_of={"b": 8.0}, gpus=8)]
    assert [host.name for host in assign(wanted, hosts)] == ["10.0.0.2", "10.0.0.1"]


def test_a_resource_tells_kinds_of_hosts_apart() -> None:
    plain = Host(name="10.0.0.1", cpus=8, gpus=0)
    hosts = [plain, dataclasses.replace(plain, name="10.0.0.2", resources=frozenset({"CPU", "fast"}))]
    wanted = host_demands(placed_on(LearnerPlacement(resource="fast"), RolloutPlacement(nodes=1)))
    assert [host.name for host in assign(wanted, hosts)] == ["10.0.0.2", "10.0.0.1"]
    with pytest.raises(ConfigError, match="resource fast"):
        assign(wanted, [plain, dataclasses.replace(plain, name="10.0.0.3")])


@pytest.mark.parametrize(
    ("learner", "rollout", "key"),
    [
        ({"nodes": 2, "gpus_per_node": 4, "ranks": 4}, {}, "placement.learner.ranks"),
        ({"nodes": 2, "ranks": 3}, {}, "placement.learner.ranks"),
        ({}, {"nodes": 2, "servers": 3}, "placement.rollout.servers"),
        ({"nodes": 2}, {"servers": 1}, "placement.rollout.servers"),
    ],
)
def test_counts_that_do_not_divide_are_refused(learner: dict[str, int], rollout: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} "):
        placed_on(LearnerPlacement(**learner), RolloutPlacement(**rollout))


ALONE = placed_on(LearnerPlacement(ranks=1), RolloutPlacement(servers=2), colocated=True)
PAIRS_ON_TWO_HOSTS = placed_on(LearnerPlacement(nodes=2, gpus_per_node=2), RolloutPlacement(servers=4), colocated=True)
AT_URL = changed(placed_on(LearnerPlacement(ranks=2)), rollout=RolloutConfig(server_urls=("http://127.0.0.1:30000",)))
REFUSED = "weight_sync.transport"


@pytest.mark.parametrize(
    ("asked", "sync", "found"),  # [GPUs there] the transport, or the key at which it is refused
    [
        (placed_on(), {}, {0: "gloo", 1: "cuda_ipc", 2: "nccl"}),
        (placed_on(), {"transport": "nccl"}, {0: REFUSED, 1: REFUSED, 2: "nccl"}),
        (placed_on(), {"transport": "cuda_ipc"}, {0: "cuda_ipc", 1: "cuda_ipc", 2: REFUSED}),
        (placed_on(colocated=True), {"transport": "cuda_ipc"}, {2: "cuda_ipc"}),
        (placed_on(), {"double_buffer": "device"}, {0: "gloo", 1: "weight_sync.double_buffer", 2: "nccl"}),
        (placed_on(), {"delta": True}, {1: "weight_sync.delta"}),
        (TWO_PAIRS, {"double_buffer": "device"}, {2: "weight_sync.double_buffer"}),
        (TWO_PAIRS, {"delta": True}, {2: "weight_sync.delta"}),
        # a shared GPU uses files where no memory can be mapped
        (ALONE, {}, {2: "disk"}), (ALONE, {"transport": "cuda_ipc"}, {2: REFUSED}),
        (PAIRS_ON_TWO_HOSTS, {}, {4: "disk"}),
        (changed(placed_on(), rollout=RolloutConfig(engine="hf")), {}, {1: "disk"}),
        # the GPU of a server at a URL is not known
        (AT_URL, {}, {2: "disk"}), (AT_URL, {"transport": "nccl"}, {2: "nccl"}),
    ],
)
def test_the_transport_follows_from_who_shares_a_gpu(
    asked: Config, sync: dict[str, Any], found: dict[int, str]
) -> None:
    asked = changed(asked, weight_sync=sync, model={"dtype": "bfloat16"}, staleness={"max": 1})
    for gpus, transport in found.items():
        parts = host_demands(asked, gpus)
        if "." not in transport:
            assert resolve(asked, decide_placement(asked, parts)).weight_sync.transport == transport
            continue
        with pytest.raises(ConfigError, match=f"^{re.escape(transport)} "):
            decide_placement(asked, parts)


@pytest.mark.parametrize(("nodes", "ranks", "servers"), [(1, 2, 2), (1, 4, 2), (2, 4, 4), (2, 8, 4), (2, 4, 8)])
def test_servers_that_share_gpus_get_their_weights_from_the_rank_there(
    nodes: int, ranks: int, servers: int
) -> None:
    learner = LearnerPlacement(nodes=nodes, gpus_per_node=ranks // nodes)
    asked = placed_on(learner, RolloutPlacement(servers=servers), colocated=True)
    wanted = host_demands(asked)
    pairs = [sorted(part.gpus_of.keys() - {"buffer"}) for demand in wanted for part in demand.per_gpu()]
    assert asked.placement.ranks_of_servers == {
        pair[1]: int(pair[0].removeprefix("learner/")) for pair in pairs if len(pair) == 2
    }
    parts = [part for demand in wanted for part in demand.per_gpu()]
    resolved = resolve(asked, decide_placement(asked, parts))
    assert resolved.weight_sync.transport == ("cuda_ipc" if nodes == 1 else "disk")


TWO_SERVERS = placed_on(rollout=RolloutPlacement(servers=2))


@pytest.mark.parametrize(
    ("asked", "gpus_there", "servers"),
    [
        (TWO_SERVERS, 1, 2), (TWO_SERVERS, 3, 1), (TWO_SERVERS, 0, 1), (placed_on(), 1, 1), (TWO_PAIRS, 2, 1),
        (TWO_NODES, 16, 1), (placed_on(LearnerPlacement(nodes=1), RolloutPlacement(nodes=1)), 2, 1),
    ],
)
def test_servers_of_one_gpu_divide_its_fraction(asked: Config, gpus_there: int, servers: int) -> None:
    parts = [part for demand in host_demands(asked, gpus_there) for part in demand.per_gpu()]
    assert servers_per_gpu(parts) == servers
    resolved = resolve(asked, decide_placement(asked, parts))
    assert resolved.rollout.gpu_memory_utilization == asked.rollout.gpu_memory_utilization / servers


def test_a_server_at_a_url_gets_no_gpu() -> None:
    assert host_demands(AT_URL, 2)[0].gpus_of == {"buffer": 0, "rollout/0": 0, "learner/0": 1, "learner/1": 1}


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_rollout_servers_ask_for_an_api_key_made_from_the_clients_key(tmp_path: Path, host: str) -> None:
    new_keys(tmp_path / "keys")
    network = NetworkConfig(host=host, keys=str(tmp_path / "keys"))
    assert authorization(network) == {"Authorization": f"Bearer {api_key(network)}"}
    assert len(api_key(network)) == 64
    new_keys(tmp_path / "others")
    assert api_key(dataclasses.replace(network, keys=str(tmp_path / "others"))) != api_key(network)
    assert authorization(NetworkConfig(host=host, insecure=True)) == {}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Small stand-ins for the model and data that a user of the GSM8K configs provides."""
    folder = tmp_path_factory.mktemp("gsm8k")
    save_tiny_model("tiny-qwen2", folder / "model", seed=0)
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 32_768}))
    row = {"question": "What is 1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = folder / "rows.parquet"
    assert main(["prepare", "gsm8k", str(folder / "rows.jsonl"), str(rows)]) == 0
    return [f"model.path={folder / 'model'}", f"task.path={rows}", f"task.eval_path={rows}", f"run.dir={folder}"]


def failing(error: Exception) -> Callable[..., None]:
    def init(**_: object) -> None:
        raise error

    return init


@pytest.mark.processes
@pytest.mark.parametrize("name", ["gsm8k_single_gpu", "gsm8k_two_node"])
def test_a_gsm8k_config_passes_its_dry_run_without_a_cluster(
    name: str, stand_ins: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", failing(ConnectionError("Could not find any running Ray instance")))
    assert main(["train", str(ROOT / "configs" / f"{name}.yaml"), *stand_ins, "--dry-run"]) == 0
    placement = capsys.readouterr().out.partition("# placement\n")[2].partition("\n# memory\n")[0]
    assert all(f"{process}/0" in placement for process in ("rollout", "learner"))
