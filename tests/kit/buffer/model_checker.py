"""A model of the store that knows none of its rules: it keeps every event and checks what the store answers.

With `files`, the store has a journal there, committed after every event as the server does after every turn, and
crashes and resumes restore from it. Without, a crash restores from rows in memory, and a resume finds no journal.
"""

from __future__ import annotations

import json
import pickle
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from async_rl.base.run_dir.checkpoints import TrainingState
from buffer.journal import Journal, Place, payload_folder, read_payload
from buffer.past_journal import import_past, read_arrived
from buffer.staleness import Rules
from buffer.store import Store, buffer_checkpoint, restore_checkpoint
from buffer.store_state import StoredGroup, StoreState
from tests.kit.buffer.arrivals import make_arrival, plain_rules
from tests.kit.runs import training_state

WORKERS = ("rollout/0", "rollout/1")
EVERYTHING = 10**6


FOLDERS = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Journals are written to memory where possible: the disk is not what is tested."""


class ModelChecker:
    def __init__(self, rules: Rules, files: Path | None = None, keep_steps: int = -1) -> None:
        self.rules = rules
        self.files, self.keep_steps = files, keep_steps
        self.rows: dict[int, StoredGroup] = {}  # [group id] the newest row
        self.version = self.served_version = self.first_version = self.oldest_trained = self.num_events = 0
        self.crashes = self.resumes = self.kept = 0
        self.is_draining = False
        self.batch: list[StoredGroup] | None = None
        self.starts: dict[int, int] = {}
        self.workers: dict[int, str] = {}
        self.running: list[int] = []
        self.newest: dict[int, int] = {}  # [group id] version of its newest token, once finished
        self.uses: dict[int, list[int]] = {}  # [group id] batches it was trained in
        self.drops: Counter[str] = Counter()
        self.checkpoints: dict[int, tuple[TrainingState, bytes, Path | None]] = {}
        self.journal = self.open_journal()
        self.store = Store(rules, StoreState(record=self.record))
        self.store.served(0)
        self.commit()
        self.save()

    def open_journal(self) -> Journal | None:
        return Journal(self.journal_file, self.keep_steps) if self.files else None

    @property
    def journal_file(self) -> Path:
        assert self.files
        return self.files / f"{self.resumes}.sqlite"

    def close(self) -> None:
        if self.journal:
            self.journal.close()  # without a last commit, as when the process is killed

    def commit(self) -> None:
        if self.journal:
            self.journal.commit(self.store.state.scalars())

    def record(self, row: StoredGroup) -> None:
        self.rows[row.group_id] = row
        if self.journal:
            self.journal.record(row)
        if row.state == "dropped":
            assert row.group_id not in self.uses, "dropped after it was trained on"
            self.drops[row.drop_reason] += 1
            if row.group_id in self.running:
                self.running.remove(row.group_id)
            if row.drop_reason == "late":
                last = self.last_batch(row.group_id)
                assert last <= self.version, "dropped while it could be trained on"
                assert self.rules.late != "wait"

    def last_batch(self, group_id: int) -> int:
        young = self.newest[group_id] if self.rules.late == "mask" else self.starts[group_id]
        return young + self.rules.max_staleness

    def admit(self, count: int, worker: str) -> None:
        for slot in self.store.admit(worker, count, now_s=0.0):
            assert not self.is_draining, "started while a push waits for the groups that run"
            assert self.store.state.slots_held <= self.rules.slots
            assert slot.group_id not in self.starts and slot.start_version == self.served_version
            self.starts[slot.group_id], self.workers[slot.group_id] = slot.start_version, worker
            self.running.append(slot.group_id)

    def finish(self, count: int, pick: int, newest: int, equal: bool = False) -> None:
        """Finish groups whose newest token has version `newest`, limited to what is possible: from the start version to
        the announced version; with `drain` no weights arrive while a group runs."""
        for _ in range(min(count, len(self.running))):
            group_id = self.running[pick % len(self.running)]
            start = self.starts[group_id]
            self.newest[group_id] = start if self.rules.drain else min(max(start, newest), self.version)
            self.running.remove(group_id)
            outcome = make_arrival(self.newest[group_id], equal_rewards=equal, reward=float(group_id))
            self.store.finish(group_id, b"%d" % group_id, outcome, drop_equal=True)

    def fail(self, pick: int, requeue: bool) -> None:
        if self.running:
            self.store.fail(self.running[pick % len(self.running)], "test", requeue)

    def abandon(self, worker: str) -> None:
        lost = [group_id for group_id in self.running if self.workers[group_id] == worker]
        assert self.store.abandon(worker) == len(lost)

    def acknowledge_aborts(self, worker: str) -> None:
        """The groups that a worker is told to abort were granted to it and were dropped as late."""
        aborted = self.store.aborts(worker)
        assert all(self.workers[i] == worker and self.rows[i].drop_reason == "late" for i in aborted)
        self.store.acknowledge_aborts(worker, aborted)
        assert self.store.aborts(worker) == []

    def learn(self) -> None:
        """The learner's next event: train the batch that it holds, or serve if that is due, or ask for a batch."""
        if self.batch:
            for row in self.batch:
                self.uses.setdefault(row.group_id, []).append(self.version)
            self.version += 1
            self.store.trained(self.version)
            self.batch = None
            self.save()
        elif self.version - self.served_version >= self.rules.every_steps:
            self.is_draining = self.rules.drain and not self.rules.exact  # exact may have to grant more before a push
            if self.store.may_push():
                assert not (self.rules.drain and self.running), "pushed under a group that runs"
                self.served_version = self.version
                self.is_draining = False
                self.store.served(self.version)
                self.store.served(self.version)  # the answer was lost
                assert self.store.capacity() <= self.rules.slots - self.store.state.slots_held
        elif batch := self.store.take(self.version):
            self.batch = batch
            self.check_batch(batch)

    def check_batch(self, batch: list[StoredGroup]) -> None:
        rules, v = self.rules, self.version
        ids = [row.group_id for row in batch]
        assert len(ids) == rules.prompts_per_step and ids == sorted(set(ids))
        assert sum(i not in self.uses for i in ids) >= rules.fresh_per_step, "too few fresh groups"
        assert max(len(self.uses.get(i, ())) for i in ids) < rules.max_uses, "used too often"
        assert all(row.payload == b"%d" % row.group_id for row in batch)
        ages = [v + rules.max_staleness - self.last_batch(i) for i in ids]
        assert max(ages) <= rules.max_staleness, "bound"
        self.oldest_trained = max(self.oldest_trained, *ages)
        if rules.exact:
            only = max(self.first_version, v - rules.max_staleness)
            assert all(self.starts[i] == self.newest[i] == only for i in ids), "not of the exact version"

    def save(self) -> None:
        """Make a checkpoint: the buffer's part, and what the checker itself has to remember with it."""
        plain = json.loads(json.dumps(buffer_checkpoint(self.store.state)))
        saved = training_state(self.version, buffer=plain)
        known = pickle.dumps((self.starts, self.workers, self.uses, self.drops, self.first_version))
        self.checkpoints[self.version] = saved, known, self.journal_file if self.files else None

    def crash(self) -> None:
        """The buffer dies after any event and is restored from its journal; its clients notice nothing.

        Except that groups may start until the learner asks again whether it may push.
        """
        self.crashes += 1
        self.is_draining = False
        before = self.store.state.counters()
        live = [row for row in self.rows.values() if row.state not in ("trained", "dropped")]
        scalars = json.loads(json.dumps(self.store.state.scalars()))
        if self.journal:
            self.close()
            self.journal = self.open_journal()
            assert self.journal
            found = self.journal.load()
            assert found
            assert sorted(found[0]) == sorted(live), "the journal has other groups"
            self.check_journal()
            live, scalars, _ = found
        self.store = Store(self.rules, StoreState(record=self.record))
        self.store.state.restore(live, scalars)
        assert self.store.state.counters() == before

    def resume(self, back: int) -> None:
        """The whole run resumes from a checkpoint some versions ago; the learner serves that version first."""
        saved, known, past_file = self.checkpoints[max(min(self.checkpoints), self.version - back)]
        self.close()
        self.resumes += 1
        self.version = self.served_version = saved.version
        self.checkpoints = {v: kept for v, kept in self.checkpoints.items() if v <= saved.version}
        self.starts, self.workers, self.uses, self.drops, self.first_version = pickle.loads(known)
        self.running, self.rows, self.batch, self.is_draining = [], {}, None, False
        self.journal = self.open_journal()
        if self.journal and past_file:
            import_past(self.journal, past_file, saved)
        past = read_arrived(past_file, [i for i, *_ in saved.buffer["live"]]) if past_file else {}
        self.store = Store(self.rules, StoreState(record=self.record))
        restore_checkpoint(saved, self.store.state, self.store.mode, past)
        finished = self.store.state.finished
        assert all(self.newest[i] <= saved.version and row.payload == b"%d" % i for i, row in finished.items())
        assert sum(row.drop_reason == "future_version" for row in self.rows.values()) == sum(
            self.newest[i] > saved.version for i in past
        )
        self.kept += len(finished)
        if self.rules.exact and not finished:
            self.first_version = saved.version
        self.store.served(self.version)
        self.commit()
        self.check_journal()

    def check_journal(self) -> None:
        """The journal's tables hold the whole run, and every payload that it lists can be read."""
        if not self.journal:
            return
        with closing(sqlite3.connect(self.journal_file)) as database:
            uses = database.execute("SELECT group_id, version FROM uses").fetchall()
            groups = database.execute("SELECT group_id FROM groups ORDER BY group_id").fetchall()
            dropped = database.execute("SELECT drop_reason FROM groups WHERE state = 'dropped'").fetchall()
            places = database.execute("SELECT group_id, file, start, bytes FROM payloads").fetchall()
        assert sorted(uses) == sorted((group_id, at) for group_id, versions in self.uses.items() for at in versions)
        assert [group_id for group_id, in groups] == sorted(self.starts)
        assert Counter(reason for reason, in dropped) == self.drops
        assert all(read_payload(payload_folder(self.journal_file), Place(*place)) == b"%d" % i for i, *place in places)

    def run_dry(self) -> None:
        """Once every group that may run has finished, the learner can take its next step: there is no deadlock."""
        self.admit(EVERYTHING, WORKERS[0])
        self.finish(EVERYTHING, 0, self.served_version)
        before = (self.version, self.served_version, self.batch)
        self.learn()
        assert (self.version, self.served_version, self.batch) != before, self.store.describe(0.0)

    def check(self) -> None:
        self.num_events += 1
        self.commit()
        state = self.store.state
        state.check_accounting()
        counters = state.counters()
        assert counters["buffer/unaccounted"] == 0
        assert counters["buffer/admitted"] == len(self.starts)
        assert counters["buffer/running"] == len(self.running)
        assert {reason: n for reason, n in state.accounting.dropped.items() if n} == self.drops
        assert counters["buffer/trained"] == len(self.uses)
        mean_id = sum(self.uses) / len(self.uses) if self.uses else None  # a group's reward is its id
        assert counters.get("buffer/trained/reward") == mean_id, "not the mean over all groups trained in the run"
        assert counters["buffer/uses"] == sum(map(len, self.uses.values()))
        for of, rows in (("running", state.running), ("finished", state.finished)):
            assert state.starts[of] == Counter(row.start_version for row in rows.values()), of
        assert state.newest == Counter(row.newest_version for row in state.finished.values())
        assert state.num_held_fresh == sum(row.is_fresh for row in state.held.values())
        assert counters["buffer/slots_held"] <= self.rules.slots


