"""The contract of rewards: the scoring function, its declarations, its results, and threads that call it in time."""

from __future__ import annotations

import asyncio
import difflib
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from async_rl.base.errors import RewardError, WaitTimeoutError, raised_at, shown
from async_rl.base.host import usable_cores
from async_rl.base.types import MAX_METRICS, MAX_NAME_CHARS

if TYPE_CHECKING:
    from async_rl.base.config import Config

Score = Callable[..., Any]
"""A scoring function, `def` or `async def`. Its arguments are the question, what is scored (see Reward.of), and
`settings` if there are any. It returns a number, a RewardResult, a mapping with `score`, or None. For a group it
returns a list of these."""

Of = Literal["answer", "episode", "group"]
MAX_THREADS = 32
MAX_TASKS = 256
IDLE_TIMEOUT_S = 300.0
"""The longest wait for an idle child process of a reward. A user's reward function may call from more threads than
there are children; timeouts.reward_s usually ends its wait earlier."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A verdict with metrics, or the reason why there is none."""

    score: float | None
    """The reward. None: there is no verdict; the answer leaves its group, and is not trained on as if it were wrong."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log, as reward/<name of the reward>/<name>."""
    reason: str = ""
    """Why there is no verdict, as a sentence."""
    is_final: bool = True
    """False: the same input may get another verdict next time, so this one is not cached."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """The cost of the call, such as tokens. These numbers are summed and logged as scoring/<name of the
    reward>/<name>. A cached verdict costs nothing."""


class CallLimits(NamedTuple):
    """The limits of a reward's calls in one worker. The configuration of the reward may override them."""

    timeout_s: float
    """How long one call may take."""
    concurrency: int
    """The most simultaneous calls."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward with its declarations. Exactly one of `function` and `open` is set.

    Raises:
        ValueError: both or neither is set, `is_function_of_input` is set for a reward of something else than an answer,
            or a field has a value that is not allowed.
    """

    function: Score | None = None
    open: Callable[[Config, Any], AbstractAsyncContextManager[Score]] | None = None
    """Called once in each worker with the configuration and the settings. Returns a context that opens what the
    reward needs and yields the scoring function, which then takes no settings."""
    of: Of = "answer"
    """What is scored, the function's second argument: the text of an answer, an Episode, or a list of a group's
    Episodes."""
    settings: Any = None
    """The class of the reward's settings, made by async_rl.base.config.section.section. None: it has no settings."""
    is_function_of_input: bool = False
    """Whether the same question, answer and settings always give the same verdict. Only then verdicts may be cached."""
    inputs: Callable[[Config], Any] | None = None
    """Returns further parts of the configuration that cached verdicts depend on, as JSON values. None: no others."""
    modules: tuple[str, ...] = ()
    """Further modules on whose code cached verdicts depend, besides the function's own module. A package stands for
    all its modules."""
    concurrency: int = 0
    """The most simultaneous calls in a worker. 0: MAX_THREADS for a `def`, MAX_TASKS for an `async def`."""
    limits: Callable[[Config, Any], CallLimits] | None = None
    """A function from the configuration and the settings to the limits of a call. None: timeouts.reward_s and
    `concurrency`."""
    check: Callable[[Config, Any, float, str], None] | None = None
    """Called before a run starts; raises ConfigError if the reward can't work on this machine. Its arguments are the
    configuration, the settings, the time limit of a call in seconds, and the configuration key of the reward."""
    describe: Callable[[Config, Any], str] | None = None
    """A function from the configuration and the settings to what `async-rl status` says about the reward."""

    def __post_init__(self) -> None:
        near = difflib.get_close_matches(str(self.of), get_args(Of), n=1)
        hint = f". Did you mean {near[0]}?" if near else ""
        _check_field("of", self.of, self.of in get_args(Of), f"one of {', '.join(get_args(Of))}", hint)
        for name in ("function", "open", "inputs", "limits", "check", "describe"):
            value = getattr(self, name)
            _check_field(name, value, value is None or callable(value), "a function or None")
        flag, most, modules = self.is_function_of_input, self.concurrency, self.modules
        _check_field("is_function_of_input", flag, isinstance(flag, bool), "True or False")
        is_count = isinstance(most, int) and not isinstance(most, bool) and most >= 0
        _check_field("concurrency", most, is_count, "a whole number, 0 or more")
        are_names = isinstance(modules, tuple | list) and all(isinstance(name, str) and name for name in modules)
        _check_field("modules", modules, are_names, 'names of modules, such as ("my_parser",)')
        if (self.function is None) == (self.open is None):
            raise ValueError("a Reward must have one of function and open")
        if self.is_function_of_input and self.of != "answer":
            raise ValueError(f"a Reward that is a function of its input must be of an answer, got of={self.of!r}")


