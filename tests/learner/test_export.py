"""An exported checkpoint is the trained policy: transformers loads it and gives its logprobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.checkpoints import Cut, checkpoint_folder
from async_rl.config import LoraConfig, ModelConfig, RunConfig
from async_rl.configfile import dump_config
from async_rl.errors import ConfigError
from learner.checkpoint import Checkpointer
from learner.export import export
from learner.tiny_model import save_tiny_model
from learner.update import Updater
from tests.learner.handmade import make_batch, make_config

TOKENS = [3, 7, 5, 11, 13, 4, 9]
CPU = torch.device("cpu")


@pytest.mark.parametrize("rank", [0, 2])
def test_an_export_gives_the_logprobs_of_the_policy_that_was_saved(rank: int, tmp_path: Path, one_rank: None) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    model = ModelConfig(path=str(tmp_path / "model"), lora=LoraConfig(rank=rank))
    config = make_config(tmp_path / "model", model=model, run=RunConfig(dir=str(tmp_path / "runs")))
    updater = Updater(config, CPU)
    for version in range(3):
        updater.update(make_batch(seed=version, version=version))
    checkpointer = Checkpointer(config, updater.networks, CPU)
    counts = checkpointer.counts()
    cut = Cut(version=3, lineage=0, ranks=1, networks=counts, kl_coef=0.0, consumed=[[]], buffer={})
    checkpointer.save(checkpoint_folder(config.run_dir, 3), cut)
    checkpointer.close()
    (config.run_dir / "config.yaml").write_text(dump_config(config))
    logprobs = updater.probe_logprobs(TOKENS)
    dist.destroy_process_group()  # the command has none
    try:
        assert export(config.run_dir, tmp_path / "out") == checkpoint_folder(config.run_dir, 3)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        own = lm(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    assert own.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist() == pytest.approx(logprobs, abs=1e-5)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert any(not torch.equal(p, start.get_parameter(name)) for name, p in lm.named_parameters())
    tokenizer, before = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("out", "model"))
    assert tokenizer.get_vocab() == before.get_vocab()
    assert tokenizer.chat_template == before.chat_template
    assert lm.generation_config.eos_token_id == start.generation_config.eos_token_id


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="must be a new or an empty folder"):
        export(tmp_path, tmp_path)
