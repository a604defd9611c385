"""The rewards judge, judge_pairwise and judge_listwise: a language model scores, compares or ranks answers.

The judge answers chats at one or several endpoints like OpenAI's. `JudgeClient` handles their failures:

    408, 425, 429, 5xx, a broken   the request is sent again, to another endpoint if there is one, for judge.patience_s
    connection, a timeout, a       after its first failure; then there is no verdict. The pauses double, and are at
    reply that is no JSON          least as long as a Retry-After in seconds
    401, 403, 404, 405             the reward fails, because every request would
    another 4xx                    no verdict on this answer, for example because it is too long for the model

If the judge's reply can't be read, the answer has no verdict. It is never trained on as if it were wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
from aiolimiter import AsyncLimiter
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.section import Section, section
from async_rl.base.errors import ConfigError, RewardError, first_error
from async_rl.base.network import api_key
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.contract import CallLimits, Reward, RewardResult, Score
from rollout_server.rewards.judge_verdicts import (
    LIST_PROMPT,
    PAIR_PROMPT,
    SCORE_PROMPT,
    fill,
    read_choice,
    read_ranking,
    read_score,
    schema,
    values_of,
)

Counts = dict[str, float]
Result = TypeVar("Result")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""The mean pause after the first failure of a request, and the longest pause."""
_PASSING = (408, 425, 429)
"""The HTTP statuses below 500 after which the same request may succeed."""
_HOPELESS = (401, 403, 404, 405)
"""The HTTP statuses after which no request can succeed."""
_REASON = {"reason": {"type": "string"}}
_moved: dict[tuple[str, ...], tuple[str, ...]] = {}
"""[judge.urls with which this worker was connected] where these judge servers are now, in the same order."""


@section("task.rewards.params")
class AskingSettings:
    """The settings that all judge rewards share."""

    prompt: str = ""
    """The judge's prompt; empty: a default. {question} and {reference}, the right answer, are replaced, other braces
    not."""
    system: str = ""
    """The judge's system message. Nothing is replaced in it."""
    max_tokens: PositiveInt = 1024
    """The longest reply of the judge, including its thinking."""
    temperature: NonNegativeFloat = 0.0
    """The sampling temperature of the judge."""
    structured: bool = True
    """Ask for JSON with a schema (response_format). Set false for endpoints that do not support it."""
    body: Section[dict[str, Any]] = field(default_factory=dict)
    """Further fields of each request, such as {chat_template_kwargs: {enable_thinking: false}}."""


@section("task.rewards.params")
class ScoreSettings(AskingSettings):
    """The settings of the reward `judge`. Its prompt must contain {answer}."""

    low: float = 0.0
    """The judge's lowest score, which becomes the reward 0."""
    high: float = 10.0
    """The judge's highest score, which becomes the reward 1."""

    def __post_init__(self) -> None:
        check(self.low < self.high, "task.rewards.params.high", self.high, f"more than low = {self.low:g}")


@section("task.rewards.params")
class PairSettings(AskingSettings):
    """The settings of the reward `judge_pairwise`. Its prompt must contain {answer_a} and {answer_b}."""

    opponents: NonNegativeInt = 0
    """The fewest other answers of its group that each answer is compared with; 0: all. A comparison is two requests."""


@section("task.rewards.params")
class ListSettings(AskingSettings):
    """The settings of the reward `judge_listwise`. Its prompt must contain {answers}."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The judge's reply and its cost, or the reason why there is no reply."""

    text: str | None = None
    reason: str = ""
    is_cut_off: bool = False
    """Whether the reply ended at max_tokens."""
    counts: dict[str, float] = field(default_factory=dict)
    """requests, retries, prompt_tokens, completion_tokens, and limited_s (seconds waited for the rate limit)."""


