from __future__ import annotations

from pathlib import Path

from learner.models.tiny_model import TINY_MODELS, tiny_model


def save_tiny_model(name: str, folder: Path, seed: int) -> None:
    """Model and tokenizer as a Hugging Face folder."""
    tiny_model(name, seed).save_pretrained(folder)
    TINY_MODELS[name].tokenizer().save_pretrained(folder)
