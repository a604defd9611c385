"""Checks and reads the Hugging Face model folders of a run. The checks come before any process is started."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.base.config.learning import default_lr
from async_rl.base.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from async_rl.base.config import Config


TEMPLATE_DATE = datetime(2024, 7, 26)
"""The date for chat templates such as Llama's. With today's date a prompt would change every day, a group at midnight.
"""


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_ROLES: dict[str, tuple[str, ...]] = {
    "critic.path": (), "reference.path": _CAUSAL, "reward_model.path": ("ForSequenceClassification",)
}
"""For the key of each model besides the policy: the allowed endings of its architecture's name; (): any name."""
_LOGIT_KEYS = ("final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "logits_soft_cap")
_HEAD_BIASES = ("lm_head.bias", "embed_out.bias")


@dataclass(frozen=True, slots=True)
class Maker:
    """A command that creates a model, such as `async-rl sft`."""

    command: str
    marker: str
    """A file, a copy of the configuration, that exists only in folders written by the command. The next run of
    the command may overwrite such a folder."""
    base_key: str
    """The key of the model that the command starts from."""


SFT = Maker("async-rl sft", "sft_config.yaml", "sft.base")
REWARD_MODEL = Maker("async-rl reward-model", "reward_training_config.yaml", "reward_training.base")
MARKERS = (SFT.marker, REWARD_MODEL.marker)
_MADE_BY = {"reward_model.path": REWARD_MODEL}
"""For keys of models that another command than `async-rl sft` creates: that command."""
TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")


def check_model_folder(path: str | Path, longest_tokens: int = 0, key: str = "model.path") -> list[str]:
    """Check that `path`, the value of `key`, contains a causal LM for rows of `longest_tokens` tokens.

    The config.json must describe a causal LM with attention and enough positions. All safetensors files must be
    complete. The tokenizer must have an end-of-text token and no token id beyond the model's vocabulary.

    Returns:
        A list with a warning for the user if the tokenizer has no chat template, else [].

    Raises:
        ConfigError: one of these files is missing or wrong.
    """
    folder = Path(path)
    model = _load_model_config(folder, key, _CAUSAL)
    weight_shapes(folder)
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and positions < longest_tokens:
        raise ConfigError(
            f"task.max_prompt_tokens + rollout.max_response_tokens, or rollout.max_episode_tokens if set, must be at "
            f"most {positions}, the positions of the model {folder}, got {longest_tokens}. Lower it"
        )
    if not hasattr(model, "num_attention_heads"):  # e.g. Mamba2
        raise ConfigError(
            f"{folder / 'config.json'} must describe a model with attention (num_attention_heads), got model_type "
            f"{model.model_type}: the rollout engines keep a KV cache. Choose a transformer model"
        )
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no end-of-text token, so no answer would ever end. "
            "Set eos_token in tokenizer_config.json"
        )
    vocabulary = tokenizer.get_vocab()
    token, token_id = max(vocabulary.items(), key=lambda item: item[1])
    if token_id >= model.vocab_size:
        raise ConfigError(
            f"tokenizer and model in {folder} do not belong together: token {token!r} has id {token_id}, the "
            f"model's vocab_size is {model.vocab_size}. Take the tokenizer the model was trained with, or resize "
            "the embeddings"
        )
    if tokenizer.chat_template:
        return []
    return [
        f"the tokenizer in {folder} has no chat template: prompts are plain text, without roles. A model that was "
        "trained on chats answers them badly: set chat_template in its tokenizer_config.json."
    ]


def check_trainable(path: str | Path, key: str = "model.path") -> None:
    """Check that the learner can train the causal LM in `path`, the value of `key`, without loading its weights.

    Raises:
        ConfigError: the model scales, caps or shifts its logits, which must be output embeddings times hidden state.
    """
    model = _load_model_config(Path(path), key, _CAUSAL)
    values = {name: getattr(model, name, None) for name in _LOGIT_KEYS}
    changes = [f"{name} = {value}" for name, value in values.items() if value not in (None, 1.0)]
    changes += [name for name in _HEAD_BIASES if name in weight_shapes(Path(path))]
    if changes:
        raise ConfigError(
            f"{key} {path}: a model of type {model.model_type} changes its logits by {changes[0]}, which the learner "
            "does not support: they must be output embeddings times last hidden state. Use e.g. a model of the Llama, "
            "Qwen, Mistral, Phi-3 or OLMo 2 family"
        )


def check_role_folder(key: str, path: str) -> None:
    """Check that `path`, the value of `key`, contains the kind of model that the key needs, whole and not quantised.

    Raises:
        ConfigError: `path` has another kind of model, lacks files, or has quantised weights, which the learner can't
            load.
    """
    model = _load_model_config(Path(path), key, _ROLES.get(key, ()))
    weight_shapes(Path(path))
    if quantised := getattr(model, "quantization_config", None):
        raise ConfigError(
            f"{key} {path} must have weights in float32, bfloat16 or float16; its config.json says that they are "
            f"quantised ({dict(quantised).get('quant_method')}). The learner computes with the weights as they are "
            "stored, and pushes them under their names. Take the model as it was before it was quantised"
        )


