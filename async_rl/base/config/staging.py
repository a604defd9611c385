"""The checks of weight_sync.double_buffer: who can take weights beside generation, and where it would be of no use."""

from __future__ import annotations

from collections.abc import Collection

from async_rl.base.config.check import check
from async_rl.base.config.data import RolloutConfig
from async_rl.base.config.system import WeightSyncConfig
from async_rl.base.seams import ENGINES, TRANSPORTS

KEY = "weight_sync.double_buffer"


def check_staging(
    sync: WeightSyncConfig, rollout: RolloutConfig, shares_gpus: bool, tp: int, working: Collection[str]
) -> None:
    """Check that the engine can stage weights, that the transport sends what can be staged, and that a pause is saved.

    Args:
        shares_gpus: whether learner and servers take turns in using GPUs.
        tp: the number of GPUs of a server.
        working: names of the transports that may work where the run will be.

    Raises:
        SettingsError: one of these is not so. The message gives the reason and the alternative.
    """
    engine = rollout.engine_entry
    if sync.double_buffer == "none":
        return
    able = [name for name, entry in ENGINES.items() if sync.double_buffer in entry.staging]
    check(
        sync.double_buffer in engine.staging, KEY, sync.double_buffer,
        f"{', '.join(('none', *engine.staging))} with rollout.engine {rollout.engine}",
        f"Or set rollout.engine: {' or '.join(able)}.",
    )
    for unfit, setting, reason in (
        (sync.on_update == "drain", "weight_sync.on_update drain", "Nothing is sampled while such a push travels."),
        (shares_gpus, "placement.colocated and staleness.max 0", "Learner and servers take turns there."),
        (
            tp > 1, "placement.rollout.tp above 1",
            "The push's broadcast and the server's own all-reduces could wait for each other; nobody has run it yet.",
        ),
        (bool(rollout.server_url), "rollout.server_url", "Only servers that the run starts can stage weights."),
    ):
        check(not unfit, KEY, sync.double_buffer, f"none with {setting}", reason)
    check_staging_transport(sync, working)


def check_staging_transport(sync: WeightSyncConfig, working: Collection[str]) -> None:
    """Check that the transport, unless it is auto, sends what servers can stage.

    Args:
        working: names of the transports that work where the run is.
    """
    entry = sync.transport_entry
    able = [name for name in working if TRANSPORTS[name].stages]
    others = f"Others: {' or '.join(able)}." if able else (
        "The others do not work where learner ranks and servers share GPUs: set placement.colocated: false, with a GPU "
        "for each."
    )
    check(
        sync.double_buffer == "none" or entry is None or entry.stages, KEY, sync.double_buffer,
        f"none with weight_sync.transport {sync.transport}",
        f"Weights that do not travel through a network are loaded within the pause. {others}",
    )
