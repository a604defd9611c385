"""Measures how fast the rollout worker plays episodes with tools, against the fastest schedule of the same episodes.

    python -m benchmarks.episodes configs/quickstart.yaml --rounds 3
    python -m benchmarks.episodes configs/quickstart.yaml --rounds 3 --hang

An untrained tiny model on a real SGLang server says a few random letters, most of which are read as the call of a tool
that takes a lognormal time (mean 1 s, cv 1.5; benchmarks/tool_load.py). The worker plays 50 groups of 4 episodes at
once. Then a bare client sends the same requests to the same server, with the same waits between them and as many groups
at once. So it learns what the engine takes for each request. In the fastest schedule a group begins as soon as one of
the 50 slots is free, and its episodes take their tools' times and these times of the engine, and nothing else.

The time of a load ends when all but the last learner.prompts_per_step of its groups have ended, so that a long tail of
a few episodes, in which everybody waits, decides nothing. The ratio is the schedule's time over the worker's.

With --hang the worker plays once more in each round, with one slot more, and one call of a tool hangs until
timeouts.tool_s in one of the groups. The other groups then have as many slots as before: do they take as long?
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import heapq
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import resolve
from async_rl.base.models_and_data.model_folder import end_tokens, load_tokenizer
from async_rl.base.network import authorization
from async_rl.base.types import Group
from async_rl.tools.sweeps.tables import Table
from benchmarks.generation import roll_out
from benchmarks.page import machine_text, write_page
from benchmarks.tool_load import CV, MEAN_S, Hang, call_key, look_up_s
from buffer.keys import own_keys
from learner.models.tiny_model import character_tokenizer, tiny_model
from rollout_server.engines.base import Engine, open_engine
from rollout_server.tasks.base import Task, open_task

SETTINGS = (
    "run.name=episodes", "rollout.engine=sglang", "rollout.group_size=4", "rollout.max_groups_in_flight=50",
    "rollout.max_turns=8", "rollout.max_response_tokens=6", "rollout.max_episode_tokens=256",
    "task.tools=[benchmarks.tool_load:look_up]", "rollout.tool_parser=benchmarks.tool_load:read_reply",
)  # fmt: skip
"""200 episodes at once. Settings on the command line come after these."""
CACHE_KEYS = itertools.count()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode as it was played: the request's tokens, the length of the reply, the tool's time."""

    tokens: list[int]
    """The conversation so far."""
    num_sampled: int
    tool_s: float
    """The time of the tool that the reply calls; 0 if it calls none."""


@dataclass(frozen=True, slots=True)
class Round:
    """The times of one round, each until all but the last groups of the load have ended."""

    worker_s: float
    bare_s: float
    schedule_s: float
    hang_s: float
    """The worker's time while a call hangs; 0 if that was not measured."""

    @property
    def ratio(self) -> float:
        """The worker's speed over that of the fastest schedule: 1 at best."""
        return self.schedule_s / self.worker_s

    @property
    def hang_ratio(self) -> float:
        """The worker's speed beside a call that hangs over its speed without one; 0 if that was not measured."""
        return self.worker_s / self.hang_s if self.hang_s else 0.0


def played_turns(group: Group, tokenizer: Any, ends: Sequence[int], tool_limit_s: float) -> list[list[Turn]]:
    """Return the turns of each episode of a group that the worker has played."""
    episodes = []
    for row in group.rows:
        tokens, first, turns = row.tokens.tolist(), 0, []
        for end in row.turn_ends:
            first += int(row.mask[first:].argmax())  # after what was observed
            reply = tokens[first : end + 1]
            key = call_key(tokenizer.decode(reply[:-1] if reply[-1] in ends else reply))
            tool_s = 0.0 if key is None else min(look_up_s(key), tool_limit_s)
            turns.append(Turn(group.prompt_tokens.tolist() + tokens[:first], len(reply), tool_s))
            first = end + 1
        episodes.append(turns)
    return episodes


def end_times(durations: Sequence[float], slots: int) -> list[float]:
    """Return the sorted end times of groups with these durations, each begun, in this order, once a slot is free."""
    free_s = [0.0] * slots
    return sorted(_end(free_s, duration) for duration in durations)


def _end(free_s: list[float], duration: float) -> float:
    end_s = free_s[0] + duration
    heapq.heapreplace(free_s, end_s)
    return end_s


async def bare_load(config: Config, url: str, groups: Sequence[list[list[Turn]]]) -> tuple[list[float], list[float]]:
    """Send the requests of groups to the server, with the waits between them, as many groups at once as the worker has.

    Returns:
        When each group ended, sorted, and for each group, in their order, the time that it took: that of the engine for
        its requests plus that of its tools, as long as that takes in its longest episode.
    """
    slots, ends_s, start_s = asyncio.Semaphore(config.rollout.max_groups_in_flight), [], time.monotonic()
    timeout = aiohttp.ClientTimeout(total=config.timeouts.generate_s)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=authorization(config.network)
    ) as session:

        async def send(turns: Sequence[Turn], key: str) -> float:
            """Send a request for the replies of `turns`, and return the seconds until they came."""
            sampling = {"temperature": config.rollout.temperature, "ignore_eos": True}
            body = {
                "input_ids": [turn.tokens for turn in turns], "return_logprob": True, "extra_key": key,
                "sampling_params": [sampling | {"max_new_tokens": turn.num_sampled} for turn in turns],
            }
            sent_s = time.monotonic()
            async with session.post(f"{url}/generate", json=body) as reply:
                reply.raise_for_status()
                await reply.json()
            return time.monotonic() - sent_s

        async def play_rest(turns: Sequence[Turn], key: str) -> float:
            """Play an episode from its first tool on; return the times of its tools, and of the engine."""
            await asyncio.sleep(turns[0].tool_s)
            total_s = turns[0].tool_s
            for turn in turns[1:]:
                total_s += await send([turn], key) + turn.tool_s
                await asyncio.sleep(turn.tool_s)
            return total_s

        async def play(episodes: list[list[Turn]]) -> float:
            async with slots:
                key = f"bare-{next(CACHE_KEYS)}"
                first_s = await send([turns[0] for turns in episodes], key)
                duration_s = first_s + max(await asyncio.gather(*(play_rest(turns, key) for turns in episodes)))
                ends_s.append(time.monotonic() - start_s)
                return duration_s

        durations_s = await asyncio.gather(*map(play, groups))
    return sorted(ends_s), durations_s


