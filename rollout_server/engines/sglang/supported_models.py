"""Finds out whether SGLang can serve a model. It reads SGLang's files, because importing SGLang takes many seconds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from async_rl.config import Config
from async_rl.seams.doc_pages import doc_page

_READ_FROM_CONFIG = {"Gemma2ForCausalLM": "hidden_act"}
"""By architecture, a key of config.json that SGLang needs and that transformers 5 leaves out of the files it writes."""


def why_refused(config: Config) -> str:
    """Return why SGLang can't serve the model in model.path, as a part of a sentence, or "" if it may serve it."""
    import transformers

    flags = {key.replace("_", "-") for key in config.rollout.server_args}
    packed = flags & {"quantization", "speculative-algorithm", "dp-size"}
    if config.weight_sync.staging != "none" and packed:
        return (
            f"it can't stage weights (weight_sync.staging) with {', '.join(sorted(packed))} in rollout.server_args: "
            "only one model with unpacked weights has a second set of them"
        )
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        gpu = "pip install 'async-rl[sglang-gpu]'"
        page = doc_page("installing.md")
        return f"it is not installed. With a GPU: {gpu}; else see {page}, or set rollout.engine: hf"
    model = transformers.AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    if not model.architectures:
        return ""
    name = model.architectures[0]
    folder = Path(sglang.submodule_search_locations[0]) / "srt" / "models"
    entries = (file.read_text(encoding="utf-8").partition("\nEntryClass")[2] for file in folder.glob("*.py"))
    if not any(re.search(rf"\b{name}\b", entry) for entry in entries):
        substitute = getattr(transformers, name, None)  # which SGLang runs instead, if it can
        if substitute is None or not substitute.is_backend_compatible():
            return f"it has no implementation of {name}, and can't run that of transformers. Set rollout.engine: hf"
    if config.weight_sync.staging != "none" and getattr(model, "quantization_config", None):
        return "its weights are quantised, and those can't be staged. Set weight_sync.staging: none"
    key = _READ_FROM_CONFIG.get(name, "")
    if key and not hasattr(model, key):
        return f"its {name} needs the key {key} in config.json. Add the key, or set rollout.engine: hf"
    return ""
