"""The environment whose look-ups get longer while a run goes on."""

import pytest

from benchmarks.drifting_chain import DriftingChain, drifted_s
from rollout_server.episodes.environments.chain import Chain


def test_the_mean_time_grows_evenly_and_then_stays():
    assert [drifted_s(0.1, 0.5, 100.0, since_s) for since_s in (0, 50, 100, 400)] == pytest.approx([0.1, 0.3, 0.5, 0.5])


async def _first_look_up(episode: Chain) -> str:
    (message,) = await episode.start()
    step = await episode.step({"role": "assistant", "content": f"?{message['content']}"})
    return str(step.messages[0]["content"])


def test_an_episode_is_the_one_of_chain():
    import asyncio

    drifting = asyncio.run(_first_look_up(DriftingChain(7, mean_s=0.0, end_s=0.0)))
    assert drifting == asyncio.run(_first_look_up(Chain(7, mean_s=0.0)))
