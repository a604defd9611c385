"""Writes the learner's checkpoints during training, and loads them, with torch.distributed.checkpoint (DCP).

    save   every rank copies its tensors to host memory, and training waits only for this copy; a thread then lets DCP
           write one .distcp file per rank and, once all ranks have written, the index .metadata
    name   rank 0 adds the `TrainingState` and renames the folder from step_N.partial to step_N, so that a crash leaves
           no folder that looks complete
    load   DCP reads into the live tensors in place, and reshards them if the number of ranks has changed

The tensors are one flat dictionary: `policy.<parameter>` and `critic.<parameter>` for trained weights, with `.step`,
`.exp_avg` and `.exp_avg_sq` after it for AdamW's state (the tensors and numbers of another optimizer by their names),
`.average` for the moving average of learner.ema_decay, and `random.<rank>` for the random state of each rank.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FSDPModule

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError, WaitTimeoutError
from async_rl.base.run_dir.checkpoints import (
    TrainingState,
    read_training_state,
    run_dir_of,
    write_step_metrics,
    write_training_state,
)
from learner.loop.optimizer import Optimizer

AVERAGE = ".average"
"""The suffix of a moving average's name; before it comes the name of the weight."""


class Checkpointer:
    """Saves and loads the trained networks of one learner rank and their optimizers. Every method is collective.

    Args:
        optimizers: [name of the network] its optimizer, which has the network's module.
    """

    def __init__(self, config: Config, optimizers: Mapping[str, Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        self._device = device
        self._timeout_s = config.timeouts.batch_s
        # A group of its own, because the writer runs collectives during those that training runs.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        pinned = device.type == "cuda"
        self._stager = DefaultStager(StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
        ))
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self.write_s = 0.0
        """How long the last complete checkpoint took from start to end, in seconds; training continued for most of
        them.
        """

    def save(self, target: Path, state: TrainingState, step_metrics: str = "") -> None:
        """Start a checkpoint in folder `target`, and return once the tensors are copied. Waits for the one before.

        Args:
            step_metrics: on rank 0 the metrics of the last steps, for async_rl/base/run_dir/checkpoints.py.

        Raises:
            AsyncRLError: the checkpoint before could not be written, or not in time.
        """
        self.wait()
        start_s = time.monotonic()
        partial = target.with_name(target.name + ".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(self._group)
        copied = self._stager.stage({**self._tensors(), f"random.{dist.get_rank()}": self._random_state()})
        self._running, self._target = (
            self._writer.submit(self._write, copied, partial, target, state, step_metrics, start_s), target
        )

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            WaitTimeoutError: the checkpoint is not complete after timeouts.batch_s.
            AsyncRLError: the checkpoint could not be written.
        """
        if self._running is None:
            return
        if not wait([self._running], self._timeout_s).done:
            raise WaitTimeoutError(
                f"learner/{dist.get_rank()} waited {self._timeout_s:.0f} s (timeouts.batch_s) for its checkpoint "
                f"{self._target} to be written: is the disk slow or full, or another rank gone?"
            )
        try:
            self._running.result()
        except (dcp.api.CheckpointException, OSError) as error:  # a CheckpointException is a BaseException
            raise AsyncRLError(
                f"the checkpoint {self._target} can't be written: {_first_reason(error)}. Free some space there or "
                "repair the disk, then resume from the newest checkpoint, if there is one: async-rl train --resume "
                f"{run_dir_of(self._target)}"
            ) from None
        self._running = None

    def check(self) -> None:
        """Raise the AsyncRLError of `wait` if the last write has failed. Does not wait for a write that still runs."""
        if self._running is not None and self._running.done():
            self.wait()

    def load(self, folder: Path) -> TrainingState:
        """Restore networks, optimizers and random state from the checkpoint `folder`, and return its `TrainingState`.

        A rank that the saved run did not have keeps its random state. So does a GPU if the saved run had none. If the
        saved run had no average of its weights, the average starts as the weights of the checkpoint.

        Raises:
            ConfigError: the checkpoint has other networks or more trained weights, or does not fit the networks.
        """
        state = read_training_state(folder)
        if set(state.networks) != set(self._optimizers):
            raise ConfigError(
                f"the checkpoint {folder} holds {' and '.join(sorted(state.networks))}, this configuration trains "
                f"{' and '.join(sorted(self._optimizers))}. Resume with the algorithm.advantage of the saved run"
            )
        for name, optimizer in self._optimizers.items():
            if state.networks[name]["steps"]:
                optimizer.make_state()
        tensors, rank = self._tensors(), dist.get_rank()
        check_weights(folder, tensors)
        if rank < state.ranks:
            tensors[f"random.{rank}"] = torch.empty(_held(folder)[f"random.{rank}"].size, dtype=torch.uint8)
        averages = {key for key in tensors if key.endswith(AVERAGE)}
        if starts_average := bool(averages) and not has_average(folder):
            tensors = {key: tensor for key, tensor in tensors.items() if key not in averages}
        try:
            dcp.load(tensors, checkpoint_id=folder, process_group=self._group)
        except dcp.api.CheckpointException as error:
            raise ConfigError(
                f"the checkpoint {folder} can't be loaded into the networks of this configuration: "
                f"{_first_reason(error)}. "
                "Resume with the model and critic settings of the saved run, or from another checkpoint"
            ) from error
        for name, optimizer in self._optimizers.items():
            optimizer.set_counts(state.networks[name])
            if starts_average and optimizer.average:
                optimizer.average.restart()
            for parameter_name, parameter in optimizer.module.named_parameters():
                if parameter.requires_grad:
                    head = f"{name}.{parameter_name}."
                    own = {key.removeprefix(head): value for key, value in tensors.items() if key.startswith(head)}
                    optimizer.set_numbers(parameter, own)
        if rank < state.ranks:
            on_cpu, on_gpu = tensors[f"random.{rank}"].tensor_split([len(torch.get_rng_state())])
            torch.set_rng_state(on_cpu)
            if len(on_gpu) and self._device.type == "cuda":
                torch.cuda.set_rng_state(on_gpu, self._device)
        return state

    def counts(self) -> dict[str, dict[str, float]]:
        """Return for each network the counts and numbers of its optimizer, for `TrainingState.networks`."""
        return {name: optimizer.counts() for name, optimizer in self._optimizers.items()}

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()
        self._stager.close()

    def _write(
        self, copied: Any, partial: Path, target: Path, state: TrainingState, step_metrics: str, start_s: float
    ) -> None:
        dcp.save(copied, checkpoint_id=partial, process_group=self._group)
        if dist.get_rank() == 0:
            write_step_metrics(partial, step_metrics)
            write_training_state(partial, state)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        self.write_s = time.monotonic() - start_s

    def _tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of the networks and their optimizers."""
        tensors: dict[str, Tensor] = {}
        for name, optimizer in self._optimizers.items():
            assert isinstance(optimizer.module, FSDPModule)
            optimizer.module.reshard()  # a forward pass without a backward leaves the root's parameters gathered
            for parameter_name, parameter in optimizer.module.named_parameters():
                if parameter.requires_grad:
                    tensors[f"{name}.{parameter_name}"] = parameter.detach()
                    if optimizer.average:
                        tensors[f"{name}.{parameter_name}{AVERAGE}"] = optimizer.average.of(parameter)
                    for key, value in optimizer.state_of(parameter).items():
                        tensors[f"{name}.{parameter_name}.{key}"] = value
        return tensors

    def _random_state(self) -> Tensor:
        """Return this rank's random state: the CPU's, followed by the GPU's if it has one. [bytes] uint8"""
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return torch.cat(states)


def check_weights(folder: Path, trained: Collection[str]) -> None:
    """Check the networks that a configuration trains: it must train all their weights in a checkpoint.

    Otherwise these weights would be lost. A network that the configuration lacks, such as a critic, is not checked.

    Args:
        trained: the names of the weights that the configuration trains, such as `policy.NAME`.

    Raises:
        ConfigError: a weight of the checkpoint is frozen or missing in this configuration.
    """
    held, networks = _held(folder), {name.partition(".")[0] for name in trained}

    def is_weight(name: str) -> bool:  # and not a part of one, which an optimizer or an average keeps
        return not any(name[:at] in held for at, letter in enumerate(name) if letter == ".")

    lost = sorted(
        name for name in held if name not in trained and name.partition(".")[0] in networks and is_weight(name)
    )
    if lost:
        raise ConfigError(
            f"the checkpoint {folder} holds {len(lost)} trained weights that this configuration freezes or lacks, such "
            f"as {lost[0]}: they would be lost. Leave model.frozen, model.lora and the paths of models as they were "
            "when it was written. To train other weights, begin a new run with model.path at the result of its "
            "`async-rl export`"
        )


def has_average(folder: Path) -> bool:
    """Return whether a checkpoint has the moving average of the policy's weights."""
    return any(name.startswith("policy.") and name.endswith(AVERAGE) for name in _held(folder))


def _held(folder: Path) -> dict[str, Any]:
    """Return {name: metadata} of the tensors of a checkpoint. The metadata have, for example, the `size`."""
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def _first_reason(error: BaseException) -> str:
    """Return the message of the first error that a rank raised, without the stack traces that DCP adds."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__
