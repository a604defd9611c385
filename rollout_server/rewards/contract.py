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
"""A scoring function, `def` or `async def`. Its arguments are the question, what is scored (see Reward.of), and
`settings` if there are any. It returns a number, a RewardResult, a mapping with `score`, or None. For a group it
returns a list of these."""

Of = Literal["answer", "episode", "group"]


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
