"""Episodes of several turns in a real buffer and its journal: the tables, a crash, a resume, the export."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import Config
from async_rl.base.types import Batch, Group, Slot
from async_rl.tools.view.journal_reader import JournalReader
from buffer.journal import FILE_NAME, Journal
from buffer.past_journal import import_past
from buffer.server import BufferServer
from tests.kit.buffer.clients import run_pipeline
from tests.kit.buffer.journal import exported, journalled, record_arrival, same_port, select
from tests.kit.buffer.serving import serving, serving_until_a_crash
from tests.kit.configs import changed
from tests.kit.random_episodes import LIMITS, random_episodes
from tests.kit.runs import training_state


def with_episodes(folder: Path, **sizes: int) -> Config:
    config = journalled(folder, keep_steps=-1, **sizes)
    return changed(config, task={"env": "my_games:Game"})


def play(server: BufferServer, config: Config, steps: int) -> list[Batch]:
    return run_pipeline(server, config, steps, workers=1, make=random_episodes)


def expected_tables(groups: Iterable[Group]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows that the journal must have for these groups, made token by token."""
    tables = defaultdict(list)
    for group in groups:
        rows = iter(enumerate(group.rows))
        for number, episode in enumerate(group.episodes):
            reward = None
            for _ in range(episode.rows):
                i, row = next(rows)
                reward = row.reward
                trained = [int(v) for v, is_trained in zip(row.versions, row.mask, strict=True) if is_trained]
                tables["rows"].append((
                    group.group_id, i, number, row.reward, len(trained), len(row.tokens) - len(trained), min(trained),
                    max(trained), row.finish_reason,
                ))  # fmt: skip
                tables["turns"] += [
                    (group.group_id, i, turn, row.turn_ends[turn], row.turn_rewards[turn])
                    for turn in range(len(row.turn_ends))
                ]
            tables["episodes"].append((
                group.group_id, number, reward, episode.turns, episode.tool_calls, episode.generate_s,
                episode.tool_s, episode.duration_s, episode.end, dict(episode.metrics), episode.error,
            ))  # fmt: skip
        tables["left_out"] += [(group.group_id, number, error) for number, error in enumerate(group.left_out)]
        tables["groups"].append((group.group_id, group.data_row, ""))
    return {name: sorted(rows, key=lambda row: row[:3]) for name, rows in tables.items()}


def tables_of(config: Config, only: str = "1") -> dict[str, list[tuple[Any, ...]]]:
    found = {
        name: select(config, f"SELECT {columns} FROM {name} WHERE {only} ORDER BY 1, 2, 3")
        for name, columns in {
            "rows": "group_id, row, episode, reward, response_tokens, context_tokens, oldest_version, "
            "newest_version, finish_reason",
            "episodes": "group_id, episode, reward, turns, tool_calls, generate_s, tool_s, duration_s, end, metrics, "
            "error",
            "turns": "group_id, row, turn, end_token, reward", "left_out": "group_id, number, error",
            "groups": "group_id, data_row, error",
        }.items()
    }  # fmt: skip
    found["episodes"] = [(*row[:-2], json.loads(row[-2]), row[-1]) for row in found["episodes"]]
    return found


TRAINED = "group_id IN (SELECT group_id FROM uses)"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list[Batch]]:
    """A run of 12 steps that has ended, and its batches."""
    config = with_episodes(tmp_path_factory.mktemp("played"))
    with serving(config) as server:
        return config, play(server, config, steps=12)


def test_the_tables_hold_every_episode_and_turn_that_was_trained(played: tuple[Config, list[Batch]]) -> None:
    config, batches = played
    groups = sorted((group for batch in batches for group in batch.groups), key=lambda group: group.group_id)
    assert len(groups) == 12 * 4
    assert tables_of(config, TRAINED) == expected_tables(groups)
    columns = "response_tokens, reward, newest_version"
    means = select(config, f"SELECT {columns} FROM groups WHERE {TRAINED} ORDER BY group_id")
    for group, (response_tokens, reward, newest_version) in zip(groups, means, strict=True):
        assert response_tokens == group.num_tokens / 2, "a mean over both episodes, however many rows they have"
        assert reward == pytest.approx(np.mean(group.episode_rewards))
        assert newest_version == max(int(row.versions.max()) for row in group.rows)
    worst = select(config, "SELECT step, MAX(staleness) FROM trained GROUP BY step ORDER BY step")
    assert worst == [
        (batch.version + 1, max(batch.version - group.oldest_version for group in batch.groups)) for batch in batches
    ]


