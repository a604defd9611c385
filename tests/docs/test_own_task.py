"""The configuration and the reward that README and tutorial show for one's own task work together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.cli import main
from tests.kit.assembled import run_assembled
from tests.kit.documents import DOCUMENTS, blocks
from tests.kit.models import save_tool_model

pytestmark = pytest.mark.processes
PAGES = ("README.md", "docs/tutorials/your-task-and-reward.md")
SMALL = (
    "rollout.engine=hf", "rollout.group_size=2", "rollout.max_response_tokens=8", "learner.prompts_per_step=2",
    "run.steps=2", "eval.num_prompts=2", "algorithm.filter_zero_variance=false", "weight_sync.transport=disk",
    "logging.wandb=disabled",
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_the_page_are_checked_and_train(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config,), (reward,) = blocks(DOCUMENTS[page], "yaml"), blocks(DOCUMENTS[page], "python")
    (tmp_path / "mine.yaml").write_text(config)
    (tmp_path / "my_rewards.py").write_text(reward)
    (tmp_path / "data").mkdir()
    for name, first in (("train", 0), ("test", 100)):
        lines = [json.dumps({"prompt": f"{i} + 1?", "ground_truth": str(i + 1)}) for i in range(first, first + 50)]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(lines))
    save_tool_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another folder
    settings = ["model.path=model", *SMALL]
    assert main(["train", "mine.yaml", "--dry-run", *settings]) == 0
    assert "longest sequence" in capsys.readouterr().out
    made = load_config(Path("mine.yaml"), settings)
    (made.run_dir / "logs").mkdir(parents=True)
    assert len(run_assembled(made).steps) == 2
