"""`async-rl eval`: starts an engine, evaluates a model on the held-out prompts without a run, and stops the engine."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from async_rl.base.config import Config
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import located, pinned
from async_rl.base.models_and_data.hub_names import DATA_KEYS
from async_rl.base.models_and_data.model_folder import check_model_folder, load_tokenizer
from async_rl.base.models_and_data.model_loading import load_without_weights
from async_rl.base.telemetry.metrics import reduce_metrics, with_intervals
from buffer.keys import own_keys
from rollout_server.engines.base import open_engine
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import open_task
from rollout_server.worker.worker import ScoredPlayer

_log = logging.getLogger(__name__)


async def evaluate_model(config: Config) -> dict[str, float]:
    """Evaluate model.path on eval.num_prompts held-out prompts, with eval.samples_per_prompt answers each.

    Returns the metrics {`eval/...`: value}."""
    config = located(pinned(config, ["model.path", *DATA_KEYS]), ["model.path"])
    check_model_folder(config.model.path, config.longest_tokens)
    load_without_weights("model.path", config.model.path, config.model.attn_implementation)
    values = await _evaluate(config)
    if not values:
        raise ConfigError(
            "eval.num_prompts, and task.eval_path or eval.suite, must give held-out prompts, got "
            f"{config.eval.num_prompts} and {config.task.eval_path!r}"
        )
    return values


async def _evaluate(config: Config) -> dict[str, float]:
    tokenizer = load_tokenizer(config.model.path)
    task = open_task(config, tokenizer)
    rewards = open_rewards(config, task)
    with tempfile.TemporaryDirectory(prefix="async-rl-eval-") as name, own_keys(config, Path(name) / "keys") as keys:
        config = resolve(config, keys)
        engine = open_engine(config, 0, Path(name))
        try:
            await engine.start()
            logs = config.run_dir / "logs"
            has_run = logs.is_dir()  # a new folder would take the name of a run that is still to be started
            player = ScoredPlayer(config, 0, engine, task, rewards, tokenizer, logs=logs if has_run else Path(name))
            try:
                return with_intervals(reduce_metrics((await player.evaluate(0, beside_training=False)).metrics))
            finally:
                for note in player.drain_notes():
                    _log.warning("%s", note)
                await player.aclose()
        finally:
            await engine.aclose()