def _check_field(name: str, got: object, is_allowed: bool, allowed: str, hint: str = "") -> None:
    if not is_allowed:
        raise ValueError(f"`{name}` of a Reward must be {allowed}, got {got!r:.200}{hint}")


_FIELDS = (("metrics", Mapping, "a mapping"), ("reason", str, "a text"), ("counts", Mapping, "a mapping"))
"""For each checked field of a RewardResult: its name, its type, and a description of that type for errors."""


def read_verdict(value: Any) -> RewardResult:
    """Convert the return value of a reward function, for one answer, to a RewardResult whose numbers are finite floats.

    A mapping with `score`, as verl's rewards return it, becomes a verdict with the mapping's other numbers as metrics.
    Its texts and Nones, such as the answer that was found, are left out.

    Raises:
        RewardError: the value is none of a finite number, a RewardResult, a mapping with `score`, and None; or a metric
            can't be logged, or a field of the RewardResult has a wrong type.
    """
    if value is None:
        return RewardResult(None)
    if isinstance(value, Mapping) and "score" in value:
        others = {name: each for name, each in value.items() if name != "score"}
        value = RewardResult(value["score"], {k: v for k, v in others.items() if not isinstance(v, str | None)})
    if not isinstance(value, RewardResult):
        return RewardResult(_finite(value, "return a number, a RewardResult, a mapping with score, or None"))
    for name, kind, allowed in _FIELDS:
        if not isinstance(got := getattr(value, name), kind):
            raise RewardError(f"`{name}` of a RewardResult must be {allowed}, got {shown(got)}")
    if len(value.metrics) + len(value.counts) > MAX_METRICS:
        raise RewardError(f"the reward function may log at most {MAX_METRICS} metrics, got {len(value.metrics)}")
    for name in (*value.metrics, *value.counts):
        if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            allowed = f"printable text of at most {MAX_NAME_CHARS} characters"
            raise RewardError(f"the name of a metric must be {allowed}, got {name!r:.200}")
    metrics = {name: _finite(each, f"log a number as {name}") for name, each in value.metrics.items()}
    score = None if value.score is None else _finite(value.score, "return a number or None as score")
    counts = {name: _finite(each, f"log a number as {name}") for name, each in value.counts.items()}
    return RewardResult(score, metrics, value.reason, value.is_final, counts)


def _finite(value: Any, duty: str) -> float:
    finite = duty.replace("a number", "a finite number").partition(",")[0]
    try:
        if isinstance(value, str):  # float would read "1.0", and take "nan" or an answer for a reward
            raise TypeError
        number = float(value)
    except OverflowError:
        raise RewardError(f"the reward function must {finite}, got one beyond the range of a float") from None
    except Exception:  # float runs the code of the value's class
        raise RewardError(f"the reward function must {duty}, got {shown(value)}") from None
    if not math.isfinite(number):
        raise RewardError(f"the reward function must {finite}, got {number}")
    return number


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: Future[Any] = Future()
        self.result = asyncio.wrap_future(self.future)
        """Cancelling this future cancels the call, unless a thread has begun it."""


