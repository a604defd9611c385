"""The command line: what it accepts, its exit codes, and no stack trace for what the user can mend."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from transformers import PreTrainedModel

from async_rl import pipeline
from async_rl.base.config import Config
from async_rl.base.errors import ProcessDiedError
from async_rl.cli import main
from async_rl.run.processes.signals import StopSignals
from benchmarks.marked_command import MarkedCommand, wait_until
from tests.kit.models import save_tiny_model

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model")},
        "task": {"name": "reasoning_gym/spell_backward", "params": {"min_word_len": 3, "max_word_len": 3}},
        "sft": {"steps": 2, "batch_size": 4},
    }))  # fmt: skip
    return file


@pytest.mark.processes
def test_the_program_ends_with_a_message_and_code_2_on_a_config_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "async_rl.cli", "train", str(tmp_path / "none.yaml")],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("async-rl: error: ") and done.stderr.count("\n") == 1
    assert f"{tmp_path}/none.yaml" in done.stderr


@pytest.mark.parametrize(
    "command", [[], ["fly"], ["train"], ["train", "c", "--fast"], ["prepare", "gsm8k", "a", "b", "c=d"]]
)
def test_a_wrong_command_line_ends_with_code_2(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "async-rl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "meant"), [("trian", "async-rl train"), ("resume", "train --resume"), ("evl", "async-rl eval")]
)
def test_a_command_that_there_is_not_is_answered_with_the_one_that_was_meant(
    command: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "config.yaml"])
    assert meant in capsys.readouterr().err


def test_staleness_is_an_option_of_train(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(pipeline, "run", lambda config, *_: seen.append(config) or {})
    assert main(["train", str(config_file), "--staleness", "3"]) == 0
    assert main(["train", "--staleness", "0", str(config_file), "staleness.max=2"]) == 0
    assert [config.staleness.max for config in seen] == [3, 0]


def test_config_and_overrides_may_stand_before_and_behind_options(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(pipeline, "run", lambda config, *_: seen.append(config) or {})
    folder = config_file.parent / "lr=1"
    folder.mkdir()
    shutil.copy(config_file, folder / "c=2.yaml")
    monkeypatch.chdir(folder)
    for file in (str(config_file), str(folder / "c=2.yaml"), "c=2.yaml"):  # a path with an equals sign is a config
        assert main(["train", file, "run.steps=7", "staleness.max=3"]) == 0
        assert main(["train", "run.steps=7", "staleness.max=3", file]) == 0
        assert main(["train", "run.steps=7", file, "staleness.max=3"]) == 0
    assert [(config.run.steps, config.staleness.max) for config in seen] == [(7, 3)] * 9


def test_a_leading_tilde_in_an_argument_is_the_home_directory(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(config_file.parent))
    monkeypatch.setattr("async_rl.run.before_start.dry_run.dry_run", lambda config, *_: "read")
    assert main(["train", "~/config.yaml", "--dry-run"]) == 0
    assert main(["train", "--resume", "~/run"]) == 2
    assert main(["status", "~/run"]) == 2
    assert main(["keys", "new", "~/keys"]) == 0
    output = capsys.readouterr()
    assert "~" not in output.out + output.err and f"{config_file.parent}/keys" in output.out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ProcessDiedError("learner/0 died"), 1, "async-rl: error: learner/0 died"),
        (KeyboardInterrupt(), 130, "async-rl: interrupted"),
    ],
)
def test_the_end_of_a_run_has_its_exit_code(
    error: BaseException, code: int, message: str,
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run(config: Config, signals: StopSignals, beside: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "run", run)
    assert main(["train", str(config_file)]) == code
    assert capsys.readouterr().err.startswith(message)


def test_a_bug_keeps_its_stack_trace(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "run", lambda config, signals, beside: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(config_file)])


@pytest.mark.processes  # it computes for long
def test_sft_makes_a_model_that_a_dry_run_accepts_and_may_make_it_again(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_file), "--dry-run"]) == 2
    assert "async-rl sft CONFIG" in capsys.readouterr().err
    assert main(["sft", str(config_file)]) == 0
    assert "sft step 2/2" in capsys.readouterr().out
    assert main(["train", str(config_file), "--dry-run"]) == 0
    assert "episodes per step" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert main(["sft", str(config_file)]) == 0


@pytest.mark.nightly
def test_sft_that_is_ended_leaves_no_half_model_and_can_be_run_again(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], start: Callable[..., MarkedCommand]
) -> None:
    command = start("sft", str(config_file), "sft.steps=100000")
    wait_until(lambda: "sft step 20/" in command.text(), 120, "a report of sft")
    command.process.terminate()
    command.wait(30)
    assert main(["train", str(config_file), "--dry-run"]) == 2
    assert "async-rl sft" in capsys.readouterr().err
    assert main(["sft", str(config_file)]) == 0
    assert main(["train", str(config_file), "--dry-run"]) == 0


def test_sft_learns_the_episodes_of_an_oracle(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guess = "rollout_server.episodes.environments.guess"
    oracle, env = f"sft.oracle={guess}:oracle", f"task={{env: {guess}:Guess, size: 6}}"
    assert main(["sft", str(config_file), env, oracle]) == 0
    said = capsys.readouterr().out
    assert said.startswith("6 episodes") and "sft step 2/2" in said


def test_sft_does_not_overwrite_a_model_that_it_did_not_make(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("precious")
    assert main(["sft", str(config_file)]) == 2
    assert f"model.path {tmp_path}/model" in capsys.readouterr().err
    assert (tmp_path / "model" / "model.safetensors").read_text() == "precious"


def test_sft_to_a_folder_that_it_can_not_write_ends_with_a_sentence(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert main(["sft", str(config_file), f"model.path={tmp_path}/file/model"]) == 2
    assert f"{tmp_path}/file/model " in capsys.readouterr().err

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    assert main(["sft", str(config_file)]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_sft_from_a_truncated_base_names_the_file(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "base", seed=0)
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["sft", str(config_file), f"sft.base={tmp_path}/base"]) == 2
    assert str(weights) in capsys.readouterr().err


def test_prepare_converts_the_original_gsm8k_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text('{"question": "1 + 1?", "answer": "It is two.\\n#### 2"}\n')
    assert main(["prepare", "gsm8k", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"1 rows written to {target}\n"
    assert target.is_file()
