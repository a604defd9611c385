"""Checks of settings in different sections that are each valid but do not work together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from async_rl.base.config.check import check, either
from async_rl.base.config.data import EvalConfig, TaskConfig
from async_rl.base.config.learning import check_average
from async_rl.base.config.resolve import engine_of, resolve
from async_rl.base.config.system import CheckpointConfig
from async_rl.base.config.watch import check_watch
from async_rl.base.seams import ADVANTAGES, ENGINES, EngineEntry, working_transports

if TYPE_CHECKING:
    from async_rl.base.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """Computes how many slots a staleness depth has, and the fewest slots with which a run works.

    buffer/staleness.py derives the formulas. B, F and E there are the first three fields.
    """

    prompts_per_step: int
    fresh_per_step: int
    every_steps: int
    max_uses: int

    @property
    def between_pushes(self) -> int:
        """The number of groups that the learner trains on between two pushes: E B."""
        return self.every_steps * self.prompts_per_step

    @property
    def fewest(self) -> int:
        """The fewest slots with which the learner never waits forever: E B.

        If groups are used several times, it is at least 2 F: while one batch is trained on, fresh groups start for the
        next.
        """
        return max(self.between_pushes, 2 * self.fresh_per_step * (self.max_uses > 1))

    @property
    def smallest_depth(self) -> float:
        """The smallest staleness depth, in steps of 0.25, that has at least `fewest` slots."""
        return max(0.0, (4 * (self.fewest - 1) // self.fresh_per_step - 3) / 4)

    def at(self, depth: float) -> int:
        """Return the number of slots (groups that may be in progress) at a staleness depth: (depth + 1) F, rounded up.
        """
        return math.ceil((depth + 1) * self.fresh_per_step)

    def is_enough(self, depth: float) -> bool:
        """Return whether a staleness depth has at least `fewest` slots."""
        return self.at(depth) >= self.fewest


def check_slots(depth: float | Literal["max"], slots: int, limits: SlotLimits) -> None:
    """Check that there are slots for all batches between two pushes. Otherwise the learner would wait for ever.

    Args:
        depth: staleness.depth.
        slots: the number of slots at that depth.
    """
    needed, largest_every = limits.between_pushes, slots // limits.prompts_per_step
    limit = "staleness.max" if isinstance(depth, str) else "staleness.depth"
    check(
        slots >= needed, f"({limit} + 1) * ceil(buffer.fresh_fraction * learner.prompts_per_step)",
        slots, f"at least weight_sync.every_steps * learner.prompts_per_step = {needed}",
        f"Otherwise the learner waits for ever. Set {limit} >= {-(-needed // limits.fresh_per_step) - 1}"
        + (f" or weight_sync.every_steps <= {largest_every}." if largest_every else "."),
    )


def check_eval_path(task: TaskConfig, evaluation: EvalConfig, user: str, reason: str) -> None:
    """Check that a run whose prompts come from files has held-out prompts too. Other tasks generate theirs.

    Args:
        user: the setting that needs held-out prompts.
        reason: one or more sentences on why it needs them, to end the message.
    """
    check(
        not task.path or bool(task.eval_path or evaluation.suite), "task.eval_path", task.eval_path,
        f"the held-out file with {user} and task.path", reason,
    )


def check_best(checkpoint: CheckpointConfig, evaluation: EvalConfig, task: TaskConfig, pushes: int) -> None:
    """Check that checkpoint.keep_best, if set, has an evaluation of each checkpoint's version to choose by.

    Args:
        pushes: weight_sync.every_steps; only versions that are pushed are evaluated.
    """
    if not checkpoint.keep_best:
        return
    size, evals, every = evaluation.num_prompts, evaluation.every_steps, checkpoint.every_steps
    user, by = "checkpoint.keep_best", f"eval/{checkpoint.best_by}"
    measured = f"It chooses by {by}, measured on held-out prompts."
    check(size > 0, "eval.num_prompts", size, f"above 0 with {user}", measured)
    check_eval_path(task, evaluation, user, measured)
    check(
        evals > 0 and every % evals == 0, "checkpoint.every_steps", every,
        f"a multiple of eval.every_steps = {evals} with {user}",
        f"Else {by} is not measured at each checkpoint's version.",
    )
    check(
        every % pushes == 0, "checkpoint.every_steps", every,
        f"a multiple of weight_sync.every_steps = {pushes} with {user}", "Only versions that are pushed are evaluated.",
    )


def check_suite(evaluation: EvalConfig, task: TaskConfig) -> None:
    """Check that eval.suite, if it is set, has no other held-out prompts or rewards, and a threshold for its rules."""
    names = [each.name for each in evaluation.suite]
    for other, key, hint in (
        (bool(task.eval_path), "task.eval_path", "Its prompts would be replaced. Leave one of the two empty."),
        (task.gives_rewards, "task.env or task.agent", "An environment or agent can't play its questions."),
        (bool(evaluation.gold_reward), "eval.gold_reward", "The watcher needs held-out prompts of the task."),
    ):
        check(not (names and other), "eval.suite", names, f"empty with {key}", hint)
    check(
        not names or (evaluation.is_right(1.0) and not evaluation.is_right(0.0)), "eval.correct_threshold",
        evaluation.correct_threshold, "above 0 and at most 1 with eval.suite",
        "The rules of its benchmarks give 1 to a right answer and 0 to a wrong one.",
    )


def check_gold(evaluation: EvalConfig, task: TaskConfig, *, has_rule: bool) -> None:
    """Check that eval.gold_reward, if it is set, has held-out answers to score.

    Args:
        has_rule: the task's rewards are not trained on and serve as the gold rewards already.
    """
    gold = evaluation.gold_reward
    if not gold:
        return
    check(
        evaluation.num_prompts > 0 and evaluation.every_steps > 0, "eval.gold_reward", gold,
        "empty without eval.num_prompts and eval.every_steps", "It scores the answers of evaluations beside training.",
    )
    check_eval_path(
        task, evaluation, "eval.gold_reward",
        "It scores answers to held-out prompts, and no others. Or leave eval.gold_reward empty.",
    )
    check(
        not has_rule, "eval.gold_reward", gold, "empty with reward_model.path",
        "The rewards of held-out answers are the gold rewards then: set task.reward, or reward_model.task_weight if "
        "they are trained on too.",
    )


def check_eval_servers(servers: int, evaluation: EvalConfig, task: TaskConfig, server_url: str) -> None:
    """Check that evaluation servers, if there are any, are started by the run and have evaluations to do.

    Args:
        servers: placement.eval.servers.
        server_url: the first of rollout.server_urls.
    """
    if not servers:
        return
    for unfit, key, hint in (
        (server_url, "rollout.server_urls", "The run starts no servers then. Leave it empty."),
        (evaluation.num_prompts == 0, "eval.num_prompts 0",
         "There are no held-out prompts then. Set eval.num_prompts."),
        (evaluation.every_steps == 0, "eval.every_steps 0", "Nothing is evaluated beside training. Set it."),
    ):
        check(not unfit, "placement.eval.servers", servers, f"0 with {key}", hint)
    check_eval_path(
        task, evaluation, "placement.eval.servers",
        "These servers answer held-out prompts, and nothing else. Or set placement.eval.servers: 0.",
    )


def check_cross_section(config: Config) -> None:
    """Check all combinations of settings of different sections.

    Raises:
        SettingsError: two settings do not work together. The message gives the reason and an alternative.
    """
    _check_sequence_parallel(config)
    _check_sizes(config)
    _check_algorithm(config)
    _check_interpolated(config)
    _check_episodes(config)
    check_slots(config.staleness.depth, config.slots, config.slot_limits)
    _check_replay(config)
    check_best(config.checkpoint, config.eval, config.task, config.weight_sync.every_steps)
    check_eval_servers(config.placement.eval.servers, config.eval, config.task, config.rollout.server_url)
    check_average(config.learner, config.eval, config.placement)
    _check_judge(config)
    _check_difficulty(config)
    check_watch(config.watch, config.checkpoint)
    check_suite(config.eval, config.task)
    check_gold(config.eval, config.task, has_rule=config.reward_model.leaves_task_out)
    _check_updates(config)
    if config.placement.rollout.engines:
        for name in config.engine_entries:
            server = config.server_names[config.engines.index(name)]
            resolve(config, engine_of(config, server))  # making them makes these checks for the engine
    else:
        _check_engine(config)
        working = _possible_transports(config)
        _check_transport(config, working)
        if not config.weight_sync.is_plain:
            from async_rl.base.config.weight_sync import check_push

            check_push(config, working)
    if config.staleness.mode == "exact":
        _check_exact(config)


def _check_sizes(config: Config) -> None:
    learner, shares, parts = config.learner, config.batch_shares, config.algorithm.num_minibatches
    slices = learner.sequence_parallel
    shared_by = "" if slices == 1 else f" / learner.sequence_parallel = {slices}"
    answered = "task.max_prompt_tokens + rollout.max_response_tokens"
    longest = "rollout.max_episode_tokens" if config.rollout.max_episode_tokens else answered
    check(
        learner.sharding == "full" or config.placement.learner.nodes > 1, "learner.sharding", learner.sharding,
        "full with placement.learner.nodes 1", "On one node there is nothing to copy.",
    )
    check(
        config.episodes_per_step >= shares, f"placement.learner.ranks{shared_by}", shares,
        f"at most {config.episodes_per_step}, the episodes of a step (learner.prompts_per_step * rollout.group_size)",
        "Each rank trains on at least one.",
    )
    check(
        config.episodes_per_step >= parts * shares, "algorithm.num_minibatches", parts,
        f"at most {config.episodes_per_step} episodes per step / {shares} learner ranks{shared_by}",
    )
    check(
        learner.max_tokens_per_forward >= config.longest_tokens, "learner.max_tokens_per_microbatch",
        learner.max_tokens_per_microbatch,
        f"at least {longest} = {config.longest_tokens}{shared_by}",
        "Or split the rows over several ranks with learner.sequence_parallel." if config.batch_shares > 1 else "",
    )


def _check_sequence_parallel(config: Config) -> None:
    slices, placed = config.learner.sequence_parallel, config.placement.learner
    ranks_per_node = placed.ranks // placed.nodes
    check(
        ranks_per_node % slices == 0, "learner.sequence_parallel", slices,
        f"a divisor of {ranks_per_node}, the learner ranks of a node (placement.learner)",
        "The ranks that split a row exchange its keys and values in every layer.",
    )
    check(
        slices == 1 or config.model.attn_implementation != "eager", "model.attn_implementation", "eager",
        f"sdpa, flex_attention or flash_attention_2 with learner.sequence_parallel {slices}",
    )


def _check_algorithm(config: Config) -> None:
    advantage, entry = config.algorithm.advantage, config.algorithm.advantage_entry
    size, reward_model, reference = config.rollout.group_size, config.reward_model.path, config.reference.path
    check(
        not entry.compares_group or size >= 2, "rollout.group_size", size,
        f"at least 2 with algorithm.advantage {advantage}",
        "Or set algorithm.advantage: remax or reinforce_pp; gae, too, which trains a critic.",
    )
    check(
        not (entry.needs_greedy_baseline and reward_model), "reward_model.path", reward_model,
        f"empty with algorithm.advantage {advantage}",
        "Its greedy answers, the baseline, are scored in the worker, on another scale. Use rloo or grpo.",
    )
    ptx_coef, text = config.algorithm.ptx_coef, config.task.pretrain_path
    check(
        bool(text) == (ptx_coef > 0), "task.pretrain_path", text,
        "the text to learn with algorithm.ptx_coef" if ptx_coef else "empty with algorithm.ptx_coef 0",
    )
    check(
        reference == "" or config.algorithm.kl.kind != "none", "reference.path", reference,
        "empty with algorithm.kl.kind none", "Nothing would use it. Set algorithm.kl.kind: k2_loss, say.",
    )


def _check_interpolated(config: Config) -> None:
    by_ess, is_interpolated = config.learner.lr_by_ess, config.algorithm.old_logprobs == "interpolate"
    check(
        by_ess == "off" or not is_interpolated, "learner.lr_by_ess", by_ess,
        "off with algorithm.old_logprobs interpolate",
        "Interpolated logprobs don't show how far the policy is. Or set algorithm.old_logprobs: recompute.",
    )


def _check_episodes(config: Config) -> None:
    """Check the settings for multi-turn episodes."""
    task, rollout, advantage = config.task, config.rollout, config.algorithm.advantage
    check(
        not rollout.max_episode_tokens or task.has_turns, "rollout.max_episode_tokens", rollout.max_episode_tokens,
        "0 without task.env, task.agent and task.tools", "The answer to a question is the whole episode then.",
    )
    has_questions = bool(task.path or task.name)
    check(
        not (rollout.max_episode_tokens and has_questions) or rollout.max_episode_tokens > task.max_prompt_tokens,
        "rollout.max_episode_tokens", rollout.max_episode_tokens,
        f"0, or more than task.max_prompt_tokens = {task.max_prompt_tokens}, the longest question",
        "Raise it, or lower task.max_prompt_tokens: longer questions are left out.",
    )
    check(
        not config.algorithm.advantage_entry.needs_greedy_baseline or not task.gives_rewards, "algorithm.advantage",
        advantage, "one without a greedy baseline with task.env or task.agent", "Use rloo or grpo.",
    )
    loss, of_group = config.algorithm.loss_entry, [name for name, each in ADVANTAGES.items() if each.of_group]
    check(
        not (task.env and loss.needs_row_advantage and config.algorithm.advantage_entry.of_returns),
        "algorithm.advantage", advantage, f"one of {', '.join(of_group)} with algorithm.loss {config.algorithm.loss} "
        "and task.env", "Turns have rewards of their own, so the returns of a row's tokens differ.",
    )
    check(
        not config.reward_model.path or not task.gives_rewards, "reward_model.path", config.reward_model.path,
        "empty with task.env or task.agent", "These give the rewards.",
    )
    check(
        not config.sft.oracle or task.has_turns, "sft.oracle", config.sft.oracle,
        "empty without task.env, task.agent and task.tools", "It plays episodes of several turns.",
    )


def _check_replay(config: Config) -> None:
    uses, fraction = config.buffer.max_uses, config.buffer.fresh_fraction
    check(
        uses == 1 or fraction < 1, "buffer.fresh_fraction", fraction, f"below 1 with buffer.max_uses {uses}",
        f"No batch would have room for a used group. Set {1 / uses:g} or more but below 1, or buffer.max_uses: 1.",
    )
    check(  # a third is written as 0.333333
        fraction * uses >= 1 - 1e-5, "buffer.fresh_fraction", fraction, f"at least 1 / buffer.max_uses = {1 / uses:g}",
        "In the long run, used groups can make up no more than the rest of a batch.",
    )
    check(
        uses == 1 or config.staleness.max >= 1, "buffer.max_uses", uses, "1 with staleness.max 0",
        "A used group is at least one version old. Set staleness.max >= 1.",
    )
    limits = config.slot_limits
    check(
        config.slots >= limits.fewest, "staleness.depth", config.staleness.depth,
        f"{limits.smallest_depth:g} or more with buffer.max_uses {uses}",
        "With less there are too few fresh groups to begin the next batch while this one is trained.",
    )


def _check_difficulty(config: Config) -> None:
    """Check for task.difficulty that rewards show whether a prompt is solved, and that prompts may differ by run."""
    difficulty = config.task.difficulty
    for unfit, where in (
        (config.staleness.mode == "exact", "staleness.mode exact, which compares runs on the same prompts"),
        (bool(config.reward_model.path), "reward_model.path, whose rewards the buffer does not have"),
        (config.rollout.group_size == 1, "rollout.group_size 1, where one answer does not show it"),
    ):
        got = {"solved": difficulty.solved, "unsolved": difficulty.unsolved}
        check(not (difficulty.skips and unfit), "task.difficulty", got, f"1 for both with {where}")


def _check_judge(config: Config) -> None:
    servers, path = config.placement.judge.servers, config.judge.path
    check(
        bool(servers) == bool(path), "placement.judge.servers", servers,
        "1 or more with judge.path" if path else "0 without judge.path", "They serve the model that judges.",
    )


def _check_updates(config: Config) -> None:
    """Check weight_sync.on_update against staleness.on_late, the time limits and rollout.server_args.

    With SGLang's overlap schedule and speculative decoding, tokens that are being sampled during a pause in place would
    get a wrong version.
    """
    late, on_update, server_args = config.staleness.on_late, config.weight_sync.on_update, config.rollout.server_args
    timeouts = config.timeouts
    check(
        late != "mask" or on_update != "drain", "staleness.on_late", late,
        "wait or drop with weight_sync.on_update drain",
        "All tokens of a drained answer are of one version: no single token can be too old. "
        "Or set weight_sync.on_update: in_place, retract or abort.",
    )
    check(
        on_update != "drain" or not config.task.has_turns or timeouts.batch_s >= timeouts.episode_s,
        "timeouts.batch_s", timeouts.batch_s, f"at least timeouts.episode_s = {timeouts.episode_s:g} with "
        "weight_sync.on_update drain and episodes of several turns",
        "A push waits until the episodes that run have ended. Raise it, or lower timeouts.episode_s.",
    )
    flags = {name.replace("_", "-"): value for name, value in server_args.items()}
    check(
        flags.get("disable-overlap-schedule", True) is True or on_update != "in_place"
        or "speculative-algorithm" not in flags, "rollout.server_args",
        server_args, "without disable-overlap-schedule, or with true, for weight_sync.on_update in_place with "
        "speculative-algorithm",
        "Else tokens are tagged with versions that did not sample them. Or set weight_sync.on_update: retract.",
    )


def _check_engine(config: Config) -> None:
    """Check that the engine supports each feature that the configuration uses, as its entry declares."""
    rollout, sync, entry = config.rollout, config.weight_sync, config.rollout.engine_entry
    tp, most = config.placement.rollout.tp, entry.max_tensor_parallel
    with_engine = f"with rollout.engine {rollout.engine}"
    check(
        sync.on_update in entry.update_policies, "weight_sync.on_update", sync.on_update,
        f"{either(entry.update_policies)} {with_engine}", _engines_with(lambda e: sync.on_update in e.update_policies),
    )
    check(
        not rollout.forbid_special_tokens or entry.forbids_tokens, "rollout.forbid_special_tokens", True,
        f"false {with_engine}", _engines_with(lambda e: e.forbids_tokens),
    )
    check(
        not rollout.forbid_special_tokens or config.learner.sequence_parallel == 1, "rollout.forbid_special_tokens",
        True, "false with learner.sequence_parallel above 1", "The ranks that split a head know no forbidden tokens.",
    )
    check(
        not config.records_support or entry.records_support, "algorithm.support", "replay",
        f"ignore {with_engine} and rollout.top_p, top_k or min_p",
        f"It does not say which tokens these keep. Or sample from all: top_p 1, top_k 0, min_p 0. "
        f"{_engines_with(lambda e: e.records_support)}",
    )
    check(
        not config.algorithm.loss_entry.needs_heads or config.records_support, "algorithm.loss", config.algorithm.loss,
        "another one where tokens are sampled from the whole vocabulary, or with algorithm.support ignore",
        "It reads the logprobs of all ids that a token was drawn from. Set rollout.top_k: 128, say.",
    )
    check(
        not config.algorithm.loss_entry.needs_heads or config.learner.sequence_parallel == 1, "algorithm.loss",
        config.algorithm.loss, "another one with learner.sequence_parallel above 1",
        "Ranks that split a head do not know the logprobs of all ids.",
    )
    taken = [name for name in rollout.server_args if name.replace("_", "-") in entry.sets_flags]
    check(
        not taken, "rollout.server_args", rollout.server_args, f"without {', '.join(entry.sets_flags)} {with_engine}",
        f"async-rl sets these: leave {', '.join(taken)} out.",
    )
    check(
        most == 0 or tp <= most, "placement.rollout.tp", tp, f"at most {most} {with_engine}",
        "It can't split a model over more devices. Raise placement.rollout.servers for more.",
    )
    check(
        not rollout.python or bool(entry.python), "rollout.python", rollout.python, f"empty {with_engine}",
        f"It runs in the environment of this project. {_engines_with(lambda e: bool(e.python))}",
    )
    check(
        not rollout.server_urls or entry.attaches_to_url, "rollout.server_urls", list(rollout.server_urls),
        f"empty {with_engine}", f"It can't take over a server. {_engines_with(lambda e: e.attaches_to_url)}",
    )


def _check_transport(config: Config, working: Sequence[str]) -> None:
    """Check that the engine receives what weight_sync.transport delivers, and that the placement suits the transport.
    """
    name, entry = config.weight_sync.transport, config.weight_sync.transport_entry
    if entry is None:
        return
    engine, allowed = config.rollout.engine_entry, either(["auto", *working])
    check(
        entry.delivers in engine.receives, "weight_sync.transport", name,
        f"{allowed} with rollout.engine {config.rollout.engine}",
        _engines_with(lambda other: entry.delivers in other.receives),
    )
    check(
        not entry.needs_one_device or not config.placement.rollout.is_elastic, "placement.rollout.servers",
        config.placement.rollout.servers, f"a number with weight_sync.transport {name}",
        "Each server shares its GPU with a learner rank.",
    )
    check(
        not entry.needs_one_device or _may_share_device(config), "weight_sync.transport", name,
        f"{allowed} but for servers of one GPU each on one host, which they share with a learner rank, with "
        "network.host on loopback",
        "With several GPUs set placement.colocated: true, and no more servers than learner ranks.",
    )
    check(
        not entry.needs_own_gpus or _may_have_own_gpus(config), "weight_sync.transport", name,
        f"{allowed} with placement.colocated",
        "It needs a GPU for each learner rank and each server that no other uses. Or set placement.colocated: false.",
    )


def _possible_transports(config: Config) -> list[str]:
    """Return the names of the transports that may work, as far as the settings determine the run's devices."""
    entry = config.weight_sync.transport_entry
    on_gpus = config.placement.learner.gpus_per_node > 0 or (entry is not None and "cpu" not in entry.devices)
    return working_transports(
        config.engine_entries.values(), "cuda" if on_gpus else "", one_device=_may_share_device(config),
        own_gpus=_may_have_own_gpus(config),
    )


