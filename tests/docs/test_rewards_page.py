"""The pages on rewards, judges and code: each of their examples runs as it stands there."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from rollout_server.question import Question
from rollout_server.rewards.scoring import Scoring, Verdict, open_rewards
from tests.kit.configs import changed
from tests.kit.documents import DOCUMENTS, blocks
from tests.kit.judges import FakeJudge, verdicts
from tests.kit.rewards import told
from tests.kit.sandbox import needs_bubblewrap

PAGE = DOCUMENTS["docs/how-to/rewards.md"]
FUNCTION, SEVERAL, REWARD_MODEL = blocks(PAGE, "yaml")
JUDGE, JUDGE_OF_THE_RUN, RANKING = blocks(DOCUMENTS["docs/how-to/judge.md"], "yaml")
(PROGRAMS,) = blocks(DOCUMENTS["docs/how-to/code-rewards.md"], "yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's my_rewards.py, from which a run is started."""
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks(PAGE, "python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another folder
    return tmp_path


def load(folder: Path, example: str) -> Config:
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": {"path": "x"}, **yaml.safe_load(example)}))
    return load_config(folder / "run.yaml", [f"run.dir={folder}"])


def scored(config: Config, ground_truth: Any, *answers: str) -> list[Verdict]:
    async def score() -> list[Verdict]:
        scoring = Scoring(config, open_rewards(config, None))  # type: ignore[arg-type]
        try:
            return await scoring.score(Question(messages=(), ground_truth=ground_truth), list(map(told, answers)))
        finally:
            await scoring.aclose()

    return asyncio.run(score())


def test_the_function_of_the_page_scores(folder: Path) -> None:
    assert [each.reward for each in scored(load(folder, FUNCTION), "4", "It is 4", "It is 5")] == [1, 0]


def test_the_rewards_of_the_page_are_summed_and_named(folder: Path) -> None:
    first, second, third = scored(load(folder, SEVERAL), "4", "#### 4", "x" * 301, "")
    assert first == Verdict(reward=1.2, values={"gsm8k": 1, "short": 1, "gold": 0.5, "gold/letters": 6})
    assert second.reward == 0 and second.values["short"] == 0
    assert third == Verdict(reward=0.2, values={"gsm8k": 0, "short": 1})  # gold is only logged, and gave no verdict


@pytest.mark.parametrize(("name", "rewards"), [("RANK", [-1, -0.0]), ("FEW_TURNS", [-0.0, -0.0])])
def test_the_rewards_of_groups_and_episodes_score(folder: Path, name: str, rewards: list[float]) -> None:
    config = load(folder, f"task: {{path: x.jsonl, reward: 'my_rewards:{name}'}}")
    assert [each.reward for each in scored(config, "4", "long", "ok")] == rewards


def test_the_judge_of_the_page_scores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    fake = FakeJudge(lambda body: 'Well. {"reason": "short", "score": 2}')

    async def ask() -> list[Verdict]:
        async with fake.serve() as url:
            return await verdicts(changed(load(folder, JUDGE), judge={"urls": (url,), "path": ""}), "{answer}")

    (found,) = asyncio.run(ask())
    assert found.reward == 0.25 and fake.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("example", [REWARD_MODEL, JUDGE_OF_THE_RUN, RANKING])
def test_the_other_examples_of_the_pages_are_valid(example: str, folder: Path) -> None:
    load(folder, example)


@pytest.mark.processes
@needs_bubblewrap
def test_programs_are_scored_as_the_page_says(folder: Path) -> None:
    tests = json.dumps({"fn_name": "double", "inputs": ["1", "2"], "outputs": ["2", "4"]})
    (right, half) = scored(
        load(folder, PROGRAMS), tests, "```python\ndef double(x): return 2 * x\n```",
        "```python\ndef double(x): return 2\n```",
    )  # fmt: skip
    assert (right.reward, half.reward) == (1, 0.5)
    assert right.values == {
        "code": 1, "code/passed": 1, "code/late": 0, "code/no_code": 0, "code/cheatable": 0,
    }
