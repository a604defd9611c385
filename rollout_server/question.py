"""One item of a task: what is asked, and what an answer is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of a task, with the reference answer that the reward reads. `Prompt.reference` holds it."""

    messages: tuple[dict[str, str], ...]
    """Chat messages with the keys `role` and `content`."""
    answer: Any
    """The reference answer (`ground_truth` of a file's row)."""
    solution: str = ""
    """A worked answer for supervised fine-tuning; empty: `answer`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """`extra_info` of a file's row, `metadata` of a reasoning_gym item."""
    source: str = ""
    """`data_source` of a file's row; else `task.name`."""
