"""The sections run, weight_sync, placement, network, timeouts, logging and checkpoint of the configuration."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from async_rl.base.config.check import check
from async_rl.base.config.section import List, Named, OnePart, PathText, Section, checked, section
from async_rl.base.seams import ENGINES, TRANSPORTS, TransportEntry, find_entry

Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""A timeout of at most eleven days: ZMQ counts the milliseconds of a wait in 32 bits."""


@section("run")
class RunConfig:
    """The run: its name, its seed, its length, and the run that it continues."""

    name: Annotated[str, checked(
        lambda name: name not in ("", ".", "..") and "/" not in name, "the name of a folder, without '/'"
    )] = "run"  # fmt: skip
    """The name of the run's folder."""
    dir: PathText = "runs"
    """The folder that holds the run's folder."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of prompts, sampling and training. Engines take no others than 0 to 2**32 - 1."""
    steps: PositiveInt = 100
    """Learner steps (batches) to take in this run."""
    seconds: NonNegativeFloat = 0.0
    """The run ends after the learner step that reaches this many seconds since the first step; each resume begins to
    count anew. 0: no limit."""
    resume: PathText = ""
    """The run directory to continue from its newest checkpoint, or one of its checkpoints. `--resume` sets it."""


@section("weight_sync")
class WeightSyncConfig(OnePart):
    """How new weights reach the rollout servers, and what running requests do meanwhile."""

    transport: Annotated[str, Named(TRANSPORTS, "weight_sync.transport", also=("auto",))] = "auto"
    """How weights travel. auto: gloo on CPU, nccl where learner and servers have GPUs of their own, cuda_ipc where
    each server shares a GPU with a learner rank of the same host, else disk."""
    on_update: Literal["in_place", "retract", "drain", "abort"] = "in_place"
    """How running requests take new weights. in_place: they pause, keep their KV cache and continue.
    retract: their KV cache is computed again. drain: they finish first. abort: they are submitted again with the tokens
    they have."""
    every_steps: PositiveInt = 1
    """Learner steps between two pushes."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 512 * 2**20
    """Bytes of weights that are sent at once."""
    double_buffer: Literal["none", "device", "host"] = "none"
    """The memory of servers for weights that are not complete yet, while they still sample with the old ones. The
    pause is then the swap alone. device, host: memory of the GPU or of the host, which holds the weights once more;
    for the transports nccl and gloo. none: servers stand still while weights travel."""
    lora: Literal["merged", "adapter"] = "merged"
    """The form of adapters (model.lora) on their way. merged: within whole weights. adapter: alone, and servers add
    them to the weights of their model folder, which gives the same up to rounding; with the transports nccl, gloo and
    disk."""
    delta: bool = False
    """Push only the values that have changed since the push before; all of them when a server has joined or a push has
    failed. It pays where servers compute in bfloat16, because a step changes few bfloat16 values; with the transports
    nccl, gloo and disk. Rank 0 and each server then hold the weights once more, in memory of the host."""
    verify_every: NonNegativeInt = 50
    """Verify the first push, then every so many: the sums of a server's weights and its logprobs of a probe text must
    be the learner's. In the first one every weight is also set to NaN before it, and must be loaded. A server that
    serves something else in a later one is restarted. At rollout.server_url only logprobs are compared. 0: never."""
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """The settings that `transport`, one of your own, declares."""

    @property
    def part(self) -> tuple[str, str, Any]:
        entry = self.transport_entry
        return "weight_sync.transport", self.transport, entry.settings if entry else None

    @property
    def is_compact(self) -> bool:
        """Whether weights travel as parcels (async_rl/base/weights/parcels.py); servers make whole tensors of them."""
        return self.delta or self.lora == "adapter"

    @property
    def transport_entry(self) -> TransportEntry | None:
        """The `TransportEntry` that `transport` names; None for auto, the first of `working_transports`."""
        return None if self.transport == "auto" else find_entry(TRANSPORTS, self.transport, "weight_sync.transport")


@section("placement.learner")
class LearnerPlacement:
    """The placement of the learner: the number of its ranks, their nodes, and whether each rank has a GPU."""

    nodes: PositiveInt = 1
    """Nodes that hold learner ranks."""
    gpus_per_node: NonNegativeInt = 0
    """Ranks on each node, with a GPU each. 0: `ranks` gives their number; they use the GPUs there are, else the CPU."""
    ranks: NonNegativeInt = 0
    """Ranks on all nodes together. 0: nodes * gpus_per_node, or one on each node."""
    resource: str = ""
    """The Ray resource that a node must offer (`ray start --resources`), to tell kinds of hosts apart. Empty: any node.
    """

    def __post_init__(self) -> None:
        derived = self.nodes * max(1, self.gpus_per_node)
        ranks = self.ranks or derived
        check(
            ranks == derived if self.gpus_per_node else ranks % self.nodes == 0, "placement.learner.ranks", ranks,
            f"nodes * gpus_per_node = {derived}" if self.gpus_per_node else f"a multiple of {self.nodes} nodes",
        )
        object.__setattr__(self, "ranks", ranks)


@section("placement.rollout")
class RolloutPlacement:
    """The number of rollout servers, of their nodes, and of the GPUs of each."""

    nodes: NonNegativeInt = 0
    """Nodes reserved for rollout servers. 0: they share the learner's nodes."""
    servers: PositiveInt = 1
    """Rollout servers on all nodes together."""
    engines: List[tuple[Annotated[str, Named(ENGINES, "placement.rollout.engines")], ...]] = ()
    """The engine of each server, e.g. [sglang, vllm]. Empty: rollout.engine for all. Servers of another engine than
    rollout.engine get none of rollout.server_args."""
    tp: PositiveInt = 1
    """GPUs of each server (tensor parallelism)."""
    resource: str = ""
    """Like placement.learner.resource, for the nodes reserved for rollout servers."""
    max_restarts: NonNegativeInt = 3
    """Restarts allowed for each server, evaluation servers included, between two learner steps; one more failure ends
    the run."""

    def __post_init__(self) -> None:
        check(
            self.servers % max(1, self.nodes) == 0, "placement.rollout.servers", self.servers,
            f"a multiple of {self.nodes} nodes",
        )
        check(
            len(self.engines) in (0, self.servers), "placement.rollout.engines", list(self.engines),
            f"empty, or one engine for each of {self.servers} servers",
        )


