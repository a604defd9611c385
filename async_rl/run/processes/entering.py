"""Every process of a run begins with `enter`: working directory, modules, keys, log file, ports and interface."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

from async_rl.base.config import Config
from async_rl.base.cores import limit_spinning
from async_rl.base.errors import ConfigError
from async_rl.base.network import agree_on_nccl, use_interface
from async_rl.base.network.ports import network_of
from async_rl.base.seams.user_modules import find_sent_modules_first
from buffer.protocol.keys import take_client_keys


@dataclass(frozen=True, slots=True)
class Origin:
    """The driver's working directory and keys, which each process that it starts gets beside the configuration."""

    folder: str
    """The driver's working directory, to which paths of the config are relative."""
    client_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The contents of the files with the client's keys, by name, for hosts that do not share the run's folder."""


def enter(origin: Origin, config: Config, name: str) -> Config:
    """Set a new process's working directory, modules, keys, log file and network interface.

    Returns:
        The configuration with the address of the process's host, and its ports.

    Args:
        name: the process's name. Its output, also from C code, goes to the log file of this name, with - for /.

    Raises:
        ConfigError: this host lacks the working directory, and it can't be made.
    """
    try:
        Path(origin.folder).mkdir(parents=True, exist_ok=True)  # a host without a shared disk
        os.chdir(origin.folder)
    except OSError as error:
        raise ConfigError(
            f"{name} needs the folder in which `async-rl train` was started, {origin.folder}, also on its host, where "
            f"it can't be used ({error.strerror}): make it there, or start in a folder that every host has"
        ) from None
    find_sent_modules_first()
    log_file = config.run_dir / "logs" / f"{name.replace('/', '-')}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if config.placement.num_nodes > 1:
        network = dataclasses.replace(config.network, host=ray.util.get_node_ip_address())
        config = dataclasses.replace(config, network=network)
    config = dataclasses.replace(config, network=network_of(config, name))
    take_client_keys(config.network.keys, origin.client_keys)
    use_interface(config.network.host)
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        see_own_gpus(ray.get_gpu_ids())
    agree_on_nccl()
    use_huge_pages()
    limit_spinning()
    return config


def see_own_gpus(gpus: Sequence[object]) -> None:
    """Show this process the `gpus` that Ray has given it, where Ray was told to leave CUDA_VISIBLE_DEVICES alone.

    Without this every server of such a cluster would start on GPU 0. Call it before torch looks for GPUs.
    """
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def use_huge_pages() -> None:
    """Have torch allocate large CPU tensors in huge pages, which is faster; call it before torch makes a tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
