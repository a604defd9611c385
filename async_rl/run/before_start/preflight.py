"""Checks of a configuration against the files that it names and against this host.

`async-rl train` makes these checks before it starts anything and ends at the first failure; `async-rl doctor` shows all
results. If Ray may place the run on other hosts, checks of this host alone are left out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.resolve import engine_of, resolve
from async_rl.base.errors import ConfigError, RewardError
from async_rl.base.models_and_data.experts import experts_of, recorded_experts
from async_rl.base.models_and_data.hub_names import DATA_KEYS, MODEL_KEYS, find_data, find_model, is_data, names_in
from async_rl.base.models_and_data.model_folder import (
    ROLES,
    auto_lr,
    check_is_folder,
    check_model_folder,
    check_role_folder,
    check_trainable,
    check_unquantised,
    load_tokenizer,
    policy_lr,
    weight_shapes,
)
from async_rl.base.network import interface_of
from async_rl.base.ports import check_ports
from async_rl.base.run_dir.free_space import check_disk
from async_rl.base.seams.engines import ENGINES
from async_rl.base.seams.lookup import import_object
from async_rl.run.before_start.gpus import check_gpu_driver, check_memory
from async_rl.run.processes.placement import (
    check_sharing,
    explain,
    find_hosts,
    gpus_here,
    host_demands,
    runs_here,
)
from buffer.keys import check_keys

if TYPE_CHECKING:
    from async_rl.base.seams import EngineEntry
    from rollout_server.rewards.base import NamedReward
    from rollout_server.tasks.base import Task

MODEL, TASK = "model and tokenizer", "task"
LARGE_LR = 100
"""A learning rate so many times the usual one is questioned."""


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """A check of the configuration. `async-rl doctor` shows its result as a line."""

    what: str
    value: str
    """The value of the checked setting."""
    run: Callable[[], Sequence[str] | None]
    """Makes the check; raises ConfigError if it fails. Returns warnings about settings that work but may not be
    intended."""
    needs: tuple[str, ...] = ()
    """The names (`what`) of the checks that must succeed before this one can be made."""
    pools: tuple[str, ...] = ()
    """The pools whose hosts must pass the check, e.g. ("rollout", "eval"). (): it is made only on the driver's host."""


def task_of(config: Config) -> Callable[[], Task]:
    """Return a function that returns the task of `config`.

    Its first call opens the task, later ones return the same one.
    """
    from rollout_server.tasks.base import open_task

    return cache(lambda: open_task(config, load_tokenizer(config.model.path)))


def check_names(config: Config) -> None:
    """Check that the files and `module:name` functions in the configuration exist.

    Runs before slow packages are imported.

    Raises:
        ConfigError: a file is missing, a `module:name` can't be imported, or there are not as many URLs as servers.
    """
    for key, name in names_in(config, (*MODEL_KEYS, *DATA_KEYS)):
        if is_data(key):
            if find_data(name, key) is None:
                from async_rl.base.models_and_data.row_files import files_of

                files_of(name, key)
        elif find_model(name, key) is None:
            check_is_folder(key, name)
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


def check_inputs(config: Config, task: Callable[[], Task] | None = None) -> list[str]:
    """Make all checks of `config`, and return their warnings. Raises the ConfigError of the first check that fails.

    Args:
        task: the result of `task_of`, if the caller needs the task too.
    """
    return [caution for each in input_checks(config, task) for caution in each.run() or ()]