@contextmanager
def random_checker(rng: random.Random) -> Iterator[ModelChecker]:
    """A model checker with random rules; two of three have a journal."""
    rules = random_rules(rng)
    with tempfile.TemporaryDirectory(dir=FOLDERS) as folder:
        files = Path(folder) if rng.random() < 2 / 3 else None
        checker = ModelChecker(rules, files, keep_steps=rng.choice((-1, 0, 2)))
        try:
            yield checker
        finally:
            checker.close()


def random_rules(rng: random.Random) -> Rules:
    """Random rules that Config allows."""
    bound, size = rng.randint(0, 4), rng.randint(1, 6)
    if rng.random() < 0.25:
        return plain_rules(bound, size, exact=True, drain=True)
    uses = rng.randint(2, 3) if bound and size > 1 and rng.random() < 0.5 else 1
    fresh = rng.randint(-(-size // uses), size - 1) if uses > 1 else size
    if (bound + 1) * fresh < size:
        uses, fresh = 1, size
    every_steps = rng.randint(1, (bound + 1) * fresh // size)
    late = rng.choice(("wait", "drop", "mask"))
    most = (bound + 1) * fresh
    fewest = max(every_steps * size, 2 * fresh if uses > 1 else 0)
    slots = rng.randint(fewest, most) if rng.random() < 0.5 else most
    drain = late != "mask" and rng.random() < 0.3
    return plain_rules(
        bound, size, fresh_per_step=fresh, every_steps=every_steps, slots=slots, max_uses=uses, late=late, drain=drain
    )


def walk(checker: ModelChecker, events: int, rng: random.Random, resumes: bool = True) -> None:
    """Random events as in a run: groups start and finish in any order, few fail; crashes are rarer."""
    kinds = {
        "admit": 30, "finish": 28, "equal": 2, "learn": 35, "fail": 2, "abandon": 1, "acknowledge": 2, "run_dry": 1,
        "crash": 1, "resume": 0.5 if resumes else 0,
    }
    for kind in rng.choices(list(kinds), list(kinds.values()), k=events):
        match kind:
            case "admit":
                checker.admit(rng.randint(1, 40), rng.choice(WORKERS))
            case "finish" | "equal":
                newest = rng.randint(max(0, checker.version - 3), checker.version)
                checker.finish(rng.randint(1, 3), rng.randrange(EVERYTHING), newest, kind == "equal")
            case "learn":
                checker.learn()
            case "fail":
                checker.fail(rng.randrange(EVERYTHING), requeue=rng.random() < 0.5)
            case "abandon":
                checker.abandon(WORKERS[1])
            case "acknowledge":
                checker.acknowledge_aborts(rng.choice(WORKERS))
            case "run_dry":
                checker.run_dry()
            case "crash":
                checker.crash()
            case "resume":
                checker.resume(rng.randint(0, 3))
        checker.check()
