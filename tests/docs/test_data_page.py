"""The configuration on docs/how-to/data.md reads data as the page says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.base.config.loading import load_config
from learner.models.tiny_model import character_tokenizer
from rollout_server.tasks.base import open_task
from tests.kit.documents import DOCUMENTS, blocks


def test_the_configuration_on_the_page_reads_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    sizes = {"algebra": 10, "geometry-a": 5, "geometry-b": 5, "web": 40, "algebra-test": 500, "olympiad": 20}
    for name, size in sizes.items():
        rows = [{"problem": f"{name} {i}?", "gold": {"value": str(i)}, "topic": name[:3]} for i in range(size)]
        if name.startswith("geometry"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"data/{name}.parquet")
        else:
            Path(f"data/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    others = [{"question": f"physics {i}?", "answer": "1", "task": "phy"} for i in range(3)]
    Path("data/physics.jsonl").write_text("\n".join(map(json.dumps, others)))
    Path("config.yaml").write_text(blocks(DOCUMENTS["docs/how-to/data.md"], "yaml")[0])
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ enable_thinking }}"
    task = open_task(load_config("config.yaml"), tokenizer)
    assert task.num_prompts == 10 + 2 * 10 + 4 + 3
    prompts = [task.prompt(i) for i in range(task.num_prompts)]
    assert Counter(prompt.source for prompt in prompts) == {"alg": 10, "geo": 20, "web": 4, "phy": 3}
    assert all(prompt.text.startswith("Reason step by step") and prompt.text.endswith("?|False") for prompt in prompts)
    assert Counter(prompt.source for prompt in task.eval_prompts()) == {"algebra": 380, "olympiad": 20}
    assert task.cautions == []
