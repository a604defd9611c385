"""The rewards judge, judge_pairwise and judge_listwise: a language model that scores, compares or ranks answers.

An answer without a readable verdict of the judge has no verdict, and is never trained on as if it were wrong.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.section import Section, section
from async_rl.base.errors import first_error
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.contract import CallLimits, Reward, RewardResult, Score
from rollout_server.rewards.judge.verdicts import (
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

if TYPE_CHECKING:
    from rollout_server.rewards.judge.client import JudgeClient

Counts = dict[str, float]
Result = TypeVar("Result")

_REASON = {"reason": {"type": "string"}}


@section("task.rewards.params")
class AskingSettings:
    """The settings that all rewards of a judge have."""

    prompt: str = ""
    """The prompt. {question} and {reference}, the right answer, are replaced; other braces stay. Empty: a plain one."""
    system: str = ""
    """The system message before it. Nothing is replaced in it."""
    max_tokens: PositiveInt = 1024
    """The longest reply of the judge, with its thoughts."""
    temperature: NonNegativeFloat = 0.0
    """The sampling temperature of the judge."""
    structured: bool = True
    """Ask for JSON by a schema (response_format). false for endpoints that refuse that."""
    body: Section[dict[str, Any]] = field(default_factory=dict)
    """Further fields of a request, such as {chat_template_kwargs: {enable_thinking: false}}."""


@section("task.rewards.params")
class ScoreSettings(AskingSettings):
    """The settings of the reward `judge`, whose prompt has a place for {answer}."""

    low: float = 0.0
    """The lowest score. It is the reward 0."""
    high: float = 10.0
    """The highest score. It is the reward 1."""

    def __post_init__(self) -> None:
        check(self.low < self.high, "task.rewards.params.high", self.high, f"more than low = {self.low:g}")


@section("task.rewards.params")
class PairSettings(AskingSettings):
    """The settings of the reward `judge_pairwise`, whose prompt has places for {answer_a} and {answer_b}."""

    opponents: NonNegativeInt = 0
    """The other answers of its group that each is compared with, at least; 0: all. Each comparison is two requests."""


@section("task.rewards.params")
class ListSettings(AskingSettings):
    """The settings of the reward `judge_listwise`, whose prompt has a place for {answers}."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Asks a client as the settings say."""

    client: JudgeClient
    settings: Any

    async def score(self, question: Question, response: str) -> RewardResult:
        """Return the judge's score of an answer, from 0 to 1."""
        low, high = self.settings.low, self.settings.high
        values = {**values_of(question), "answer": response, "low": f"{low:g}", "high": f"{high:g}"}
        wanted = {**_REASON, "score": {"type": "number", "minimum": low, "maximum": high}}
        value, counts, reason = await self._ask(SCORE_PROMPT, values, wanted, lambda text: read_score(text, low, high))
        if value is None:
            return RewardResult(None, reason=reason, counts=counts)
        return RewardResult((value - low) / (high - low), counts=counts)

    async def compare(self, question: Question, episodes: Sequence[Episode]) -> list[RewardResult]:
        """Return for each answer the share of its comparisons that it wins, a tie being half of one.

        Each pair is shown in both orders. If the two verdicts contradict each other, it is a tie.
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
        """Return the place of each answer in its group, from 0 for the last to 1 for the best.

        It is the mean of two rankings, for which the answers are shown in opposite orders.
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
        """Return 1 if the first of two answers is better, 0 if the second is, 0.5 for a tie; None: no verdict."""
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
        """Return the answers from the best to the worst, as the judge ranks them when they are shown in this order."""
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
        """Return what `read` finds in the judge's reply, or None; what that has cost; and why there is no verdict."""
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
    """Return the pairs of a comparison of `size` answers, so that each meets at least `opponents` others; 0: all."""
    if not opponents or opponents >= size - 1:
        return list(itertools.combinations(range(size), 2))
    distances = range(1, -(-opponents // 2) + 1)
    return sorted({(min(i, j), max(i, j)) for i in range(size) for d in distances for j in [(i + d) % size]})


def share_of_rate(config: Config) -> float:
    """Return the requests in a minute of one reward of one worker; 0: no limit."""
    names = [each.reward for each in config.task.named_rewards] + [config.eval.gold_reward]
    judges = sum(name in ("judge", "judge_pairwise", "judge_listwise") for name in names)
    return config.judge.requests_per_minute / len(config.server_names) / max(1, judges)


def summed(counts: Iterable[Counts]) -> Counts:
    """Return the sum of each count."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)  # type: ignore[arg-type]  # floats, too
    return dict(total)


async def _all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of all calls; the first that fails cancels the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]


def _with_counts(results: list[RewardResult], counts: Counts) -> list[RewardResult]:
    """Return the results, the first of them with the counts of all."""
    return [replace(result, counts=counts if index == 0 else {}) for index, result in enumerate(results)]


def _limits(config: Config, num_requests: int, of_evaluation: int = 0) -> CallLimits:
    """Return the limits of calls of so many requests; those for the prompts of an evaluation have `of_evaluation`, if
    that is more. At once there are as many as have a place for each of their requests.
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
    """Return the `check` of a reward whose prompt needs these places, and whose calls have these limits."""

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
    """Return the `open` of the reward whose function is this method of a Judge."""

    @asynccontextmanager
    async def open_judge(config: Config, settings: AskingSettings) -> AsyncIterator[Score]:
        from rollout_server.rewards.judge.client import open_client  # imports aiohttp

        async with open_client(config, share_of_rate(config)) as client:
            yield getattr(Judge(client, settings), method)

    return open_judge


def _judge_of(config: Config) -> Any:
    """Return what of the configuration changes verdicts."""
    judge = config.judge
    return [judge.path, judge.model, [judge.engine, judge.server_args] if judge.path else list(judge.urls)]


JUDGE = Reward(
    open=_opens("score"), settings=ScoreSettings, is_function_of_input=True, inputs=_judge_of,
    modules=("rollout_server.rewards.judge.verdicts",),
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
