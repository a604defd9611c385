"""The sections run, weight_sync, placement, network, timeouts, logging and checkpoint of the configuration."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from async_rl.base.config.check import check
from async_rl.base.config.section import List, Named, OnePart, PathText, Section, checked, section
from async_rl.base.seams import ENGINES, TRANSPORTS, TransportEntry, find_entry

Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""The type of a timeout: at most eleven days, because ZMQ counts the milliseconds of a wait in 32 bits."""


@section("run")
class RunConfig:
    """The run: its name, its seed, its length, and the run that it resumes."""

    name: Annotated[str, checked(
        lambda name: name not in ("", ".", "..") and "/" not in name, "the name of a folder, without '/'"
    )] = "run"  # fmt: skip
    """The name of the run's folder."""
    dir: PathText = "runs"
    """Where the run's folder is created."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of prompts, sampling and training. Engines accept only 0 to 2**32 - 1."""
    steps: PositiveInt = 100
    """Learner steps (batches) to take in this run."""
    seconds: NonNegativeFloat = 0.0
    """The run ends after the learner step that reaches this many seconds since the first step. A resume counts anew.
    0: no limit."""
    resume: PathText = ""
    """The run directory whose newest checkpoint is resumed, or one of its checkpoints. `--resume` sets it."""


@section("weight_sync")
class WeightSyncConfig(OnePart):
    """How new weights reach the rollout servers, and what happens to running requests meanwhile."""

    transport: Annotated[str, Named(TRANSPORTS, "weight_sync.transport", also=("auto",))] = "auto"
    """How weights are sent. auto: gloo on CPU, nccl if learner and servers have different GPUs, cuda_ipc if each
    server shares a GPU with a learner rank on the same host, else disk."""
    on_update: Literal["in_place", "retract", "drain", "abort"] = "in_place"
    """What happens to running requests when weights are updated. in_place: they pause, keep their KV cache and
    continue. retract: their KV cache is recomputed. drain: they finish first. abort: they are submitted again with the
    tokens so far."""
    every_steps: PositiveInt = 1
    """Learner steps between two pushes. Above staleness.depth + 1 a run is refused: the learner would wait for ever."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 512 * 2**20
    """Bytes of weights that are sent at a time."""
    double_buffer: Literal["none", "device", "host"] = "none"
    """Where servers store new weights while they still sample with the old ones, so that only the swap needs a
    pause. device, host: memory of the GPU or host, with room for a second copy of the weights; only with the transports
    nccl and gloo. none: servers pause while weights are sent."""
    lora: Literal["merged", "adapter"] = "merged"
    """What is pushed with adapters (model.lora). merged: whole weights with the adapters merged in. adapter: only
    the adapters, which servers add to the weights of their model folder (equal up to rounding); only with the
    transports nccl, gloo and disk."""
    delta: bool = False
    """Push only the values that have changed since the last push; all values to a server that joins, and to all servers
    after a failed push. It needs servers in bfloat16, because a step changes few bfloat16 values. Only with the
    transports nccl, gloo and disk. Rank 0 and each server keep a second copy of the weights in host memory."""
    verify_every: NonNegativeInt = 50
    """Verify the first push after a step, and then every so many pushes, by the sums of a server's weights and its
    logprobs of a text. Verify also a server that joins. docs/explanation/weight-updates.md says how, and which sums
    can't be compared. A server that fails a later verification is restarted. 0: never."""
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """The settings that your own `transport` declares."""

    @property
    def part(self) -> tuple[str, str, Any]:
        entry = self.transport_entry
        return "weight_sync.transport", self.transport, entry.settings if entry else None

    @property
    def is_compact(self) -> bool:
        """Whether pushes are compact: sent as parcels (async_rl/base/weights/parcels.py), which servers decode."""
        return self.delta or self.lora == "adapter"

    @property
    def is_plain(self) -> bool:
        """Whether servers get whole weights, while they are paused."""
        return not self.is_compact and self.double_buffer == "none"

    @property
    def transport_entry(self) -> TransportEntry | None:
        """The `TransportEntry` named by `transport`; None for auto, which the first of `working_transports` replaces.
        """
        return None if self.transport == "auto" else find_entry(TRANSPORTS, self.transport, "weight_sync.transport")


