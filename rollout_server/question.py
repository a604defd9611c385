"""The type of one item of a task: a question and its right answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of a task, with the right answer that the reward reads. `Prompt.question` holds it."""

    messages: tuple[dict[str, str], ...]
    """Chat messages with the keys `role` and `content`."""
    ground_truth: Any
    """The right answer (`ground_truth` of a file's row)."""
    solution: str = ""
    """A worked answer for supervised fine-tuning, which uses `ground_truth` if this is empty."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The `extra_info` of a file's row, or the `metadata` of a reasoning_gym item."""
    source: str = ""
    """The `data_source` of a file's row, or `task.name` for other tasks."""

    def __getattr__(self, name: str) -> Any:
        """Say what a reward should read that asks for `answer`, the name of `ground_truth` in earlier versions."""
        hint = ", but ground_truth: the right answer is called so" if name == "answer" else ""
        raise AttributeError(f"a Question has no {name!r}{hint}")
