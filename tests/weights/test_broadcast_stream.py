"""On a GPU a bucket is broadcast beside the gathering of the next one. The streams are fakes: there is no GPU here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from async_rl.base.weights.broadcast import BroadcastTransport
from async_rl.base.weights.members import Members
from tests.kit.publishers import CONFIG, CPU


def test_a_bucket_is_sent_in_a_stream_of_its_own_once_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Stream:
        def __init__(self, device: str) -> None:
            calls.append(("stream", device))

        def wait_event(self, event: str) -> None:
            calls.append(("wait", event))

        def synchronize(self) -> None:
            calls.append(("synchronize", None))

    @contextmanager
    def current(stream: Stream) -> Any:
        calls.append(("enter", None))
        yield
        calls.append(("leave", None))

    class Data:
        device = "cuda:0"

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda data, group, group_src: calls.append(("send", group)))
    transport = BroadcastTransport(CONFIG, Members(CONFIG, {}), 0, CPU, backend="gloo")
    transport.group = "servers"  # type: ignore[assignment]
    transport.broadcast(Data(), "filled")  # type: ignore[arg-type]
    assert calls == [
        ("stream", "cuda:0"), ("wait", "filled"), ("enter", None), ("send", "servers"), ("leave", None),
        ("synchronize", None),
    ]
    calls.clear()
    transport.broadcast(Data(), None)  # type: ignore[arg-type]
    assert calls == [("send", "servers")]
