"""The command `async-rl init`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from async_rl.starters.starter import STARTERS


def add_init(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command with `add_command` of the command line."""
    about = "write an example with its reward into this folder, to begin a project with"
    told = "; ".join(f"{name}: {starter.about}" for name, starter in STARTERS.items())
    parser = add("init", _init, about, "quickstart")
    parser.add_argument("starter", choices=STARTERS, nargs="?", default="quickstart", metavar="NAME", help=told)


def _init(args: argparse.Namespace) -> int:
    starter = STARTERS[args.starter]
    for file in starter.write(Path.cwd()):
        print(f"wrote {file.name}")
    print("next:", *starter.commands, sep="\n    ")
    return 0
