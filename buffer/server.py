"""The buffer of a run: one thread, one ROUTER, one poll loop around the store, and its journal.

A turn of the loop takes what has arrived, then answers who has been waiting, then commits the journal, and only then
sends the answers: whoever got one can rely on it. What arrives is checked before it touches the store
(buffer/protocol/operations.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import zmq

from async_rl.config import Config
from async_rl.errors import WaitTimeoutError, WireError
from async_rl.messages.codec import Limits, check_group
from async_rl.storage.checkpoints import TrainingState, resumed_training_state
from buffer.checkpoint import go_on_from
from buffer.frames import receive, view
from buffer.journal.journal import FILE_NAME, PAST_FILE_NAME, Journal, arrived
from buffer.protocol.operations import Operations
from buffer.protocol.socket import BufferSocket
from buffer.staleness import Rules
from buffer.store import Store
from buffer.store_state import StoreState

STOP_CHECK_S = 0.2
"""How long the loop sleeps at most, as no message announces that `stop` was set."""
MESSAGES_A_TURN = 256
"""Handled before parked requests get their turn."""


class BufferServer:
    """The staleness-bounded buffer of one run, at network.host. It goes on from its journal if the run has one already.

    All methods but `serve` may be called from other threads.

    Raises:
        ConfigError: network.host or network.port can't be bound, or network.keys holds no keys.
        AsyncRLError: the journal can't be read or written.
    """

    def __init__(self, config: Config) -> None:
        self._shutdown_s = config.timeouts.shutdown_s
        # First: who has the port is alone with the journal, also where the buffer before is slow to die.
        # Far beyond the largest valid group, which is refused by name, ZMQ cuts the connection.
        self._door = BufferSocket(config.network, 2**20 + 4 * Limits.from_config(config).max_group_bytes)
        self.address = self._door.address
        self._journal = _open_journal(config)
        found = self._journal.load() if self._journal else None
        state = StoreState(record=self._journal.record) if self._journal else StoreState()
        self._store = Store(Rules.from_config(config), state)
        describe = [self._journal.describe] if self._journal else []
        self._operations = Operations(config, self._store, *describe)
        if found:
            rows, scalars = found
            state.restore(rows, scalars)
            self._operations.go_on(scalars["refused"], scalars["restarts"] + 1)
        elif cut := resumed_training_state(config):
            self._go_on_from(cut, config.run_dir)
        self._lock = threading.Lock()
        self._serving = threading.Lock()

    def serve(self, stop: threading.Event) -> None:
        """Answers until `stop` is set; blocks.

        Raises:
            StalenessError: the bound would have been broken: a bug.
            AsyncRLError: the journal can't be written.
        """
        router = self._door.router
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        with self._serving:
            while not stop.is_set():
                with self._lock:
                    sleep_s = min(STOP_CHECK_S, max(0.0, self._operations.next_due_s() - time.monotonic()))
                if poller.poll(round(1000 * sleep_s) + 1):
                    self._receive()
                with self._lock:
                    answers = self._operations.answers(time.monotonic())
                    self._commit()
                for answer in answers:
                    router.send_multipart(answer.frames(), copy=False)

    def counters(self) -> dict[str, float]:
        with self._lock:
            return self._operations.counters()

    def describe(self) -> str:
        with self._lock:
            return self._operations.describe(time.monotonic())

    def abandon(self, worker: str) -> int:
        """The worker is gone: its running groups fail, their prompts go to others. Returns the number of groups."""
        with self._lock:
            return self._operations.abandon(worker)

    def close(self) -> dict[str, float]:
        """Ends the account once `serve` has returned: drops what is left as `shutdown`. Returns the last counters.

        Raises:
            StalenessError: groups are unaccounted for.
            WaitTimeoutError: `serve` goes on; its `stop` must be set first.
        """
        if not self._serving.acquire(timeout=self._shutdown_s):
            raise WaitTimeoutError(
                f"buffer: close waited {self._shutdown_s:.0f} s (timeouts.shutdown_s) for serve to return"
            )
        self._serving.release()
        with self._lock:
            self._door.close()
            self._store.close()
            self._commit()
            if self._journal:
                self._journal.close()
            return self._operations.counters()

    def _go_on_from(self, cut: TrainingState, run_dir: Path) -> None:
        past, described = {}, {}
        ids = [group_id for group_id, *_ in cut.buffer["live"]]
        past_file = run_dir / PAST_FILE_NAME.format(lineage=cut.lineage)
        if self._journal:
            self._journal.take_over(past_file, cut)
        for group_id, row in arrived(past_file, ids).items():
            with contextlib.suppress(WireError):  # sizes that the new configuration doesn't allow
                described[group_id] = check_group(view(row.payload), self._operations.limits)
                past[group_id] = row
        go_on_from(cut, self._store.state, self._store.rules, past)
        if self._journal:
            for group_id in self._store.state.finished:
                self._journal.describe(described[group_id])

    def _receive(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                identity, *frames = receive(self._door.router, zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._lock:
                self._operations.handle(identity.bytes, frames)

    def _commit(self) -> None:
        if self._journal:
            operations = self._operations
            more = {"refused": operations.refused, "restarts": operations.restarts}
            self._journal.commit({**self._store.state.scalars(), **more})


def _open_journal(config: Config) -> Journal | None:
    if not config.buffer.journal:
        return None
    return Journal(config.run_dir / FILE_NAME, config.journal_kept_steps)
