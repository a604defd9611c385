"""The tools of gsm8k_tools.yaml: a calculator, and a search in the text files of configs/gsm8k_notes."""

from pathlib import Path

from rollout_server.episodes.tools.calculator import calculate
from rollout_server.episodes.tools.retrieval import TextFolder

__all__ = ["calculate", "search"]

search = TextFolder(Path(__file__).with_name("gsm8k_notes")).search
