"""Sends the driver's local files to the hosts that lack them, before any process of the run starts.

    driver                       another host
    lists the files          ->  has it the same at the same paths? Then it uses these, and gets nothing
    hashes them              ->  has it a copy in its cache, of another run? Then it uses that
    sends them in pieces     ->  writes a copy into its cache

Models and data go to hosts with servers and no learner rank, the user's modules and files of `params` to all. Ray
carries the pieces, a few at a time. The weights of the policy are left out where its servers can start without, and get
the first ones by a push of the learner. The run's folder is not sent: hosts with learner ranks must share it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import NamedTemporaryFile
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rl.config import Config
from async_rl.driver.file_receiver import FileReceiver
from async_rl.driver.placement import Reservation
from async_rl.driver.signals import StopSignals
from async_rl.errors import AsyncRLError, ConfigError, ProcessDiedError, WaitTimeoutError
from async_rl.storage.file_sources import FileSource, Places, find_modules, find_source, local_names
from async_rl.storage.hub_names import SERVER_DATA
from async_rl.storage.param_files import param_files
from async_rl.telemetry.status import Status, write_status

PIECES_ON_THE_WAY = 4
"""The largest number of pieces that a host has not written yet."""
STATUS_INTERVAL_S = 2.0
PROGRESS_INTERVAL_S = 10.0
DISCARD_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class SentFiles:
    """The places of the driver's files on hosts that lack them."""

    places: Mapping[str, Places] = field(default_factory=dict)
    """[address of a host]"""
    lack_weights: bool = False
    """Whether a server starts without weights, and needs a push before it is used."""


def send_files(
    config: Config, reservation: Reservation, signals: StopSignals, note: Callable[[str], None]
) -> SentFiles:
    """Send the local files that the processes of `reservation` need to the hosts that lack them.

    Raises:
        ConfigError: a host has no room for them, or can't write them; or one of the learner does not see run.dir.
        WaitTimeoutError: a host did not answer within timeouts.startup_s, or not all were there after timeouts.work_s.
        ProcessDiedError: a host was lost meanwhile.
    """
    here = ray.util.get_node_ip_address()
    others = [host for host in dict.fromkeys(reservation.addresses) if host != here]
    if not others:
        return SentFiles()
    wanted: dict[tuple[str, str], list[str]] = {}
    of_servers = servers_elsewhere(reservation)
    for host, names in of_servers.items():
        if host == here:
            continue
        keys = ["model.path", *SERVER_DATA] if any(name in config.server_names for name in names) else []
        keys += ["judge.path"] if any(name in config.judge_names for name in names) else []
        for local in local_names(config, keys):
            wanted.setdefault(local, []).append(host)
    wanted |= dict.fromkeys(param_files(config, note), others)
    modules = find_modules(config)
    of_learner = [host for host in others if host not in of_servers]
    if not wanted and not modules and not of_learner:
        return SentFiles()
    sender = _Sender(config, signals, note, others)
    try:
        sender.check_run_folder(of_learner)
        for (key, path), hosts in wanted.items():
            sender.send(find_source(key, path), hosts)
        if modules:
            sender.send(modules, others)
    finally:
        sender.close()
    return SentFiles(sender.places, sender.lack_weights)


def servers_elsewhere(reservation: Reservation) -> dict[str, list[str]]:
    """Return {address of a host: its servers} of the hosts without learner ranks, which need the whole models."""
    processes: dict[str, list[str]] = defaultdict(list)
    for address, bundle in zip(reservation.addresses, reservation.bundles, strict=True):
        processes[address] += bundle.gpus_of
    return {
        host: names for host, names in processes.items() if not any(name.startswith("learner") for name in names)
    }


def can_lack_weights(config: Config) -> bool:
    """Return whether all servers can start without the policy's weights: the first push brings all, and is verified."""
    rollout, sync = config.rollout, config.weight_sync
    flags = rollout.engine_entry.weight_flags
    return (
        all(entry.starts_without_weights for entry in config.engine_entries.values())
        and sync.verify and sync.lora != "adapter" and not rollout.server_url
        and not any(name.replace("_", "-").startswith(flags) for name in rollout.server_args)
    )


