"""The extras of this package, `pip install 'async-rl[page]'`: packages that only some users need."""

from __future__ import annotations

from importlib.util import find_spec

from async_rl.base.errors import ConfigError

EXTRAS = {
    "page": ("bokeh", "starlette", "uvicorn"),
    "reasoning-gym": ("reasoning_gym",),
    "tensorboard": ("tensorboardX",),
}
"""The modules that each extra of pyproject.toml installs for the code of this project."""


def lacking(extra: str) -> str:
    """Return what of an extra is not installed and how to install it, as a sentence's end; "" if nothing lacks."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    return f"needs {', '.join(missing)}, not installed here. Run: pip install 'async-rl[{extra}]'" if missing else ""


def check_extra(extra: str, user: str) -> None:
    """Raise a ConfigError that begins with `user`, what can't work without the extra, if it is not installed."""
    if text := lacking(extra):
        raise ConfigError(f"{user} {text}")
