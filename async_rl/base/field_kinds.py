"""The kinds of the fields of a group, of its rows and of its episodes.

async_rl/base/types.py declares each field once, as `name: Annotated[type, kind]`. From this follow how the field is
sent and checked (async_rl/base/messages/field_packing.py), the largest size of a message (limits.py), the version of
the messages (codec.py), and the field's column in the journal and in the Parquet file of its export
(buffer/journal/tables.py). """

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar, get_type_hints

MAX_INT = 2**62
MAX_INT32 = 2**31 - 1
MAX_NAME_CHARS = 200
MAX_CAUSE_CHARS = 2000
"""The longest text of the error of an episode or a group; the rest is cut off."""
MAX_METRICS = 64
"""The most metrics that the environment may log in one episode; their names have at most MAX_NAME_CHARS characters."""


class Kind:
    """Says which values a field may have."""


class Scalar(Kind):
    """One value of a group, a row or an episode: a column of a table."""


@dataclass(frozen=True, slots=True)
class Whole(Scalar):
    """A whole number in low..high."""

    low: int = 0
    high: int = MAX_INT32


@dataclass(frozen=True, slots=True)
class Number(Scalar):
    """A finite number that is at least `low`. Only a field of a group may be None."""

    low: float = -math.inf
    may_be_none: bool = False


@dataclass(frozen=True, slots=True)
class Flag(Scalar):
    """True or false."""


@dataclass(frozen=True, slots=True)
class Text(Scalar):
    """A text. A longer one is refused, or cut by its sender if `is_cut`; so is one that is not valid Unicode."""

    max_chars: int = MAX_NAME_CHARS
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Choice(Scalar):
    """One of these names."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metrics(Scalar):
    """A map of at most MAX_METRICS names to finite numbers, in the journal as JSON. A group has none."""


@dataclass(frozen=True, slots=True)
class Texts(Kind):
    """A list of texts of a group, at most Limits.max_left_out. `column` is the column of one in the journal's table."""

    each: Text
    column: str


@dataclass(frozen=True, slots=True)
class ChatMessages(Kind):
    """Chat messages of a group: maps with the texts `role` and `content`. The journal has them in the payload alone."""


@dataclass(frozen=True, slots=True)
class Array(Kind):
    """Numbers in low..high of one numpy dtype (little-endian); floats are finite."""

    dtype: str
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class PerPromptToken(Array):
    """A number for each token of a group's prompt."""


@dataclass(frozen=True, slots=True)
class PerToken(Array):
    """A number for each token of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerTurn(Array):
    """A number for each turn that a row trains. `column` is its column in the journal's table of turns."""

    column: str


K = TypeVar("K", bound=Kind)


def kinds_of(declared: type, kind: type[K]) -> dict[str, K]:
    """Return the fields of a kind that a class declares, by name, in their order."""
    hints = get_type_hints(declared, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, kind)
    }