class _Sender:
    """The driver's side: a FileReceiver on each host, and the waits for them."""

    def __init__(
        self, config: Config, signals: StopSignals, note: Callable[[str], None], hosts: Sequence[str]
    ) -> None:
        self.places: dict[str, dict[tuple[str, str], str]] = {host: {} for host in hosts}
        self.lack_weights = False
        self._config = config
        self._signals = signals
        self._note = note
        self._limit = config.timeouts.limit("startup_s")
        """The limit since `_since_s` for all waits."""
        self._is_started = False
        self._since_s = self._told_s = self._noted_s = time.monotonic()
        node_of = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
        remote: Any = ray.remote(FileReceiver)
        self._receivers: dict[str, Any] = {
            host: remote.options(
                num_cpus=0, max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_of[host], soft=False),
            ).remote()
            for host in hosts
        }

    def check_run_folder(self, hosts: Sequence[str]) -> None:
        """Check that each of `hosts` sees the folder of the run."""
        folder = self._config.run_dir.absolute()
        with NamedTemporaryFile(dir=folder, prefix=".shared-") as marker:
            asked = {host: self._receivers[host].sees.remote(marker.name) for host in hosts}
            sees = self._ask(asked, f"the search for {folder}")
        if blind := [host for host in hosts if not sees[host]]:
            raise ConfigError(
                f"run.dir must be a folder that the driver shares with the hosts of the learner, which writes its "
                f"checkpoints there; {', '.join(blind)} does not see the {folder} of this host. Set run.dir to a "
                "folder on a disk that they share. Or place the learner on the host where you start the run: there "
                "`ray start --resources='{\"learner\": 1}'`, and placement.learner.resource: learner"
            )

    def send(self, source: FileSource, hosts: Sequence[str]) -> None:
        """Have each of `hosts` hold what `source` names, at its own paths or as a copy."""
        what = f"{source.key} {source.path}"
        asked = {host: self._receivers[host].likeness.remote(source) for host in hosts}
        like = self._ask(asked, f"the comparison of its files with {what}")
        self._begin_work()
        lacking = [host for host in hosts if like[host] != "same"]
        if not lacking:
            return
        if source.key == "model.path" and can_lack_weights(self._config):
            source, self.lack_weights = source.without_weights(), True
        if others := [host for host in lacking if like[host] == "other"]:
            self._note(f"{', '.join(others)} has other files than the driver at {what}; the driver's are used")
        digests = source.digests(lambda: self._check(f"the digests of {what}", ["the driver's disk"]))
        asked = {host: self._receivers[host].find.remote(source, digests) for host in lacking}
        places = self._ask(asked, f"the search for {what}")
        if getting := [host for host in lacking if not places[host]]:
            without = ", all but the weights, which the learner pushes" if source.lacks_weights else ""
            content = f"{len(source.files)} file(s), {_size(source.num_bytes)}{without}"
            self._note(f"{', '.join(getting)} gets {what} from the driver: {content}")
            self._send_pieces(source, getting, what)
            asked = {host: self._receivers[host].finish.remote(source) for host in getting}
            places |= self._ask(asked, f"the copy of {what}")
        for host in lacking:
            self.places[host][source.key, source.path] = places[host]

    def _begin_work(self) -> None:
        """From the first answer of all hosts on, timeouts.work_s limits what they do."""
        if not self._is_started:
            self._is_started, self._since_s = True, time.monotonic()
            self._limit = self._config.timeouts.limit("work_s")

    def close(self) -> None:
        """End the receivers, which remove what is incomplete."""
        discarding = [receiver.discard.remote() for receiver in self._receivers.values()]
        ray.wait(discarding, num_returns=len(discarding), timeout=DISCARD_TIMEOUT_S)
        for receiver in self._receivers.values():
            ray.kill(receiver)

    def _send_pieces(self, source: FileSource, hosts: Sequence[str], what: str) -> None:
        calls: dict[ObjectRef, str] = {}
        sent_bytes = 0
        for file in source.files:
            offset_bytes = 0
            for piece in source.pieces(file):
                shared = ray.put(piece)  # once for all hosts
                for host in hosts:
                    calls[self._receivers[host].write.remote(file.name, offset_bytes, shared)] = host
                offset_bytes += len(piece)
                sent_bytes += len(piece)
                self._answers(calls, f"the copy of {what}", most=(PIECES_ON_THE_WAY - 1) * len(hosts))
                if time.monotonic() - self._noted_s > PROGRESS_INTERVAL_S:
                    self._noted_s = time.monotonic()
                    done = f"{_size(sent_bytes)} of {_size(source.num_bytes)} of {what}"
                    self._note(f"{', '.join(hosts)}: the driver has sent {done}")
        self._answers(calls, f"the copy of {what}")

    def _ask(self, calls: Mapping[str, ObjectRef], what: str) -> dict[str, Any]:
        """Wait for a call to each host; return {host: result}."""
        return self._answers({call: host for host, call in calls.items()}, what)

    def _answers(self, calls: dict[ObjectRef, str], what: str, most: int = 0) -> dict[str, Any]:
        """Wait until at most `most` of `calls` have no answer; takes the others out, and returns {host: result}."""
        results: dict[str, Any] = {}
        while len(calls) > most:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=1.0)
            for call in done:
                host = calls.pop(call)
                results[host] = self._result(host, call, what)
            if calls:
                self._check(what, sorted(set(calls.values())))
        return results

    def _result(self, host: str, call: ObjectRef, what: str) -> Any:
        try:
            return ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, AsyncRLError):
                raise type(error.cause)(f"{host}: {error.cause}") from None
            raise AsyncRLError(f"{host} could not finish {what}: {type(error.cause).__name__}: {error.cause}") from None
        except RayError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ProcessDiedError(f"{host} was lost before it had finished {what}: {reason}") from None

    def _check(self, what: str, hosts: Sequence[str]) -> None:
        """Raise KeyboardInterrupt after Ctrl-C, and WaitTimeoutError after the limit; write status.json now and then.
        """
        self._signals.check()
        now_s = time.monotonic()
        if now_s - self._since_s > self._limit.seconds:
            raise WaitTimeoutError(f"the driver waited {self._limit} for {', '.join(hosts)} to finish {what}")
        if now_s - self._told_s > STATUS_INTERVAL_S:
            self._told_s = now_s
            write_status(self._config.run_dir, [Status(
                process="driver", host=ray.util.get_node_ip_address(), doing=f"waits for {what}",
                waits_on=", ".join(hosts), since_s=self._since_s, limit_s=self._limit.seconds,
            )], "running")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e3:.0f} kB"
