"""A reward model of `async-rl reward-model` on an SGLang server, against transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from learner.models.reward_model import RewardRow
from learner.stages.reward_training import Comparison, RewardData, train_reward_model
from rollout_server.engines.http_admin import HttpAdmin
from rollout_server.engines.sglang.launch import server_flags, sglang_process
from tests.kit.configs import make_config, server_config
from tests.kit.models import save_tiny_model


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_sglang_gives_the_outputs_of_transformers(tmp_path: Path) -> None:
    """Without a bias in the file SGLang would add one at random, of up to 0.1 for this model."""
    save_tiny_model("tiny-qwen2", tmp_path / "base", seed=0)
    rows = [[10, 11, 3, 12, 2], [10, 11, 3, 13, 14, 15, 2], [20, 3, 2], [21, 3, 30, 31]]
    read = [RewardRow(row) for row in rows]
    data = RewardData([Comparison(read[:2], [(0, 1, 0.0)]), Comparison(read[2:], [(0, 1, 0.0)])], [], read[:1])
    training = make_config(tmp_path / "base", reward_training={"lr": 1e-3, "epochs": 4})
    list(train_reward_model(training, data, tmp_path / "rm"))
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    expected = [lm(torch.tensor([row])).logits.item() for row in rows]

    config = server_config("sglang", tmp_path / "rm")
    model: Any = AutoConfig.from_pretrained(tmp_path / "rm")
    flags = server_flags(config, model, on_gpu=False, free_memory_bytes=4 * 2**30, seed=0) | {"is-embedding": True}
    server = sglang_process("reward model", flags, tmp_path / "server.log", config)

    async def ask() -> Any:
        await server.start()
        try:
            return await asyncio.to_thread(
                HttpAdmin(config, server.url).ask, "POST", "/classify", {"input_ids": rows}
            )
        finally:
            await server.aclose()

    found = [each["embedding"] for each in asyncio.run(ask())]
    assert [len(each) for each in found] == [1] * 4
    assert [each[0] for each in found] == pytest.approx(expected, abs=1e-4)
