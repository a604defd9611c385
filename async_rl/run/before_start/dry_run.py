"""Shows which settings differ from the defaults and the sizes that follow from them, without starting a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config, leaves, load_config, read_yaml
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import located, pinned
from async_rl.base.models_and_data.model_folder import policy_lr
from async_rl.run.before_start.gpus import UNKNOWN_SIZE, plan_here, plan_memory
from async_rl.run.before_start.preflight import check_inputs, check_names, task_of
from async_rl.run.processes.placement import explain, find_hosts, runs_here

NO_SIZE = "the run spans other hosts; say how large their GPUs are: --gpu-gb 80"


def dry_run(
    config: Config, check: Callable[[], None] = lambda: None, gpu_gb: float = 0.0, shows_all: bool = False
) -> str:
    """Check a configuration, and return as text its changed settings and the sizes derived from them. Starts no run.

    Args:
        check: called regularly while a model is downloaded. If it raises, the download ends.
        gpu_gb: the memory of the smallest GPU, in units of 1e9 bytes, if the run uses other hosts; 0: not known.
        shows_all: the text ends with all settings. It is valid YAML, as the rest is comments.

    Raises:
        ConfigError: the run can't work, or needs more memory than GPUs of `gpu_gb` have.
    """
    check_names(config)
    shown = pinned(config)
    config = located(shown, check=check)
    task = task_of(config)
    cautions = check_inputs(config, task)
    hosts = find_hosts(config)
    if runs_here(config):
        if gpu_gb:
            raise ConfigError("--gpu-gb is for runs over several hosts: this one is on this host, which is measured")
        plan = plan_here(config)  # which check_inputs has checked
    else:
        plan = plan_memory(config, sum(host.gpus for host in hosts) or inf, round(1e9 * gpu_gb)) if gpu_gb else None
        cautions += plan.check() if plan else []
    placement, prompts = config.placement, task().num_prompts
    derived = {
        "epochs of the training prompts, at least":
            f"{config.run.steps * config.learner.prompts_per_step / prompts:.3g} of {prompts} prompts",
        "episodes per step": config.episodes_per_step,
        "groups in flight or waiting, at most": config.slots,
        "episodes at the engines, at most": min(
            config.slots, config.rollout.max_groups_in_flight * placement.rollout.most
        ) * config.rollout.group_size,
        "optimizer steps per batch": config.algorithm.steps_per_batch,
        "learning rate of the policy": f"{policy_lr(config):g}",
        "episodes per learner rank and step": config.episodes_per_step / config.batch_shares,
        "longest sequence, tokens": config.longest_tokens,
        "correction": config.correction_kind,
        "journal keeps tokens for, steps": config.journal_kept_steps if config.buffer.journal else "no journal",
    }
    if config.records_support:
        derived["supports, bytes a sampled token"] = supports_line(config)
    settings = dump_config(shown)
    sections = {
        "differs from the defaults": [
            f"{key:<46} {value}" for key, value, _ in changed_settings(read_yaml(settings)[0])
        ],
        "derived": [f"{key:<46} {value}" for key, value in derived.items()], "placement": explain(config, hosts),
        "memory": plan.table() if plan else [f"not computed: {UNKNOWN_SIZE if runs_here(config) else NO_SIZE}"],
        "caution": cautions,
    }
    parts = [f"# {title}\n" + "".join(f"# {line}\n" for line in lines) for title, lines in sections.items() if lines]
    return "\n".join([*parts, *([settings] if shows_all else [])])


_SUPPORT_BYTES = {0.8: (3.6, 21.0), 0.9: (5.1, 51.0), 0.95: (7.2, 108.0), 0.99: (16.0, 417.0)}
"""By top_p: bytes of a token's support in a message, at temperatures 0.6 and 1. Measured on 8 answers of
SmolLM2-135M with 96 tokens each, whose distributions have a mean entropy of 0.67 and 2.05 nats. A larger model is
surer and takes less."""
_ID_BYTES = 1.5
"""Bytes of an id in a small support."""


def supports_line(config: Config) -> str:
    """Return a line on the size of the tokens' supports: in messages, and in the journal of this run."""
    sampling = config.rollout.sampling
    most_ids = min(sampling.top_k or inf, 1 / sampling.min_p if sampling.min_p else inf)
    above = [sizes for top_p, sizes in _SUPPORT_BYTES.items() if top_p >= sampling.top_p]
    low, high = (min(size, 1 + _ID_BYTES * most_ids) for size in (above[0] if above else (16.0, inf)))
    steps = min(config.run.steps, config.journal_kept_steps if config.journal_kept_steps >= 0 else config.run.steps)
    tokens = steps * config.episodes_per_step * config.longest_response_tokens
    if high == inf:
        return f"about {low:.0f} (temperature 0.6) or far more (temperature 1)"
    kept = f", at most {high * tokens / 1e9:.2g} GB in the journal" if config.buffer.journal else ""
    return f"about {low:.0f} (temperature 0.6) to {high:.0f} (temperature 1){kept}"


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, value, default) for each setting that differs from the default of the configuration's preset.

    The default is `...` if there is none: the key is required, or another version of this program wrote it.
    """
    algorithm = config.get("algorithm")
    preset = algorithm.get("preset") if isinstance(algorithm, dict) else None
    fixed = ["model.path=none", "task.name=reasoning_gym/none"]
    try:
        text = dump_config(load_config(None, [*fixed, *([f"algorithm.preset={preset}"] if preset else [])]))
    except ConfigError:
        text = dump_config(load_config(None, fixed))
    defaults = leaves(read_yaml(text)[0])
    required = {"model.path", "task.name"}
    found = [(key, value, ... if key in required else defaults.get(key, ...)) for key, value in leaves(config).items()]
    is_set = [key not in required or value for key, value, _ in found]  # task.env and task.agent take no task.name
    return [each for each, counts in zip(found, is_set, strict=True) if counts and each[1] != each[2]]
