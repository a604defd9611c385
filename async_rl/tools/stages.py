"""The commands of the stages before RL.

    async-rl sft            makes model.path from sft.base
    async-rl reward-model   makes reward_model.path from reward_training.base
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from async_rl.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from async_rl.base.config import Config
    from async_rl.base.messages.reports import StepDone
    from learner.stages.reward_training import RewardData

_MOST_DEMONSTRATIONS = 256
"""The most demonstrations whose mean reward is shifted to 0."""


def make_sft_model(config: Config) -> Path:
    """Fine-tune sft.base on the task's demonstrations. Returns the folder of the result, model.path."""
    from async_rl.base.config.loading import dump_config
    from async_rl.base.models_and_data.fetching import located, pinned
    from async_rl.base.models_and_data.hub_names import DATA_KEYS
    from async_rl.base.models_and_data.model_folder import SFT
    from async_rl.base.models_and_data.model_writing import check_target, written_whole

    config = pinned(config, ["sft.base", *DATA_KEYS])
    target = check_target("model.path", config.model.path, SFT)
    from learner.stages.sft import Demonstration, answer_demonstration, base_tokenizer, train_sft

    recorded, config = config, located(config, ["sft.base"])
    tokenizer = base_tokenizer(config)
    count = config.sft.steps * config.sft.batch_size
    if config.sft.oracle:
        from rollout_server.episodes.demonstrations import Demonstrator, summary_of

        demonstrator = Demonstrator(config, tokenizer)
    else:
        from rollout_server.tasks.base import open_task

        task = open_task(config, tokenizer)
    with written_whole(target) as folder:
        (folder / SFT.marker).write_text(dump_config(recorded))
        if config.sft.oracle:
            episodes = demonstrator.play(count)
            print(summary_of(episodes), flush=True)
            rows = [row for episode in episodes for row in episode.rows]
            examples = [Demonstration(row.tokens.tolist(), row.mask.tolist()) for row in rows]
        else:
            pairs = task.sft_pairs(min(task.num_prompts, count))
            examples = [answer_demonstration(prompt.tokens.tolist(), answer) for prompt, answer in pairs]
        _show(train_sft(config, examples, folder), f"sft step {{}}/{config.sft.steps}")
    return target


def make_reward_model(config: Config) -> Path:
    """Train a reward model on reward_training.path. Returns the folder of the result, reward_model.path."""
    from async_rl.base.config.loading import dump_config
    from async_rl.base.models_and_data.fetching import located, pinned
    from async_rl.base.models_and_data.hub_names import COMPARISON_KEYS, DATA_KEYS
    from async_rl.base.models_and_data.model_folder import REWARD_MODEL
    from async_rl.base.models_and_data.model_writing import check_target, written_whole

    models = ("model.path", "reward_training.base")
    if not config.reward_model.path:
        raise ConfigError("reward_model.path must be the folder for the result of async-rl reward-model, got none")
    if not config.reward_training.path:
        raise ConfigError("reward_training.path must be a file of comparisons for async-rl reward-model, got none")
    config = pinned(config, [*models, *DATA_KEYS, *COMPARISON_KEYS])
    target = check_target("reward_model.path", config.reward_model.path, REWARD_MODEL)
    from learner.stages.reward_training import train_reward_model

    recorded, config = config, located(config, models)
    with written_whole(target) as folder:
        (folder / REWARD_MODEL.marker).write_text(dump_config(recorded))
        _show(train_reward_model(config, reward_data(config), folder), "reward-model step {}")
    return target


def reward_data(config: Config) -> RewardData:
    """Read the data of the reward training: the comparisons, and with zero_at demonstrations the demonstrations."""
    from async_rl.base.models_and_data.model_folder import check_model_folder, load_tokenizer
    from learner.models.reward_model import RewardRows
    from learner.stages.reward_training import Comparison, RewardData
    from rollout_server.tasks.base import open_task
    from rollout_server.tasks.comparisons import ComparedAnswers, read_comparisons, split_by_prompt

    training, path = config.reward_training, config.model.path
    check_model_folder(path)
    tokenizer, rows = load_tokenizer(path), RewardRows(path, training.base or path)
    found = read_comparisons(config, training.path, "reward_training.path", tokenizer)
    print(f"{training.path}: {found.summary}", flush=True)
    if training.eval_path:
        held_out = read_comparisons(config, training.eval_path, "reward_training.eval_path", tokenizer)
        print(f"{training.eval_path}: {held_out.summary}", flush=True)
        train, test = found.comparisons, held_out.comparisons
    else:
        train, test = split_by_prompt(found.comparisons, training.held_out, config.run.seed)

    def as_rows(compared: Iterable[ComparedAnswers]) -> list[Comparison]:
        return [Comparison([rows.row(*answer) for answer in each.answers], each.pairs) for each in compared]

    compared = as_rows(train)
    zero = [row for each in compared for row in each.rows] if training.zero_at == "comparisons" else []
    if training.zero_at == "demonstrations":
        task = open_task(config, tokenizer)
        try:
            pairs = task.sft_pairs(min(task.num_prompts, _MOST_DEMONSTRATIONS))
        except ConfigError as error:
            allowed = "reward_training.zero_at must be comparisons or none with a task without demonstrations"
            raise ConfigError(f"{allowed}: {error}") from None
        zero = [rows.row(prompt.messages, prompt.tokens.tolist(), answer) for prompt, answer in pairs]
    return RewardData(compared, as_rows(test), zero)


def _show(reports: Iterable[StepDone], head: str) -> None:
    """Print a line for each report.

    Args:
        head: a format for the beginning of the line, with a placeholder for the step.
    """
    for report in reports:
        values = "  ".join(f"{metric.key} {metric.value:.4g}" for metric in report.metrics)
        print(f"{head.format(report.version)}  {values}", flush=True)
