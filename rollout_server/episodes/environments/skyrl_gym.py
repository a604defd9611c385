"""The environments of skyrl-gym (pip install skyrl-gym==0.4.0), played in this process: gsm8k_multi_turn, search, ...

    task:
      path: data/gsm8k/train.parquet
      env: rollout_server.episodes.environments.skyrl_gym:SkyRLGym
      params: {name: gsm8k_multi_turn, extras: {max_turns: 3}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from async_rl.base.errors import ConfigError
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool
from rollout_server.episodes.user_code import in_thread
from rollout_server.question import Question

try:
    import skyrl_gym
    from omegaconf import OmegaConf
except ImportError as error:
    raise ConfigError(f"skyrl-gym can't be imported ({error}): pip install skyrl-gym==0.4.0") from error


class SkyRLGym:
    """One episode of an environment of skyrl-gym, a class for `task.env`.

    Its methods run in threads, as they may block.

    The environment gets the question's right answer in extras["reward_spec"]["ground_truth"], as in SkyRL's files.

    Args:
        name: the name of the environment in skyrl-gym.
        env_config: the environment's configuration, e.g. the address of a search server.
        extras: further entries of the environment's `extras`, e.g. max_turns.
    """

    tools: Sequence[Tool] = ()

    def __init__(
        self, question: Question, name: str, env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._question = question
        spec = {"method": "rule", "ground_truth": question.ground_truth}
        about = {**question.extra, "extra_info": question.extra, "data_source": question.source, "reward_spec": spec}
        config = OmegaConf.create(dict(env_config or {}))
        self._make = partial(skyrl_gym.make, name, env_config=config, extras={**about, **(extras or {})})
        self._env: Any = None

    async def start(self) -> list[Message]:
        self._env = await in_thread(self._make)
        messages, _ = await in_thread(partial(self._env.init, [dict(said) for said in self._question.messages]))
        return [Message(role=said["role"], content=said["content"]) for said in messages]

    async def step(self, reply: Message) -> Step:
        """Pass the reply to the environment and return its answer; an empty message if it gives no observation."""
        out = await in_thread(partial(self._env.step, reply["content"]))
        said = [Message(role=seen["role"], content=seen["content"]) for seen in out["observations"]]
        measured = self._env.get_metrics() if out["done"] else {}
        metrics = {name: value for name, value in measured.items() if isinstance(value, int | float)}
        return Step(messages=said or [user("")], reward=out["reward"], done=bool(out["done"]), metrics=metrics)

    async def close(self) -> None:
        if self._env is not None:
            await in_thread(self._env.close)
