"""The versions of a reply's tokens, from the spans that a server reports."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.base.errors import AsyncRLError
from rollout_server.engines.http_engine import token_versions


def test_spans_give_each_token_its_version() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    assert token_versions(spans, 3).tolist() == [3, 3, 4]


@pytest.mark.parametrize(
    "spans",
    [
        None, [], [{"version": "default", "start": 0, "end": 3}], [{"version": "1", "start": 0, "end": 2}],
        [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 3}],
    ],
)
def test_versions_must_cover_every_token(spans: list[dict[str, Any]] | None) -> None:
    with pytest.raises(AsyncRLError, match="version"):
        token_versions(spans, 3)
