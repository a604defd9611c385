"""Checks of pushes that are not plain: weight_sync.lora, weight_sync.delta and weight_sync.double_buffer."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from async_rl.base.config.check import check
from async_rl.base.seams import ENGINES, TRANSPORTS

if TYPE_CHECKING:
    from async_rl.base.config import Config
    from async_rl.base.config.system import WeightSyncConfig

KEY = "weight_sync.double_buffer"
_FLOAT32 = "In float32 a step changes nearly all values: there is nothing to save."


def check_push(config: Config, working: Collection[str]) -> None:
    """Check that engine, transport and settings suit compact pushes (only adapters or changed values) and staging.

    Args:
        working: names of the transports that may work for the run.

    Raises:
        SettingsError: they do not. The message gives the reason and an alternative.
    """
    if config.weight_sync.double_buffer != "none":
        _check_staging(config)
    if config.weight_sync.is_compact:
        _check_compact(config)
    check_sending(config, working)


def _check_staging(config: Config) -> None:
    sync, engine = config.weight_sync, config.rollout.engine_entry
    able = [name for name, entry in ENGINES.items() if sync.double_buffer in entry.staging]
    check(
        sync.double_buffer in engine.staging, KEY, sync.double_buffer,
        f"{', '.join(('none', *engine.staging))} with rollout.engine {config.rollout.engine}",
        f"Or set rollout.engine: {' or '.join(able)}.",
    )
    for unfit, setting, reason in (
        (sync.on_update == "drain", "weight_sync.on_update drain", "Nothing is sampled while such a push travels."),
        (config.shares_gpus, "placement.colocated and staleness.max 0", "Learner and servers take turns there."),
        (
            config.placement.rollout.tp > 1, "placement.rollout.tp above 1",
            "The push's broadcast and the server's own all-reduces could wait for each other; nobody has run it yet.",
        ),
        (bool(config.rollout.server_url), "rollout.server_urls", "Only servers that the run starts can stage weights."),
    ):
        check(not unfit, KEY, sync.double_buffer, f"none with {setting}", reason)


def _check_compact(config: Config) -> None:
    sync, rollout, model = config.weight_sync, config.rollout, config.model
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
    key, got, default = _compact(sync)
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
        (sync.double_buffer != "none", f"{KEY} {sync.double_buffer}", "Staged weights must come whole."),
    ):
        check(not unfit, key, got, f"{default} with {setting}", reason)


def check_sending(config: Config, working: Collection[str], device_type: str = "") -> None:
    """Check that the transport, unless it is auto, and the servers' type of numbers suit compact pushes and staging.

    Args:
        working: names of the transports that work for the run.
        device_type: where the weights are, cpu or cuda, which decides for model.dtype auto; empty: not known.

    Raises:
        SettingsError: they do not. The message gives the reason and an alternative.
    """
    sync = config.weight_sync
    check(
        not sync.delta or config.model.dtype != "auto" or device_type != "cpu", "weight_sync.delta", True,
        "false with model.dtype auto on a CPU, which is float32", f"{_FLOAT32} Or set model.dtype: bfloat16.",
    )
    entry, with_transport = sync.transport_entry, f"with weight_sync.transport {sync.transport}"
    able = [name for name in working if TRANSPORTS[name].stages]
    others = f"Others: {' or '.join(able)}." if able else (
        "The others do not work where learner ranks and servers share GPUs: set placement.colocated: false, with a GPU "
        "for each."
    )
    check(
        sync.double_buffer == "none" or entry is None or entry.stages, KEY, sync.double_buffer,
        f"none {with_transport}",
        f"Weights that do not travel through a network are loaded within the pause. {others}",
    )
    (key, got, default), able = _compact(sync), [name for name in working if TRANSPORTS[name].carries_parcels]
    others = f" Others: {' or '.join(able)}." if able else ""
    check(
        not sync.is_compact or entry is None or entry.carries_parcels, key, got, f"{default} {with_transport}",
        f"It moves whole weights within one host or in a form of its own.{others}",
    )


def _compact(sync: WeightSyncConfig) -> tuple[str, object, str]:
    """Return the setting that makes pushes compact: (its key, its value, its default)."""
    return ("weight_sync.delta", True, "false") if sync.delta else ("weight_sync.lora", sync.lora, "merged")
