"""An unusable model folder is refused before anything starts, with what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import check_model_folder, check_trainable, end_tokens, load_tokenizer
from async_rl.base.models_and_data.model_writing import written_whole


def edit_json(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        content.update(changes)
        (folder / name).write_text(json.dumps(content))

    return edit


def remove(*names: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return edit


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def test_a_good_folder_passes_and_its_tokenizer_loads(tiny_model: Path) -> None:
    check_model_folder(tiny_model, longest_tokens=1024)
    tokenizer = load_tokenizer(tiny_model)
    assert tokenizer.decode(tokenizer.encode("ab c", add_special_tokens=False)) == "ab c"


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (remove("config.json"), "config.json"),
        (write("config.json", "{"), "config.json"),
        (edit_json("config.json", architectures=["BertForMaskedLM"]), "got BertForMaskedLM"),
        (edit_json("config.json", max_position_embeddings=None), "max_position_embeddings"),  # of a Qwen2
        (remove("model.safetensors"), "*.safetensors"),
        (write("model.safetensors.index.json", '{"weight_map": {"w": "part-2.safetensors"}}'), "part-2.safetensors"),
        (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
        (write("tokenizer.json", "{}"), "tokenizer"),
        (edit_json("config.json", vocab_size=50), "vocab_size is 50"),
        (edit_json("tokenizer_config.json", eos_token=None), "end-of-text"),
    ],
)
def test_a_broken_folder_is_refused_with_the_reason(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None], part: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    with pytest.raises(ConfigError, match=re.escape(part)):
        check_model_folder(folder)


def test_sequences_longer_than_the_models_positions_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"at most 1024.* got 1025"):
        check_model_folder(tiny_model, longest_tokens=1025)


def test_the_end_tokens_are_collected_from_all_files(tiny_model: Path, tmp_path: Path) -> None:
    assert end_tokens(tiny_model) == [2]  # <eos> of the character tokenizer
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    edit_json("generation_config.json", eos_token_id=[5, 3])(folder)
    assert end_tokens(folder) == [2, 3, 5]
    (folder / "generation_config.json").unlink()
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "eos_token_id": 9}}
    (folder / "config.json").write_text(json.dumps(nested))
    assert end_tokens(folder) == [2, 9]


def test_a_model_that_fine_tuning_has_not_finished_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    with pytest.raises(ConfigError, match="async-rl sft"):
        check_model_folder(tmp_path / "model")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "sft_config.yaml").touch()
    with pytest.raises(ConfigError, match=r"sft_config\.yaml.*async-rl sft"):
        check_model_folder(tmp_path / "half")


def test_a_model_is_whole_or_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for _ in range(2):  # also where an earlier one is
        with written_whole(folder) as partial:
            (partial / "config.json").write_text("new")
            assert not folder.exists() or (folder / "config.json").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert (folder / "config.json").read_text() == "new"
        (folder / "config.json").write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(folder) as partial:
        (partial / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "config.json").read_text() == "old"


def folder_of(path: Path, model_type: str, weight: str = "lm_head.weight", **changes: object) -> Path:
    """Save the configuration of a small model of this type with one weight of this name."""
    config = AutoConfig.for_model(model_type, vocab_size=100, hidden_size=64, num_hidden_layers=1, **changes)
    config.save_pretrained(path)
    save_file({weight: torch.zeros(1)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("model_type", "changes"), [
    ("llama", {}), ("qwen3", {}), ("gemma3_text", {}), ("gpt2", {}), ("granite", {"logits_scaling": 1.0}),
])
def test_a_model_with_a_plain_head_can_be_trained(model_type: str, changes: dict[str, object], tmp_path: Path) -> None:
    check_trainable(folder_of(tmp_path, model_type, **changes))


@pytest.mark.parametrize(("model_type", "weight", "changes", "change"), [
    ("granite", "lm_head.weight", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
    ("cohere", "lm_head.weight", {}, "logit_scale = 0.0625"),
    ("gemma2", "lm_head.weight", {}, "final_logit_softcapping = 30.0"),
    ("falcon_h1", "lm_head.weight", {"lm_head_multiplier": 0.25}, "lm_head_multiplier = 0.25"),
    ("recurrent_gemma", "lm_head.weight", {}, "logits_soft_cap = 30.0"),
    ("phi", "lm_head.bias", {}, "lm_head.bias"),
])
def test_a_head_that_the_learner_can_not_train_is_refused_without_loading_it(
    model_type: str, weight: str, changes: dict[str, object], change: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, model_type, weight, **changes)
    with pytest.raises(ConfigError, match=f"^reference.path .* {model_type} .*{change}"):
        check_trainable(folder, "reference.path")
