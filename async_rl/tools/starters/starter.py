"""`async-rl init`: writes a configuration with its reward into a folder, as the start of a user's project.

No other command loads this module.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from async_rl.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """An example: its files, and the commands that run it."""

    files: Mapping[str, tuple[str, str]]
    """For each file, by its name in the user's folder: (the package that contains it, its path there)."""
    commands: tuple[str, ...]
    """The commands to run next, in this order."""

    def write(self, folder: Path) -> list[Path]:
        """Write the files into the folder. Returns their paths.

        Raises:
            ConfigError: one of them exists already, and none was written; or the folder can't be written.
        """
        targets = {name: folder / name for name in self.files}
        if existing := [str(target) for target in targets.values() if target.exists() or target.is_symlink()]:
            raise ConfigError(
                f"async-rl init overwrites nothing, and there is {', '.join(existing)} already: "
                "run it in another folder, or move that away"
            )
        written: list[Path] = []
        try:
            for name, (package, path) in self.files.items():
                with files(package).joinpath(path).open("rb") as source, targets[name].open("xb") as target:
                    written.append(targets[name])
                    shutil.copyfileobj(source, target)
        except OSError as error:
            for file in written:
                file.unlink()
            raise ConfigError(f"{folder} can't be written: {error.strerror}. Run async-rl init elsewhere") from None
        return list(targets.values())


_HERE = "async_rl.tools.starters"
STARTERS = {
    "quickstart": Starter(
        files={
            "quickstart.yaml": (_HERE, "quickstart/quickstart.yaml"),
            "spelling.py": (_HERE, "quickstart/spelling.py"),
            "words.jsonl": (_HERE, "quickstart/words.jsonl"),
            "held_out_words.jsonl": (_HERE, "quickstart/held_out_words.jsonl"),
        },
        commands=("async-rl sft quickstart.yaml", "async-rl train quickstart.yaml"),
    ),
    "agent": Starter(
        files={
            "agent.yaml": (_HERE, "agent/agent.yaml"),
            "chain.py": ("rollout_server.episodes.environments", "chain.py"),
        },
        commands=("async-rl sft agent.yaml", "async-rl train agent.yaml"),
    ),
    "math": Starter(
        files={"gsm8k.yaml": (_HERE, "math/gsm8k.yaml"), "answers.py": (_HERE, "math/answers.py")},
        commands=("async-rl doctor gsm8k.yaml", "async-rl train gsm8k.yaml"),
    ),
}
"""The examples, by the name given to `async-rl init`."""
