"""The checks that what is measured on held-out prompts, and what answers them, has some."""

from __future__ import annotations

from async_rl.base.config.check import check
from async_rl.base.config.data import EvalConfig, TaskConfig
from async_rl.base.config.outputs import CheckpointConfig


def check_eval_path(task: TaskConfig, user: str, reason: str) -> None:
    """Check that a run with prompts from files has held-out ones. Other tasks make their own.

    Args:
        user: the setting that needs them.
        reason: one or more sentences that say what for, to end the message.
    """
    check(
        not task.path or bool(task.eval_path), "task.eval_path", task.eval_path,
        f"the held-out file with {user} and task.path", reason,
    )


def check_best(checkpoint: CheckpointConfig, evaluation: EvalConfig, task: TaskConfig) -> None:
    """Check, if checkpoint.keep_best is set, that held-out prompts are answered at the version of each checkpoint."""
    if not checkpoint.keep_best:
        return
    size, evals, every = evaluation.num_prompts, evaluation.every_steps, checkpoint.every_steps
    user, by = "checkpoint.keep_best", f"eval/{checkpoint.best_by}"
    measured = f"It chooses by {by}, measured on held-out prompts."
    check(size > 0, "eval.num_prompts", size, f"above 0 with {user}", measured)
    check_eval_path(task, user, measured)
    check(
        evals > 0 and every % evals == 0, "checkpoint.every_steps", every,
        f"a multiple of eval.every_steps = {evals} with {user}",
        f"Else {by} is not measured at each checkpoint's version.",
    )


def check_gold(evaluation: EvalConfig, task: TaskConfig, *, has_rule: bool) -> None:
    """Check that eval.gold_reward, if it is set, has held-out answers to score.

    Args:
        has_rule: whether the rewards of the task, which are not trained on, are the gold ones.
    """
    gold = evaluation.gold_reward
    if not gold:
        return
    check(
        evaluation.num_prompts > 0 and evaluation.every_steps > 0, "eval.gold_reward", gold,
        "empty without eval.num_prompts and eval.every_steps", "It scores the answers of evaluations beside training.",
    )
    check_eval_path(
        task, "eval.gold_reward",
        "It scores answers to held-out prompts, and no others. Or leave eval.gold_reward empty.",
    )
    check(
        not has_rule, "eval.gold_reward", gold, "empty with reward_model.path",
        "The rewards of held-out answers are the gold rewards then: set task.reward, or reward_model.task_weight if "
        "they are trained on too.",
    )


def check_eval_servers(servers: int, evaluation: EvalConfig, task: TaskConfig, server_url: str) -> None:
    """Check that evaluation servers, if there are any, are ones that the run starts and that have evaluations to make.

    Args:
        servers: their number, placement.eval.servers.
        server_url: the value of rollout.server_url.
    """
    if not servers:
        return
    for unfit, key, hint in (
        (server_url, "rollout.server_url", "The URL names the run's only server. Leave it empty."),
        (evaluation.num_prompts == 0, "eval.num_prompts 0",
         "There are no held-out prompts then. Set eval.num_prompts."),
        (evaluation.every_steps == 0, "eval.every_steps 0", "Nothing is evaluated beside training. Set it."),
    ):
        check(not unfit, "placement.eval.servers", servers, f"0 with {key}", hint)
    check_eval_path(
        task, "placement.eval.servers",
        "These servers answer held-out prompts, and nothing else. Or set placement.eval.servers: 0.",
    )
