"""Groups and their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.base.types import Batch, Group, Row, Slot, Support


def make_row(
    tokens: Sequence[int] | int = 3, logprobs: Sequence[float] | None = None, /, reward: float = 0.5, version: int = 0,
    **changes: Any,
) -> Row:
    """A row of which every token is trained.

    Args:
        tokens: these, or so many.
        version: of all tokens.
        changes: fields, as they are.
    """
    ids = np.arange(tokens) if isinstance(tokens, int) else tokens
    logprobs = np.linspace(-2.0, -0.5, len(ids)) if logprobs is None else logprobs
    fields: dict[str, Any] = {
        "tokens": np.array(ids, np.int32), "mask": np.ones(len(ids), np.bool_), "reward": reward,
        "logprobs": np.array(logprobs, np.float32), "versions": np.full(len(ids), version, np.int32),
        "finish_reason": "stop",
    }
    return Row(**fields | changes)


def make_group(
    slot: Slot | int, prompt: Sequence[int] = (7, 8), rows: Sequence[Row] | None = None, version: int = 0,
    **changes: Any,
) -> Group:
    """The group of a slot; by default with two rows whose rewards are equal.

    Args:
        slot: or the number of the group and of its prompt, which then starts at `version`.
    """
    if isinstance(slot, int):
        slot = Slot(group_id=slot, prompt_index=slot, start_version=version)
    if rows is None:
        rows = [make_row(length, version=slot.start_version) for length in (3, 4)]
    fields: dict[str, Any] = {
        "group_id": slot.group_id, "prompt_index": slot.prompt_index, "start_version": slot.start_version,
        "temperature": 1.0, "prompt_tokens": np.array(prompt, np.int32), "duration_s": 1.5, "worker": "rollout/0",
        "rows": tuple(rows), "messages": ({"role": "user", "content": "1 + 1?"},),
    }
    return Group(**fields | changes)


def batch_of(*groups: Group, version: int = 0, **changes: Any) -> Batch:
    """A batch whose groups were finished at its version."""
    return Batch(**{"version": version, "groups": groups, "finished_versions": (version,) * len(groups)} | changes)


def assert_same(a: Group, b: Group) -> None:
    for field in dataclasses.fields(Group):
        if field.name not in ("prompt_tokens", "rows"):
            assert getattr(a, field.name) == getattr(b, field.name), field.name
    np.testing.assert_array_equal(a.prompt_tokens, b.prompt_tokens)
    assert len(a.rows) == len(b.rows)
    for left, right in zip(a.rows, b.rows, strict=True):
        for field in dataclasses.fields(Row):
            x, y = getattr(left, field.name), getattr(right, field.name)
            if isinstance(x, Support):
                assert isinstance(y, Support) and (x.ids.dtype, x.offsets.dtype) == (y.ids.dtype, y.offsets.dtype)
                np.testing.assert_array_equal(x.offsets, y.offsets)
                x, y = x.ids, y.ids
            np.testing.assert_array_equal(x, y)
            assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
