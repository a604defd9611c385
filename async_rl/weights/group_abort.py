"""Frees a server that hangs in a collective of a failed push: the learner tells it by the group's store to abort.

Gloo notices a dead member, NCCL on one host does not: a kernel that waits for the dead peer waits for ever, and
`destroy_process_group`, which SGLang calls to leave a group, waits for the kernel. So a thread of the server waits for
the learner's word, or for the learner's end, and then aborts the server's half of the group.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, ProcessGroup, Store, TCPStore

_KEY = "aborted"
_FOR_EVER = timedelta(days=1000)


def tell_to_abort(store: Store, group_name: str) -> None:
    """Make every server that waits in `abort_when_told` abort the group."""
    with suppress(DistError, RuntimeError):  # a store that can't be reached has been noticed by the servers too
        PrefixStore(group_name, store).set(_KEY, "")


def abort_when_told(group: ProcessGroup, group_name: str, host: str, port: int) -> None:
    """Start a thread that aborts `group` once the learner, which serves the store at `host`, says so or has ended."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)  # of its own: others wait for its answers

    def wait_and_abort() -> None:
        with suppress(DistError, RuntimeError):
            PrefixStore(group_name, store).wait([_KEY], _FOR_EVER)
        group.abort()

    threading.Thread(target=wait_and_abort, name=f"abort of {group_name}", daemon=True).start()
