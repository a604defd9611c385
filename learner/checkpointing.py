"""The learner's state on disk, written beside training: torch.distributed.checkpoint (DCP) and `TrainingState`.

    save     every rank copies its shards to host memory (training waits for that), then a thread writes them
    whole    the folder gets its name when all ranks have written theirs: a crash leaves nothing half
    load     into the networks in place; DCP reshards, so the number of ranks may differ

Weights that are not trained (under LoRA, all but the adapters) are those of model.path and not saved.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FSDPModule

from async_rl.config import Config
from async_rl.errors import AsyncRLError, ConfigError, WaitTimeoutError
from async_rl.storage.checkpoints import TrainingState, read_training_state, run_dir_of, write_training_state
from learner.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class Network:
    """What is trained together."""

    module: nn.Module
    optimizer: Optimizer


class Checkpointer:
    """Saves and loads the networks of one learner rank; every method is collective.

    Args:
        networks: by name; the same on all ranks.
    """

    def __init__(self, config: Config, networks: Mapping[str, Network], device: torch.device) -> None:
        self._networks = networks
        self._device = device
        self._timeout_s = config.timeouts.checkpoint_s
        # Of its own: the thread's collectives must not get between those of training.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        pinned = device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
            )
        )
        self._running: Future[Any] | None = None
        self.write_s = 0.0
        """How long the last whole checkpoint took from its start, most of it beside training."""

    def save(self, target: Path, cut: TrainingState) -> None:
        """Start a checkpoint that becomes whole as folder `target`; returns once training may go on.

        Raises:
            AsyncRLError: see `wait`, of the checkpoint before.
        """
        self.wait()
        start_s = time.monotonic()
        partial = target.with_name(target.name + ".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(self._group)
        written = cast(
            "Future[Any]",
            dcp.async_save(
                self._tensors(dist.get_rank()), checkpoint_id=partial, process_group=self._group,
                async_stager=self._stager,
            ),
        )
        self._running, self._target = Future(), target
        written.add_done_callback(lambda done: self._finish(done, partial, target, cut, start_s))

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole.

        Raises:
            WaitTimeoutError: not within timeouts.checkpoint_s.
            AsyncRLError: it could not be written.
        """
        if self._running is None:
            return
        if not wait([self._running], self._timeout_s).done:
            raise WaitTimeoutError(
                f"learner/{dist.get_rank()} waited {self._timeout_s:.0f} s (timeouts.checkpoint_s) for its checkpoint "
                f"{self._target} to be written: is the disk slow or full, or another rank gone?"
            )
        try:
            self._running.result()
        except (dcp.api.CheckpointException, OSError) as error:  # the first is no Exception
            raise AsyncRLError(
                f"the checkpoint {self._target} can't be written: {_first_reason(error)}. Free some space there or "
                "mend the disk, then go on from the newest whole checkpoint, if there is one: async-rl train --resume "
                f"{run_dir_of(self._target)}"
            ) from None
        self._running = None

    def check(self) -> None:
        """
        Raises:
            AsyncRLError: the checkpoint that was being written could not be.
        """
        if self._running is not None and self._running.done():
            self.wait()

    def load(self, folder: Path) -> TrainingState:
        """Networks, optimizers and this rank's random state as they were; a new rank goes on with its own.

        Raises:
            ConfigError: the checkpoint is of other networks.
        """
        cut = read_training_state(folder)
        if set(cut.networks) != set(self._networks):
            raise ConfigError(
                f"{folder} holds {' and '.join(sorted(cut.networks))}, this configuration trains "
                f"{' and '.join(sorted(self._networks))}. Resume with the algorithm.advantage it was saved with"
            )
        rank = dist.get_rank()
        tensors = self._tensors(rank if rank < cut.ranks else None)
        try:
            dcp.load(tensors, checkpoint_id=folder, process_group=self._group)
        except dcp.api.CheckpointException as error:
            raise ConfigError(
                f"{folder} can't be loaded into the networks of this configuration: {_first_reason(error)}"
            ) from error
        for name, network in self._networks.items():
            network.optimizer.set_counts(cut.networks[name])
        if rank < cut.ranks:
            _set_random_state(tensors[f"random.{rank}"])
        return cut

    def counts(self) -> dict[str, dict[str, int]]:
        """`TrainingState.networks`."""
        return {name: network.optimizer.counts() for name, network in self._networks.items()}

    def close(self) -> None:
        self.wait()
        self._stager.close()

    def _finish(self, done: Future[Any], partial: Path, target: Path, cut: TrainingState, start_s: float) -> None:
        """In DCP's thread: rank 0 makes the checkpoint whole."""
        assert self._running is not None
        try:
            done.result()  # there already: this is its callback
            if dist.get_rank() == 0:
                write_training_state(partial, cut)
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
            self.write_s = time.monotonic() - start_s
            self._running.set_result(None)
        except BaseException as error:
            self._running.set_exception(error)

    def _tensors(self, random_of: int | None) -> dict[str, Tensor]:
        """What is saved, as the live tensors themselves; DTensors for what is sharded."""
        tensors = dict(
            item for name, network in self._networks.items() for item in _network_tensors(name, network)
        )
        if random_of is not None:
            tensors[f"random.{random_of}"] = _random_state(self._device)
        return tensors


def policy_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The trained weights of a checkpoint's policy, by the names they have in it."""
    return {f"policy.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad}


def load_unsharded(tensors: dict[str, Tensor], folder: Path) -> None:
    """Read a checkpoint's tensors in place in this one process, whatever number of ranks wrote it."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is no process group
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)


def _first_reason(error: BaseException) -> str:
    """Without the frames of every rank that DCP adds."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__


def _network_tensors(name: str, network: Network) -> Iterator[tuple[str, Tensor]]:
    assert isinstance(network.module, FSDPModule)
    network.module.reshard()  # a forward pass without a backward leaves the root's parameters gathered
    for parameter_name, parameter in network.module.named_parameters():
        if parameter.requires_grad:
            yield f"{name}.{parameter_name}", parameter.detach()
            for key, value in network.optimizer.state_of(parameter).items():
                yield f"{name}.{parameter_name}.{key}", value


def _random_state(device: torch.device) -> Tensor:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_random_state(state: Tensor) -> None:
    on_cpu = len(torch.get_rng_state())
    torch.set_rng_state(state[:on_cpu])
    if len(state) > on_cpu:
        torch.cuda.set_rng_state(state[on_cpu:])