class _RefusedError(Exception):
    """An endpoint replied with HTTP status 400 or above."""

    def __init__(self, status: int, text: str, retry_after: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status
        self.wanted_s = 0.0
        """The seconds of a Retry-After header; 0 if it has none, or a date."""
        with suppress(ValueError):
            self.wanted_s = float(retry_after)


class JudgeClient:
    """Sends requests to the judge's endpoints from one event loop, at most judge.concurrency at a time.

    Args:
        session: an HTTP session that sends the API key.
        per_minute: the most requests per minute; 0: no limit.
    """

    def __init__(self, config: Config, session: aiohttp.ClientSession, per_minute: float) -> None:
        self._judge = config.judge
        self._session = session
        self._rate = AsyncLimiter(1, 60 / per_minute) if per_minute else None
        self._places = asyncio.Semaphore(config.judge.concurrency)
        self._models: dict[str, str] = {}
        """For each address of a judge: the first model that it lists."""
        self._open = Counter(dict.fromkeys(range(len(config.judge.urls)), 0))
        """For each index in judge.urls: the number of requests that this judge has not answered yet."""

    async def ask(self, body: Mapping[str, Any]) -> JudgeReply:
        """Send a chat completion with this body, and return the reply.

        Raises:
            RewardError: no request can succeed, see _HOPELESS.
        """
        patience_s, clock = self._judge.patience_s, asyncio.get_running_loop().time
        deadline_s: float | None = None
        problem, failed, pause_s, has_forgotten = "", -1, FIRST_PAUSE_S, False
        counts = {"requests": 0.0, "retries": 0.0, "limited_s": 0.0}
        while deadline_s is None or clock() < deadline_s:
            wanted_s = 0.0
            try:
                async with asyncio.timeout_at(deadline_s) as patience:
                    counts["limited_s"] += await self._wait_for_rate()
                    async with self._places:
                        judge = min(set(self._open) - {failed} or self._open, key=self._open.__getitem__)
                        url = _moved.get(self._judge.urls, self._judge.urls)[judge]
                        counts |= {"retries": counts["requests"], "requests": counts["requests"] + 1}
                        async with asyncio.timeout(self._judge.timeout_s):
                            answered = await self._post(judge, url, body)
                return _read(answered, counts)
            except TimeoutError:
                if patience.expired():
                    break
                problem = f"no whole reply in {self._judge.timeout_s:g} s (judge.timeout_s)"
            except _RefusedError as error:
                problem, status, wanted_s = str(error), error.status, error.wanted_s
                if status == 404 and not has_forgotten and self._models.pop(url, ""):
                    has_forgotten = True  # it may have started again with another model
                elif status in _HOPELESS:
                    key = "judge.api_key_variable" if status in (401, 403) else "judge.urls and judge.model"
                    raise RewardError(f"the judge at {url} refuses all requests, see {key}: {problem}") from None
                elif status < 500 and status not in _PASSING:
                    return JudgeReply(reason=f"the judge refused the request: {problem}", counts=counts)
            except (aiohttp.ClientError, OSError, ValueError) as error:  # a ValueError: no JSON, as a gateway's page
                problem = f"{type(error).__name__}: {error}"
            problem, failed = f"{url}: {problem}", judge
            deadline_s = deadline_s or clock() + patience_s
            pause = max(wanted_s, pause_s * random.uniform(0.5, 1.5))
            await asyncio.sleep(min(pause, max(0.0, deadline_s - clock())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        reason = f"the judge did not answer for {patience_s:g} s (judge.patience_s): {problem}"
        return JudgeReply(reason=reason, counts=counts)

    async def _wait_for_rate(self) -> float:
        """Wait until the rate limit allows a request; return the seconds waited."""
        if self._rate is None:
            return 0.0
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self._rate.acquire()
        return clock() - began_s

    async def _post(self, judge: int, url: str, body: Mapping[str, Any]) -> Any:
        """Send one chat completion to an endpoint, and return the JSON of its reply."""
        self._open[judge] += 1
        try:
            model = self._judge.model or self._models.get(url) or await self._first_model(url)
            return await self._send("POST", f"{url.rstrip('/')}/chat/completions", {"model": model, **body})
        finally:
            self._open[judge] -= 1

    async def _first_model(self, url: str) -> str:
        listed = await self._send("GET", f"{url.rstrip('/')}/models")
        try:
            self._models[url] = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RewardError(f"the judge at {url}/models lists no model: set judge.model") from None
        return self._models[url]

    async def _send(self, method: str, address: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._session.request(method, address, json=body) as response:
            text = await response.text(errors="replace")
            if response.status >= 400:
                raise _RefusedError(response.status, text, response.headers.get("Retry-After", "0"))
            return json.loads(text)


def move_judges(urls: Sequence[str], to: Sequence[str]) -> None:
    """Make the clients of this worker send their requests elsewhere: a judge server was started again.

    Args:
        urls: judge.urls, with which the worker was connected.
        to: the URLs of the same servers now, in the same order.
    """
    _moved[tuple(urls)] = tuple(to)


@asynccontextmanager
async def open_client(config: Config, per_minute: float) -> AsyncIterator[JudgeClient]:
    """A context with the client of one reward in one worker.

    Raises:
        ConfigError: there is no endpoint, or the environment variable with its key is not set.
    """
    judge, variable = config.judge, config.judge.api_key_variable
    if not judge.urls:
        raise ConfigError(
            f"judge.urls must name an endpoint, got none; only `async-rl train` starts servers of judge.path "
            f"{judge.path!r}"
        )
    key = api_key(config.network) if judge.path else os.environ.get(variable, "")
    if variable and not key:
        raise ConfigError(f"judge.api_key_variable: the variable {variable} is not set where the rollout workers run")
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=judge.concurrency), timeout=aiohttp.ClientTimeout(),
        headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=not judge.path,
    ) as session:
        yield JudgeClient(config, session, per_minute)


def _read(answered: Any, counts: dict[str, float]) -> JudgeReply:
    """Return the text of a chat completion, with `counts` extended by its tokens. The content may be a list of parts.
    """
    try:
        choice = answered["choices"][0]
        content = choice["message"]["content"] or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        usage = answered.get("usage") or {}
        counts |= {key: float(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return JudgeReply(reason=f"the judge's reply has no text: {str(answered)[:200]}", counts=counts)
    return JudgeReply(text, is_cut_off=choice.get("finish_reason") == "length", counts=counts)


@dataclass(frozen=True, slots=True)
class Judge:
    """Asks a judge with one reward's settings. Its three methods are the functions of the three rewards."""

    client: JudgeClient
    settings: Any

    async def score(self, question: Question, response: str) -> RewardResult:
        """Return the judge's score of an answer, scaled to 0..1."""
        low, high = self.settings.low, self.settings.high
        values = {**values_of(question), "answer": response, "low": f"{low:g}", "high": f"{high:g}"}
        wanted = {**_REASON, "score": {"type": "number", "minimum": low, "maximum": high}}
        value, counts, reason = await self._ask(SCORE_PROMPT, values, wanted, lambda text: read_score(text, low, high))
        if value is None:
            return RewardResult(None, reason=reason, counts=counts)
        return RewardResult((value - low) / (high - low), counts=counts)

    async def compare(self, question: Question, episodes: Sequence[Episode]) -> list[RewardResult]:
        """Return for each answer the share of its comparisons that it wins. A tie counts as half a win.

        The judge sees each pair in both orders. If its two verdicts contradict each other, it is a tie.
        """
        answers = [episode.answer for episode in episodes]
        pairs = pairs_of(len(answers), self.settings.opponents)
        met = await _all(self._meet(question, answers[first], answers[second]) for first, second in pairs)
        won: list[list[float]] = [[] for _ in answers]
        total = summed(counts for _, counts, _ in met)
        reason = "it was compared with no other answer"
        for (first, second), (share, _, why) in zip(pairs, met, strict=True):
            reason = why or reason
            if share is not None:
                won[first].append(share)
                won[second].append(1 - share)
        return _with_counts([
            RewardResult(sum(shares) / len(shares)) if shares else RewardResult(None, reason=reason) for shares in won
        ], total)

    async def rank(self, question: Question, episodes: Sequence[Episode]) -> list[RewardResult]:
        """Return the rank of each answer in its group, from 0 for the worst to 1 for the best.

        It is the mean of two rankings, for which the judge sees the answers in opposite orders.
        """
        answers, size = [episode.answer for episode in episodes], len(episodes)
        if size < 2:
            return [RewardResult(None, reason="there is no other answer to rank it with")] * size
        orders = [list(range(size)), list(reversed(range(size)))]
        ranked = await _all(self._rank(question, answers, order) for order in orders)
        places = [order for order, _, _ in ranked if order is not None]
        total = summed(counts for _, counts, _ in ranked)
        if not places:
            return _with_counts([RewardResult(None, reason=ranked[0][2])] * size, total)
        scores = [1 - sum(order.index(each) for order in places) / len(places) / (size - 1) for each in range(size)]
        differ = len(places) == 2 and places[0] != places[1]
        return _with_counts([RewardResult(score) for score in scores], summed([total, {"disagreed": float(differ)}]))

    async def _meet(self, question: Question, first: str, second: str) -> tuple[float | None, Counts, str]:
        """Compare two answers. Returns (result, costs, why there is no verdict).

        The result is 1 if the first is better, 0 if the second is, 0.5 for a tie, None for no verdict.
        """
        if first == second:
            return 0.5, {}, ""
        wanted = {**_REASON, "better": {"type": "string", "enum": ["A", "B", "tie"]}}
        asked = await _all(
            self._ask(PAIR_PROMPT, {**values_of(question), "answer_a": a, "answer_b": b}, wanted, read_choice)
            for a, b in ((first, second), (second, first))
        )
        (ahead, _, reason), (behind, _, other_reason) = asked
        counts = summed(each for _, each, _ in asked)
        if ahead is None or behind is None:
            return None, counts, reason or other_reason
        differ = {ahead, behind} in ({0.0}, {1.0})  # each time the answer in the same place was the better one
        return (ahead + 1 - behind) / 2, summed([counts, {"disagreed": float(differ)}]), ""

    async def _rank(
        self, question: Question, answers: Sequence[str], order: list[int]
    ) -> tuple[list[int] | None, Counts, str]:
        """Let the judge rank the answers, shown in this order.

        Returns (their indices, best first, or None; the costs; why there is no verdict).
        """
        shown = "\n\n".join(f"{number}:\n{answers[each]}" for number, each in enumerate(order, 1))
        size = len(answers)
        number = {"type": "integer", "minimum": 1, "maximum": size}
        wanted = {"ranking": {"type": "array", "items": number, "minItems": size, "maxItems": size}}
        values = {**values_of(question), "answers": shown}
        ranking, counts, reason = await self._ask(LIST_PROMPT, values, wanted, lambda text: read_ranking(text, size))
        return [order[place] for place in ranking] if ranking is not None else None, counts, reason

    async def _ask(
        self, prompt: str, values: dict[str, str], wanted: dict[str, Any], read: Callable[[str], Any]
    ) -> tuple[Any, Counts, str]:
        """Ask the judge. Returns (what `read` finds in the reply or None, the costs, why there is no verdict).

        Args:
            prompt: the default prompt.
            values: what replaces the {names} in the prompt.
            wanted: the properties of the JSON reply.
        """
        settings = self.settings
        messages = [{"role": "user", "content": fill(settings.prompt or prompt, values)}]
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        body = {"messages": messages, "max_tokens": settings.max_tokens, "temperature": settings.temperature}
        if settings.structured:
            body["response_format"] = schema(wanted)
        reply = await self.client.ask(body | settings.body)
        if reply.text is None:
            return None, summed([reply.counts, {"unanswered": 1.0}]), reply.reason
        value = None if reply.is_cut_off else read(reply.text)
        if value is None:
            counts = summed([reply.counts, {"unreadable": 1.0}])
            fault = "was cut off, see max_tokens" if reply.is_cut_off else "has no verdict"
            return None, counts, f"the judge's reply {fault}: {reply.text[:200]!r}"
        return value, reply.counts, ""


def pairs_of(size: int, opponents: int) -> list[tuple[int, int]]:
    """Return pairs of the indices of `size` answers, so that each is paired with at least `opponents` others; 0: all.
    """
    if not opponents or opponents >= size - 1:
        return list(itertools.combinations(range(size), 2))
    distances = range(1, -(-opponents // 2) + 1)
    return sorted({(min(i, j), max(i, j)) for i in range(size) for d in distances for j in [(i + d) % size]})


def share_of_rate(config: Config) -> float:
    """Return the rate limit of one reward in one worker: its equal share of judge.requests_per_minute; 0: no limit."""
    names = [each.reward for each in config.task.named_rewards] + [config.eval.gold_reward]
    judges = sum(name in ("judge", "judge_pairwise", "judge_listwise") for name in names)
    return config.judge.requests_per_minute / len(config.server_names) / max(1, judges)


def summed(counts: Iterable[Counts]) -> Counts:
    """Add up counts by name."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)  # type: ignore[arg-type]  # floats, too
    return dict(total)


async def _all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls simultaneously and return their results. The first error cancels the other calls and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]


def _with_counts(results: list[RewardResult], counts: Counts) -> list[RewardResult]:
    """Return the results with `counts` in the first one, so that each count is logged once for the group."""
    return [replace(result, counts=counts if index == 0 else {}) for index, result in enumerate(results)]


def _limits(config: Config, num_requests: int, of_evaluation: int = 0) -> CallLimits:
    """Return the limits of a reward whose calls send `num_requests` requests each to the judge.

    So many calls run simultaneously that all their requests fit into judge.concurrency.

    Args:
        of_evaluation: the number of requests of a call for a held-out prompt, if it is larger.
    """
    judge = config.judge
    at_once = max(1, judge.concurrency // max(1, num_requests or of_evaluation))
    evaluations = min(at_once, config.eval.num_prompts)
    most = evaluations * max(num_requests, of_evaluation) + (at_once - evaluations) * num_requests
    turns = -(-most // judge.concurrency)
    rate = share_of_rate(config)
    held_back_s = 60 / rate * most if rate else 0.0
    return CallLimits(judge.patience_s + judge.timeout_s * (1 + turns) + held_back_s, at_once)


def _limits_of_score(config: Config, settings: ScoreSettings) -> CallLimits:
    return _limits(config, 1)


def _limits_of_pairs(config: Config, settings: PairSettings) -> CallLimits:
    sizes = config.rollout.group_size, config.eval.samples_per_prompt
    of_group, of_evaluation = (2 * len(pairs_of(size, settings.opponents)) for size in sizes)
    return _limits(config, of_group, of_evaluation)


def _limits_of_list(config: Config, settings: ListSettings) -> CallLimits:
    return _limits(config, 2)


def _checks(places: Sequence[str], limits: Callable[[Config, Any], CallLimits]) -> Callable[..., None]:
    """Return the `check` of a judge reward: the prompt must have its placeholders, and calls must have enough time.

    Args:
        places: the names of the placeholders, such as `answer` for {answer}.
        limits: the `limits` of the reward.
    """

    def check_judge(config: Config, settings: AskingSettings, timeout_s: float, key: str) -> None:
        judge, needed_s = config.judge, limits(config, settings).timeout_s
        check(
            bool(judge.path or judge.urls), key, "a judge", "another reward without judge.path and judge.urls",
            "Set one of them: the model that judges, or an endpoint.",
        )
        needed = [f"{{{place}}}" for place in places]
        check(
            not settings.prompt or all(place in settings.prompt for place in needed), f"{key}.params.prompt",
            settings.prompt, f"a text with {' and '.join(needed)}",
        )
        check(
            timeout_s >= needed_s, f"{key}.timeout_s", timeout_s, f"at least {needed_s:g} s",
            "A call may take so long by judge.timeout_s, judge.patience_s and judge.requests_per_minute, and if it is "
            "cut off, its group is lost. Leave it out, or lower these.",
        )
        check(
            needed_s < config.timeouts.batch_s, "timeouts.batch_s", config.timeouts.batch_s,
            f"more than {needed_s:g} s, which a verdict may take",
            "Raise it, or lower judge.patience_s, or eval.samples_per_prompt where pairs are compared.",
        )

    return check_judge


def _opens(method: str) -> Callable[..., AbstractAsyncContextManager[Score]]:
    """Return the `open` of a reward whose scoring function is the method `method` of a Judge."""

    @asynccontextmanager
    async def open_judge(config: Config, settings: AskingSettings) -> AsyncIterator[Score]:
        async with open_client(config, share_of_rate(config)) as client:
            yield getattr(Judge(client, settings), method)

    return open_judge


def _judge_of(config: Config) -> Any:
    """Return the parts of the configuration that the judge's verdicts depend on; see Reward.inputs."""
    judge = config.judge
    return [judge.path, judge.model, [judge.engine, judge.server_args] if judge.path else list(judge.urls)]


JUDGE = Reward(
    open=_opens("score"), settings=ScoreSettings, is_function_of_input=True, inputs=_judge_of,
    modules=("rollout_server.rewards.judge_verdicts",),
    limits=_limits_of_score, check=_checks(("answer",), _limits_of_score),
)
"""The reward `judge`."""
JUDGE_PAIRWISE = Reward(
    open=_opens("compare"), of="group", settings=PairSettings, limits=_limits_of_pairs,
    check=_checks(("answer_a", "answer_b"), _limits_of_pairs),
)
"""The reward `judge_pairwise`."""
JUDGE_LISTWISE = Reward(
    open=_opens("rank"), of="group", settings=ListSettings, limits=_limits_of_list,
    check=_checks(("answers",), _limits_of_list),
)
"""The reward `judge_listwise`."""
