"""The buffer's server: one thread polls a socket, applies messages to the store, and writes the store's journal.

A turn of the loop handles the messages that have arrived, then collects the replies, then commits the journal, and only
then sends the replies. So whatever a client was told is in the journal. buffer/operations.py checks each message before
it changes the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import zmq

from async_rl.base.config import Config, NetworkConfig
from async_rl.base.errors import ConfigError, WaitTimeoutError, WireError
from async_rl.base.messages.codec import check_group
from async_rl.base.messages.fields import Limits
from async_rl.base.network import shuffled
from async_rl.base.run_dir.checkpoints import TrainingState, past_file, resumed_training_state
from buffer.journal import FILE_NAME, PAST_FILE_NAME, Journal
from buffer.keys import CurveAuthenticator
from buffer.operations import Operations
from buffer.staleness import Rules
from buffer.store import Store, restore_checkpoint
from buffer.store_state import StoreState
from buffer.wire import receive, view

STOP_CHECK_S = 0.2
"""The longest sleep of the loop, in seconds. The loop checks `stop` only between sleeps."""
MESSAGES_A_TURN = 256
"""The most messages that a turn handles before it answers parked requests."""
LONGEST_TURN_S = 0.5
"""After this time a turn handles no further message. Clients repeat a request that is not answered for a while."""


class BufferServer:
    """Serves the buffer of one run at network.host. Call `serve` in a thread of its own.

    If the run directory has a journal, the buffer continues from it. Otherwise a resumed run continues from its
    checkpoint. All methods but `serve` may be called from other threads.

    Raises:
        ConfigError: network.host or network.port can't be bound, or network.keys has no keys.
        AsyncRLError: the journal can't be read or written.
    """

    def __init__(self, config: Config) -> None:
        self._shutdown_s = config.timeouts.shutdown_s
        # The port is bound first: its owner alone uses the journal, even while an earlier buffer is still ending.
        # A message may be larger than any valid group, so that it is refused with a reason; if it is far larger, ZMQ
        # closes the connection.
        self._socket = BufferSocket(config.network, 2**20 + 4 * Limits.from_config(config).max_group_bytes)
        self.address = self._socket.address
        journal = Journal(config.run_dir / FILE_NAME, config.journal_kept_steps) if config.buffer.journal else None
        self._journal = journal
        state = StoreState(*((journal.record, journal.record_streak) if journal else ()))
        draw = None
        if config.task.difficulty.skips:
            from buffer.difficulty import PromptDraw

            draw = PromptDraw(config)
        self._store = Store(Rules.from_config(config), state, draw, config.eval.is_right)
        self._operations = Operations(config, self._store, journal.record_group if journal else None)
        if found := journal.load() if journal else None:
            rows, scalars, streaks = found
            state.restore(rows, scalars, streaks)
            self._operations.restore(scalars)
        elif saved := resumed_training_state(config):
            self._resume(saved, config.run_dir)
        self._lock = threading.Lock()
        self._serving = threading.Lock()

    def serve(self, stop: threading.Event) -> None:
        """Answer messages until `stop` is set.

        Raises:
            AsyncRLError: the journal can't be written.
            StalenessError: a group in a batch was too old, which is a bug.
        """
        router = self._socket.router
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        with self._serving:
            while not stop.is_set():
                with self._lock:
                    sleep_s = min(STOP_CHECK_S, max(0.0, self._operations.next_due_s() - time.monotonic()))
                if poller.poll(round(1000 * sleep_s) + 1):
                    self._receive()
                with self._lock:
                    replies = self._operations.replies(time.monotonic())
                    self._commit()
                for reply in replies:
                    router.send_multipart(reply.frames(), copy=False)

    def counters(self) -> dict[str, float]:
        with self._lock:
            return self._operations.counters()

    def describe(self) -> str:
        with self._lock:
            return self._operations.describe(time.monotonic())

    def abandon(self, worker: str, incarnation: int) -> int:
        """Fail the running groups of a lost worker, and return their number; see Operations.abandon.

        The journal has it when this returns: the driver does not ask the next buffer again.
        """
        with self._lock:
            num_groups = self._operations.abandon(worker, incarnation)
            self._commit()
        return num_groups

    def retire(self, worker: str, incarnation: int) -> int:
        """Give a worker no more slots, and return the number of its running groups; see Operations.retire."""
        with self._lock:
            return self._operations.retire(worker, incarnation)

    def close(self) -> dict[str, float]:
        """Close the buffer, and return its final counters. Set the `stop` of `serve` before.

        The call waits until `serve` returns. Groups that are running or finished are dropped for the reason `shutdown`.

        Raises:
            WaitTimeoutError: `serve` did not return within timeouts.shutdown_s.
        """
        if not self._serving.acquire(timeout=self._shutdown_s):
            raise WaitTimeoutError(
                f"the buffer's close waited {self._shutdown_s:.0f} s (timeouts.shutdown_s) for serve to return"
            )
        self._serving.release()
        with self._lock:
            self._socket.close()
            self._store.close()
            self._commit()
            if self._journal:
                self._journal.close()
            return self._operations.counters()

    def _resume(self, saved: TrainingState, run_dir: Path) -> None:
        """Restore the store of a resumed run, from its checkpoint and the journal of the run so far.

        The new journal gets the groups that continue, and those trained or dropped before the checkpoint.
        """
        from buffer.past_journal import import_past, read_arrived

        past, groups = {}, {}
        ids = [group_id for group_id, *_ in saved.buffer["live"]]
        past_journal = past_file(run_dir, PAST_FILE_NAME, saved.lineage)
        if self._journal:
            import_past(self._journal, past_journal, saved)
        for group_id, row in read_arrived(past_journal, ids).items():
            with contextlib.suppress(WireError):  # the new configuration allows no such group
                groups[group_id] = check_group(view(row.payload), self._operations.limits)
                past[group_id] = row
        arrived = restore_checkpoint(saved, self._store.state, self._store.mode, past)
        if self._journal:
            for group_id in arrived:
                self._journal.record_group(groups[group_id])
            for position, streak in self._store.state.prompts.streaks.items():
                self._journal.record_streak(position, streak)

    def _receive(self) -> None:
        end_s = time.monotonic() + LONGEST_TURN_S
        for _ in range(MESSAGES_A_TURN):
            try:
                identity, *frames = receive(self._socket.router, zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._lock:
                self._operations.handle(identity.bytes, frames)
            if time.monotonic() >= end_s:
                return

    def _commit(self) -> None:
        if self._journal:
            self._journal.commit({**self._store.state.scalars(), **self._operations.scalars()})


BIND_S = 10.0
"""Seconds to wait until a port is free. Ray ends an earlier buffer that does not respond only after 5 s."""
FREE_PORTS = (61000, 65536)
"""The range of the buffer's port if network.ports is not set. Linux gives outgoing connections lower ports. Otherwise
one of them could take the buffer's port while the buffer restarts."""
MAX_UNREAD = 1000
"""The most replies that are kept for a client that does not read them. Further replies are lost, which is harmless:
clients repeat a request that got no reply."""


