"""The pages on rewards, judges and code: each of their examples runs as it stands there."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForSequenceClassification

from async_rl.base.config import Config, JudgePlacement
from async_rl.base.config.loading import load_config
from learner.loop.ranks import Ranks
from learner.models.reward_model import RewardModel
from rollout_server.question import Question
from rollout_server.rewards.base import open_rewards
from rollout_server.rewards.scoring import Scoring, Verdict
from tests.kit.configs import changed
from tests.kit.documents import DOCUMENTS, blocks
from tests.kit.judges import FakeJudge, verdicts
from tests.kit.learner.batches import make_batch
from tests.kit.models import save_bare_reward_model
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


def judged(config: Config, reply: str, *answers: str) -> tuple[list[Verdict], FakeJudge]:
    """The verdicts of a judge that replies so, with its address in place of the page's."""

    async def ask() -> tuple[list[Verdict], FakeJudge]:
        fake = FakeJudge(lambda body: reply)
        async with fake.serve() as url:
            return await verdicts(changed(config, judge={"urls": (url,), "path": ""}), *answers), fake

    return asyncio.run(ask())


def test_the_judge_of_the_page_scores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    found, fake = judged(load(folder, JUDGE), 'Well. {"reason": "short", "score": 2}', "{answer}")
    assert found[0].reward == 0.25 and fake.headers[0]["Authorization"] == "Bearer secret"
    assert fake.prompts[0].startswith('Is this a helpful answer to "2 + 2?"? Answer: {answer}\nReply with JSON: {"re')


def test_the_judge_of_the_page_on_servers_of_the_run_compares(folder: Path) -> None:
    config = load(folder, JUDGE_OF_THE_RUN)
    assert config.judge_names == ("judge/0",)
    alone = changed(config, placement={"judge": JudgePlacement()}, judge={"path": "", "urls": ("http://h/v1",)})
    found, fake = judged(alone, '{"better": "A"}', "x", "y")
    assert [each.reward for each in found] == [0.5, 0.5] and len(fake.asked) == 2


def test_the_judge_of_the_page_ranks_a_group(folder: Path) -> None:
    found, fake = judged(load(folder, RANKING), '{"ranking": [1, 3, 2]}', "x", "y", "z")
    # in the other order the same numbers name z, x and y: x is 1st and 2nd, y 3rd twice, z 2nd and 1st
    assert [each.reward for each in found] == [0.75, 0.0, 0.75] and len(fake.asked) == 2


def test_the_reward_model_of_the_page_scores_in_the_place_of_the_rule(folder: Path, one_rank: None) -> None:
    config = load(folder, REWARD_MODEL)
    assert config.task.reward == "gsm8k"
    path = save_bare_reward_model(folder / config.reward_model.path)
    batch = make_batch()
    ranks = Ranks(init_device_mesh("cpu", (1,)))
    scored = RewardModel(config, torch.device("cpu"), torch.float32, ranks).score(batch)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    group, found = batch.groups[0], scored.groups[0].rows[0]
    row = torch.tensor([[*group.prompt_tokens.tolist(), *found.tokens.tolist()]])
    model.config.pad_token_id = None  # then it reads the last token of a single sequence
    assert found.reward == pytest.approx(model(row).logits.item(), rel=1e-5)


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