def input_checks(config: Config, task: Callable[[], Task] | None = None) -> list[PreflightCheck]:
    """Return all checks that apply to `config`. Each check comes after those that it `needs`."""
    model, host = config.model.path, config.network.host
    has_questions = bool(config.task.path or config.task.name)
    task = task or task_of(config)
    servers, policy = ("rollout", "eval"), ("rollout", "eval", "learner")
    checks: list[PreflightCheck] = []

    def add(what: str, value: str, run: Callable[[], Any], *needs: str, pools: tuple[str, ...] = ()) -> None:
        checks.append(PreflightCheck(what, value, run, needs, pools))

    add(MODEL, model, lambda: check_model_folder(model, config.longest_tokens), pools=policy)
    for name, entry in config.engine_entries.items():
        if not config.rollout.server_url:
            settings = resolve(config, engine_of(config, config.server_names[config.engines.index(name)]))
            add("rollout.engine", name, partial(check_model, settings), MODEL, pools=servers)
        verifies = config.weight_sync.verify_every > 0
        add("how the learner updates servers", name, partial(_check_admin, name, entry, verifies))
    add("learner.optimizer", config.learner.optimizer, lambda: _check_optimizer(config), pools=("learner",))
    add("learner.lr", str(config.learner.lr), lambda: _check_lr(config), MODEL)
    if pushed := config.checkpoint.push_to_hub:
        add("checkpoint.push_to_hub", pushed, lambda: _check_login(pushed))
    roles = {key: path for key in ROLES if (path := attrgetter(key)(config))}
    for key, path in roles.items():
        add(key, path, partial(check_role_folder, key, path))
    if judge := config.judge.path:
        add("judge.path", judge, lambda: _check_judge(config), pools=("judge",))
    if config.placement.num_nodes == 1:  # else Ray knows the hosts' addresses
        add("network.host", host, lambda: _check_addresses(config))
    if config.network.ports:
        add("network.ports", config.network.ports, lambda: check_ports(config))
    if runs_here(config):
        add("placement", f"{config.placement.processes_per_node} processes", lambda: _check_placement(config))
        add("weight_sync.transport", config.weight_sync.transport,
            lambda: check_sharing(config, host_demands(config, gpus_here())))
        if keys := config.network.keys:
            add("network.keys", keys, lambda: check_keys(keys))
    # Another host may have packages for attention that this one lacks; every model has eager attention.
    attention = config.model.attn_implementation if runs_here(config) else "eager"
    for key, path in {"model.path": model, **roles}.items():
        needs = (MODEL, key) if key in roles else (MODEL,)
        add(f"{key} loads", path, partial(_check_loading, key, path, config, attention), *needs)
    loads = [f"{key} loads" for key in ("model.path", *roles)]
    add("disk", f"room in {config.run.dir}", lambda: _check_disk(config), *loads)
    if runs_here(config):
        add("memory of the run", "learner, servers", lambda: check_memory(config), *loads)
    if config.rollout.sampling.narrows and not config.records_support:
        caution = (
            "algorithm.support = ignore: rollout.top_p, top_k or min_p leave tokens out of the sampling, while "
            "logprobs are those of all tokens. Importance ratios are biased once the policy has moved. replay is exact."
        )
        add("algorithm.support", "ignore", lambda: [caution])
    if config.task.has_turns:
        played = config.task.env or config.task.agent or ", ".join(config.task.tools)
        add("episodes", played, lambda: _check_episodes(config), MODEL, pools=servers)
    source = ", ".join(each.path for each in config.task.train_data) or config.task.name or config.task.env
    add(TASK, source, lambda: _check_task(task(), has_questions, config.learner.prompts_per_step), MODEL, pools=servers)
    if benchmarks := ", ".join(each.name for each in config.eval.suite):
        add("eval.suite", benchmarks, lambda: _check_suite(config, task()), TASK, pools=servers)
    add("reward", config.task.reward_names, lambda: _check_reward(config, task()), TASK, pools=servers)
    return checks


def _check_loading(key: str, path: str, config: Config, attention: str) -> None:
    """Load the model in `path`, the value of `key`, without its weights, and check that the learner can use it.

    No model may be quantised. Policy and reference must be of a kind that the learner can train. The policy must have
    the names of its weight files (else a push would miss some), and support adapters and frozen weights. The other
    models must support the policy's rows. With learner.sequence_parallel, all except reward encoders must be of a kind
    that can be split.
    """
    from async_rl.base.models_and_data.model_loading import check_reads_rows, load_without_weights

    check_unquantised(path, key)
    if key in ("model.path", "reference.path"):
        check_trainable(path, key)
    settings, slices = config.model, config.learner.sequence_parallel
    model = load_without_weights(key, path, attention)
    reads_text = key == "reward_model.path" and _reads_text(config)  # in tokens of its own
    if key != "model.path" and not reads_text:
        check_reads_rows(model, key, path, config)
    if slices > 1 and (key != "reward_model.path" or hasattr(model, "score")):
        from learner.models.sequence import check_splittable
        from learner.models.split_vocabulary import check_vocabulary

        check_splittable(model, key, path)
        placed = config.placement.learner
        copies = placed.nodes if config.learner.sharding == "hybrid" else 1
        check_vocabulary(model.get_input_embeddings().num_embeddings, placed.ranks, slices, copies)
    if key == "model.path":
        from async_rl.base.weights.checkpoint_names import check_names

        check_names(model, weight_shapes(Path(path)), path)
    if key == "model.path" and config.algorithm.router_aux_coef:
        from learner.models.balance import RouterBalance

        RouterBalance(model, experts_of(path))
    if key == "model.path" and settings.lora.rank:
        from learner.models.lora import add_adapters

        add_adapters(model, settings.lora)
    if key == "model.path" and settings.frozen:
        from learner.models.network import freeze

        freeze(model, settings.frozen)


