"""Buffers with a journal, and what is read from the file."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from async_rl.base.config import Config
from async_rl.base.messages.codec import check_group, encode_group
from async_rl.base.messages.fields import Limits
from async_rl.base.types import Group
from async_rl.cli import main
from buffer.journal import FILE_NAME, Journal
from buffer.server import BufferServer
from buffer.store_state import Arrival, State, StoredGroup
from tests.kit.configs import buffer_config, changed


def journalled(folder: Path, keep_steps: int = 20, **sections: Any) -> Config:
    """A run whose buffer keeps a journal in folder/run."""
    return buffer_config(
        **{"max_staleness": 1, **sections}, run={"name": "run", "dir": folder}, checkpoint={"every_steps": 0},
        buffer={"journal": True, "journal_keep_steps": keep_steps},
    )


def select(config: Config, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(config.run_dir / FILE_NAME)) as database:
        return database.execute(query).fetchall()


def exported(config: Config, *options: str) -> list[dict[str, Any]]:
    """What `async-rl export-trajectories` writes of a run, a record for each row."""
    target = config.run_dir / "out.parquet"
    assert main(["export-trajectories", str(config.run_dir), str(target), *options]) == 0
    return pq.read_table(target).to_pylist()


def same_port(config: Config, server: BufferServer) -> Config:
    return changed(config, network={"port": int(server.address.rpartition(":")[2])})


def record_arrival(journal: Journal, group: Group, state: State, limits: Limits) -> None:
    """Record a group that arrived, as the buffer does."""
    payload = encode_group(group)
    columns = check_group(payload, limits)
    journal.record_group(columns)
    journal.record(StoredGroup(
        group.group_id, group.prompt_index, group.start_version, group.worker, data_row=group.data_row, state=state,
        arrival=Arrival.of(columns), payload=payload, trained_versions=(0,) if state == "trained" else (),
    ))  # fmt: skip
