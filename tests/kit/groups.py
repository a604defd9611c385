"""Groups and their rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from async_rl.types import Group, Row, Slot


def make_row(length: int = 3, version: int = 0, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "logprobs": np.linspace(-2.0, -0.5, length, dtype=np.float32),
        "versions": np.full(length, version, np.int32),
        "mask": np.ones(length, np.bool_),
        "reward": 0.5,
        "finish_reason": "stop",
    }
    return Row(**{**fields, **changes})


def make_group(slot: Slot, group_size: int = 2, **changes: Any) -> Group:
    fields: dict[str, Any] = {
        "group_id": slot.group_id,
        "prompt_index": slot.prompt_index,
        "start_version": slot.start_version,
        "temperature": 1.0,
        "prompt_tokens": np.array([7, 8], np.int32),
        "rows": tuple(make_row(3 + i, slot.start_version) for i in range(group_size)),
        "duration_s": 1.5,
        "worker": "rollout/0",
    }
    return Group(**{**fields, **changes})


def assert_same(a: Group, b: Group) -> None:
    for field in dataclasses.fields(Group):
        if field.name not in ("prompt_tokens", "rows"):
            assert getattr(a, field.name) == getattr(b, field.name), field.name
    np.testing.assert_array_equal(a.prompt_tokens, b.prompt_tokens)
    assert len(a.rows) == len(b.rows)
    for left, right in zip(a.rows, b.rows, strict=True):
        for field in dataclasses.fields(Row):
            x, y = getattr(left, field.name), getattr(right, field.name)
            np.testing.assert_array_equal(x, y)
            assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