async def measure_round(config: Config, engine: Engine, task: Task, batches: int, with_hang: bool) -> Round:
    """Return the times of `batches` batches of groups, played by the worker, then by the bare client, and `with_hang`
    by the worker again, while one call of a tool hangs.
    """
    last = (batches - 1) * config.learner.prompts_per_step - 1
    rolled = await roll_out(config, engine, task, batches)
    groups = sorted((group for batch in rolled.batches for group in batch.groups), key=lambda group: group.group_id)
    tokenizer, ends = load_tokenizer(config.model.path), end_tokens(config.model.path)
    turns = [played_turns(group, tokenizer, ends, config.timeouts.tool_s) for group in groups]
    ends_s, durations_s = await bare_load(config, engine.url, turns)
    hang_s = 0.0
    if with_hang:
        slots = config.rollout.max_groups_in_flight + 1
        more = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_groups_in_flight=slots))
        Hang.is_due = True
        hang_s = (await roll_out(more, engine, task, batches)).taken_s[-2]
    schedule_s = end_times(durations_s, config.rollout.max_groups_in_flight)[last]
    return Round(rolled.taken_s[-2], ends_s[last], schedule_s, hang_s)


async def measure(config: Config, batches: int, rounds: int, with_hang: bool, logs: Path) -> list[Round]:
    engine = open_engine(config, 0, logs)
    measured = []
    try:
        await engine.start()
        task = open_task(config, load_tokenizer(config.model.path))
        await roll_out(config, engine, task, 2)  # warm-up
        gc.collect()
        gc.freeze()  # as the rollout process of a run does
        for number in range(rounds):
            measured.append(await measure_round(config, engine, task, batches, with_hang))
            print(f"round {number + 1}/{rounds}: {measured[-1]}", flush=True)
        return measured
    finally:
        await engine.aclose()


def report(command: str, config: Config, rounds: Sequence[Round], episodes: int) -> str:
    header = ["round", "worker, episodes/s", "bare client", "fastest schedule", "worker / schedule"]
    rows = [
        [
            str(number + 1), *(f"{episodes / s:.1f}" for s in (each.worker_s, each.bare_s, each.schedule_s)),
            f"{each.ratio:.3f}",
        ]
        for number, each in enumerate(rounds)
    ]  # fmt: skip
    with_hang = any(each.hang_s for each in rounds)
    if with_hang:
        header += ["worker beside a call that hangs", "beside / without"]
        for row, each in zip(rows, rounds, strict=True):
            row += [f"{episodes / each.hang_s:.1f}", f"{each.hang_ratio:.3f}"]
    rollout = config.rollout
    text = f"""# Episodes with tools: the worker against the fastest schedule

Command: `{command}`, {machine_text()}.

{rollout.max_groups_in_flight} groups of {rollout.group_size} episodes at once on SGLang with an untrained tiny model,
tools with lognormal times (mean {MEAN_S:g} s, cv {CV:g}). The schedule has the same tools' times, and the engine's
times for the same requests from a bare client.

{Table(header, rows).markdown()}
Median ratio to the schedule: {statistics.median(each.ratio for each in rounds):.3f}."""
    if with_hang:
        ratio = statistics.median(each.hang_ratio for each in rounds)
        text += f" Median ratio of the other groups beside a hanging call to those without one: {ratio:.3f}."
    return text + "\n"


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--batches", type=int, default=12, help="learner.prompts_per_step groups each, at least 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/episodes"), help="writes OUT.md and OUT.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    words = ["python -m benchmarks.episodes", args.config, f"--batches {args.batches} --rounds {args.rounds}"]
    command = " ".join([*words, *["--hang"] * args.hang, f"--out {args.out}", *args.overrides])
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("tiny-qwen2", seed=0).save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
        config = load_config(args.config, [*SETTINGS, f"model.path={folder}", *args.overrides])
        logs = args.out.with_name(f"{args.out.name}-server")
        with own_keys(config, Path(folder) / "keys") as keys:
            config = resolve(config, keys)
            rounds = asyncio.run(measure(config, args.batches, args.rounds, args.hang, logs))
    episodes = (args.batches - 1) * config.learner.prompts_per_step * config.rollout.group_size
    numbers = {"command": command, "episodes": episodes, "rounds": [dataclasses.asdict(each) for each in rounds]}
    write_page(args.out, report(command, config, rounds, episodes), numbers)


if __name__ == "__main__":
    main()
