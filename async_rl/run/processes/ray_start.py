"""Connects the driver to Ray: to a cluster that runs already, or to a Ray that is started for this run."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError, WaitTimeoutError
from async_rl.base.seams.lookup import doc_page, modules_to_send

TOKEN_PAGE = doc_page("how-to/two-nodes.md")
JOIN_COMMANDS = (
    "on the first host `ray start --head`, on each other one `ray start --address=<first host>:6379`, "
    f"then async-rl on any of them, all with RAY_AUTH_MODE=token and the same token: {TOKEN_PAGE}"
)
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class NoClusterError(ConfigError):
    """There is no Ray cluster at RAY_ADDRESS or, if that is not set, on this host."""


@contextlib.contextmanager
def open_ray(config: Config) -> Iterator[None]:
    """A context manager that connects this process to Ray. It disconnects at the end of the block.

        RAY_ADDRESS is set             the cluster at this address
        placement.num_nodes above 1    the cluster that this host has joined
        otherwise                      a Ray that is started on this host, for this process alone

    Raises:
        NoClusterError: there is no cluster to join.
        ConfigError: this process is connected to Ray already, or the cluster refuses it.
        WaitTimeoutError: Ray did not start on this host.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, starves a run on a host with other work
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        raise ConfigError(
            "a run starts Ray, or joins a cluster, with settings of its own, but this process is connected to Ray "
            "already, by ray.init(). Call ray.shutdown() before, or train in another process"
        )
    with contextlib.ExitStack() as stack:
        if address := os.environ.get("RAY_ADDRESS") or ("auto" if config.placement.num_nodes > 1 else ""):
            stack.callback(ray.shutdown)
            _join(config, address)
        else:
            stack.enter_context(_own_token())
            stack.callback(ray.shutdown)
            _start_here(config)
        yield


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """A context manager that gives a Ray started in the block its own token, unless the user has set a token.

    Otherwise Ray would write a token into the home folder, and a later `ray start --head` would ask for it. After the
    block RAY_AUTH_MODE and RAY_AUTH_TOKEN are restored, and Ray reads them again.
    """
    of_ray: Any = importlib.import_module("ray._raylet")
    loader = of_ray.AuthenticationTokenLoader.instance()
    loader.reset_cache()
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    if not loader.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        loader.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        loader.reset_cache()
        of_ray.Config.initialize("")


def _join(config: Config, address: str) -> None:
    import ray

    try:
        ray.init(address=address, **_QUIET)
        has_others = sum(node["Alive"] for node in ray.nodes()) > 1
        if has_others and (modules := modules_to_send()):  # Ray takes these only when it connects
            ray.shutdown()
            carried = {"py_modules": modules, "excludes": ["__pycache__"]}
            ray.init(address=address, runtime_env=carried, **_QUIET)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise ConfigError(
            f"Ray can't carry the modules of {os.getcwd()} to other hosts: {error}. Name large files in a .rayignore "
            "in their package"
        ) from None
    except ConnectionError as error:
        raise NoClusterError(_why_no_cluster(config, error)) from None
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            f"the Ray cluster at {address} lets only those in who know its token ({error}). {_token_advice()}"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"RAY_ADDRESS must be HOST:PORT, such as 10.0.0.1:6379, got {address} ({error}). `ray start --head` "
            f"prints it. {_without_address(config)}"
        ) from None
    except RuntimeError as error:  # usually the cluster has another version of Ray or Python
        raise ConfigError(
            f"the Ray cluster at {address} can't be joined: {str(error).strip()}\nEvery host and this process must "
            "have the same versions of Python and Ray: install them anew where they differ, then `ray stop` and "
            f"start the cluster again: {JOIN_COMMANDS}"
        ) from None


def _start_here(config: Config) -> None:
    import ray

    if hides_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the ways to hide GPUs the one that Ray knows, too
    placement = config.placement
    try:
        ray.init(
            address="local", include_dashboard=False, num_cpus=1 + placement.num_servers + placement.learner.ranks,
            object_store_memory=128 * 2**20,  # only reports travel through it
            **_QUIET,
        )
    except Exception as error:  # Ray has no class of its own for this
        if "timed out during startup" not in str(error):
            raise
        raise WaitTimeoutError(
            "the driver waited 30 s (a limit of Ray's own) for Ray's processes to start on this host. Start the "
            "run again when less else runs here; if that changes nothing, /tmp/ray/session_latest/logs says more"
        ) from None


def _why_no_cluster(config: Config, error: ConnectionError) -> str:
    if address := os.environ.get("RAY_ADDRESS"):
        return (
            f"RAY_ADDRESS is {address}, and no Ray cluster lets this process in there ({error}): there is none, or it "
            f"wants another token. {_token_advice()} {_without_address(config)} Or start a cluster: {JOIN_COMMANDS}"
        )
    hosts = config.placement.num_nodes
    return f"placement wants {hosts} hosts, but no Ray cluster is found ({error}). Start one: {JOIN_COMMANDS}"


def _token_advice() -> str:
    mode = os.environ.get("RAY_AUTH_MODE")
    return (
        f"RAY_AUTH_MODE, here {mode or 'not set'}, and with `token` the token itself must be as they were at "
        f"`ray start`: {TOKEN_PAGE}."
    )


def _without_address(config: Config) -> str:
    place = "on this host alone" if config.placement.num_nodes == 1 else "on the cluster that this host has joined"
    return f"To run {place}: `unset RAY_ADDRESS`."


@contextlib.contextmanager
def ray_messages_in(file: Path) -> Iterator[None]:
    """A context manager that appends Ray's messages to `file`. For example, Ray writes a page about a killed process.

    Otherwise Ray would print them, even with log_to_driver off. The driver reports the events itself.
    """
    from ray._private import worker

    def write(data: dict[str, Any], ignore_prefix: bool) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            log.writelines(f"{line}\n" for line in data["lines"])

    printed, worker.print_to_stdstream = worker.print_to_stdstream, write
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


def hides_gpus() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs from this process: it is empty, -1 or NoDevFiles."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
