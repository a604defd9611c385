"""Checks of a configuration against the files that it names and against this host.

`async-rl train` makes these checks before it starts anything and ends at the first that fails; `async-rl doctor` shows
all results. If Ray may place the run on other hosts, checks of this host alone are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.driver.placement import check_ipc, explain, gpus_here, runs_here
from async_rl.driver.resources import host_demands
from async_rl.network import interface_of
from async_rl.storage.free_space import check_disk
from async_rl.storage.model_folder import (
    check_model_folder,
    check_role_folder,
    check_trainable,
    load_tokenizer,
    role_folders,
)

MODEL, TASK = "model and tokenizer", "task"


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """One check, which `async-rl doctor` shows as one line."""

    what: str
    value: str
    """The value of the setting in the config."""
    run: Callable[[], object]
    """Makes the check; raises ConfigError if it fails."""
    needs: str = ""
    """`what` of the check that must succeed before this one can be made; empty: there is none."""
    everywhere: bool = False
    """Whether the check must succeed on every host of a run, not only on the driver's."""


def check_inputs(config: Config) -> None:
    """Make all checks of `config`; raises the ConfigError of the first that fails."""
    for each in input_checks(config):
        each.run()


def input_checks(config: Config) -> list[PreflightCheck]:
    """Return all checks that apply to `config`; each comes after the one that it `needs`."""
    from rollout_server.rewards.base import open_reward
    from rollout_server.tasks.base import open_task

    model, reward = config.model.path, config.task.reward
    task = cache(lambda: open_task(config, load_tokenizer(model)))
    checks = [PreflightCheck(MODEL, model, lambda: check_model_folder(model, config.longest_tokens), everywhere=True)]
    adapted = config.model.lora.rank > 0
    checks.append(PreflightCheck(
        "learner", model, lambda: check_trainable(model, has_adapters=adapted), MODEL, everywhere=True
    ))
    if not config.rollout.server_url:
        engine = config.rollout.engine
        checks.append(PreflightCheck(
            "rollout.engine", engine, lambda: config.rollout.engine_entry.check_model(config), MODEL, everywhere=True
        ))
    for key, path in role_folders(config).items():
        checks.append(PreflightCheck(key, path, partial(check_role_folder, key, path)))
    checks.append(PreflightCheck("disk", f"room in {config.run.dir}", lambda: check_disk(config), everywhere=True))
    if config.placement.num_nodes == 1:  # else Ray knows the hosts' addresses
        host = config.network.host
        checks.append(PreflightCheck("network.host", host, lambda: interface_of(host)))
    if runs_here(config):
        checks += _checks_of_this_host(config)
    return [
        *checks,
        # Only making a prompt shows that a generated task's template fails or that it can't give eval.size questions.
        PreflightCheck(TASK, config.task.path or config.task.name, lambda: task().prompt(0), MODEL, everywhere=True),
        PreflightCheck(
            "reward", reward or "the task's own", lambda: open_reward(config, task()), TASK, everywhere=True
        ),
    ]


def _checks_of_this_host(config: Config) -> list[PreflightCheck]:
    from buffer.protocol.keys import check_keys

    placement, keys = config.placement, config.network.keys
    processes = f"{placement.learner.ranks} learner rank(s), {placement.rollout.servers} rollout server(s)"
    checks = [
        PreflightCheck("placement", processes, lambda: _check_placement(config)),
        PreflightCheck("weight_sync.transport", config.weight_sync.transport, lambda: _check_transport(config)),
        PreflightCheck("model.attn_implementation", config.model.attn_implementation, lambda: _check_attention(config)),
    ]
    if keys:
        checks.append(PreflightCheck("network.keys", keys, lambda: check_keys(keys)))
    if placement.pin_cpus:
        checks.append(PreflightCheck("placement.pin_cpus", "true", lambda: _check_cores(config)))
    return checks


def _check_placement(config: Config) -> None:
    learner, rollout, gpus = config.placement.learner, config.placement.rollout, gpus_here()
    wanted = learner.ranks + rollout.servers * rollout.tp
    check(
        rollout.tp == 1 or gpus >= wanted or bool(config.rollout.server_url), "placement.rollout.tp", rollout.tp,
        f"1 on a host with {gpus:g} GPUs, fewer than learner ranks + servers * tp = {wanted}",
        "A server wants tp whole GPUs; on the CPU it starts one rank.",
    )
    explain(config)


def _check_transport(config: Config) -> None:
    transport, entry, gpus = config.weight_sync.transport, config.weight_sync.transport_entry, gpus_here()
    check(
        gpus > 0 or entry is None or "cpu" in entry.devices, "weight_sync.transport", transport,
        "auto, gloo or disk on a host without GPUs",  # cuda_ipc runs there, over shared memory
    )
    check(
        gpus != 1 or entry is None or not entry.needs_own_gpus or bool(config.rollout.server_url),
        "weight_sync.transport", transport,
        "auto, cuda_ipc or disk on a host with one GPU", "NCCL refuses two ranks on one device.",
    )
    check_ipc(config, host_demands(config, gpus))


def _check_attention(config: Config) -> None:
    name = config.model.attn_implementation
    check(
        gpus_here() > 0 or name != "flash_attention_2", "model.attn_implementation", name,
        "sdpa, eager or flex_attention on a host without GPUs",
    )


def _check_cores(config: Config) -> None:
    from async_rl.driver.actors import share_of_cores

    share_of_cores(config, 0, sorted(os.sched_getaffinity(0)))