class RewardThreads:
    """A pool of daemon threads that call reward functions. Calls start in the order of their arrival.

    A thread whose call takes longer than `timeout_s` is given up, and a new thread replaces it.

    Args:
        timeout_s: the time limit of one call.
        limit: the configuration key of `timeout_s`, for error messages.
    """

    def __init__(self, timeout_s: float, num_threads: int, limit: str = "timeouts.reward_s") -> None:
        self._timeout_s = timeout_s
        self._limit = f"{limit} = {timeout_s:g} s"
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._begun_s: dict[_Call, float] = {}
        """When each running call began. Whichever removes it, its thread or `_replace_overdue`, sets its outcome."""
        for _ in range(num_threads):
            self._start_thread()

    async def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call all functions in the threads, wait for them, and return their results in the same order.

        Once a call has failed or `run` is cancelled, no further call starts.

        Raises:
            RewardError: a call raised, or took longer than the timeout.
            WaitTimeoutError: results are missing after `limit_s`, because calls still wait for a thread.
        """
        if not functions:  # no episode of the group can be scored
            return []
        limit_s, num_before = self.limit_s(len(functions)), self._queue.qsize()
        end_s = time.monotonic() + limit_s
        calls = [_Call(function) for function in functions]
        for call in calls:
            self._queue.put(call)
        results = [call.result for call in calls]
        try:
            while True:
                if time.monotonic() >= end_s:
                    raise WaitTimeoutError(
                        f"{len(calls)} answers waited {limit_s:g} s for the {self._num_threads} reward threads, behind "
                        f"{num_before} others that may take {self._limit} each"
                    )
                done, waiting = await asyncio.wait(
                    results, timeout=self._until_overdue_s(), return_when=asyncio.FIRST_EXCEPTION
                )
                if errors := [error for result in done if (error := result.exception())]:
                    raise errors[0]
                if not waiting:
                    return [result.result() for result in results]
                self._replace_overdue()  # the calls of all groups, because a cancelled group no longer checks its own
        finally:
            for result in results:
                result.cancel()

    def limit_s(self, num_calls: int) -> float:
        """Return the time limit of a `run` with `num_calls` calls, after the calls already queued; see `time_limit_s`.
        """
        return time_limit_s(self._queue.qsize() + num_calls, self._num_threads, self._timeout_s)

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="rewards", daemon=True).start()

    def _until_overdue_s(self) -> float:
        """Return the seconds until the longest running call reaches `timeout_s`; 0 if it has reached it."""
        now_s = time.monotonic()
        return max(0.0, min(self._begun_s.copy().values(), default=now_s) + self._timeout_s - now_s)

    def _replace_overdue(self) -> None:
        now_s = time.monotonic()
        for call, begun_s in self._begun_s.copy().items():  # dict.copy is atomic, so other threads may change it
            if now_s - begun_s < self._timeout_s or self._begun_s.pop(call, None) is None:
                continue
            self._start_thread()
            error = f"the reward function took longer than {self._limit} for one response"
            if call.result.cancelled():
                warnings.warn(f"{error}; the group had been given up meanwhile", stacklevel=2)
            call.future.set_exception(RewardError(error))

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            self._begun_s[call] = time.monotonic()
            outcome = _outcome(call.function)
            if self._begun_s.pop(call, None) is None:
                return  # the call was overdue, and another thread has taken the place of this one
            if isinstance(outcome, RewardError):
                call.future.set_exception(outcome)
            else:
                call.future.set_result(outcome)


def num_children() -> int:
    """Return the number of a worker's processes for scoring: one per usable core, at least 2 and at most MAX_THREADS.

    A process with math-verify takes 60 MB.
    """
    return min(MAX_THREADS, max(2, usable_cores()))


def time_limit_s(num_calls: int, at_once: int, timeout_s: float) -> float:
    """Return twice the time that `num_calls` calls need if each takes the whole timeout and `at_once` run at a time.

    It includes one more round for calls that are already running. The factor of two allows for a busy host.
    """
    return 2 * (1 + math.ceil(num_calls / at_once)) * timeout_s


def _outcome(function: Callable[[], Any]) -> Any:
    """Call a function and return its result, or a RewardError if it raised."""
    try:
        return function()
    except RewardError as error:
        return error
    except (Exception, SystemExit) as error:
        return raised(error)


def raised(error: BaseException) -> RewardError:
    """Wrap what a reward function raised in a RewardError."""
    wrapped = RewardError(f"{type(error).__name__}: {error}, at {raised_at(error)}")
    wrapped.__cause__ = error
    return wrapped
