"""The contract of rewards: the scoring function, its declarations, and its possible results."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from async_rl.base.errors import RewardError, shown
from async_rl.base.types import MAX_METRICS, MAX_NAME_CHARS

if TYPE_CHECKING:
    from async_rl.base.config import Config

Score = Callable[..., Any]
"""A function that scores, `def` or `async def`. It takes the question and what the reward is `of`, and the settings
if there are any; it returns a number, a RewardResult, a mapping with `score`, or None. One of a group returns a list of
these."""

Of = Literal["answer", "episode", "group"]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A verdict with metrics, or the reason why there is none."""

    score: float | None
    """The reward; None: no verdict. The answer then leaves its group, and is never trained on as if it were wrong."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log, as reward/<name of the reward>/<name>."""
    reason: str = ""
    """Why there is no verdict, in a sentence."""
    is_final: bool = True
    """False: the same input may get another verdict, so this one is not cached."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """The cost of the call, such as tokens: numbers that are summed and logged as scoring/<name of the reward>/<its
    name>. A cached verdict costs nothing."""


class CallLimits(NamedTuple):
    """The limits of the calls of a reward in one worker, unless the configuration of the reward has others."""

    timeout_s: float
    """How long one call may take."""
    concurrency: int
    """The most simultaneous calls."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward with its declarations. It has one of `function` and `open`.

    Raises:
        ValueError: it has both or none of the two, is a function of its input but not of an answer, or a field has a
            value that is not allowed.
    """

    function: Score | None = None
    open: Callable[[Config, Any], AbstractAsyncContextManager[Score]] | None = None
    """Opens what the reward needs, once in each worker, given the configuration and the settings, and yields the
    function, which then takes no settings."""
    of: Of = "answer"
    """The second argument: the text of one answer, one Episode, or the list of the Episodes of a group."""
    settings: Any = None
    """The class of its settings, made by async_rl.base.config.section.section; None: it has none."""
    is_function_of_input: bool = False
    """Whether the same question, answer and settings always give the same verdict, which may then be cached."""
    inputs: Callable[[Config], Any] | None = None
    """Returns further parts of the configuration that change a cached verdict, as in JSON; None: no others."""
    modules: tuple[str, ...] = ()
    """The names of further modules whose code changes a cached verdict, besides the function's own. A package counts
    with all of its modules."""
    concurrency: int = 0
    """The most simultaneous calls of a worker; 0: MAX_THREADS of a `def`, MAX_TASKS of an `async def`."""
    limits: Callable[[Config, Any], CallLimits] | None = None
    """Returns the limits of its calls, given the configuration and the settings; None: timeouts.reward_s and
    `concurrency`."""
    check: Callable[[Config, Any, float, str], None] | None = None
    """Checks before a run starts that the reward can work on this machine; raises ConfigError if not. It gets the
    configuration, the settings, the time limit of a call in seconds, and the key of the reward."""
    describe: Callable[[Config, Any], str] | None = None
    """Returns the words of `async-rl status` about it, given the configuration and the settings."""

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
"""The name and the type of fields of a RewardResult, and the words for what they must be."""


def read_verdict(value: Any) -> RewardResult:
    """Return what a reward function returned for one answer as a RewardResult whose numbers are finite floats.

    A mapping with `score`, as verl's rewards return it, is a verdict whose other numbers are metrics; its texts and
    Nones, such as the answer that was found, are left out.

    Raises:
        RewardError: it is neither a finite number nor a RewardResult, nor a mapping with `score`, nor None, a metric
            can't be logged, or a field of the RewardResult has another type than it must.
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
