"""Asynchronous RL post-training of language models with bounded staleness.

docs/how-to/python.md has programs that use these names.

Each name is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.api import Callback, TrainedStep, TrainingRun, evaluate, train
    from async_rl.base.config import Config
    from async_rl.base.config.loading import load_config
    from async_rl.base.errors import AsyncRLError, ConfigError

    __version__: str

__all__ = [
    "AsyncRLError", "Callback", "Config", "ConfigError", "TrainedStep", "TrainingRun", "__version__", "evaluate",
    "load_config", "train",
]

_MODULES = {
    "AsyncRLError": "async_rl.base.errors", "Callback": "async_rl.api", "Config": "async_rl.base.config",
    "ConfigError": "async_rl.base.errors", "TrainedStep": "async_rl.api", "TrainingRun": "async_rl.api",
    "evaluate": "async_rl.api", "load_config": "async_rl.base.config.loading", "train": "async_rl.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("async-rl")
        except PackageNotFoundError:  # the repository is on PYTHONPATH and was not installed
            return "unknown"
    if name not in _MODULES:
        raise AttributeError(f"module 'async_rl' has no attribute {name!r}")
    from importlib import import_module

    from async_rl.base.seams.lookup import check_module_names

    check_module_names()
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
