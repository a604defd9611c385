"""Samples the replies of a group's sessions from the engine of the run.

The replies to one and the same conversation are one request with several answers: with equal first messages the first
turn of a group is a single request, as the answers to a question are. Every other reply is a request of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from async_rl.base.errors import AsyncRLError
from async_rl.base.types import Prompt
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.episodes.conversation.session import Generate

GenerateReplies = Callable[[GenerationRequest], Awaitable[list[SampledReply]]]
"""Has the engine answer a request; returns its replies."""


@dataclass(slots=True)
class _Waiting:
    """One reply that a session waits for."""

    sample: int
    turn: int
    future: asyncio.Future[SampledReply]


class GroupSampler:
    """Samples the replies of one group's episodes; equal conversations that wait at the same time share a request.

    Args:
        generate: has the engine answer a request.
        request: the group's request. Each reply takes all of it but the prompt's tokens, n and max_tokens.
    """

    def __init__(self, generate: GenerateReplies, request: GenerationRequest) -> None:
        self._generate = generate
        self._request = request
        self._collected: dict[tuple[tuple[int, ...], int], list[_Waiting]] = {}
        """The replies asked for in the current turn of the event loop, by conversation and largest number of tokens."""
        self._running: set[asyncio.Task[None]] = set()

    def of_sample(self, sample: int) -> Generate:
        """Return the function that samples the replies of episode `sample` of the group."""
        return partial(self._reply, sample, itertools.count())

    async def _reply(self, sample: int, turns: Iterator[int], tokens: list[int], max_tokens: int) -> SampledReply:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(sample, next(turns), loop.create_future())
        if not self._collected:
            loop.call_soon(self._send_collected)
        self._collected.setdefault((tuple(tokens), max_tokens), []).append(waiting)
        return await waiting.future

    def _send_collected(self) -> None:
        collected, self._collected = self._collected, {}
        for (tokens, max_tokens), waiting in collected.items():
            task = asyncio.get_running_loop().create_task(self._send(list(tokens), max_tokens, waiting))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            for one in waiting:
                one.future.add_done_callback(partial(_cancel_if_unwanted, task, waiting))

    async def _send(self, tokens: list[int], max_tokens: int, waiting: list[_Waiting]) -> None:
        prompt = dataclasses.replace(self._request.prompt, tokens=np.array(tokens, np.int32))
        request = dataclasses.replace(
            self._request, prompt=prompt, n=len(waiting), max_tokens=max_tokens, seed=self._seed(prompt, waiting)
        )
        try:
            replies = await self._generate(request)
            if len(replies) != request.n:
                raise AsyncRLError(
                    f"the engine must answer request {request.key} with {request.n} replies, got "
                    f"{len(replies)}: correct the `generate` of the engine that rollout.engine names"
                )
        except asyncio.CancelledError:
            for one in waiting:
                one.future.cancel()
            raise
        except Exception as error:  # each session raises it
            for one in waiting:
                if not one.future.done():
                    one.future.set_exception(error)
            return
        for one, reply in zip(waiting, replies, strict=True):
            if not one.future.done():
                one.future.set_result(reply)

    def _seed(self, prompt: Prompt, waiting: list[_Waiting]) -> int:
        """Return the seed of a request: the run's own for the first turn of a whole group, else one for its replies.

        The engine draws the random numbers of an answer from (seed, prompt, number of the answer in its request), so
        that replies of different episodes or turns need different seeds.
        """
        replies = [(reply.sample, reply.turn) for reply in waiting]
        if replies == [(sample, 0) for sample in range(self._request.n)]:
            return self._request.seed
        source = np.random.SeedSequence((self._request.seed, *replies[0], 1))
        return int(source.generate_state(1, np.uint64)[0]) >> 1


def _cancel_if_unwanted(task: asyncio.Task[None], waiting: list[_Waiting], _: object) -> None:
    """Cancel the request `task` if every caller that waits for one of its answers has been cancelled."""
    if all(reply.future.cancelled() for reply in waiting):
        task.cancel()