def _may_share_device(config: Config) -> bool:
    """Whether each server may share a device with a learner rank, which then passes weights on that device."""
    placement = config.placement
    has_rank = placement.learner.gpus_per_node <= 1 or len(placement.ranks_of_servers) == placement.rollout.most
    return placement.num_nodes == 1 and placement.rollout.tp == 1 and has_rank and config.network.is_on_loopback


def _may_have_own_gpus(config: Config) -> bool:
    """Whether each learner rank and each server may have a GPU for itself."""
    return not config.placement.colocated or bool(config.rollout.server_url)


def _engines_with(can: Callable[[EngineEntry], bool]) -> str:
    """Return the hint `Or set rollout.engine: a or b.`, with the engines for which `can` is true; "" if there are none.
    """
    names = [name for name, entry in ENGINES.items() if can(entry)]
    return f"Or set rollout.engine: {either(names)}." if names else ""


def _check_exact(config: Config) -> None:
    """Check the settings that staleness.mode exact needs: on_late wait, on_update drain, every_steps 1 and max_uses 1.
    """
    late, on_update = config.staleness.on_late, config.weight_sync.on_update
    every_steps, uses = config.weight_sync.every_steps, config.buffer.max_uses
    for key, got, needed, reason in (
        ("staleness.on_late", late, "wait", "A push waits for the groups of a batch, so none is ever late."),
        ("weight_sync.on_update", on_update, "drain", "An answer that spans two versions has no exact staleness."),
        ("weight_sync.every_steps", every_steps, 1, "Every version trains a batch of its own."),
        ("buffer.max_uses", uses, 1, "A group used again is older."),
    ):
        hint = f"{reason} Or set staleness.mode: bounded."
        check(got == needed, key, got, f"{needed} with staleness.mode exact", hint)
