"""An exported checkpoint, loaded with transformers, gives the logprobs of the trained policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import write_training_state
from learner.models.export import export
from tests.kit.learner.exported import TOKENS, train_and_export
from tests.kit.models import save_tiny_model
from tests.kit.runs import make_checkpoint, training_state

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.mark.parametrize("rank", [0, 2])
def test_an_export_gives_the_logprobs_of_the_policy_that_was_saved(rank: int, tmp_path: Path, one_rank: None) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    logprobs = train_and_export(tmp_path / "model", tmp_path, rank)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        own = lm(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    assert own.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist() == pytest.approx(logprobs, rel=1e-5)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert any(not torch.equal(p, start.get_parameter(name)) for name, p in lm.named_parameters())
    tokenizer, before = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("out", "model"))
    assert tokenizer.get_vocab() == before.get_vocab()
    assert tokenizer.chat_template == before.chat_template
    assert lm.generation_config.eos_token_id == start.generation_config.eos_token_id


def test_an_export_without_weights_that_the_checkpoint_holds_is_refused(tmp_path: Path, one_rank: None) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    train_and_export(tmp_path / "model", tmp_path, rank=0)
    config = tmp_path / "runs" / "run" / "config.yaml"
    config.write_text(config.read_text().replace("frozen: []", "frozen: [model.embed_tokens.*]"))
    with pytest.raises(ConfigError, match=r"1 trained weights .*embed_tokens"):
        export(tmp_path / "runs" / "run", tmp_path / "other")


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        export(tmp_path, tmp_path)


def test_a_target_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3)
    (tmp_path / "file").touch()
    for target in (Path("/proc/model"), tmp_path / "file" / "model"):
        with pytest.raises(ConfigError, match=str(target)):
            export(tmp_path, target)


def test_the_newest_checkpoint_is_not_exported_while_a_resume_leaves_it_open(tmp_path: Path) -> None:
    for version, name in ((5, "step_5"), (9, "step_9.lineage_0"), (10, "step_10.lineage_0")):
        checkpoint = tmp_path / "checkpoints" / name
        checkpoint.mkdir(parents=True)
        write_training_state(checkpoint, training_state(version))
    (tmp_path / ".resuming").write_text("lineage_0 5")
    with pytest.raises(ConfigError, match=r"/\.resuming .* step_10\.lineage_0"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"config\.yaml"):  # a checkpoint that is named is taken
        export(tmp_path / "checkpoints" / "step_9", tmp_path / "out")
    (tmp_path / ".resuming").unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml"):  # also one that a resume has set aside
        export(tmp_path / "checkpoints" / "step_9.lineage_0", tmp_path / "out")