@section("placement.eval")
class EvalPlacement:
    """The evaluation servers, which answer held-out prompts and nothing else, so that training does not wait for them.
    """

    servers: NonNegativeInt = 0
    """Servers that make the evaluations beside training, on the nodes of the rollout servers, each with rollout.engine
    and placement.rollout.tp GPUs. A version that is due is pushed to them, so that all of its answers come from it. If
    they are still busy then, the version is skipped, or its push waits (see eval.every_steps), and no other push does.
    0: a rollout server evaluates, beside its work for training."""


@section("placement.judge")
class JudgePlacement:
    """The servers of the judge (judge.path), which no weights are pushed to."""

    servers: NonNegativeInt = 0
    """Servers of judge.path, on the nodes of the rollout servers, between which its requests are shared."""
    tp: PositiveInt = 1
    """GPUs of each of them (tensor parallelism)."""


@section("placement")
class PlacementConfig:
    """The nodes, GPUs and cores that learner ranks and servers get, and whether they share GPUs."""

    learner: Section[LearnerPlacement] = field(default_factory=LearnerPlacement)
    rollout: Section[RolloutPlacement] = field(default_factory=RolloutPlacement)
    eval: Section[EvalPlacement] = field(default_factory=EvalPlacement)
    judge: Section[JudgePlacement] = field(default_factory=JudgePlacement)
    colocated: bool = False
    """Learner ranks and servers share GPUs, one of each on a GPU; rollout.gpu_memory_utilization splits the memory."""
    pin_cpus: bool = False
    """Each server and learner rank gets cores of its own, an equal share of this host's. Without GPUs, rollout and
    learner work at the same time only with this."""

    def __post_init__(self) -> None:
        check(
            not self.colocated or (self.rollout.nodes == 0 and self.rollout.tp == 1), "placement.colocated", True,
            "false where servers have nodes of their own, or span GPUs (placement.rollout.nodes, tp)",
        )
        check(
            self.rollout.nodes > 0 or self.rollout.servers % self.learner.nodes == 0, "placement.rollout.servers",
            self.rollout.servers, f"a multiple of the learner's {self.learner.nodes} nodes, which they share",
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
        """The number of servers of the whole run: for rollouts, for evaluations and of the judge."""
        return self.rollout.servers + self.eval.servers + self.judge.servers

    @property
    def ranks_of_servers(self) -> dict[str, int]:
        """The learner rank on the GPU of each rollout server, by the server's name; {} without `colocated`.

        On each node the first rank is on the GPU of the first server, and so on. Servers without a rank are left out.
        """
        if not self.colocated:
            return {}
        nodes = self.learner.nodes
        ranks, servers = self.learner.ranks // nodes, self.rollout.servers // nodes
        return {
            f"rollout/{node * servers + gpu}": node * ranks + gpu
            for node in range(nodes) for gpu in range(min(ranks, servers))
        }

    @property
    def processes_per_node(self) -> int:
        """The largest number of learner ranks and servers that are on one node and share its cores."""
        ranks = self.learner.ranks // self.learner.nodes
        return max(ranks, self.servers_per_node) if self.rollout.nodes else ranks + self.servers_per_node

    @property
    def servers_per_node(self) -> int:
        """The largest number of servers that are on one node."""
        return math.ceil(self.num_servers / (self.rollout.nodes or self.learner.nodes))




class Limit(NamedTuple):
    """The time limit of one wait, with the configuration key that sets it, which the error of a longer wait names."""

    seconds: float
    key: str

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s ({self.key})"


@section("timeouts")
class TimeoutsConfig:
    """The time limits of all waits of a run, in seconds; a wait that exceeds its limit ends with an error."""

    startup_s: Seconds = 600.0
    """How long a process of the run may take to start and to reach the others, and a reward to open its files and
    connections."""
    generate_s: Seconds = 1800.0
    """How long the engine may take to answer one group; in an episode of several turns, to give one reply."""
    tool_s: Seconds = 30.0
    """How long one call of a tool may take. The model is told when it took longer."""
    turn_s: Seconds = 120.0
    """How long an environment may take to answer a reply, or an agent to ask for the next one."""
    episode_s: Seconds = 3600.0
    """How long one episode may take. After that `task.on_timeout` decides its reward."""
    reward_s: Seconds = 30.0
    """How long one call of the reward function may take, from when a thread begins with it."""
    batch_s: Seconds = 3600.0
    """How long one large piece of work may take: the batch that the learner waits for, the groups that a push waits for
    with weight_sync.on_update drain, an evaluation, the writing of a checkpoint."""
    push_s: Seconds = 300.0
    """How long each part of a weight push may take: that all servers join it, pause, get a bucket, or go on."""
    buffer_s: Seconds = 30.0
    """How long one request to the buffer may take."""
    silent_s: Seconds = 60.0
    """A process that tells the driver nothing for this long counts as dead; a buffer with a journal counts as dead
    after buffer_s / 3."""
    shutdown_s: Seconds = 30.0
    """How long a process that was asked to end may take."""
    pause_s: Seconds = 259_200.0
    """How long a run that its watcher has paused waits for `async-rl answer`, before it ends with a checkpoint."""
    interrupt_s: Seconds = 300.0
    """How long the running step and its checkpoint may take after Ctrl-C or SIGTERM, before the run ends without them.
    """

    def limit(self, name: str) -> Limit:
        """Return the timeout in the field `name`, such as push_s, with its configuration key."""
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
    """Whether requests can be sent below `url`: it has no query or fragment, and no user, which can't be sent."""
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
    """The address of a run's sockets and the keys that protect them, also from other users of the same host. In a run
    on several hosts, each process listens on the address that Ray has for its node (`ray start --node-ip-address`).
    """

    host: Annotated[str, checked(_is_one_interface, (
        "the IPv4 address of one interface, in numbers (127.0.0.1 where all processes share a host, else an address of "
        "this host that the others reach)"
    ))] = "127.0.0.1"  # fmt: skip
    """The IPv4 address that sockets bind and others reach. An address beyond loopback needs keys, or insecure."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """The port of the buffer. 0: a free one."""
    ports: Annotated[str, checked(_is_range, (
        "two ports from 1024 to 65535, such as 20000-20099, or empty"
    ))] = ""  # fmt: skip
    """The ports of all sockets of a run that other hosts connect to, FIRST-LAST, for a firewall between them: the
    buffer (unless `port` is set), the servers, and the stores that torch.distributed finds its ranks with. Each is a
    free one of these, and several runs may share a range. Ray, NCCL and gloo have settings of their own. Empty: any."""
    keys: PathText = ""
    """The folder made by `async-rl keys new`. Empty: at each start the run makes keys of its own, which it removes at
    its end. With keys, groups and batches are encrypted, the buffer accepts only clients that hold the client's key,
    and rollout servers ask for an API key made from that key."""
    insecure: bool = False
    """Make no keys, and accept that whoever reaches `host`, on loopback every user and program of this host, can read
    the training data and write into it."""

    def __post_init__(self) -> None:
        check(
            self.is_on_loopback or bool(self.keys) or self.insecure, "network.host", self.host,
            "a loopback address unless network.keys or network.insecure is set",
            "Make keys with `async-rl keys new DIR` and set network.keys: DIR.",
        )

    def ports_in(self, first: int, count: int, of: int) -> str:
        """Return `count` parts of `ports`, divided into `of`, so that processes take different ones."""
        ports = self.port_range
        part = ports[first * len(ports) // of : (first + count) * len(ports) // of]
        return f"{part[0]}-{part[-1]}" if ports else ""

    @property
    def port_range(self) -> range:
        """The ports of `ports`; empty if any will do."""
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
    """Learner steps between two Hugging Face folders of the policy, run_dir/models/step_N, which are all kept and which
    training waits for. 0: only run_dir/model, at the end."""
    push_to_hub: Annotated[str, checked(_is_repository, "OWNER/NAME of a repository of the hub")] = ""
    """The repository of the hub, OWNER/NAME, to which run_dir/model is uploaded when the run has ended. It is made,
    as a private one, if there is none. Empty: nothing is uploaded."""
    keep_last: PositiveInt = 2
    """The number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """The number of further checkpoints to keep: those that are the best on held-out prompts."""
    best_by: Literal["accuracy", "reward"] = "accuracy"
    """The measure of the best: accuracy, the share of right answers (eval/accuracy), or reward, the mean
    reward (eval/reward)."""


@section("logging")
class LoggingConfig:
    """The loggers that get the metrics besides run_dir/metrics.jsonl: wandb, trackio and TensorBoard."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """The mode of wandb. auto: online when the user is logged in, else disabled."""
    trackio: bool = False
    """Whether the same metrics go to trackio, where it is installed (`pip install trackio`)."""
    tensorboard: bool = False
    """Whether the same metrics go to event files in run_dir/tensorboard (`pip install 'async-rl[tensorboard]'`).
    `tensorboard --logdir RUN_DIR` shows them (`pip install tensorboard`)."""
    project: str = "async-rl"
    """The project in wandb and trackio."""

    @property
    def has_trackers(self) -> bool:
        """Whether a tracker may be on. With wandb auto that depends on the user's login."""
        return self.wandb != "disabled" or self.trackio or self.tensorboard
