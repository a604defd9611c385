"""Run directories for the tests of the page, written with the code that writes those of real runs."""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.messages.codec import encode_group
from async_rl.base.run_dir.log_ratio_file import LogRatioWriter, StepLogRatios
from async_rl.base.telemetry.status import Status, write_status
from async_rl.base.telemetry.timeline import ChromeTrace, Span
from async_rl.base.types import EpisodeFacts, Group, Row
from buffer.journal import FILE_NAME, SCHEMA, PayloadFiles, Place, payload_folder
from tests.kit.groups import make_group, make_row

RIGHT_TO_LEFT = "\u202e"
"""A character that turns the direction of all text behind it."""
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n" + RIGHT_TO_LEFT
MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
STEP_S = 1.0


def tokens_of(text: str) -> list[int]:
    """The test tokenizer has one token for each character, and one for each of MARKS."""
    parts = re.findall("|".join(map(re.escape, MARKS)) + "|.", text, re.DOTALL)
    return [len(CHARACTERS) + MARKS.index(part) if part in MARKS else CHARACTERS.index(part) for part in parts]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=" "))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def text_group(group_id: int, answers: Sequence[str], prompt: str = "prompt", version: int = 0) -> Group:
    """Return a group whose answers have their first half sampled by `version` and the rest by the next one."""
    rows = []
    for number, text in enumerate(answers):
        ids = tokens_of(text)
        versions = np.repeat([version, version + 1], [len(ids) // 2, len(ids) - len(ids) // 2]).astype(np.int32)
        rows.append(make_row(ids, np.linspace(-0.1, -2.0, len(ids)), float(number), versions=versions))
    return make_group(group_id, tokens_of(prompt), rows, version, keeps_kv=True)


CHAT_PROMPT = (
    "<|im_start|>system\nYou are a shop. Answer in one line.<|im_end|>\n"
    "<|im_start|>user\nWhat does a pear cost?<|im_end|>\n<|im_start|>assistant\n"
)
CHAT_TURNS = (
    '<tool_call>\n{"name": "price", "arguments": {"item": "pear"}}\n</tool_call><|im_end|>',
    "\n<|im_start|>user\n<tool_response>\n3 euros a piece\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "It costs 3 euros.<|im_end|>",
)


def make_chat(group_id: int, version: int = 0) -> Group:
    """Return a group of two episodes in the template of Qwen: one that called a tool, and one whose tool call hung."""
    lengths = [len(tokens_of(part)) for part in CHAT_TURNS]
    mask = np.repeat([True, False, True], lengths)
    row = Row(
        tokens=np.array(tokens_of("".join(CHAT_TURNS)), np.int32), mask=mask, reward=1.0, finish_reason="stop",
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32), versions=np.full(len(mask), version, np.int32),
        turn_ends=(lengths[0] - 1, sum(lengths) - 1), turn_rewards=(0.0, 1.0),
    )  # fmt: skip
    first = slice(0, lengths[0])
    hung = dataclasses.replace(
        row, tokens=row.tokens[first], mask=mask[first], logprobs=row.logprobs[first], versions=row.versions[first],
        reward=0.0, finish_reason="timeout", turn_ends=(lengths[0] - 1,), turn_rewards=(0.0,),
    )  # fmt: skip
    facts = (
        EpisodeFacts(rows=1, turns=2, tool_calls=1, generate_s=1.0, tool_s=0.5, duration_s=1.5, end="done"),
        EpisodeFacts(rows=1, turns=1, tool_calls=1, generate_s=0.5, tool_s=0.0, duration_s=60.5, end="timeout"),
    )
    group = text_group(group_id, ["x"], CHAT_PROMPT, version)
    return dataclasses.replace(group, rows=(row, hung), episodes=facts)


class JournalWriter:
    """Writes groups into a journal as a buffer does; the first half of them is trained on, the others are dropped."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE_NAME
        self._db = sqlite3.connect(self._file, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(SCHEMA)
        self._db.execute("REPLACE INTO state VALUES (0, '{}')")
        kept = [Place(*row) for row in self._db.execute("SELECT file, start, bytes FROM payloads")]
        self._payloads = PayloadFiles(payload_folder(self._file), kept)

    def add(self, group: Group, step: int | None = None, drop_reason: str | None = None) -> None:
        lengths = [len(row.tokens) for row in group.rows]
        episodes = [episode for episode, rows in enumerate(group.episode_rows) for _ in range(rows)]
        state = "trained" if step is not None else "dropped" if drop_reason else "finished"
        self._db.execute("BEGIN")
        self._db.execute(
            "INSERT INTO groups (group_id, prompt_index, start_version, worker, state, drop_reason, finished_version, "
            "data_row, newest_version, response_tokens, reward, duration_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                group.group_id, group.prompt_index, group.start_version, group.worker, state, drop_reason,
                group.start_version, group.data_row, group.start_version + 1, float(np.mean(lengths)),
                float(np.mean([row.reward for row in group.rows])), group.duration_s,
            ),
        )  # fmt: skip
        self._db.executemany(
            "INSERT INTO rows (group_id, row, episode, reward, response_tokens, context_tokens, "
            "oldest_version, newest_version, finish_reason) VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?)",
            [
                (
                    group.group_id, i, episode, r.reward, len(r.tokens), int(r.versions[0]), int(r.versions[-1]),
                    r.finish_reason,
                )
                for i, (r, episode) in enumerate(zip(group.rows, episodes, strict=True))
            ],
        )  # fmt: skip
        self._db.executemany(
            "INSERT INTO episodes (group_id, episode, turns, tool_calls, generate_s, tool_s, duration_s, end, error) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (group.group_id, i, f.turns, f.tool_calls, f.generate_s, f.tool_s, f.duration_s, f.end, f.error)
                for i, f in enumerate(group.episodes)
            ],
        )  # fmt: skip
        self._db.executemany(
            "INSERT INTO left_out VALUES (?, ?, ?)",
            [(group.group_id, number, error) for number, error in enumerate(group.left_out)],
        )
        if step is not None:
            self._db.execute("INSERT INTO uses VALUES (?, ?)", (group.group_id, step - 1))
        (place,) = self._payloads.append([memoryview(encode_group(group))])
        self._db.execute("INSERT INTO payloads VALUES (?, ?, ?, ?)", (group.group_id, *place))
        self._db.execute("COMMIT")

    def add_without_answers(self, group_id: int, state: str, drop_reason: str = "") -> None:
        """Add the row of a group that has not arrived, or never will."""
        self._db.execute(
            "INSERT INTO groups (group_id, prompt_index, start_version, worker, state, drop_reason, finished_version, "
            "data_row, newest_version) VALUES (?, ?, 1, 'rollout/0', ?, ?, -1, -1, -1)",
            (group_id, group_id, state, drop_reason),
        )

    def close(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        self._payloads.close()


def metrics_of(step: int) -> dict[str, float]:
    """The record of a step, with the metrics that the pages show."""
    return {
        "step": step, "time/written_at_s": 10.0 + STEP_S * step, "time/since_first_step_s": STEP_S * (step - 1),
        "reward/mean": step / 100, "staleness/mean": 1.0, "staleness/max": 2.0, "staleness/episodes_1": 6.0,
        "staleness/episodes_2": 2.0, "by_staleness/1/reward": 0.5, "by_staleness/2/reward": 0.4,
        "utilisation/learner": 0.6, "utilisation/rollout": 0.9, "utilisation/rollout/sync": 0.1,
        "occupancy/rollout": 0.5, "offpolicy/ess": 0.9, "throughput/trained_tokens_per_s": 1234.0,
        "time/step_s": STEP_S, "time/wait_data_s": 0.3, "time/train_s": 0.6, "time/push_s": 0.1, "push/pause_s": 0.1,
        "rollout/group_s": 0.8, "rollout/group_s_squared": 0.7, "rollout/concurrency": 8.0, "rollout/groups": 16.0,
        "rollout/failed": 0.0, "rollout/aborted": 0.0, "buffer/trained": 16.0 * step, "buffer/dropped_late": 1.0,
        "buffer/dropped_late/response_tokens": 50.0, "buffer/trained/response_tokens": 20.0, "alarm/ess": 0.0,
        "alarm/kl": float(step == 3), "policy/grad_norm": 0.5,
    }  # fmt: skip


def append_step(run_dir: Path, step: int) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(step)) + "\n")


def write_timeline(run_dir: Path, steps: int) -> None:
    """Each step: the learner waits 0.3 s, updates for 0.6 s and pushes for 0.1 s; rollout is busy for 0.9 s."""
    trace = ChromeTrace(run_dir / "timeline.json", 0.0)
    for step in range(steps):
        start_s = 5.0 + STEP_S * step
        trace.add(
            [
                Span("learner/0", "wait_data", start_s, start_s + 0.3, "batch"),
                Span("learner/0", "busy", start_s + 0.3, start_s + 0.9, "update"),
                Span("learner/0", "sync", start_s + 0.9, start_s + 1.0, "push"),
                Span("rollout/0", "busy", start_s, start_s + 0.9),
                Span("rollout/0", "sync", start_s + 0.9, start_s + 1.0, "weights"),
            ],
            [],
        )
    trace.close()


def write_log_ratios(run_dir: Path, step: int, group: Group) -> None:
    """The first token of each answer was masked by the learner; the others have the log ratio 0.5."""
    lengths = [len(row.tokens) for row in group.rows]
    values = [np.array([np.nan] + [0.5] * (length - 1), np.float16) for length in lengths]
    writer = LogRatioWriter(run_dir, 0, -1)
    writer.write(step, StepLogRatios(
        np.full(len(lengths), group.group_id), np.arange(len(lengths), dtype=np.int32), np.array(lengths, np.int32),
        np.concatenate(values), None,
    ))
    writer.close()


def make_run(run_dir: Path, steps: int = 12, note: str = "ended normally", groups: int = 4) -> Path:
    """Write the directory of a run with `steps` steps, and twice as many groups as `groups`, half of them dropped."""
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = [
        "model.path=none", "task.name=reasoning_gym/none", "staleness.max=2", "run.steps=20",
        f"run.name={run_dir.name}",
    ]  # fmt: skip
    (run_dir / "config.yaml").write_text(dump_config(load_config(None, settings)))
    for step in range(1, steps + 1):
        append_step(run_dir, step)
    write_timeline(run_dir, steps)
    status = Status(process="learner/0", doing="trains", waits_on="buffer", since_s=0.0, told_s=2.0, limit_s=60.0)
    write_status(run_dir, [status], note)
    write_tokenizer(run_dir / "model")
    journal = JournalWriter(run_dir)
    for i in range(groups):
        group = text_group(i, ["right answer", HOSTILE], prompt=f"question {i} {HOSTILE}", version=1)
        journal.add(group, step=i + 3)
        write_log_ratios(run_dir, i + 3, group)
        journal.add(text_group(groups + i, ["late", "later"], version=1), drop_reason="late")
    journal.close()
    return run_dir