def partial_of(folder: Path) -> Path:
    """Return the folder into which the files of `folder` are written until it is complete."""
    return folder.with_name(f"{folder.name}.partial")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files to load from `folder`: those in its index, else model.safetensors, else all.

    Raises:
        ConfigError: there are no such files, or files in the index are missing.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index} is not a safetensors index with a weight_map. Copy it again") from None
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(
                f"{folder} lacks {len(missing)} of its weight files: {', '.join(missing[:3])}. Copy or download them"
            )
        return [folder / name for name in names]
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no *.safetensors weights. Save them with model.save_pretrained({str(folder)!r})"
        )
    return files


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Return {name: shape} of the tensors in a model folder, read from the headers of its weight files.

    Raises:
        ConfigError: there are no weight files, or one of them is incomplete or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a whole safetensors file: {error}. Copy or download it again") from None
    return shapes


def num_weights(path: str | Path) -> int:
    """Return the number of weights in the model folder `path`. Raises ConfigError as `weight_shapes` does."""
    return sum(math.prod(shape) for shape in weight_shapes(Path(path)).values())


def policy_lr(config: Config) -> float:
    """Return the policy's learning rate: learner.lr, or if that is auto, `auto_lr`."""
    return auto_lr(config) if config.learner.lr == "auto" else config.learner.lr


def auto_lr(config: Config) -> float:
    """Return the learning rate that learner.lr = auto means: it is computed from the size of model.path.

    Raises:
        ConfigError: the folder has no complete weight files.
    """
    return default_lr(num_weights(config.model.path), has_adapters=config.model.lora.rank > 0)


def has_tokenizer(path: str | Path) -> bool:
    """Return whether the folder `path` contains files of a tokenizer."""
    return any(file for pattern in TOKENIZER_FILES for file in Path(path).glob(pattern))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the folder `path`, without network access.

    Raises:
        ConfigError: there is no tokenizer, or it can't be loaded.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(path):
        # transformers would return an empty tokenizer of the model's type
        raise ConfigError(
            f"{path} holds no tokenizer. Save the one the model was trained with: "
            f"tokenizer.save_pretrained({str(path)!r})"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ConfigError(f"the tokenizer in {path} can't be loaded: {_first_lines(error)}. Copy it again") from None
    return tokenizer


def end_tokens(path: str | Path) -> list[int]:
    """Return the ids of the tokens that end an answer: all end-of-text tokens that the model folder declares.

    Chat models declare several, in config.json, in the tokenizer and in generation_config.json.
    """
    from transformers import AutoConfig, GenerationConfig

    model = AutoConfig.from_pretrained(path)
    sources: list[Any] = [model, model.get_text_config(), load_tokenizer(path)]
    if (Path(path) / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(path))
    tokens: set[int] = set()
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        tokens.update(named if isinstance(named, list) else [] if named is None else [named])
    return sorted(tokens)


def forbidden_tokens(config: Config) -> tuple[int, ...]:
    """Return the ids of tokens that must not be sampled; () unless rollout.forbid_special_tokens is set.

    They are all special tokens of the tokenizer, except those that end an answer.
    """
    if not config.rollout.forbid_special_tokens:
        return ()
    tokenizer: Any = load_tokenizer(config.model.path)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(sorted((special | set(tokenizer.all_special_ids)) - set(end_tokens(config.model.path))))


def check_is_folder(key: str, path: str | Path) -> None:
    """Raise ConfigError if `path`, the value of `key`, is not a folder. The message says how to get it."""
    if not Path(path).is_dir():
        raise ConfigError(f"{key} {path} is not a folder. {_how_to_get(Path(path), key)}")


def _load_model_config(folder: Path, key: str, endings: tuple[str, ...]) -> PretrainedConfig:
    """Load the config.json of the model in `folder`, the value of `key`. Returns its part on the text model.

    Args:
        endings: the name of the model's architecture must end in one of these; empty: any name is allowed.

    Raises:
        ConfigError: there is no config.json, transformers can't read it, or it describes another kind of model.
    """
    from transformers import AutoConfig

    check_is_folder(key, folder)
    file = folder / "config.json"
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        hint = ". If `async-rl sft` was interrupted, run it again" if (folder / SFT.marker).is_file() else ""
        raise ConfigError(f"{key} {folder} is no Hugging Face model: no config.json. Found: {found}{hint}")
    try:
        model: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many types
        raise ConfigError(f"{file} can't be loaded: {_first_lines(error)}. Take the model's own file") from None
    architectures = model.architectures or []
    if architectures and endings and not any(name.endswith(endings) for name in architectures):
        raise ConfigError(f"{file} must describe a model {' or '.join(endings)}, got {', '.join(architectures)}")
    return model.get_text_config()


def _how_to_get(folder: Path, key: str) -> str:
    """Return advice on how to get the model that is missing in `folder`, the value of `key`."""
    maker = _MADE_BY.get(key, SFT)
    if partial_of(folder).is_dir():
        return f"`{maker.command}` ended before it was whole: run it again"
    if folder.parts[:1] == ("models",):
        return f"If it is on the Hugging Face hub, name it as it is named there: OWNER/{folder.name}"
    section = maker.base_key.partition(".")[0]
    return f"If the {section} section of your config makes it, run first: {maker.command} CONFIG"


def _first_lines(error: Exception) -> str:
    return " ".join(line.strip().rstrip(".") for line in str(error).strip().splitlines()[:2])