@section("placement.learner")
class LearnerPlacement:
    """Where the learner runs: the number of its ranks, their nodes, and whether each rank has a GPU."""

    nodes: PositiveInt = 1
    """Nodes with learner ranks."""
    gpus_per_node: NonNegativeInt = 0
    """Ranks on each node, each with a GPU. 0: `ranks` gives their number; they use the GPUs that exist, else the CPU.
    """
    ranks: NonNegativeInt = 0
    """Ranks on all nodes together. 0: nodes * gpus_per_node, or one per node."""
    resource: str = ""
    """The Ray resource that the nodes must offer (`ray start --resources`), to choose a kind of host. Empty: any node.
    """

    def __post_init__(self) -> None:
        derived = self.nodes * max(1, self.gpus_per_node)
        ranks = self.ranks or derived
        check(
            ranks == derived if self.gpus_per_node else ranks % self.nodes == 0, "placement.learner.ranks", ranks,
            f"nodes * gpus_per_node = {derived}" if self.gpus_per_node else f"a multiple of {self.nodes} nodes",
        )
        object.__setattr__(self, "ranks", ranks)


def _is_server_range(servers: dict[str, Any]) -> bool:
    are_numbers = all(type(number) is int for number in servers.values())
    return are_numbers and servers.keys() == {"min", "max"} and 1 <= servers["min"] <= servers["max"]


@section("placement.rollout")
class RolloutPlacement:
    """Where rollout servers run: their number, their nodes, and the GPUs of each."""

    nodes: NonNegativeInt = 0
    """Nodes reserved for rollout servers. 0: they share the learner's nodes. If `servers` has a minimum, any number
    above 0 means the same: servers run on every node that offers `resource`, or on every node without learner ranks if
    that is empty. Such nodes may join the Ray cluster during the run, and leave."""
    servers: PositiveInt | Annotated[
        dict[str, Any], checked(_is_server_range, "{min: FEWEST, max: MOST}, whole numbers with 1 <= min <= max"),
    ] = 1
    """Rollout servers on all nodes together. `{min: 1, max: 8}`: the run begins with 1 and takes more while nodes have
    room. Below the minimum the learner pauses, for at most timeouts.pause_s. `async-rl servers RUN` lists, adds and
    removes servers of a run."""
    leave_s: PositiveFloat = 30.0
    """How long a server that leaves may take to finish its groups; others are started again elsewhere. If Ray
    announces that its node leaves, at most until 5 s before that."""
    engines: List[tuple[Annotated[str, Named(ENGINES, "placement.rollout.engines")], ...]] = ()
    """The engine of each server, e.g. [sglang, vllm]. Empty: rollout.engine for all. rollout.server_args apply only
    to servers of rollout.engine."""
    tp: PositiveInt = 1
    """GPUs of each server (tensor parallelism)."""
    resource: str = ""
    """Like placement.learner.resource, for the nodes reserved for rollout servers."""
    max_restarts: NonNegativeInt = 3
    """Restarts allowed for each server, also an evaluation server, between two learner steps. One more failure of the
    same server ends the run."""

    def __post_init__(self) -> None:
        check(
            self.is_elastic or self.most % max(1, self.nodes) == 0, "placement.rollout.servers", self.servers,
            f"a multiple of {self.nodes} nodes",
        )
        check(
            not self.engines or (len(self.engines) == self.most and not self.is_elastic), "placement.rollout.engines",
            list(self.engines), "empty, or one engine for each server with a fixed number of servers",
        )

    @property
    def is_elastic(self) -> bool:
        """Whether servers may join and leave: `servers` has a minimum and a maximum."""
        return not isinstance(self.servers, int)

    @property
    def fewest(self) -> int:
        """The number of servers with which the run begins."""
        return self.servers if isinstance(self.servers, int) else self.servers["min"]

    @property
    def most(self) -> int:
        """The largest number of servers that the run may have."""
        return self.servers if isinstance(self.servers, int) else self.servers["max"]


