"""The interface of rollout engines, which generate replies. `rollout.engine` names the engine of a run.

An engine consists of a class that implements `Engine`, a `ServerAdmin` with which the learner pauses and updates it
(async_rl/base/weights/servers.py), and an `EngineEntry` (async_rl/base/seams/engines.py). `StopTexts` and the
functions for KV cache sizes at the end of this file are shared by several engines.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from async_rl.base.config import Config, Sampling
from async_rl.base.types import FloatArray, IntArray, Prompt, RoutingArray, Support

_GREEDY_TEMPERATURE = 1e-4
"""Temperature of greedy replies; engines treat 0 differently. A token 1e-3 nats below the best has probability e^-10.
"""
_KV_SHARE = 0.25
"""The share of the host's free memory that all KV caches may take; the learner needs the rest."""
MAX_GRAPH_REPLIES = 1024
"""The largest decode batch for which a server on a GPU captures a CUDA graph. Each size takes time at the start."""


class Purpose(StrEnum):
    """What the engine's replies are used for."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    """Answers to a held-out prompt. No training batch waits for them."""
    BASELINE = "baseline"
    """The greedy reply to a group's prompt, whose reward is the group's baseline. It is never trained on, but the
    group waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to an engine for `n` replies to one prompt."""

    purpose: Purpose = Purpose.TRAINING
    group_id: int
    """The group of the request. In an evaluation: the number of the prompt among all prompts that the worker was given.
    A group of multi-turn episodes may have several requests at the engine simultaneously."""
    prompt: Prompt
    start_version: int
    """The served version when the group was admitted; 0 in an evaluation. No older version may sample its replies."""
    seed: int
    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    wants_support: bool = False
    """Whether the engine must record the support of each token, and compute logprobs over that support."""
    wants_support_logprobs: bool = False
    """Whether the engine must also record the logprob of each id in the support."""
    wants_routing: bool = False
    """Whether the engine must record the experts of each token."""

    @property
    def key(self) -> str:
        """A text that all requests with the same purpose and group share. Request ids at the server begin with it."""
        return f"{self.purpose}-{self.group_id}"

    def greedy(self) -> GenerationRequest:
        """Return a copy of the request that asks for greedy replies, without support or routing."""
        sampling = Sampling(_GREEDY_TEMPERATURE)
        return replace(
            self, **sampling._asdict(), wants_support=False, wants_support_logprobs=False, wants_routing=False
        )

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """One reply: T >= 1 sampled tokens with logprobs and versions. A sampled end-of-text token is included."""

    tokens: IntArray  # [T]
    logprobs: FloatArray
    """[T] log_softmax(logits / temperature), taken over the ids in `support`. Without a support it is taken over the
    whole vocabulary, even if top_p, top_k or min_p leave tokens out."""
    versions: IntArray  # [T] policy version whose weights sampled the token
    finish_reason: str
    """`stop` (the model ended the reply) or `length` (it reached max_tokens)."""
    support: Support | None = None
    """The ids that each token was drawn from; None unless the request wants it."""

    routing: RoutingArray | None = None
    """[P + T - 1, layers, k] the experts that each token of prompt and reply was fed through in its first forward
    pass; later passes with newer weights are ignored. The last token was not fed. None unless the request wants it."""

    def cut(self, length: int) -> SampledReply:
        """Return the first `length` tokens as a reply with finish_reason `stop`."""
        dropped = len(self.tokens) - length
        return replace(
            self, tokens=self.tokens[:length], logprobs=self.logprobs[:length], versions=self.versions[:length],
            finish_reason="stop", support=self.support and self.support.cut(0, length),
            routing=None if self.routing is None else self.routing[: len(self.routing) - dropped],
        )


@dataclass(slots=True, eq=False, kw_only=True)
class PartialReply:
    """What an engine has recorded so far of a reply that it is still sampling."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sets: list[IntArray] = field(default_factory=list)
    """The ids that each token was drawn from, ascending; recorded only if the request wants the support."""
    set_logprobs: list[FloatArray] = field(default_factory=list)
    """The logprobs of the ids in `sets`, recorded only if the request wants them."""
    fed: list[RoutingArray] = field(default_factory=list)
    """Arrays [n, layers, k]: the experts of all tokens of prompt and reply except the last, in order."""
    finish_reason: str = ""
    """`stop` or `length`; empty until the reply has ended."""
    sample: int = 0
    """The reply's number in its group."""

    def reply(self) -> SampledReply:
        return SampledReply(
            tokens=np.array(self.tokens, dtype=np.int32), logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32), finish_reason=self.finish_reason,
            support=Support.of_arrays(self.sets, self.set_logprobs) if self.sets else None,
            routing=np.concatenate(self.fed) if self.fed else None,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """The number of replies that an engine is sampling now, and its capacity."""

    running: int
    """The number of replies in the running batch."""
    slots: int
    """The largest number of replies that the engine samples simultaneously."""
    kv_tokens: int = 0
    """The size of the KV cache in tokens; 0: not known."""


