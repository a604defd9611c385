"""Every command takes the names of models and data sets on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.models_and_data.fetching import located, pinned
from async_rl.cli import main
from async_rl.run.before_start.dry_run import dry_run
from async_rl.tools.doctor.host import Check, examine_config
from async_rl.tools.view.token_texts import find_tokenizer
from tests.kit.hub import HubServer, open_hub
from tests.kit.models import save_tiny_model

pytestmark = pytest.mark.processes  # together they compute for long

MODEL, DATA = "Qwen/Qwen9-tiny", "some/sums"
SPLITS = [f"task.path=hf://{DATA}:train", f"task.eval_path=hf://{DATA}:test"]


def sums(*numbers: int) -> bytes:
    rows = ({"question": f"{n} + 1 =", "answer": f"#### {n + 1}"} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    with open_hub() as hub:
        hub.add_model(MODEL, tmp_path / "model")
        hub.add_dataset(DATA, {"train.jsonl": sums(*range(8)), "test.jsonl": sums(8, 9)})
        hub.use(monkeypatch, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield hub


def config_of(*overrides: str) -> Config:
    small = ["rollout.engine=hf", "rollout.max_response_tokens=8", "eval.num_prompts=2", "logging.wandb=disabled"]
    return load_config(None, [f"model.path={MODEL}", *SPLITS, *small, *overrides])


def test_a_dry_run_fetches_and_shows_the_commits(hub: HubServer) -> None:
    text = dry_run(config_of(), shows_all=True)
    assert f"path: hf://{MODEL}@{hub.models[MODEL].branches['main']}\n" in text
    assert f"eval_path: hf://{DATA}@{hub.datasets[DATA].branches['main']}:test\n" in text
    assert set(hub.downloads.values()) == {1}


def test_the_doctor_downloads_nothing_and_checks_what_is_there(hub: HubServer) -> None:
    def found(config: Config) -> list[Check]:
        return list(examine_config(config, is_driver=True))

    (check,) = found(config_of())
    assert (check.what, check.state) == ("model.path", "warn") and "not in this host's cache" in check.found
    assert not hub.downloads
    located(pinned(config_of()))
    assert [(each.what, each.state) for each in found(config_of())] == [("model.path", "ok"), ("task.path", "warn")]
    dry_run(config_of())
    checks = {each.what: each for each in found(config_of())}
    assert checks["task.eval_path"].state == checks["model and tokenizer"].state == "ok"
    task = checks["task"]
    assert task.state == "warn" and task.found.count("is read as GSM8K's own") == 2  # as what was guessed is told
    (check,) = found(config_of("model.path=Qwen/Qwen0"))
    assert (check.what, check.state) == ("hub", "broken") and "Qwen/Qwen0" in check.found


def test_the_page_of_a_run_finds_the_tokenizer_in_the_cache(hub: HubServer, tmp_path: Path) -> None:
    config = pinned(config_of())
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    assert find_tokenizer(folder, config.model.path) is None
    requests = hub.requests.copy()
    model = Path(located(config).model.path)
    fetched = hub.requests - requests
    assert find_tokenizer(folder, config.model.path) == model / "tokenizer.json"
    assert hub.requests - requests == fetched  # the page asks nobody


def test_fine_tuning_starts_from_a_model_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    steps = ["sft.steps=1", "sft.batch_size=2"]
    (tmp_path / "config.yaml").write_text(dump_config(config_of()))
    assert main(["sft", "config.yaml", f"sft.base={MODEL}@main", "model.path=runs/new", *steps]) == 0
    recorded = load_config(tmp_path / "runs" / "new" / "sft_config.yaml").sft.base
    assert recorded == f"hf://{MODEL}@{hub.models[MODEL].branches['main']}"
    assert main(["sft", "config.yaml", f"model.path=hf://{MODEL}", *steps]) == 2


def test_a_model_of_the_hub_is_evaluated(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(config_of()))
    assert main(["eval", MODEL, "config.yaml"]) == 0
    assert "eval/accuracy" in capsys.readouterr().out
    assert main(["eval", MODEL]) == 2
    assert "needs a CONFIG" in capsys.readouterr().err
