"""Engines without a model: what they say is known."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

import numpy as np

from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import GenerationRequest, Load, SampledReply

TOKENIZER = character_tokenizer()


def completion(tokens: Sequence[int], version: int = 0, *, ended: bool = True) -> SampledReply:
    """A reply of these tokens, all of one version."""
    return SampledReply(
        tokens=np.array(tokens, np.int32), logprobs=np.full(len(tokens), -0.5, np.float32),
        versions=np.full(len(tokens), version, np.int32), finish_reason="stop" if ended else "length",
    )


class EchoEngine:
    """Answers every request with the right answer, labelled with the request's start version."""

    url, vocab_size = "", len(TOKENIZER)

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    async def load(self) -> Load:
        return Load(running=3, slots=12)

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        self.requests.append(request)
        await asyncio.sleep(0.002)
        tokens = TOKENIZER(request.prompt.question.ground_truth + "<eos>")["input_ids"][: request.max_tokens]
        return [completion(tokens, request.start_version)] * request.n


class TalkingEngine:
    """Answers each request with the text that `say` makes of the last message, and of the answer's number among n.

    Tokens have the newest of the versions that the test sets and that of the request.
    """

    url, vocab_size = "", len(TOKENIZER)

    def __init__(self, say: Callable[[str, int, int], str], delay_s: float = 0.001) -> None:
        self.say = say
        self.delay_s = delay_s
        self.version = 0
        self.requests: list[GenerationRequest] = []
        self.num_running = 0

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    async def load(self) -> Load:
        return Load(running=0, slots=1)

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        self.requests.append(request)
        self.num_running += 1
        version = max(self.version, request.start_version)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.num_running -= 1
        last = re.split(r"<eos>|<sep>", TOKENIZER.decode(request.prompt.tokens).removesuffix("<sep>"))[-1].strip()
        texts = [self.say(last, number, request.n) for number in range(request.n)]
        return [self._completion(text, version, request.max_tokens) for text in texts]

    def _completion(self, text: str, version: int, max_tokens: int) -> SampledReply:
        tokens = TOKENIZER(text + "<eos>", add_special_tokens=False)["input_ids"][:max_tokens]
        return completion(tokens, version, ended=tokens[-1] == TOKENIZER.eos_token_id)


def follow(last: str, number: int, n: int) -> str:
    """The right reply in `chain`, but a wrong one of the first of three answers, which only the first turn asks for."""
    right = f"={last}" if last.isdecimal() else f"?{last}"
    return "?!" if (number, n) == (0, 3) else right
