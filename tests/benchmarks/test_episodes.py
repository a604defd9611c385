"""The benchmark of episodes: the load's tools, the replay of what was played, the schedule, and the table."""

from __future__ import annotations

import asyncio
import json
import statistics
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from async_rl.types import EpisodeFacts, Group, Row
from benchmarks.episodes import Round, Turn, bare_load, end_times, played_turns, report
from benchmarks.tool_load import Hang, call_key, look_up, look_up_s, read_reply
from learner.models.tiny_model import character_tokenizer
from tests.kit.configs import make_config

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id
CONFIG = make_config(rollout={"group_size": 2, "concurrency": 2})
CALL, ANSWER = "a", next(letter for letter in "bcdefghij" if call_key(letter) is None)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_tools_take_lognormal_times_of_mean_1_s_and_cv_1_5() -> None:
    times = [look_up_s(key) for key in range(40_000)]
    assert statistics.fmean(times) == pytest.approx(1.0, abs=0.05)
    assert statistics.stdev(times) / statistics.fmean(times) == pytest.approx(1.5, abs=0.2)


def test_three_of_four_replies_are_calls_and_their_text_says_of_what() -> None:
    keys = [call_key(f"reply {number}") for number in range(2000)]
    assert sum(key is not None for key in keys) / len(keys) == pytest.approx(0.75, abs=0.04)
    call, answer = (asyncio.run(read_reply(text, [])) for text in (CALL, ANSWER))
    assert json.loads(call.calls[0][1]) == {"key": call_key(CALL)}
    assert (answer.content, answer.calls) == (ANSWER, ())


def test_only_the_next_call_hangs() -> None:
    quick = next(key for key in range(1000) if look_up_s(key) < 0.05)

    async def call() -> str:
        return await asyncio.wait_for(look_up(quick), 5)

    Hang.is_due = True
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(look_up(quick), 0.1))
    assert asyncio.run(call()) == "found"


def test_what_was_played_is_read_from_its_tokens() -> None:
    first, observed, second = [*encode(CALL), END], encode("\nfound"), encode(ANSWER)
    mask = np.array([True] * 2 + [False] * len(observed) + [True])
    tokens = np.array(first + observed + second, np.int32)
    row = Row(
        tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), versions=np.zeros(len(tokens), np.int32), mask=mask,
        reward=0.0, finish_reason="stop", turn_ends=(1, len(tokens) - 1), turn_rewards=(0.0, 0.0),
    )
    facts = EpisodeFacts(rows=1, turns=2, tool_calls=1, tool_s=1.0, generate_s=0.0, duration_s=1.0, end="done")
    group = Group(
        group_id=0, prompt_index=0, start_version=0, temperature=1.0, prompt_tokens=np.array([7, 3], np.int32),
        rows=(row,), duration_s=1.0, episodes=(facts,),
    )
    key = call_key(CALL)
    assert key is not None
    ((one, two),) = played_turns(group, TOKENIZER, [END], tool_limit_s=30)
    assert one == Turn([7, 3], 2, look_up_s(key))
    assert two == Turn([7, 3, *first, *observed], 1, 0.0)
    assert played_turns(group, TOKENIZER, [END], tool_limit_s=0.001)[0][0].tool_s == 0.001


def test_in_the_fastest_schedule_a_group_begins_when_a_slot_is_free() -> None:
    assert end_times([3, 1, 1, 2], slots=2) == [1, 2, 3, 4]
    assert end_times([3, 1, 1, 2], slots=4) == [1, 1, 2, 3]


def test_the_bare_client_sends_every_turn_and_waits_for_the_tools_between() -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        await asyncio.sleep(0.02)
        return web.json_response([])

    async def load() -> tuple[list[float], list[float]]:
        application = web.Application()
        application.router.add_post("/generate", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        long, short = [Turn([5], 3, 0.2), Turn([5, 6], 2, 0.0)], [Turn([5], 4, 0.1)]
        result = await bare_load(CONFIG, f"http://{host}:{port}", [[long, short]] * 3)
        await runner.cleanup()
        return result

    ends_s, durations_s = asyncio.run(load())
    assert len(asked) == 6 and len({body["extra_key"] for body in asked}) == 3
    first = [body for body in asked if len(body["input_ids"]) == 2]
    assert [[s["max_new_tokens"] for s in body["sampling_params"]] for body in first] == [[3, 4]] * 3
    assert [body["input_ids"] for body in asked if body not in first] == [[[5, 6]]] * 3
    assert min(durations_s) >= 0.2 + 2 * 0.02 and ends_s == sorted(ends_s)
    assert ends_s[-1] > 1.9 * min(durations_s)  # two slots for three groups


def test_the_table_has_the_ratios_of_each_round_and_their_medians() -> None:
    rounds = [Round(10.0, 9.5, 9.0, 10.5), Round(20.0, 19.0, 19.0, 20.0), Round(10.0, 9.0, 8.0, 10.0)]
    text = report("the command", CONFIG, rounds, episodes=100)
    assert "| 1 | 10.0 | 10.5 | 11.1 | 0.900 | 9.5 | 0.952 |" in text
    assert "Median ratio to the schedule: 0.900" in text and "without one: 1.000." in text
    without = report("the command", CONFIG, [Round(10.0, 9.5, 9.0, 0.0)], episodes=100)
    assert "| 1 | 10.0 | 10.5 | 11.1 | 0.900 |" in without and "hang" not in without
