"""What generates: one interface over SGLang and the in-process engine; `rollout.engine` chooses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from async_rl.config import Config
from async_rl.types import FloatArray, IntArray, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """`n` answers to one prompt."""

    group_id: int
    """Unique among the engine's running requests; negative for evaluations."""
    prompt: Prompt
    start_version: int
    """Served version when the group was admitted; no token of it may be older."""
    seed: int
    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. The arrays have the length T >= 1; the end-of-text token is included if it was sampled."""

    tokens: IntArray  # [T]
    logprobs: FloatArray  # [T] of log_softmax(logits / temperature), before top_p
    versions: IntArray  # [T] weight version that sampled the token
    finish_reason: str
    """`stop` (the model ended the answer) or `length` (it ran into max_tokens)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine itself says of its load at one instant."""

    running: int
    """Requests (rollouts) in the running batch."""
    slots: int
    """Requests it would run at once at most."""


class Engine(Protocol):
    """Serves one policy, from weight version 0 on. `url` answers SGLang's weight-update requests."""

    url: str
    """Base URL of the weight-update endpoints, e.g. http://127.0.0.1:41234. Valid after `start`."""
    vocab_size: int
    """Token ids are below this. Valid after `start`."""

    async def start(self) -> None:
        """Up and serving version 0, or an error that says why not, with the last lines of its log."""

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`n` completions. Call it concurrently, once per group: the engine batches inside."""

    async def load(self) -> Load | None:
        """None where it can't tell right now. Cheap: it is asked twice a second."""

    async def aclose(self) -> None:
        """Ends the engine and everything it started within `timeouts.shutdown_s`."""


def open_engine(config: Config, index: int, log_dir: Path) -> Engine:
    """Open the engine that rollout.engine names, not started yet, as rollout server number `index`.

    Raises:
        ConfigError: there is no such engine, or it can't be imported.
    """
    engine: Engine = config.rollout.engine_entry.load()(config, index, log_dir)
    return engine
