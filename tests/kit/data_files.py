"""Files of prompts, and the tasks that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from async_rl.base.config import Config, TaskConfig
from learner.models.tiny_model import character_tokenizer
from rollout_server.tasks.base import Task, open_task
from tests.kit.configs import make_config

TOKENIZER = character_tokenizer()


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON lines, or as Parquet if the name ends so, and return the path."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def sums(name: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{i}?", "answer": str(i)} for i in range(count)]


def opened(path: Any, *, eval_path: Any = "", eval_size: int = 0, seed: int = 0, **task: Any) -> Task:
    settings = TaskConfig(path=path, eval_path=eval_path, **({"reward": "math:gcd"} | task))
    config: Config = make_config(task=settings, eval={"num_prompts": eval_size}, run={"seed": seed})
    return open_task(config, TOKENIZER)
