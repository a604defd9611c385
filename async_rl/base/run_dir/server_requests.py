"""A person's requests to a running run: to add, remove or limit its rollout servers, as files of the run directory."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from async_rl.base.config.check import check
from async_rl.base.config.loading import load_config
from async_rl.base.config.system import is_server_url
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.files import write_whole
from async_rl.base.run_dir.run_dir import is_locked

_FOLDER = "server_requests"
Action = Literal["add", "remove", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """A request about the rollout servers of a run."""

    action: Action
    url: str = ""
    """For `add`: the URL of the server that joins."""
    name: str = ""
    """For `remove`: the name of the server that leaves, such as rollout/1."""
    now: bool = False
    """For `remove`: whether it leaves at once. Otherwise it finishes its groups."""
    number: int = 0
    """For `max`: the number of servers that the run may have from now on."""


def request_of(run_dir: Path, action: Action, value: str, now: bool) -> ServerRequest:
    """Return the request that a person has typed.

    Args:
        value: the URL, name or number.

    Raises:
        ConfigError: the run has no such server, can't have as many, or does not use running servers.
    """
    config = load_config(run_dir / "config.yaml", [])
    placed, kinds = config.placement.rollout, "with placement.rollout.servers: {min: FEWEST, max: MOST}"
    names = [f"rollout/{number}" for number in range(placed.most)]
    check(
        placed.is_elastic, "placement.rollout.servers", placed.servers, "a minimum and a maximum",
        f"Start a run {kinds}.",
    )
    match action:
        case "remove":
            check(value in names, "NAME", value, f"one of {', '.join(names)}")
            return ServerRequest(action=action, name=value, now=now)
        case "max":
            check(
                value.isdecimal() and placed.fewest <= int(value) <= placed.most, "N", value,
                f"from {placed.fewest} to {placed.most}", f"The run was started {kinds}.",
            )
            return ServerRequest(action=action, number=int(value))
        case "add":
            check(is_server_url(value), "URL", value, "http://host:port of a running server")
            check(
                bool(config.rollout.server_urls), "rollout.server_urls", list(config.rollout.server_urls),
                "URLs from the start, in a run to which a URL is added", "Or raise the number of servers: max N.",
            )
            return ServerRequest(action=action, url=value)


def request_servers(run_dir: Path, request: ServerRequest) -> None:
    """Write a request, which the driver takes within a second or two.

    Raises:
        ConfigError: the run does not go on.
    """
    if not is_locked(run_dir):
        raise ConfigError(f"{run_dir} does not run, so no server can be added or removed")
    folder = run_dir / _FOLDER
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"{time.time_ns()}.json", json.dumps(asdict(request)))


def take_requests(run_dir: Path) -> list[ServerRequest]:
    """Return the requests that have come since the last call, oldest first, and delete them."""
    found = []
    for file in sorted((run_dir / _FOLDER).glob("*.json")):
        found.append(ServerRequest(**json.loads(file.read_text())))
        file.unlink()
    return found


def drop_requests(run_dir: Path) -> None:
    """Delete the requests that came before this start of the run. A rollback is no start."""
    shutil.rmtree(run_dir / _FOLDER, ignore_errors=True)
