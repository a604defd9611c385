"""Checks of weight_sync.lora, weight_sync.delta and weight_sync.double_buffer against engines and transports."""

from __future__ import annotations

from collections.abc import Collection

from async_rl.base.config.check import check
from async_rl.base.config.data import RolloutConfig
from async_rl.base.config.learning import ModelConfig
from async_rl.base.config.system import WeightSyncConfig
from async_rl.base.seams import ENGINES, TRANSPORTS

_FLOAT32 = "In float32 a step changes nearly all values: there is nothing to save."


def check_compact(
    sync: WeightSyncConfig, rollout: RolloutConfig, model: ModelConfig, working: Collection[str]
) -> None:
    """Check that compact pushes (only adapters or changed values), if they are on, suit the other settings.

    Args:
        working: names of the transports that may work for the run.

    Raises:
        SettingsError: they do not. The message gives the reason and an alternative.
    """
    if not sync.is_compact:
        return
    check(
        sync.lora == "merged" or model.lora.rank > 0, "weight_sync.lora", sync.lora,
        "merged with model.lora.rank 0", "Without adapters every weight is trained.",
    )
    check(
        sync.lora == "merged" or not sync.delta, "weight_sync.delta", True, "false with weight_sync.lora adapter",
        "All values of adapters change in each step, and they are few.",
    )
    check(
        not sync.delta or model.dtype != "float32", "weight_sync.delta", True, "false with model.dtype float32",
        _FLOAT32,
    )
    key, got, default = _setting(sync)
    able = [name for name, entry in ENGINES.items() if entry.rebuilds_weights]
    check(
        rollout.engine_entry.rebuilds_weights, key, got, f"{default} with rollout.engine {rollout.engine}",
        f"Its servers take whole weights only. Or set rollout.engine: {' or '.join(able)}.",
    )
    quantising = [name for name in rollout.server_args if name.replace("_", "-") in rollout.engine_entry.quantises_by]
    for unfit, setting, reason in (
        (
            bool(quantising), f"{', '.join(quantising)} in rollout.server_args",
            "The weights that a server makes of parts have the type model.dtype; it can't make quantised ones of them.",
        ),
        (bool(rollout.server_url), "rollout.server_urls", "Only servers that the run starts make weights of parts."),
        (sync.double_buffer != "none", f"weight_sync.double_buffer {sync.double_buffer}",
         "Staged weights must come whole."),
    ):
        check(not unfit, key, got, f"{default} with {setting}", reason)
    check_compact_transport(sync, working)


def check_compact_transport(sync: WeightSyncConfig, working: Collection[str]) -> None:
    """Check that the transport, unless it is auto, supports compact pushes.

    Args:
        working: names of the transports that work for the run.
    """
    entry, (key, got, default) = sync.transport_entry, _setting(sync)
    able = [name for name in working if TRANSPORTS[name].carries_parcels]
    others = f" Others: {' or '.join(able)}." if able else ""
    check(
        not sync.is_compact or entry is None or entry.carries_parcels, key, got,
        f"{default} with weight_sync.transport {sync.transport}",
        f"It moves whole weights within one host or in a form of its own.{others}",
    )


def check_compact_type(sync: WeightSyncConfig, model: ModelConfig, device_type: str) -> None:
    """Check that servers compute in bfloat16 if weight_sync.delta is on. The device decides for model.dtype auto."""
    check(
        not sync.delta or model.dtype != "auto" or device_type != "cpu", "weight_sync.delta", True,
        "false with model.dtype auto on a CPU, which is float32", f"{_FLOAT32} Or set model.dtype: bfloat16.",
    )


def _setting(sync: WeightSyncConfig) -> tuple[str, object, str]:
    """Return the setting that makes pushes compact: (its key, its value, its default)."""
    if sync.delta:
        return "weight_sync.delta", True, "false"
    return "weight_sync.lora", sync.lora, "merged"


KEY = "weight_sync.double_buffer"


def check_staging(
    sync: WeightSyncConfig, rollout: RolloutConfig, shares_gpus: bool, tp: int, working: Collection[str]
) -> None:
    """Check that weight_sync.double_buffer, if it is on, is supported by engine and transport, and saves a pause.

    Args:
        shares_gpus: whether learner and servers take turns in using GPUs.
        tp: the number of GPUs of a server.
        working: names of the transports that may work for the run.

    Raises:
        SettingsError: one of these is not so. The message gives the reason and an alternative.
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
        (bool(rollout.server_url), "rollout.server_urls", "Only servers that the run starts can stage weights."),
    ):
        check(not unfit, KEY, sync.double_buffer, f"none with {setting}", reason)
    check_staging_transport(sync, working)


def check_staging_transport(sync: WeightSyncConfig, working: Collection[str]) -> None:
    """Check that the transport, unless it is auto, supports weight_sync.double_buffer.

    Args:
        working: names of the transports that work for the run.
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
