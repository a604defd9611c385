"""The games for one player of textarena (pip install textarena==0.7.4), played in this process.

    task:
      env: rollout_server.episodes.environments.textarena:TextArena
      params: {name: GuessTheNumber-v0}
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from async_rl.base.errors import ConfigError
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool
from rollout_server.episodes.user_code import in_thread

try:
    import textarena
except ImportError as error:
    raise ConfigError(f"textarena can't be imported ({error}): pip install textarena==0.7.4") from error

Result = TypeVar("Result")
_RANDOM = threading.Lock()
"""Protects Python's global random numbers, from which all games of textarena draw."""


class TextArena:
    """One game of textarena, a class for `task.env`.

    The episode's reward is the player's reward at the end of the game.

    The games are played in their `-raw` form, whose observations contain only what is new. All games with the same
    index draw the same random numbers, whatever other games are played at the same time.

    Args:
        name: the game's id without `-raw`.
        index: the prompt's index. It determines the game.
    """

    tools: Sequence[Tool] = ()

    def __init__(self, name: str, index: int = 0) -> None:
        self._name = name
        self._seed = index % 2**32  # random.seed takes -3 for 3, and numpy no negative numbers
        self._state = random.Random(self._seed).getstate()
        self._env: Any = None

    async def start(self) -> list[Message]:
        return await in_thread(partial(self._with_own_random, self._start))

    async def step(self, reply: Message) -> Step:
        return await in_thread(partial(self._with_own_random, partial(self._step, reply["content"])))

    async def close(self) -> None:
        pass

    def _start(self) -> list[Message]:
        self._env = textarena.make(f"{self._name}-raw")
        try:
            self._env.reset(num_players=1, seed=self._seed)
        except AssertionError as refused:
            name = self._name
            raise ConfigError(f"task.params.name must be a game for one player, got {name!r}: {refused}") from None
        return [self._new()]

    def _step(self, text: str) -> Step:
        done, _ = self._env.step(text)
        if not done:
            return Step(messages=[self._new()])
        rewards, info = self._env.close()
        return Step(done=True, reward=float(rewards[0]), metrics={"invalid_move": float(info[0]["invalid_move"])})

    def _new(self) -> Message:
        """Return the game's messages since the last reply as one message, without the game's copy of that reply."""
        _, seen = self._env.get_observation()
        return user("\n".join(text for speaker, text, _ in seen if speaker == textarena.GAME_ID))

    def _with_own_random(self, function: Callable[[], Result]) -> Result:
        """Call `function` with this game's own state of Python's global random numbers, and return its result."""
        with _RANDOM:
            others = random.getstate()
            random.setstate(self._state)
            try:
                return function()
            finally:
                self._state = random.getstate()
                random.setstate(others)
