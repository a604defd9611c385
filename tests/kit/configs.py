"""One builder of configurations, and the sizes that the tests of a part share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.resolve import resolve
from async_rl.pipeline import open_run_dir


def make_config(model: Path | str = "none", /, **sections: Any) -> Config:
    """A run on the task chain_sum at staleness.max 0, all other defaults but for what a test names.

    Args:
        model: its folder; most tests read none.
        sections: a dict has some settings of a section; a section of its own class is taken whole.
    """
    small = {"model": {"path": model}, "task": {"name": "reasoning_gym/chain_sum"}, "staleness": {"max": 0}}
    return Config(**{name: _plain(section) for name, section in _over(small, sections).items()})


def changed(config: Config, **sections: Any) -> Config:
    """The configuration with other settings: `changed(config, run={"seed": 1})`."""
    return replace(config, **{
        name: replace(getattr(config, name), **_plain(given)) if isinstance(given, dict) else given
        for name, given in sections.items()
    })


@contextmanager
def opened_run(config: Config) -> Iterator[Config]:
    """The settings of a run, whose directory is open within the block."""
    with open_run_dir(config, {}) as decided:
        yield resolve(config, decided)


def buffer_config(max_staleness: int = 0, prompts_per_step: int = 4, workers: int = 1, **sections: Any) -> Config:
    """Sizes and limits that the groups of `make_group` keep, which have equal rewards."""
    small = {
        "task": {"max_prompt_tokens": 16}, "rollout": {"group_size": 2, "max_response_tokens": 32},
        "staleness": {"max": max_staleness}, "algorithm": {"filter_zero_variance": False},
        "buffer": {"journal": False}, "learner": {"prompts_per_step": prompts_per_step},
        "placement": {"rollout": {"servers": workers}},
        "timeouts": {"buffer_s": 5.0, "batch_s": 20.0, "shutdown_s": 5.0},
    }
    return make_config(**_over(small, sections))


def learner_config(model: Path | str = "none", /, **sections: Any) -> Config:
    """Sizes and limits that the batches of `make_batch` keep. Runs are written beside the model."""
    small = {
        "task": {"max_prompt_tokens": 12}, "rollout": {"group_size": 4, "max_response_tokens": 9},
        "buffer": {"journal": False}, "staleness": {"max": 2}, "run": {"steps": 2, "dir": Path(model).parent / "runs"},
        "learner": {"prompts_per_step": 3, "lr": 1e-3, "max_tokens_per_microbatch": 4096},
    }  # fmt: skip
    return make_config(model, **_over(small, sections))


def worker_config(model: Path | str = "none", /, **sections: Any) -> Config:
    """Small groups of short answers to questions that `EchoEngine` knows, and limits that end a test that hangs."""
    small = {
        "task": {"name": "reasoning_gym/spell_backward", "size": 50, "max_prompt_tokens": 64, "max_failures": 5},
        "rollout": {"engine": "hf", "group_size": 3, "max_response_tokens": 8}, "staleness": {"max": 0},
        "algorithm": {"filter_zero_variance": False}, "buffer": {"journal": False}, "run": {"steps": 100},
        "learner": {"prompts_per_step": 4}, "eval": {"num_prompts": 6, "samples_per_prompt": 2},
        "timeouts": {"generate_s": 20, "reward_s": 5, "buffer_s": 5, "batch_s": 20, "shutdown_s": 5},
    }
    return make_config(model, **_over(small, sections))


def server_config(engine: str, model: Path, **rollout: Any) -> Config:
    """Prompts and replies together fit the tiny models' positions exactly."""
    return make_config(
        model, task={"name": "reasoning_gym/spell_backward", "max_prompt_tokens": 512},
        rollout={"engine": engine, "max_response_tokens": 512, "max_groups_in_flight": 32, **rollout},
        learner={"prompts_per_step": 32},
    )


def with_keys(config: Config, folder: Path) -> Config:
    """The config with new keys in `folder`, as the servers of a run have them."""
    from buffer.keys import new_keys

    new_keys(folder)
    return changed(config, network={"keys": folder})


def _over(small: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """The sections, with the settings of `small` that they leave open."""
    return {**small, **{
        name: {**small.get(name, {}), **given} if isinstance(given, dict) else given for name, given in sections.items()
    }}


def _plain(section: Any) -> Any:
    """A dict of settings with its folders as text; other sections as they are."""
    if not isinstance(section, dict):
        return section
    return {name: str(value) if isinstance(value, Path) else value for name, value in section.items()}