def _reads_text(config: Config) -> bool:
    from learner.models.reward_model import RewardRows

    return RewardRows(config.model.path, config.reward_model.path).reads_text


def _check_login(name: str) -> None:
    from async_rl.base.models_and_data.hub import check_login

    check_login(name)


def _check_addresses(config: Config) -> None:
    """Check that network.host is an address of this host, and that a server at rollout.server_urls can reach it."""
    interface_of(config.network.host)
    if config.rollout.server_url:
        from async_rl.run.before_start.attached_server import check_server_reaches_learner

        check_server_reaches_learner(config)


def _check_optimizer(config: Config) -> None:
    from learner.loop.optimizer import check_optimizer

    check_optimizer(config.learner)


def _check_lr(config: Config) -> list[str]:
    """Return a warning if the policy's learning rate is at least LARGE_LR times the one that `auto` takes."""
    chosen, usual = policy_lr(config), auto_lr(config)
    if chosen < LARGE_LR * usual:
        return []
    return [
        f"learner.lr = {chosen:g} is {chosen / usual:.0f} times as much as auto takes for this model, {usual:g}: at "
        "such rates a policy usually collapses."
    ]


def _check_disk(config: Config) -> None:
    """Check the free space for an upper bound on the size of a checkpoint; if that does not fit, for its exact size."""
    from learner.memory.room import most_state_bytes

    try:
        check_disk(config, most_state_bytes(config))
    except ConfigError:
        from learner.memory.sizes import checkpoint_bytes

        check_disk(config, checkpoint_bytes(config))


def check_model(config: Config) -> None:
    """Raise ConfigError if the engine rollout.engine can't serve the model in model.path."""
    if reason := config.rollout.engine_entry.why_model_refused(config):
        raise ConfigError(f"rollout.engine {config.rollout.engine} can't serve {config.model.path}: {reason}")
    if recorded_experts(config) and not config.rollout.engine_entry.records_routing:
        others = ", ".join(name for name, entry in ENGINES.items() if entry.records_routing)
        raise ConfigError(
            f"rollout.routing must be ignore with rollout.engine {config.rollout.engine} and {config.model.path}, a "
            "mixture of experts: this engine does not say which experts it has used, so the learner's routers must "
            f"choose by themselves. Or take an engine that does: {others}"
        )


def _check_admin(name: str, entry: EngineEntry, verifies: bool) -> None:
    """Check that the ServerAdmin class of the engine `name` defines all calls that pushes need.

    Args:
        entry: the engine's entry.
        verifies: whether weight_sync.verify_every is set.
    """
    from async_rl.base.weights.server_admin import lacking_calls

    admin = entry.load_admin()
    lacking = lacking_calls(entry, admin, verifies=verifies) if isinstance(admin, type) else {"a class": "open_admin"}
    if lacking:
        calls = ", ".join(f"{call} (for {why})" for call, why in lacking.items())
        raise ConfigError(
            f"rollout.engine {name}: {admin!r} must define {calls}: the calls of ServerAdmin in "
            "async_rl/base/weights/server_admin.py. Write them, or let the engine's entry declare less"
        )


