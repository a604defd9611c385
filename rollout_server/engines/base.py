"""The interface of rollout engines, which generate replies. `rollout.engine` names the engine of a run.

An engine has a class that implements `Engine`, a `ServerAdmin` (async_rl/base/weights/server_admin.py) with which the
learner pauses and updates it, and an `EngineEntry` (async_rl/base/seams/engines.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from async_rl.base.config import Config
from async_rl.base.types import FloatArray, IntArray, Prompt

_GREEDY_TEMPERATURE = 1e-4
"""Temperature of greedy replies. Engines treat 0 differently; here a token 1e-3 nats behind the best has e^-10."""


class Purpose(StrEnum):
    """The use that is made of the replies to a request."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    """A held-out prompt. No batch waits for it."""
    BASELINE = "baseline"
    """The greedy reply to a group's prompt, whose reward is the group's baseline. It is never trained on, but the
    group waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to an engine for `n` replies to one prompt."""

    purpose: Purpose = Purpose.TRAINING
    group_id: int
    """The group that the request is for; in an evaluation the number of its prompt among all that the worker was given.
    Several requests of one group run at once if its episodes have several turns."""
    prompt: Prompt
    start_version: int
    """The served version when the group was admitted; no token of the replies may be older. 0 in an evaluation."""
    seed: int
    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0

    @property
    def key(self) -> str:
        """A text that requests share if they have the same purpose and group; ids at the server begin with it."""
        return f"{self.purpose}-{self.group_id}"

    def greedy(self) -> GenerationRequest:
        """Return the request for greedy replies."""
        return replace(self, temperature=_GREEDY_TEMPERATURE, top_p=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """One reply: T >= 1 sampled tokens, also the end-of-text token if it was sampled, with logprobs and versions."""

    tokens: IntArray  # [T]
    logprobs: FloatArray  # [T] of log_softmax(logits / temperature), before top_p
    versions: IntArray  # [T] policy version whose weights sampled the token
    finish_reason: str
    """`stop` (the model ended the reply) or `length` (it reached max_tokens)."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine at one instant, and its size."""

    running: int
    """The number of replies in the running batch."""
    slots: int
    """The largest number of replies that the engine samples at once."""
    kv_tokens: int = 0
    """The number of tokens for which the KV cache has room; 0: not known."""


class Engine(Protocol):
    """A rollout engine: samples replies from one policy, whose weights have version 0 at the start."""

    url: str
    """The engine's address for its `ServerAdmin`, e.g. http://127.0.0.1:41234. Valid after `start`."""
    vocab_size: int
    """The number of token ids, 0..vocab_size - 1. Valid after `start`."""

    async def start(self) -> None:
        """Start the engine; return when it serves version 0. AsyncRLError: it can't start; the message says why."""

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        """Sample and return `request.n` replies. Calls run concurrently, one per group; the engine batches them.

        The caller limits the time (timeouts.generate_s) by cancelling the call, which also ends it in the engine.
        """

    async def load(self) -> Load | None:
        """Return the load of this moment, or None if it is not known. It must be cheap: it is called twice a second."""

    async def aclose(self) -> None:
        """End the engine and all processes and threads that it started, within `timeouts.shutdown_s`."""


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raise ValueError if the prompt is empty or has a token outside the vocabulary: it would make an engine crash."""
    tokens = prompt.tokens
    if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"prompt {prompt.index} must be one or more tokens in 0..{vocab_size - 1}, got {tokens.tolist()[:20]}"
        )


def open_engine(config: Config, index: int, log_dir: Path) -> Engine:
    """Return the engine that rollout.engine names, not started yet. ConfigError: its class can't be imported."""
    engine: Engine = config.rollout.engine_entry.load()(config, index, log_dir)
    return engine