@section("placement.eval")
class EvalPlacement:
    """The evaluation servers. They only answer held-out prompts, so that training does not wait for evaluations."""

    servers: NonNegativeInt = 0
    """Servers for the evaluations during training, on the rollout nodes, each with rollout.engine and
    placement.rollout.tp GPUs. A version to evaluate is pushed to them, so one version samples all its answers. If they
    are still busy, the version is skipped or its push waits (see eval.every_steps); other pushes never wait. 0: a
    rollout server evaluates, in addition to its training work."""


@section("placement.judge")
class JudgePlacement:
    """The servers of the judge's model (judge.path). They get no weight pushes."""

    servers: NonNegativeInt = 0
    """Servers of judge.path, on the rollout nodes. Requests to the judge are spread over them."""
    tp: PositiveInt = 1
    """GPUs of each judge server (tensor parallelism)."""


@section("placement")
class PlacementConfig:
    """Which nodes, GPUs and cores the learner ranks and servers get, and whether they share GPUs."""

    learner: Section[LearnerPlacement] = field(default_factory=LearnerPlacement)
    rollout: Section[RolloutPlacement] = field(default_factory=RolloutPlacement)
    eval: Section[EvalPlacement] = field(default_factory=EvalPlacement)
    judge: Section[JudgePlacement] = field(default_factory=JudgePlacement)
    colocated: bool = False
    """Learner ranks and servers share GPUs, one of each per GPU; rollout.gpu_memory_utilization divides the memory."""
    pin_cpus: bool = False
    """Give each server and learner rank its own cores, an equal share of the host's. Without GPUs, rollout and
    learner work simultaneously only with this."""

    def __post_init__(self) -> None:
        check(
            not self.colocated or (self.rollout.nodes == 0 and self.rollout.tp == 1), "placement.colocated", True,
            "false where servers have nodes of their own, or span GPUs (placement.rollout.nodes, tp)",
        )
        check(
            self.rollout.nodes > 0 or self.rollout.is_elastic or self.rollout.most % self.learner.nodes == 0,
            "placement.rollout.servers", self.rollout.servers,
            f"a multiple of the learner's {self.learner.nodes} nodes, which they share",
        )
        check(
            not (self.rollout.is_elastic and self.colocated), "placement.rollout.servers", self.rollout.servers,
            "a number with placement.colocated", "Each server shares its GPU with a learner rank.",
        )
        check(
            not (self.rollout.is_elastic and self.pin_cpus), "placement.pin_cpus", True,
            "false if placement.rollout.servers has a minimum", "The cores are divided among all processes.",
        )
        check(
            not (self.colocated and self.eval.servers), "placement.eval.servers", self.eval.servers,
            "0 with placement.colocated", "Evaluation servers want GPUs that no learner rank uses.",
        )
        check(
            not (self.colocated and self.judge.servers), "placement.judge.servers", self.judge.servers,
            "0 with placement.colocated", "The judge wants GPUs that no learner rank uses. Or set judge.urls.",
        )
        check(not (self.pin_cpus and self.num_nodes > 1), "placement.pin_cpus", True, "false on several nodes")

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the whole run."""
        return self.learner.nodes + self.rollout.nodes

    @property
    def num_servers(self) -> int:
        """The largest number of servers of the whole run: rollout, evaluation and judge servers."""
        return self.rollout.most + self.eval.servers + self.judge.servers

    @property
    def ranks_of_servers(self) -> dict[str, int]:
        """For each rollout server, by name: the learner rank on the same GPU; {} without `colocated`.

        On each node the first rank shares a GPU with the first server, and so on. Servers without a rank are left out.
        """
        if not self.colocated:
            return {}
        nodes = self.learner.nodes
        ranks, servers = self.learner.ranks // nodes, self.rollout.most // nodes
        return {
            f"rollout/{node * servers + gpu}": node * ranks + gpu
            for node in range(nodes) for gpu in range(min(ranks, servers))
        }

    @property
    def processes_per_node(self) -> int:
        """The most learner ranks and servers on one node, which share its cores."""
        ranks = self.learner.ranks // self.learner.nodes
        return max(ranks, self.servers_per_node) if self.rollout.nodes else ranks + self.servers_per_node

    @property
    def servers_per_node(self) -> int:
        """The most servers on one node."""
        return math.ceil(self.num_servers / (self.rollout.nodes or self.learner.nodes))




class Limit(NamedTuple):
    """The time limit of a wait, and its configuration key, which the error of an overdue wait names."""

    seconds: float
    key: str

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s ({self.key})"


@section("timeouts")
class TimeoutsConfig:
    """The time limits of all waits of a run, in seconds. A server that waits longer is restarted. Any other wait beyond
    its limit ends the run with an error, unless its key says otherwise."""

    startup_s: Seconds = 600.0
    """How long a process of the run may take to start and connect to the others, and a reward to open what it needs."""
    generate_s: Seconds = 1800.0
    """How long the engine may take to answer one group; in a multi-turn episode, to sample one reply. If it takes
    longer, its server is restarted, and all of the server's groups begin anew."""
    tool_s: Seconds = 30.0
    """How long one tool call may take. If it takes longer, the model gets an error message as its result."""
    turn_s: Seconds = 120.0
    """How long an environment may take to respond to a reply, or an agent to ask for the next reply. If it takes
    longer, task.on_timeout decides the episode's reward."""
    episode_s: Seconds = 3600.0
    """How long one episode may take. If it takes longer, task.on_timeout decides its reward."""
    reward_s: Seconds = 30.0
    """How long one call of the reward function may take, from when a thread starts it. If it takes longer, its group is
    dropped and counted."""
    batch_s: Seconds = 3600.0
    """How long one large piece of work may take: a batch, the groups that a push waits for with weight_sync.on_update
    drain, an evaluation, writing a checkpoint."""
    push_s: Seconds = 300.0
    """How long each part of a weight push may take: until all servers have joined, paused, got a bucket, or resumed."""
    buffer_s: Seconds = 30.0
    """How long one request to the buffer may take."""
    silent_s: Seconds = 60.0
    """A process that does not report to the driver for this long counts as dead; a buffer with a journal after
    buffer_s / 3."""
    shutdown_s: Seconds = 30.0
    """How long a process may take to end after it was asked to. Then it is killed."""
    pause_s: Seconds = 259_200.0
    """How long a paused run waits: for `async-rl answer`, then it ends with a checkpoint; or for
    placement.rollout.servers.min servers, then it ends with an error."""
    interrupt_s: Seconds = 300.0
    """How long the running step and its checkpoint may take after Ctrl-C or SIGTERM. Then the run ends without them."""

    def limit(self, name: str) -> Limit:
        """Return the timeout in the field `name`, such as push_s, together with its configuration key."""
        return Limit(getattr(self, name), f"timeouts.{name}")


