from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.base.models_and_data.model_folder import weight_files
from async_rl.base.weights.checkpoint_names import write_weights
from tests.kit.models import save_tiny_model


def test_weights_beyond_the_limit_are_split_into_shards_in_order(tmp_path: Path) -> None:
    tensors = [(name, torch.ones(size)) for name, size in zip("abcdef", (2, 3, 4, 1, 9, 1), strict=True)]
    assert write_weights(iter(tensors), tmp_path, torch.float32, 20) == 80
    assert [sorted(load_file(file)) for file in weight_files(tmp_path)] == [["a", "b"], ["c", "d"], ["e"], ["f"]]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 80}


def test_transformers_loads_the_shards_of_a_model(tmp_path: Path) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for file in weight_files(tmp_path / "model"):
        file.unlink()
    write_weights(model.named_parameters(), tmp_path / "model", torch.float32, 100_000)
    assert len(weight_files(tmp_path / "model")) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_at_most_one_shard_of_gathered_tensors_is_in_memory(tmp_path: Path) -> None:
    alive: set[int] = set()
    most = 0

    def gather() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for number in range(20):
            data = np.full(4, number, np.float32)
            alive.add(number)
            weakref.finalize(data, alive.discard, number)  # with the last tensor in it
            tensor = torch.from_numpy(data)
            del data
            most = max(most, len(alive))
            yield f"w{number}", tensor
            del tensor

    write_weights(gather(), tmp_path, torch.float32, 4 * 16)
    assert 4 <= most <= 4 + 1  # and the tensor that did not fit
    assert len(weight_files(tmp_path)) == 5
