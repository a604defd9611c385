"""Checks of settings in different sections, which are valid by themselves and do not work together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from async_rl.config.check import check
from async_rl.seams import ENGINES, TRANSPORTS, EngineEntry

if TYPE_CHECKING:
    from async_rl.config import Config


def check_cross_section(config: Config) -> None:
    """
    Raises:
        SettingsError: two settings do not work together; gives the reason and the alternative.
    """
    _check_sizes(config)
    _check_algorithm(config)
    _check_slots(config)
    _check_replay(config)
    _check_mask(config)
    _check_best(config)
    _check_engine(config)
    _check_transport(config)
    _check_overlap(config)
    if config.staleness.mode == "exact":
        _check_exact(config)


def _check_sizes(config: Config) -> None:
    ranks, parts = config.placement.learner.ranks, config.algorithm.minibatches
    check(
        config.learner.sharding == "full" or config.placement.learner.nodes > 1, "learner.sharding",
        config.learner.sharding, "full with placement.learner.nodes 1", "On one node there is nothing to copy.",
    )
    check(
        config.rollouts_per_step >= parts * ranks, "algorithm.minibatches", parts,
        f"at most {config.rollouts_per_step} rollouts per step / {ranks} learner ranks",
    )
    check(
        not config.algorithm.advantage_entry.compares_group or config.rollout.group_size >= 2, "rollout.group_size",
        config.rollout.group_size, f"at least 2 with algorithm.advantage {config.algorithm.advantage}",
        "Or set algorithm.advantage: gae.",
    )
    check(
        config.learner.max_tokens_per_microbatch >= config.longest_tokens, "learner.max_tokens_per_microbatch",
        config.learner.max_tokens_per_microbatch,
        f"at least task.max_prompt_tokens + rollout.max_response_tokens = {config.longest_tokens}",
    )


def _check_algorithm(config: Config) -> None:
    needs_baseline = config.algorithm.advantage_entry.needs_greedy_baseline
    check(
        not (needs_baseline and config.reward_model.path), "reward_model.path", config.reward_model.path,
        f"empty with algorithm.advantage {config.algorithm.advantage}",
        "Its greedy answers are scored in the worker, on another scale. Use rloo or grpo.",
    )
    check(
        config.reference.path == "" or config.algorithm.kl.kind != "none", "reference.path", config.reference.path,
        "empty with algorithm.kl.kind none", "Nothing would use it. Set algorithm.kl.kind: k2_loss, say.",
    )


def _check_slots(config: Config) -> None:
    """Groups of all batches between two pushes must fit: buffer/staleness.py proves that this is enough."""
    every_steps, prompts = config.weight_sync.every_steps, config.learner.prompts_per_step
    fresh, needed = config.fresh_per_step, every_steps * prompts
    largest_every = config.max_slots // prompts
    check(
        config.max_slots >= needed, "(staleness.max + 1) * ceil(buffer.fresh_fraction * learner.prompts_per_step)",
        config.max_slots, f"at least weight_sync.every_steps * learner.prompts_per_step = {needed}",
        f"Otherwise the learner waits for ever. Set staleness.max >= {-(-needed // fresh) - 1}"
        + (f" or weight_sync.every_steps <= {largest_every}." if largest_every else "."),
    )


def _check_replay(config: Config) -> None:
    uses, fraction = config.buffer.max_uses, config.buffer.fresh_fraction
    check(
        uses == 1 or fraction < 1, "buffer.fresh_fraction", fraction, f"below 1 with buffer.max_uses {uses}",
        f"No batch would have room for a used group. Set it to {1 / uses:g} or more, or buffer.max_uses: 1.",
    )
    check(
        fraction * uses >= 1, "buffer.fresh_fraction", fraction, f"at least 1 / buffer.max_uses = {1 / uses:g}",
        "No more of a batch than the rest can be used groups in the long run.",
    )
    check(
        uses == 1 or config.staleness.max >= 1, "buffer.max_uses", uses, "1 with staleness.max 0",
        "A used group is at least one version old. Set staleness.max >= 1.",
    )


def _check_mask(config: Config) -> None:
    check(
        config.staleness.late != "mask" or config.weight_sync.on_update != "drain", "staleness.late",
        config.staleness.late, "wait or drop with weight_sync.on_update drain",
        "All tokens of a drained answer are of one version: none is too old alone. "
        "Or set weight_sync.on_update: in_place, retract or abort.",
    )


def _check_best(config: Config) -> None:
    """The best checkpoint is known only where checkpoints are measured."""
    metric = config.checkpoint.best_metric
    if not config.checkpoint.keep_best or not metric.startswith("eval/"):  # what a step measures is known only then
        return
    evals, every = config.eval.every_steps, config.checkpoint.every_steps
    needed = "with checkpoint.keep_best"
    check(
        metric in config.eval.metrics, "checkpoint.best_metric", metric,
        f"one of {', '.join(config.eval.metrics)} with eval.samples {config.eval.samples}",
        "Or one that steps measure, such as reward/mean.",
    )
    measured = f"{metric} is measured on held-out prompts."
    check(config.eval.size > 0, "eval.size", config.eval.size, f"above 0 {needed}", measured)
    check(
        not config.task.path or bool(config.task.eval_path), "task.eval_path", config.task.eval_path,
        f"the held-out file {needed} and task.path", measured,
    )
    check(
        evals > 0 and every % evals == 0, "checkpoint.every_steps", every,
        f"a multiple of eval.every_steps = {evals} {needed}",
        f"So that {metric} is measured at each checkpoint's version.",
    )


def _check_engine(config: Config) -> None:
    """An engine is asked only for what it declares."""
    rollout, sync, entry = config.rollout, config.weight_sync, config.rollout.engine_entry
    servers, tp = config.placement.rollout.servers, config.placement.rollout.tp
    with_engine = f"with rollout.engine {rollout.engine}"
    check(
        sync.on_update in entry.update_policies, "weight_sync.on_update", sync.on_update,
        f"{_either(entry.update_policies)} {with_engine}", _engines_with(lambda e: sync.on_update in e.update_policies),
    )
    check(
        not sync.background or entry.updates_in_background, "weight_sync.background", True, f"false {with_engine}",
        "This engine loads what it receives into the weights it samples from, so it must stand still from the first "
        f"bucket on. {_engines_with(lambda e: e.updates_in_background)}",
    )
    check(
        tp <= entry.max_tensor_parallel or entry.max_tensor_parallel == 0, "placement.rollout.tp", tp,
        f"{'at most ' if entry.max_tensor_parallel > 1 else ''}{entry.max_tensor_parallel} {with_engine}",
        "It can't split a model over more devices. Raise placement.rollout.servers for more.",
    )
    check(
        not rollout.server_url or entry.attaches_to_url, "rollout.server_url", rollout.server_url,
        f"empty {with_engine}", f"It can't take over a server. {_engines_with(lambda e: e.attaches_to_url)}",
    )
    check(
        not rollout.server_url or servers == 1, "rollout.server_url", rollout.server_url,
        f"empty with placement.rollout.servers {servers}", "The URL is of one server.",
    )


def _engines_with(can: Callable[[EngineEntry], bool]) -> str:
    """The hint that names the engines that can do what another can't."""
    names = [name for name, entry in ENGINES.items() if can(entry)]
    return f"Or set rollout.engine: {_either(names)}." if names else ""


