"""A field that is declared in async_rl/base/types.py is sent, journalled and exported without another line."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import msgpack
import numpy as np
import pyarrow.parquet as pq

from async_rl.base.messages.codec import encode_group
from async_rl.base.types import (
    EpisodeFacts,
    GroupFacts,
    Kind,
    PerPromptToken,
    PerToken,
    PerTurn,
    Row,
    Scalar,
    Slot,
    Texts,
    kinds_of,
)
from buffer.journal import FILE_NAME, Journal
from buffer.journal_export import export_trajectories
from tests.kit.buffer.journal import record_arrival
from tests.kit.random_episodes import LIMITS, random_episodes


def test_every_declared_field_is_sent_journalled_and_exported(tmp_path: Path) -> None:
    group = random_episodes(Slot(group_id=0, prompt_index=0, start_version=0), np.random.default_rng(0))
    message = msgpack.unpackb(encode_group(group))
    journal = Journal(tmp_path / FILE_NAME, keep_steps=-1)
    record_arrival(journal, group, "trained", LIMITS)
    journal.commit({"version": 0})
    journal.close()
    export_trajectories(tmp_path, tmp_path / "out.parquet")
    exported = set(pq.read_schema(tmp_path / "out.parquet").names)
    for declared, table in ((GroupFacts, "groups"), (EpisodeFacts, "episodes"), (Row, "rows")):
        assert kinds_of(declared, Kind).keys() <= message.keys() | message["episodes"].keys()
        with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
            columns = {column for _, column, *_ in database.execute(f"PRAGMA table_info({table})")}
        assert kinds_of(declared, Scalar).keys() <= columns
        for kind in (Scalar, PerToken, PerPromptToken, PerTurn, Texts):
            assert kinds_of(declared, kind).keys() <= exported
