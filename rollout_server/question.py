"""The type of a task's questions, each with its right answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from async_rl.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of a task, with the right answer that the reward reads. It is stored in `Prompt.question`."""

    messages: tuple[dict[str, str], ...]
    """Chat messages with the keys `role` and `content`."""
    ground_truth: Any
    """The right answer (`ground_truth` of a file's row)."""
    solution: str = ""
    """A worked answer for supervised fine-tuning. If it is empty, `ground_truth` is used."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The `extra_info` of a file's row, or the `metadata` of a reasoning_gym item."""
    source: str = ""
    """The `data_source` of a file's row, or `task.name` for other tasks."""

    def with_system_prompt(self, text: str) -> Question:
        """Return the question with a system message before its own messages; unchanged if the text is empty.

        Raises:
            ConfigError: the question already has a system message.
        """
        if not text:
            return self
        if any(message["role"] == "system" for message in self.messages):
            raise ConfigError(
                "task.system_prompt must be empty where prompts have a system message of their own, as one of "
                f"{self.source} has: {str(self.messages[0])[:120]}"
            )
        return replace(self, messages=({"role": "system", "content": text}, *self.messages))