def test_episodes_survive_a_crash_of_the_buffer(tmp_path: Path) -> None:
    config = with_episodes(tmp_path)
    with serving_until_a_crash(config) as server:
        before = play(server, config, steps=4)
    kept = tables_of(config)
    assert expected_tables(group for batch in before for group in batch.groups) == tables_of(config, TRAINED)
    with serving(same_port(config, server)) as server:
        assert tables_of(config) == kept
        arrived = select(config, "SELECT group_id FROM groups WHERE state IN ('finished', 'held') ORDER BY 1")
        reader = JournalReader(config.run_dir / FILE_NAME)
        payloads = [group for (group_id,) in arrived if (group := reader.payload(group_id))]
        ids = ", ".join(str(group.group_id) for group in payloads)
        assert payloads, "groups arrived that no batch held yet"
        assert expected_tables(payloads) == tables_of(config, f"group_id IN ({ids})")


def test_a_resume_takes_over_the_episodes_from_before_its_checkpoint(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    slots = [Slot(group_id=i, prompt_index=i, start_version=0) for i in range(6)]
    groups = [random_episodes(slot, rng) for slot in slots]
    past = Journal(tmp_path / "past.sqlite", keep_steps=-1)
    for group in groups:
        record_arrival(past, group, "trained" if group.group_id < 3 else "finished", LIMITS)
    past.commit({"version": 1})
    past.close()
    saved = training_state(1, buffer={"scalars": {"next_group_id": 5}, "live": [[3, 3, 0, -1], [4, 4, 0, -1]]})
    config = journalled(tmp_path)
    journal = Journal(config.run_dir / FILE_NAME, keep_steps=-1)
    for _ in range(2):  # as after a crash between the import and the first commit
        import_past(journal, tmp_path / "past.sqlite", saved)
    assert tables_of(config) == expected_tables(groups[:3])
    for group in groups[3:5]:
        record_arrival(journal, group, "finished", LIMITS)
    for _ in range(2):
        record_arrival(journal, groups[3], "held", LIMITS)
        journal.commit({"version": 1})
    assert tables_of(config) == expected_tables(groups[:5]), "a group that is recorded twice is there once"
    journal.close()


def test_episodes_are_exported_with_their_turns(played: tuple[Config, list[Batch]]) -> None:
    config, batches = played
    rows = {(record["group_id"], record["row"]): record for record in exported(config)}
    assert len(rows) == select(config, "SELECT COUNT(*) FROM rows")[0][0]
    for batch in batches:
        for group in batch.groups:
            number_of = [number for number, rows_of in enumerate(group.episode_rows) for _ in range(rows_of)]
            for i, row in enumerate(group.rows):
                record, episode = rows[group.group_id, i], group.episodes[number_of[i]]
                assert record["episode"] == number_of[i]
                for name in ("turns", "tool_calls", "generate_s", "tool_s", "duration_s", "end"):
                    assert record[name] == getattr(episode, name)
                assert json.loads(record["metrics"]) == episode.metrics
                assert (record["data_row"], record["error"]) == (group.data_row, episode.error)
                assert record["left_out"] == list(group.left_out)
                assert record["turn_ends"] == list(row.turn_ends)
                assert record["turn_rewards"] == list(row.turn_rewards)
                assert record["response_tokens"] + record["context_tokens"] == len(row.tokens)
                assert record["tokens"] == row.tokens.tolist() and record["mask"] == row.mask.tolist()
                assert record["prompt_tokens"] == group.prompt_tokens.tolist()
