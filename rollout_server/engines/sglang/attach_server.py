"""Attaches a run to an SGLang server that is already running, and removes what earlier runs left in it."""

from __future__ import annotations

from pathlib import Path

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.errors import WeightSyncError
from rollout_server.engines.sglang.admin import SGLangAdmin


def attach_server(admin: SGLangAdmin, config: Config) -> None:
    """Reset the server: end its requests, load the weights of model.path as version 0, and empty its cache.

    Raises:
        ConfigError: the server's settings would make it tag tokens with wrong versions.
        WeightSyncError: the server can't be reached, or refuses.
        WaitTimeoutError: the server did not answer within `timeouts.push_s`.
    """
    try:
        is_disabled = admin.server_info().get("disable_overlap_schedule")
        check(
            is_disabled is True or config.weight_sync.on_update != "in_place", "rollout.server_url", admin.url,
            "a server with --disable-overlap-schedule for weight_sync.on_update in_place",
            "Else it tags tokens with versions that did not sample them. Or set weight_sync.on_update: retract.",
        )
        admin.resume()  # an earlier run may have left the server paused in the middle of a push
        admin.abort_all()
        admin.pause("in_place")
        admin.begin_update()
        admin.load_folder(Path(config.model.path).resolve(), version=0)
        admin.end_update()
        admin.resume()
        admin.flush_when_idle()
        version = admin.served_version()
    except WeightSyncError as error:
        raise WeightSyncError(
            f"rollout.server_url {admin.url} can't be used: {error}. Is an SGLang server running there?"
        ) from error
    if version != "0":
        raise WeightSyncError(
            f"the server at {admin.url} must serve weight version 0 after its reset, got {version!r}"
        )
