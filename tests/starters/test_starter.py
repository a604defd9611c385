"""`async-rl init`: what it writes can be run, and it overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from async_rl.base.config.loading import load_config
from async_rl.base.seams import import_object
from async_rl.cli import main
from async_rl.tools.starters.quickstart.spelling import letters_in_place
from async_rl.tools.starters.starter import STARTERS
from rollout_server.question import Question
from rollout_server.tasks.base import open_task
from tests.kit.documents import ROOT
from tests.kit.engines.fakes import TOKENIZER


def question(answer: str) -> Question:
    return Question(messages=({"role": "user", "content": "?"},), ground_truth=answer)


@pytest.mark.parametrize("name", STARTERS)
def test_an_example_is_written_with_its_reward_and_names_what_to_run_next(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 0
    assert {file.name for file in tmp_path.iterdir()} == set(STARTERS[name].files)
    (config_file,) = tmp_path.glob("*.yaml")
    assert f"    async-rl train {config_file.name}" in capsys.readouterr().out.splitlines()
    task = load_config(config_file).task
    module = (task.reward or task.env).partition(":")[0]
    assert (tmp_path / f"{module}.py").is_file()
    assert callable(import_object(task.reward or task.env, "task.reward"))


def test_nothing_is_overwritten_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spelling.py").write_text("mine")
    assert main(["init"]) == 2
    assert f"{tmp_path}/spelling.py" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("spelling.py", "mine")]


def test_the_quickstarts_data_can_be_read_and_its_sets_are_disjoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "quickstart"]) == 0
    task = open_task(load_config("quickstart.yaml"), TOKENIZER)
    train = [task.prompt(index).question for index in range(task.num_prompts)]
    held_out = [prompt.question for prompt in task.eval_prompts()]
    assert (len(train), len(held_out)) == (1000, 256)
    assert not {each.ground_truth for each in train} & {each.ground_truth for each in held_out}
    assert all(each.messages[0]["content"].split()[-1][::-1] == each.ground_truth for each in (*train, *held_out))


def test_the_spelling_reward_grows_with_each_letter_in_its_place() -> None:
    rewards = [letters_in_place(question("abcde"), text) for text in ("", "xbxxx", "abcdx", "abcdefghij", " abcde")]
    assert rewards == pytest.approx([0, 0.1, 0.4, 0.25, 1])


@pytest.mark.parametrize(
    ("response", "reward"), [("so it is 1,234.", 1), ("12 and 1234.0", 1), ("1234 or 7", 0), ("none", 0)]
)
def test_the_reward_of_the_math_example_reads_the_last_number(response: str, reward: float) -> None:
    from async_rl.tools.starters.math.answers import last_number

    assert last_number(question("1234"), response) == reward


def test_the_agent_example_has_the_settings_of_the_shipped_one() -> None:
    starter = yaml.safe_load((ROOT / "async_rl" / "tools" / "starters" / "agent" / "agent.yaml").read_text())
    shipped = yaml.safe_load((ROOT / "configs" / "agent_cpu.yaml").read_text())
    shipped["task"]["env"], shipped["sft"]["oracle"] = "chain:Chain", "chain:oracle"
    shipped["rollout"]["engine"] = "hf"
    assert starter == shipped