def _check_task(task: Task, has_questions: bool, prompts_per_step: int) -> list[str]:
    """Create the task's first prompt, because only that shows whether its chat template works.

    Returns the task's warnings, and one if a batch has more prompts than the task.
    """
    prompt = task.prompt(0)
    if not len(prompt.tokens) and has_questions:
        raise ConfigError(
            f"task: a prompt of {prompt.source} has no tokens: its text is {prompt.text!r}. Correct the task"
        )
    if prompts_per_step <= task.num_prompts:
        return task.cautions
    caution = (
        f"learner.prompts_per_step = {prompts_per_step} is more than the {task.num_prompts} training prompts: every "
        "batch asks some of them twice."
    )
    return [*task.cautions, caution]


def _check_suite(config: Config, task: Task) -> None:
    """Read the questions of eval.suite."""
    from rollout_server.tasks.suites import suite_prompts

    suite_prompts(config, task)


def _check_episodes(config: Config) -> None:
    """Check the environment, agent or tools, and that the model's chat template can be extended turn by turn."""
    from rollout_server.episodes.multi_turn import MultiTurnPlayer

    def generate(request: object) -> NoReturn:
        raise AssertionError("a check generates nothing")

    server_url = "http://127.0.0.1:1"  # only the format of tool calls is chosen; nothing is sent
    MultiTurnPlayer(config, load_tokenizer(config.model.path), generate, server_url, Path(os.devnull))


def _check_reward(config: Config, task: Task) -> list[str]:
    """Open the rewards and the gold reward, and try the user's own ones.

    Returns a warning for each reward that runs programs without containment.
    """
    from rollout_server.rewards.base import open_gold_reward, open_rewards

    rewards, gold = open_rewards(config, task), open_gold_reward(config, task)
    names = [*(each.reward for each in config.task.named_rewards[: len(rewards)]), config.eval.gold_reward]
    for name, each in zip(names, (*rewards, *gold), strict=False):
        if ":" in name:
            _try_reward(each, name, task)
    if config.task.sandbox.kind != "none":
        return []
    return [f"task.sandbox: the reward {each.name}: {each.about}." for each in (*rewards, *gold) if each.about]


def _try_reward(named: NamedReward, name: str, task: Task) -> None:
    """Call a user's reward function with the first prompt and its right answer, and check its result and duration.

    Rewards that may wait for a network (`async def`, `open`) and rewards of episodes or groups are not called.

    Args:
        name: the name in the configuration.
    """
    from rollout_server.rewards.base import is_async
    from rollout_server.rewards.contract import read_verdict
    from rollout_server.rewards.reward_calls import RewardThreads

    function = named.reward.function
    if function is None or named.reward.of != "answer" or is_async(function):
        return
    question = task.prompt(0).question
    settings = {} if named.settings is None else {"settings": named.settings}
    answer = question.solution or str(question.ground_truth)
    threads = RewardThreads(named.timeout_s, 1, named.limit)
    try:
        asyncio.run(threads.run([lambda: read_verdict(function(question, answer, **settings))]))
    except RewardError as error:
        raise ConfigError(f"the reward {name} fails for the right answer to the first prompt: {error}") from error
    finally:
        threads.close()


def _check_judge(config: Config) -> list[str]:
    """Check the model of the judge's servers. Returns a warning if it has no chat template."""
    judge = config.judge
    check(not judge.urls, "judge.urls", list(judge.urls), "empty with judge.path", "The run fills them in.")
    return check_model_folder(judge.path, key="judge.path")


def _check_placement(config: Config) -> list[str]:
    """Check that the processes fit on this host. Returns a warning if they can't share the GPUs that it lacks."""
    check_gpu_driver()
    learner, rollout, gpus = config.placement.learner, config.placement.rollout, gpus_here()
    wanted = learner.ranks + len(config.server_names) * rollout.tp
    check(
        rollout.tp == 1 or gpus >= wanted or bool(config.rollout.server_url), "placement.rollout.tp", rollout.tp,
        f"1 on a host with {gpus:g} GPUs, fewer than learner ranks + servers * tp = {wanted}",
        "A server wants tp whole GPUs; on the CPU it starts one rank.",
    )
    explain(config, find_hosts(config))
    if gpus or not config.placement.colocated:
        return []
    return ["placement.colocated: there is no GPU here, so learner and servers share none."]