class Engine(Protocol):
    """A rollout engine: samples replies from one policy. It starts with weights of version 0."""

    url: str
    """The address where the engine's `ServerAdmin` reaches it, e.g. http://127.0.0.1:41234. Set by `start`."""
    vocab_size: int
    """The number of token ids, 0..vocab_size - 1. Set by `start`."""

    async def start(self) -> None:
        """Start the engine and return when it serves version 0.

        Raises:
            AsyncRLError: it can't start; the message says why.
        """

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        """Sample and return `request.n` replies. Calls run concurrently, one per group; the engine batches them.

        The caller limits the time (timeouts.generate_s) by cancelling the call, which also ends it in the engine.
        """

    async def load(self) -> Load | None:
        """Return the current load, or None if it is not known. It must be cheap: it is called twice a second."""

    async def aclose(self) -> None:
        """End the engine and all processes and threads that it started, within `timeouts.shutdown_s`."""


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raise ValueError if the prompt is empty or has a token outside the vocabulary; such prompts crash engines."""
    tokens = prompt.tokens
    if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"prompt {prompt.index} must be one or more tokens in 0..{vocab_size - 1}, got {tokens.tolist()[:20]}"
        )


def open_engine(config: Config, index: int, log_dir: Path) -> Engine:
    """Return the engine that rollout.engine names, not started yet.

    Raises:
        ConfigError: its class can't be imported.
    """
    engine: Engine = config.rollout.engine_entry.load()(config, index, log_dir)
    return engine


class StopTexts:
    """Stop texts of replies: a reply ends with the token that completes one of the texts.

    That token is kept, even if its text goes on after the stop text: it was sampled, so it is trained on like the
    others. Tokens after it are dropped, if an engine has sampled any. The remaining logprobs stay right, because a
    token depends only on the tokens before it.

    Args:
        texts: one or more texts, none empty.
        tokenizer: decodes tokens, special tokens included.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self._texts = tuple(texts)
        self._tokenizer = tokenizer
        # A token is at least a byte. The first tokens of a part may be decoded otherwise than within the whole reply.
        self._tail_tokens = max(len(text.encode()) for text in texts) + 4

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop text. The tokens before it must not contain one."""
        return self._is_in(tokens[-self._tail_tokens :])

    def cut(self, reply: SampledReply) -> SampledReply:
        """Return the reply, cut after the token that completes a stop text; unchanged if it contains none."""
        tokens = reply.tokens.tolist()
        if not self._is_in(tokens):
            return reply
        count = bisect.bisect_left(range(len(tokens)), True, lo=1, key=lambda count: self._is_in(tokens[:count]))
        return reply.cut(count)

    def _is_in(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return any(each in text for each in self._texts)


def kv_tokens(config: Config, token_bytes: int, row_tokens: int, free_memory_bytes: int) -> int:
    """Return how many tokens a server's KV cache should have room for: all rows in flight, or fewer if memory is short.

    There is always room for one row.

    Args:
        token_bytes: the memory of one token; see kv_token_bytes.
        row_tokens: the tokens reserved for one row, prompt included.
        free_memory_bytes: the host's free memory. All its servers together may use the share _KV_SHARE.
    """
    affordable = int(_KV_SHARE * free_memory_bytes / config.placement.servers_per_node / token_bytes)
    return max(row_tokens, min(config.max_running_replies * row_tokens, affordable))


def graph_replies(config: Config) -> int:
    """Return the largest decode batch with a CUDA graph: all replies of a server, at most MAX_GRAPH_REPLIES.

    The engines' default, 256 or 512, leaves larger batches without a graph and captures sizes that never occur.
    """
    return min(config.max_running_replies, MAX_GRAPH_REPLIES)


def kv_token_bytes(model: Any, dtype: str, tp: int = 1) -> int:
    """Return the bytes of one token's keys and values in the KV cache of each of a server's `tp` ranks.

    Each rank has at least one head. If there are fewer heads than ranks, several ranks keep the same head.

    Args:
        model: the text part of the model's transformers config.
        dtype: the type of the cache; float32 takes 4 bytes a number, others 2.
        tp: the number of tensor-parallel ranks.
    """
    heads = int(getattr(model, "num_key_value_heads", None) or model.num_attention_heads)
    of_rank = max(1, heads // tp)
    return 2 * int(model.num_hidden_layers) * of_rank * head_size(model) * (4 if dtype == "float32" else 2)


def head_size(model: Any) -> int:
    """Return the size of one attention head of a model, from the text part of its transformers config."""
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