def _is_one_interface(host: str) -> bool:
    try:
        return not ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        return False


def _is_range(ports: str) -> bool:
    match = re.fullmatch(r"(\d{4,5})-(\d{4,5})", ports)
    return not ports or (match is not None and 1024 <= int(match[1]) <= int(match[2]) < 2**16)


def is_server_url(url: str) -> bool:
    """Whether requests can be sent to addresses below `url`: it has a host, and no user, query or fragment."""
    if re.search(r"[\s?#]", url):
        return False
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # the port is no number, or none that a port can have
        return False
    return is_address and parts.scheme in ("http", "https")


@section("network")
class NetworkConfig:
    """The address of a run's own sockets, and the keys that protect them, also from other users of the same host. In a
    run on several hosts, these sockets are at the address that Ray has for their node (`ray start --node-ip-address`).
    Sockets of Ray and of the engines: docs/explanation/security.md."""

    host: Annotated[str, checked(_is_one_interface, (
        "the IPv4 address of one interface, in numbers (127.0.0.1 where all processes share a host, else an address of "
        "this host that the others reach)"
    ))] = "127.0.0.1"  # fmt: skip
    """The IPv4 address that sockets bind and other processes connect to. Beyond loopback it needs keys, or insecure."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """The port of the buffer. 0: a free one."""
    ports: Annotated[str, checked(_is_range, (
        "two ports from 1024 to 65535, such as 20000-20099, or empty"
    ))] = ""  # fmt: skip
    """The range FIRST-LAST for the run's sockets that other hosts connect to, for a firewall: the buffer (unless `port`
    is set), the servers, and the stores of torch.distributed. Several runs may share a range. Ray, NCCL and gloo have
    their own settings. Empty: any port."""
    keys: PathText = ""
    """The folder made by `async-rl keys new`, which you copy to every host. Empty: the run makes its own keys, brings
    them to every host, and removes them at its end. With keys, groups and batches are encrypted, the buffer accepts
    only clients with the client's key, and rollout servers require an API key derived from it."""
    insecure: bool = False
    """Make no keys. Everybody who can reach `host`, on loopback every user and program of this host, can then read
    and change the training data."""

    def __post_init__(self) -> None:
        check(
            self.is_on_loopback or bool(self.keys) or self.insecure, "network.host", self.host,
            "a loopback address unless network.keys or network.insecure is set",
            "Make keys with `async-rl keys new DIR` and set network.keys: DIR.",
        )

    def ports_in(self, first: int, count: int, of: int) -> str:
        """Divide `ports` into `of` equal parts, and return `count` of them, from number `first` on, as FIRST-LAST.

        Processes take different parts, so that their ports do not collide. Returns "" if `ports` is empty.
        """
        ports = self.port_range
        part = ports[first * len(ports) // of : (first + count) * len(ports) // of]
        return f"{part[0]}-{part[-1]}" if ports else ""

    @property
    def port_range(self) -> range:
        """The range `ports` as numbers; empty if any port may be used."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1) if self.ports else range(0)

    @property
    def is_on_loopback(self) -> bool:
        """Whether `host` is a loopback address, so that no other host can reach the sockets."""
        return ipaddress.IPv4Address(self.host).is_loopback


def _is_repository(name: str) -> bool:
    return re.fullmatch(r"([\w.-]+/[\w.-]+)?", name) is not None


@section("checkpoint")
class CheckpointConfig:
    """The checkpoints: how often learner and buffer are saved in run_dir/checkpoints, as one consistent state, and
    which checkpoints are kept.
    """

    every_steps: NonNegativeInt = 100
    """Learner steps between two checkpoints; one more is saved at the end. 0: only after Ctrl-C or SIGTERM."""
    models_every_steps: NonNegativeInt = 0
    """Learner steps between two exports of the policy as a Hugging Face folder, run_dir/models/step_N. All are kept,
    and training waits for each. 0: only run_dir/model, at the end."""
    push_to_hub: Annotated[str, checked(_is_repository, "OWNER/NAME of a repository of the hub")] = ""
    """The repository of the hub, OWNER/NAME, to which run_dir/model is uploaded after the run. It is created as a
    private one if it does not exist. Empty: nothing is uploaded."""
    keep_last: PositiveInt = 2
    """The number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """The number of further checkpoints to keep: the best ones on held-out prompts."""
    best_by: Literal["accuracy", "reward"] = "accuracy"
    """The measure for keep_best: the share of right answers (accuracy, eval/accuracy) or the mean reward (eval/reward).
    """


@section("logging")
class LoggingConfig:
    """The loggers that get the metrics in addition to run_dir/metrics.jsonl: wandb, trackio, TensorBoard, Prometheus.
    """

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """The mode of wandb. auto: online if the user is logged in, else disabled."""
    trackio: bool = False
    """Send metrics to trackio (`pip install trackio`)."""
    tensorboard: bool = False
    """Write metrics to event files in run_dir/tensorboard (`pip install 'async-rl[tensorboard]'`).
    `tensorboard --logdir RUN_DIR` shows them (`pip install tensorboard`)."""
    prometheus: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """The port where Prometheus may fetch the metrics, without a key, at network.host on the host of `async-rl train`
    (`pip install 'async-rl[prometheus]'`). 0: none."""
    project: str = "async-rl"
    """The project in wandb and trackio."""

    @property
    def has_trackers(self) -> bool:
        """Whether any of these loggers may be on. With wandb auto that depends on the user's login."""
        return self.wandb != "disabled" or self.trackio or self.tensorboard
