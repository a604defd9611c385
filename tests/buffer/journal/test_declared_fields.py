"""A field that is declared in async_rl/base/types.py is sent, checked, journalled and exported without another line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pyarrow.parquet as pq
import pytest

from async_rl.base.errors import WireError
from async_rl.base.messages.codec import SCHEMA_VERSION, decode_group, encode_group
from async_rl.base.types import Slot
from async_rl.tools.view.journal_reader import JournalReader
from buffer import journal as journals
from buffer.journal import FILE_NAME, Journal
from buffer.journal_export import export_trajectories
from tests.kit.buffer.journal import record_arrival
from tests.kit.random_episodes import LIMITS, random_episodes

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
NEW_FIELDS = {
    "GroupFacts": [
        'mood: Annotated[str, Choice(("calm", "wild"))] = "calm"', "num_hints: Annotated[int, Whole()] = 0",
        "is_hard: Annotated[bool, Flag()] = False", 'notes: Annotated[tuple[str, ...], Texts(Text(), "note")] = ()',
    ],
    "EpisodeFacts": [
        "seed: Annotated[int, Whole(0, MAX_INT)] = 0", "score: Annotated[float, Number(0.0)] = 0.0",
        "was_retried: Annotated[bool, Flag()] = False",
        "costs: Annotated[Mapping[str, float], Metrics()] = field(default_factory=dict)",
    ],
    "Row": [
        "entropies: Annotated[FloatArray, PerToken('<f4', low=0)] = field(default_factory=lambda: np.zeros(0))",
        'language: Annotated[str, Text()] = ""',
        "turn_s: Annotated[tuple[float, ...], PerTurn('<f8', column='seconds')] = ()",
    ],
}  # fmt: skip


def tree_with_new_fields(folder: Path) -> Path:
    """Return a tree that is this one, with one line more in async_rl/base/types.py for each of NEW_FIELDS."""
    text = (ROOT / "async_rl" / "base" / "types.py").read_text()
    for name, fields in NEW_FIELDS.items():
        head, class_line, body = text.partition(f"class {name}:\n")
        assert class_line
        docstring_end = body.index('"""', body.index('"""') + 3) + 3
        lines = "".join(f"\n    {field}" for field in fields)
        text = head + class_line + body[:docstring_end] + "\n" + lines + body[docstring_end:]
    (folder / "async_rl" / "base").mkdir(parents=True)
    for parent in ("async_rl", "async_rl/base"):
        for path in (ROOT / parent).iterdir():
            if path.name not in ("base", "types.py", "__pycache__"):
                (folder / parent / path.name).symlink_to(path)
    (folder / "async_rl" / "base" / "types.py").write_text(text)
    for name in ("buffer", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def use_new_fields(folder: str) -> None:
    """Send, journal and export a group with values in the new fields; print what was found. It runs in the tree."""
    plain = random_episodes(Slot(group_id=0, prompt_index=0, start_version=0), np.random.default_rng(0))
    group = dataclasses.replace(
        plain, mood="wild", num_hints=3, is_hard=True, notes=("a", "b"),
        episodes=tuple(
            dataclasses.replace(episode, seed=2**40, score=0.5, was_retried=True, costs={"tea": 2.0})
            for episode in plain.episodes
        ),
        rows=tuple(
            dataclasses.replace(
                row, entropies=np.full(len(row.tokens), 0.25, np.float32), language="de",
                turn_s=(1.5,) * len(row.turn_ends),
            )
            for row in plain.rows
        ),
    )  # type: ignore[call-arg]
    message = msgpack.unpackb(encode_group(group))
    refused = []
    for change in ({"mood": "sad"}, {"num_hints": -1}, {"episodes": {**message["episodes"], "score": [1, 2]}}):
        try:
            decode_group(msgpack.packb(message | change), LIMITS)
        except WireError as error:
            refused.append(str(error))
    decoded = decode_group(encode_group(group), LIMITS)
    journal = Journal(Path(folder) / FILE_NAME, keep_steps=-1)
    record_arrival(journal, group, "trained", LIMITS)
    journal.commit({"version": 0})
    journal.close()
    export_trajectories(Path(folder), Path(folder) / "out.parquet")
    row = pq.read_table(Path(folder) / "out.parquet").to_pylist()[0]
    reader = JournalReader(Path(folder) / FILE_NAME)
    print(json.dumps({
        "sent": sorted([*message, *message["episodes"]]),
        "refused": refused,
        "versions": [SCHEMA_VERSION, journals.SCHEMA_VERSION],
        "decoded": [
            decoded.mood, decoded.num_hints, decoded.is_hard, decoded.notes, decoded.episodes[0].seed,
            decoded.episodes[0].score, decoded.episodes[0].was_retried, decoded.episodes[0].costs,
            decoded.rows[0].language, decoded.rows[0].entropies.tolist(), decoded.rows[0].turn_s,
        ],
        "exported": [row[name] for name in (
            "mood", "num_hints", "is_hard", "notes", "seed", "score", "was_retried", "costs", "language", "entropies",
            "turn_s",
        )],
        "in SQL": reader.rows(
            "SELECT mood, score, costs, language, seconds FROM groups JOIN episodes USING (group_id) "
            "JOIN rows USING (group_id, episode) JOIN turns USING (group_id, row) LIMIT 1"
        ),
        "of row": [len(plain.rows[0].tokens), len(plain.rows[0].turn_ends)],
    }))  # fmt: skip


def test_a_declared_field_is_sent_checked_journalled_and_exported(tmp_path: Path) -> None:
    tree = tree_with_new_fields(tmp_path / "tree")
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as this; this.use_new_fields({str(tmp_path)!r})"],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    num_tokens, num_turns = found["of row"]
    names = [line.partition(":")[0] for fields in NEW_FIELDS.values() for line in fields]
    assert set(names) <= set(found["sent"])
    rest = ["de", [0.25] * num_tokens, [1.5] * num_turns]
    assert found["decoded"] == ["wild", 3, True, ["a", "b"], 2**40, 0.5, True, {"tea": 2.0}, *rest]
    assert found["exported"] == ["wild", 3, 1, ["a", "b"], 2**40, 0.5, 1, '{"tea": 2.0}', *rest]
    assert found["in SQL"] == [
        {"mood": "wild", "score": 0.5, "costs": '{"tea": 2.0}', "language": "de", "seconds": 1.5}
    ]
    assert [error.partition(":")[0] for error in found["refused"]] == ["mood", "num_hints", "episodes.score"]
    wire, journal = found["versions"]
    assert wire != SCHEMA_VERSION and journal != journals.SCHEMA_VERSION, "other versions are told apart by themselves"
