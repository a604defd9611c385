"""Checks of a configuration against the files that it names and against this host.

`async-rl train` makes these checks before it starts anything and ends at the first failure; so does `async-rl doctor`.
If Ray may place the run on other hosts, checks of this host alone are left out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.resolve import engine_of, resolve
from async_rl.base.errors import ConfigError, RewardError
from async_rl.base.models_and_data import model_folder
from async_rl.base.models_and_data.experts import recorded_experts
from async_rl.base.models_and_data.hub_names import DATA_KEYS, LEARNER_MODELS, MODEL_KEYS, hub_repo, is_data, names_in
from async_rl.base.network import check_ports, interface_of
from async_rl.base.run_dir.free_space import check_disk
from async_rl.base.seams.engines import ENGINES
from async_rl.base.seams.lookup import import_object
from async_rl.run.before_start.gpus import check_gpu_driver, check_memory
from async_rl.run.processes.placement import assign, decide_placement, find_hosts, gpus_here, host_demands, runs_here
from buffer.keys import check_keys

if TYPE_CHECKING:
    from rollout_server.tasks.base import Task


def task_of(config: Config) -> Callable[[], Task]:
    """Return a function that opens the task of `config` at its first call, and then returns the same one."""
    from rollout_server.tasks.base import open_task

    return cache(lambda: open_task(config, model_folder.load_tokenizer(config.model.path)))


def check_names(config: Config) -> None:
    """Check that the files and `module:name` functions in the configuration exist, before slow packages are imported.

    Raises:
        ConfigError: a file is missing, a `module:name` can't be imported, or there are not as many URLs as servers.
    """
    for key, name in names_in(config, (*MODEL_KEYS, *DATA_KEYS)):
        if is_data(key) and hub_repo(name, key) is None:
            from async_rl.base.models_and_data.row_files import files_of

            files_of(name, key)
        elif hub_repo(name, key) is None:
            model_folder.check_is_folder(key, name)
    task = config.task
    named = {"task.reward": task.reward, "task.env": task.env, "task.agent": task.agent, "task.name": task.name}
    named |= {f"task.rewards[{number}].reward": each.reward for number, each in enumerate(task.rewards)}
    named["eval.gold_reward"] = config.eval.gold_reward
    for key, name in named.items():
        if ":" in name and not (key == "task.agent" and task.agent_python):
            import_object(name, key)
    urls, placed = config.rollout.server_urls, config.placement.rollout
    check(
        not urls or placed.fewest <= len(urls) == len(set(urls)) <= placed.most, "rollout.server_urls", list(urls),
        f"empty, or another URL for each of placement.rollout.servers: {placed.servers}",
    )


def check_inputs(
    config: Config, task: Callable[[], Task] | None = None, *, is_driver: bool = True
) -> list[str]:
    """Make all checks of `config`, and return warnings about settings that work but may not be intended.

    Args:
        task: the result of `task_of`, if the caller needs the task too.
        is_driver: whether this host starts the run. On another one only that is checked which servers need.

    Raises:
        ConfigError: the first check that fails.
    """
    task = task or task_of(config)
    cautions = model_folder.check_model_folder(config.model.path, config.longest_tokens)
    for name in config.engine_entries if not config.rollout.server_url else ():
        check_model(resolve(config, engine_of(config, config.server_names[config.engines.index(name)])))
    if config.judge.path:
        check(
            not config.judge.urls, "judge.urls", list(config.judge.urls), "empty with judge.path",
            "The run fills them in.",
        )
        cautions += model_folder.check_model_folder(config.judge.path, key="judge.path")
    if is_driver:
        cautions += _check_driver(config)
    if config.task.has_turns:
        _check_episodes(config)
    task().prompt(0)  # applies the chat template
    if (batch := config.learner.prompts_per_step) > (prompts := task().num_prompts):
        cautions.append(f"learner.prompts_per_step = {batch:,}: some of the {prompts:,} prompts are twice in a batch.")
    if config.eval.suite:
        from rollout_server.tasks.suites import suite_prompts

        suite_prompts(config, task())
    return [*cautions, *task().cautions, *_check_reward(config, task())]


def _check_driver(config: Config) -> list[str]:
    """Make the checks that only the host that starts the run must pass. Returns warnings."""
    from async_rl.base.weights.servers import check_admin
    from learner.memory.sizes import checkpoint_bytes

    is_here = runs_here(config)
    for name, entry in config.engine_entries.items():
        check_admin(name, entry, verifies=config.weight_sync.verify_every > 0)
    if config.checkpoint.push_to_hub:
        from async_rl.base.models_and_data.hub import check_login

        check_login(config.checkpoint.push_to_hub)
    if config.placement.num_nodes == 1:  # else Ray knows the hosts' addresses
        interface_of(config.network.host)
    check_ports(config)
    if is_here:
        check_gpu_driver()
        tp, gpus = config.placement.rollout.tp, gpus_here()
        check(
            tp == 1 or gpus > 0 or bool(config.rollout.server_url), "placement.rollout.tp", tp,
            "1 on a host without GPUs", "On the CPU a server starts one rank.",
        )
        wanted = host_demands(config, gpus)
        assign(wanted, find_hosts(config))
        decide_placement(config, [part for demand in wanted for part in demand.per_gpu()])
        if config.network.keys:
            check_keys(config.network.keys)
    # Another host may have packages for attention that this one lacks; every model has eager attention.
    attention = config.model.attn_implementation if is_here else "eager"
    for key, path in names_in(config, LEARNER_MODELS):
        check_loading(key, path, config, attention)
    check_disk(config, checkpoint_bytes(config))
    cautions = check_memory(config) if is_here else []
    if is_here and config.placement.colocated and not gpus_here():
        cautions.append("placement.colocated = true: this host has no GPUs that learner and servers could share.")
    if (chosen := model_folder.policy_lr(config)) >= 100 * (usual := model_folder.auto_lr(config)):
        cautions.append(
            f"learner.lr = {chosen:g} is {chosen / usual:.0f} times as much as auto takes for this model, {usual:g}: "
            "at such rates a policy usually collapses."
        )
    if config.rollout.sampling.narrows and not config.records_support:
        cautions.append(
            "algorithm.support = ignore: rollout.top_p, top_k or min_p leave tokens out of the sampling, while "
            "logprobs are those of all tokens. Importance ratios are biased once the policy has moved. replay is exact."
        )
    return cautions


def check_loading(key: str, path: str, config: Config, attention: str) -> None:
    """Load the model in `path`, the value of `key`, without its weights, and check that the learner can use it."""
    from async_rl.base.models_and_data.model_loading import check_reads_rows, load_without_weights
    from async_rl.base.weights.checkpoint_names import check_names as check_weight_names

    model_folder.check_role_folder(key, path)
    if key in ("model.path", "reference.path"):
        model_folder.check_trainable(path, key)
    model = load_without_weights(key, path, attention)
    if config.learner.sequence_parallel > 1 and (key != "reward_model.path" or hasattr(model, "score")):
        from learner.models.sequence import check_splittable

        check_splittable(model, key, path)
    if key == "model.path":
        return check_weight_names(model, model_folder.weight_shapes(Path(path)), path)
    if key == "reward_model.path":
        from learner.models.reward_model import RewardRows

        if RewardRows(config.model.path, path).reads_text:  # in tokens of its own
            return
    check_reads_rows(model, key, path, config)


def check_model(config: Config) -> None:
    """Raise ConfigError if the engine rollout.engine can't serve the model in model.path."""
    if reason := config.rollout.engine_entry.why_model_refused(config):
        raise ConfigError(f"rollout.engine {config.rollout.engine} can't serve {config.model.path}: {reason}")
    if recorded_experts(config) and not config.rollout.engine_entry.records_routing:
        others = ", ".join(name for name, entry in ENGINES.items() if entry.records_routing)
        raise ConfigError(
            f"rollout.routing must be ignore with rollout.engine {config.rollout.engine} and the mixture of experts "
            f"{config.model.path}: the engine does not say which experts it has used. These do: {others}"
        )


