"""What the store remembers, and how it is kept and brought back: live rows and a few scalars."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from async_rl.errors import StalenessError
from buffer.group_accounting import GroupAccounting
from buffer.store_rows import DropReason, Row, State


def nothing(row: Row) -> None:
    """Keeps no journal."""


@dataclass(slots=True, kw_only=True)
class StoreState:
    """Live rows by state, and scalars. `scalars()` and `rows()` are the whole of it, for `restored`."""

    record: Callable[[Row], None] = nothing
    """Called with every row that is new or changed, final ones included, which are then forgotten here."""
    version: int = 0
    """Batches trained: the newest policy version there is."""
    served_version: int | None = None
    first_version: int = 0
    """Exact mode counts from it."""
    next_group_id: int = 0
    next_prompt: int = 0
    requeued: deque[int] = field(default_factory=deque)
    """Prompts to grant before fresh ones."""
    unserved: Counter[int] = field(default_factory=Counter)
    """[version] fresh groups trained to yield it: they hold their slots until it is served."""
    account: GroupAccounting = field(default_factory=GroupAccounting)
    running: dict[int, Row] = field(default_factory=dict)
    finished: dict[int, Row] = field(default_factory=dict)
    held: dict[int, Row] = field(default_factory=dict)
    used: dict[int, Row] = field(default_factory=dict)

    @property
    def num_held_fresh(self) -> int:
        return sum(row.is_fresh for row in self.held.values())

    @property
    def slots_held(self) -> int:
        return len(self.running) + len(self.finished) + self.num_held_fresh + self.unserved.total()

    def rows(self) -> list[Row]:
        """Of all live groups, by group id."""
        places = (self.running, self.finished, self.held, self.used)
        return sorted((row for rows in places for row in rows.values()), key=lambda row: row.group_id)

    def put(self, row: Row, state: State, **changes: Any) -> None:
        """Move a row, with changes, to where its new state is kept; final ones are recorded and forgotten."""
        if (before := self._place(row.state)) is not None:
            before.pop(row.group_id, None)
        row = row._replace(state=state, **changes)
        if (after := self._place(state)) is not None:
            after[row.group_id] = row
        self.record(row)

    def drop(self, row: Row, reason: DropReason, requeue: bool, now_s: float = 0.0) -> None:
        self.account.drop(row, reason, now_s)
        if requeue:
            self.requeued.append(row.prompt_index)
            self.account.requeued += 1
        self.put(row, "dropped", drop_reason=reason)

    def unaccounted(self) -> int:
        """Admitted - (trained at least once + dropped + running + buffered + held): 0 by invariant 3, at any time."""
        account = self.account
        live = len(self.running) + len(self.finished) + self.num_held_fresh
        return account.admitted - account.trained - account.dropped.total() - live

    def check_identity(self) -> None:
        """
        Raises:
            StalenessError: groups are lost or counted twice.
        """
        if self.unaccounted():
            raise StalenessError(
                f"{self.account.admitted} groups were admitted, but the account is trained {self.account.trained}, "
                f"dropped {self.account.dropped.total()}, running {len(self.running)}, buffered {len(self.finished)}, "
                f"held by the learner {self.num_held_fresh}"
            )

    def counters(self) -> dict[str, float]:
        """Numbers of groups: depth, running, held (by the learner), used and slots_held now; others since the start."""
        return {
            "buffer/depth": float(len(self.finished)),
            "buffer/running": float(len(self.running)),
            "buffer/held": float(len(self.held)),
            "buffer/used": float(len(self.used)),
            "buffer/slots_held": float(self.slots_held),
            "buffer/unaccounted": float(self.unaccounted()),
            **self.account.metrics(),
        }

    def scalars(self) -> dict[str, Any]:
        """Everything but the rows, as plain values (numbers, list, dict with text keys)."""
        return {
            "version": self.version, "served_version": self.served_version, "first_version": self.first_version,
            "next_group_id": self.next_group_id, "next_prompt": self.next_prompt, "requeued": list(self.requeued),
            "unserved": {str(version): number for version, number in self.unserved.items()},
            **self.account.scalars(),
        }

    def restore(self, rows: Iterable[Row], scalars: Mapping[str, Any]) -> None:
        """Into an empty state: what `rows` and `scalars` said at one moment. Final rows are passed over."""
        self.version, self.served_version = scalars["version"], scalars["served_version"]
        self.first_version = scalars["first_version"]
        self.next_group_id, self.next_prompt = scalars["next_group_id"], scalars["next_prompt"]
        self.requeued = deque(scalars["requeued"])
        self.unserved = Counter({int(version): number for version, number in scalars["unserved"].items()})
        self.account.restore(scalars)
        for row in sorted(rows, key=lambda row: row.group_id):
            if (place := self._place(row.state)) is not None:
                place[row.group_id] = row

    def _place(self, state: State) -> dict[int, Row] | None:
        match state:
            case "running":
                return self.running
            case "finished":
                return self.finished
            case "held":
                return self.held
            case "used":
                return self.used
        return None
