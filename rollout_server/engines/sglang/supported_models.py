"""Finds out whether SGLang can serve a model and read its tool calls.

It reads SGLang's files, because importing SGLang takes many seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from async_rl.base.config import Config
from async_rl.base.seams.doc_pages import doc_page

_READ_FROM_CONFIG = {"Gemma2ForCausalLM": "hidden_act"}
"""By architecture, a key of config.json that SGLang needs and that transformers 5 leaves out of the files it writes."""

_UNREADABLE = "gpt-oss"
"""The parser that needs more than a reply: `<|start|>assistant`, which the template writes, and the end `<|call|>`."""


def why_refused(config: Config) -> str:
    """Return why SGLang can't serve the model in model.path, as a part of a sentence, or "" if it may serve it."""
    import transformers

    flags = {key.replace("_", "-") for key in config.rollout.server_args}
    packed = flags & {"quantization", "speculative-algorithm", "dp-size"}
    if config.weight_sync.double_buffer != "none" and packed:
        return (
            f"it can't stage weights (weight_sync.double_buffer) with {', '.join(sorted(packed))} in "
            "rollout.server_args: only one model with unpacked weights has a second set of them"
        )
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        gpu = "pip install 'async-rl[sglang-gpu]'"
        page = doc_page("installing.md")
        return f"it is not installed. With a GPU: {gpu}; else see {page}, or set rollout.engine: hf"
    srt = Path(sglang.submodule_search_locations[0]) / "srt"
    if reason := _why_parser_refused(config.rollout.tool_parser, srt):
        return reason
    model = transformers.AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    if not model.architectures:
        return ""
    name = model.architectures[0]
    files = (srt / "models").glob("*.py")
    entries = (file.read_text(encoding="utf-8").partition("\nEntryClass")[2] for file in files)
    if not any(re.search(rf"\b{name}\b", entry) for entry in entries):
        substitute = getattr(transformers, name, None)  # which SGLang runs instead, if it can
        if substitute is None or not substitute.is_backend_compatible():
            return f"it has no implementation of {name}, and can't run that of transformers. Set rollout.engine: hf"
    if config.weight_sync.double_buffer != "none" and getattr(model, "quantization_config", None):
        return "its weights are quantised, and those can't be staged. Set weight_sync.double_buffer: none"
    key = _READ_FROM_CONFIG.get(name, "")
    if key and not hasattr(model, key):
        return f"its {name} needs the key {key} in config.json. Add the key, or set rollout.engine: hf"
    return ""


def _why_parser_refused(name: str, srt: Path) -> str:
    """Return why SGLang can't read calls with rollout.tool_parser `name`, as a part of a sentence, or ""."""
    if not name or ":" in name:
        return ""
    text = (srt / "function_call" / "parser_names.py").read_text(encoding="utf-8")
    names = re.findall(r'^ +"([^"]+)",$', text.partition("TOOL_CALL_PARSER_NAMES")[2], re.MULTILINE)
    known = [each for each in names if each != _UNREADABLE]
    if name in known:
        return ""
    why = "needs more than the text of a reply" if name == _UNREADABLE else "is none of its parsers of tool calls"
    return f"rollout.tool_parser {name!r} {why}. Set one of {', '.join(known)}, or module:name, a parser of yours"
