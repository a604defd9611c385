"""Every process of a run begins with `enter`: working directory, modules, keys, log file, ports and interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

from async_rl.base.config import Config
from async_rl.base.config.resolve import Decided, engine_of, resolve
from async_rl.base.cores import limit_spinning
from async_rl.base.errors import ConfigError
from async_rl.base.network import agree_on_nccl, use_interface
from async_rl.base.network.ports import ports_of
from async_rl.base.seams.user_modules import find_sent_modules_first
from buffer.protocol.keys import take_client_keys


@dataclass(frozen=True, slots=True)
class Origin:
    """What each process of a run gets from the driver."""

    folder: str
    """The driver's working directory, to which paths of the config are relative."""
    config: Config
    """The user's configuration, as it was loaded."""
    decided: Decided = field(default_factory=dict)
    """The values that the driver has decided for the run."""
    client_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The contents of the files with the client's keys, by name, for hosts that do not share the run's folder."""


def enter(origin: Origin, name: str, port: int = 0) -> Config:
    """Set a new process's working directory, modules, keys, log file and network interface; returns its settings.

    Args:
        name: the process's name. Its output, also from C code, goes to the log file of this name, with - for /.
        port: the port of the process that this one replaces; 0: there was none.

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
    config = _settings_of(origin, name, port)
    log_file = config.run_dir / "logs" / f"{name.replace('/', '-')}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    take_client_keys(config.network.keys, origin.client_keys)
    use_interface(config.network.host)
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        see_own_gpus(ray.get_gpu_ids())
    agree_on_nccl()
    use_huge_pages()
    limit_spinning()
    return config


def _settings_of(origin: Origin, name: str, port: int) -> Config:
    """Return the settings of a process: what the driver has decided, and its place."""
    config = resolve(origin.config, origin.decided)
    host = config.network.host if config.placement.num_nodes == 1 else ray.util.get_node_ip_address()
    return resolve(config, {
        "network.host": host, "network.port": port or config.network.port, "network.ports": ports_of(config, name),
        **(engine_of(config, name) if name in config.server_names else {}),
    })


def see_own_gpus(gpus: Sequence[object]) -> None:
    """Show this process the `gpus` that Ray has given it, where Ray was told to leave CUDA_VISIBLE_DEVICES alone.

    Without this every server of such a cluster would start on GPU 0. Call it before torch looks for GPUs.
    """
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def use_huge_pages() -> None:
    """Have torch allocate large CPU tensors in huge pages, which is faster; call it before torch makes a tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