def _check_episodes(config: Config) -> None:
    """Check the environment, agent or tools, and that the model's chat template can be extended turn by turn."""
    from rollout_server.episodes.multi_turn import MultiTurnPlayer

    generate: Any = None  # a check generates nothing
    server_url = "http://127.0.0.1:1"  # only the format of tool calls is chosen; nothing is sent
    tokenizer = model_folder.load_tokenizer(config.model.path)
    MultiTurnPlayer(config, tokenizer, generate, server_url, Path(os.devnull))


def _check_reward(config: Config, task: Task) -> list[str]:
    """Open the rewards and the gold reward, and try the user's own ones. Returns warnings about programs.

    A user's function is called with the first prompt and its right answer, unless it may wait for a network
    (`async def`, `open`), or scores episodes or groups.
    """
    from rollout_server.rewards.contract import RewardThreads, read_verdict
    from rollout_server.rewards.scoring import is_async, open_gold_reward, open_rewards

    rewards, gold = open_rewards(config, task), open_gold_reward(config, task)
    names = [*(each.reward for each in config.task.named_rewards[: len(rewards)]), config.eval.gold_reward]
    question = task.prompt(0).question
    for name, each in zip(names, (*rewards, *gold), strict=False):
        function = each.reward.function
        if ":" not in name or function is None or each.reward.of != "answer" or is_async(function):
            continue
        settings = {} if each.settings is None else {"settings": each.settings}
        call = partial(function, question, question.solution or str(question.ground_truth), **settings)
        threads = RewardThreads(each.timeout_s, 1, each.limit)
        try:
            read_verdict(*asyncio.run(threads.run([call])))
        except RewardError as error:
            raise ConfigError(f"the reward {name} fails for the right answer to the first prompt: {error}") from error
        finally:
            threads.close()
    if config.task.sandbox.kind != "none":
        return []
    return [f"task.sandbox: the reward {each.name}: {each.about}." for each in (*rewards, *gold) if each.about]