def _either(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _check_transport(config: Config) -> None:
    """cuda_ipc maps memory between processes on one device of one host, and the receiver reads a pickle for it."""
    placement, name, entry = config.placement, config.weight_sync.transport, config.weight_sync.transport_entry
    if entry is None:
        return
    engine = config.rollout.engine_entry
    carried = [other for other, each in TRANSPORTS.items() if each.delivers in engine.receives]
    check(
        entry.delivers in engine.receives, "weight_sync.transport", name,
        f"{_either(['auto', *carried])} with rollout.engine {config.rollout.engine}",
        _engines_with(lambda other: entry.delivers in other.receives),
    )
    anywhere = [other for other in carried if not TRANSPORTS[other].needs_one_device]
    one_device = placement.num_nodes == 1 and placement.learner.gpus_per_node <= 1 and placement.rollout.tp == 1
    check(
        not entry.needs_one_device or (one_device and config.network.is_on_loopback), "weight_sync.transport", name,
        f"{_either(['auto', *anywhere])} but for one server on one GPU of one host, with network.host on loopback",
        "Or set weight_sync.transport: auto.",
    )


def _check_overlap(config: Config) -> None:
    """With SGLang's overlap schedule a token is on its way when a pause in place comes, and gets a wrong version."""
    flag = {name.replace("_", "-"): value for name, value in config.rollout.server_args.items()}
    check(
        flag.get("disable-overlap-schedule", True) is True or config.weight_sync.on_update != "in_place",
        "rollout.server_args", config.rollout.server_args,
        "without disable-overlap-schedule, or with true, for weight_sync.on_update in_place",
        "Else tokens are tagged with versions that did not sample them. Or set weight_sync.on_update: retract.",
    )


def _check_exact(config: Config) -> None:
    """A batch comes whole from one version, so a push waits for its groups and nothing else decides what is in it."""
    needed = "with staleness.mode exact"
    bounded = "Or set staleness.mode: bounded."
    check(
        config.staleness.late == "wait", "staleness.late", config.staleness.late, f"wait {needed}",
        f"A push waits for the groups of a batch, so none is ever late. {bounded}",
    )
    check(
        config.weight_sync.on_update == "drain", "weight_sync.on_update", config.weight_sync.on_update,
        f"drain {needed}", f"An answer that spans two versions has no exact staleness. {bounded}",
    )
    check(
        config.weight_sync.every_steps == 1, "weight_sync.every_steps", config.weight_sync.every_steps,
        f"1 {needed}", f"Every version trains a batch of its own. {bounded}",
    )
    check(
        config.buffer.max_uses == 1, "buffer.max_uses", config.buffer.max_uses, f"1 {needed}",
        f"A group used again is older. {bounded}",
    )
