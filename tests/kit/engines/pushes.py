"""Pushes of new weights into an SGLang server."""

from __future__ import annotations

from pathlib import Path

from rollout_server.engines.sglang.admin import SGLangAdmin
from tests.kit.engines.in_thread import EngineInThread


def update_in_place(server: EngineInThread, model: Path, version: int) -> None:
    """Load new weights from disk under running requests, as a weight push does."""
    admin = SGLangAdmin(server.config, server.engine.url)
    admin.pause("in_place")
    admin.begin_update()
    admin.load_folder(model, version)
    admin.end_update()
    admin.resume()
