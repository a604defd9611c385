"""The interface of rollout engines, which generate answers. rollout.engine chooses one of the table ENGINES.

An engine consists of a class that implements `Engine`, a `ServerAdmin` (async_rl/weights/server_admin.py) by which the
learner pauses and updates it, and an entry of ENGINES, or one elsewhere that is named as `module:name`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from async_rl.config import Config
from async_rl.types import FloatArray, IntArray, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for `n` answers to one prompt."""

    group_id: int
    """Unique among the engine's running requests; negative for evaluations."""
    prompt: Prompt
    start_version: int
    """Served version when the group was admitted; no token of the answers may be older."""
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
    versions: IntArray  # [T] policy version whose weights sampled the token
    finish_reason: str
    """`stop` (the model ended the answer) or `length` (it reached max_tokens)."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine at one instant, as it reports it."""

    running: int
    """Rollouts in the running batch."""
    slots: int
    """The largest number of rollouts that it runs at once."""


class Engine(Protocol):
    """Serves one policy, from weight version 0 on."""

    url: str
    """Address by which the engine's `ServerAdmin` reaches it, e.g. http://127.0.0.1:41234. Valid after `start`."""
    vocab_size: int
    """Token ids are below this. Valid after `start`."""

    async def start(self) -> None:
        """Start and return when version 0 is served.

        Raises:
            AsyncRLError: it can't start; says why, with the last lines of its log.
        """

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Sample `n` completions. Calls run concurrently, one for each group; the engine batches them.

        The caller limits the time (timeouts.generate_s) by cancelling, which ends the requests in the engine too.
        """

    async def load(self) -> Load | None:
        """The load now; None if it is not known. Called twice a second, so it must be cheap."""

    async def aclose(self) -> None:
        """End the engine and everything that it started, within `timeouts.shutdown_s`."""


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """
    Raises:
        ValueError: the prompt has no tokens, or one that the model does not know, which would end SGLang's server.
    """
    tokens = prompt.tokens
    if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"prompt {prompt.index} must be one or more tokens in 0..{vocab_size - 1}, got {tokens.tolist()[:20]}"
        )


def open_engine(config: Config, index: int, log_dir: Path) -> Engine:
    """Open the engine that rollout.engine names, not started yet, as rollout server number `index`.

    Raises:
        ConfigError: the engine can't be imported.
    """
    engine: Engine = config.rollout.engine_entry.load()(config, index, log_dir)
    return engine