class BufferSocket:
    """The buffer's ZMQ socket (ROUTER), bound to network.host and network.port.

    If network.port is 0, a free port of network.ports is taken. `address` has the port that was bound.

    Args:
        max_message_bytes: if a client sends a larger message, ZMQ closes its connection.

    Raises:
        ConfigError: the address can't be bound, or network.keys has no keys.
    """

    def __init__(self, network: NetworkConfig, max_message_bytes: int) -> None:
        self._context = zmq.Context()
        self._authenticator: CurveAuthenticator | None = None
        self.router = self._context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self.router.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        try:
            if network.keys:
                self._authenticator = CurveAuthenticator(self.router, Path(network.keys))
            self.address = _bind(self.router, network)
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        self.router.close()
        if self._authenticator:
            self._authenticator.stop()
        self._context.term()


def _bind(router: zmq.Socket[bytes], network: NetworkConfig) -> str:
    """Bind the socket to network.port, or to a free port of network.ports if it is 0, and return the address.

    Raises:
        ConfigError: no port could be bound within BIND_S.
    """
    until_s = time.monotonic() + BIND_S
    ports = [network.port] if network.port else shuffled(network.port_range or range(*FREE_PORTS))
    while True:
        for port in ports:
            try:
                router.bind(address := f"tcp://{network.host}:{port}")
                return address
            except zmq.ZMQError as error:
                failure = error
                if error.errno != zmq.EADDRINUSE:
                    break
        if failure.errno != zmq.EADDRINUSE or time.monotonic() > until_s:
            raise ConfigError(
                f"network.host = {network.host}, network.port = {network.port}: the buffer can't bind it ({failure}). "
                "Set network.host to an address of this host, network.port to a free port or 0"
                + (f", network.ports (its part is {network.ports}) to more ports" if network.ports else "")
            ) from None
        time.sleep(0.1)
