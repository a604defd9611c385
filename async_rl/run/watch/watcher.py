"""The watcher: checks the rules of async_rl/base/config/watch.py on the metrics of a run, step by step.

It only finds trouble; async_rl/run/watch/run_watch.py acts on it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from async_rl.base.config import Config
from async_rl.base.config.watch import RULES, Rule
from async_rl.base.seams.lookup import doc_page

Values = Mapping[str, float]
PAGE = doc_page("how-to/watcher.md")
ACTING = {name for name, rule in RULES.items() if rule.acts}
NO_GOLD = {"reference_kl", "diversity"}
"""Rules that detect over-optimisation without gold rewards. If there are gold rewards, these rules only warn."""
BEFORE, SMALL_KL, FIRST_GROWTH = 10, 0.2, 25
"""For the growth of the KL, which begins at 0: the number of earlier steps to compare with, the smallest KL that counts
(nats a token), and the first step that is checked."""
NOISE_STEPS, ASSUMED_STEPS = 100, 10
"""The number of steps over which the noise of the mean reward is measured, and the number that an assumed noise
counts as."""
HEALTHY = 0.9
"""A loss of diversity goes back to the newest version that had at least this share of the start's diversity."""
MARK_EVERY = 5
"""A growth of the KL goes back to the newest version that is a multiple of this and at least this many steps old."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The value that a rule compares with its limit, and further numbers for its message."""

    value: float
    now: float = math.nan
    start: float = math.nan
    best: float = math.nan


@dataclass(frozen=True, slots=True)
class Finding:
    """The results of the rules that were checked at a step or an evaluation."""

    version: int
    measured: Mapping[str, Measurement]
    states: Mapping[str, bool]
    """Whether each checked rule is broken."""
    new: tuple[str, ...]
    trouble: tuple[str, ...]
    """The rules that have just broken and to which the run must react."""
    over: Mapping[str, int]
    """For each rule that is no longer broken: the step since which it was."""
    back_to: int
    """The last version before the trouble."""

    def text(self, names: Iterable[str]) -> str:
        """Return a description of what the rules `names` have found."""
        return "; ".join(RULES[name].meaning.format(**asdict(self.measured[name])) for name in sorted(names))


@dataclass(frozen=True, slots=True)
class _Gold:
    """The gold rewards of one or several evaluations: mean and mean square."""

    version: int
    labels: float
    mean: float
    squared: float


def limits_of(config: Config) -> dict[str, float]:
    """Return the limit of each rule that is on, by name: from watch.rules, or else the rule's default."""
    limits = {name: rule.limit for name, rule in RULES.items()}
    if config.model.dtype == "float32":
        limits["mismatch"] = 0.01
    if not config.correction_entry.is_applied:  # no weight multiplies the loss, so that none is truncated
        del limits["truncated"]
    given = {**limits, **config.watch.rules}
    return {name: limit for name, limit in given.items() if not isinstance(limit, str)}


class Watcher:
    """Checks the rules on the metrics of steps and evaluations, which must be added in the order of their ends.

    Args:
        limits: the rules that are on, and their limits.
        group_size: the number of episodes of a prompt; their rewards are not independent measurements.
        eval_every: steps between two evaluations; 0: there are none during training.
        accepted: rules that a person has accepted. They only warn.
    """

    def __init__(
        self, limits: Mapping[str, float], group_size: int, eval_every: int = 0, accepted: Iterable[str] = ()
    ) -> None:
        self._limits, self._group_size, self._eval_every = limits, group_size, eval_every
        self.accepted = set(accepted)
        self._since: dict[str, int] = {}
        """For each rule that is broken now: the version when it broke."""
        self._counts = Counter[str]()
        """How often each rule was found broken."""
        self._said = ""
        """The findings of the rules that act, from the last time when one of them was broken."""
        self._version = self._sampled_by = 0
        """The newest step, and the mean version of the policy that sampled its answers, rounded down."""
        self._recent: dict[str, deque[float]] = {}
        self._start: dict[str, list[float]] = {}
        """For each rule: the first values of its metric. `_recent` has the newest values."""
        self._healthy = 0
        self._squares: deque[tuple[float, float]] = deque(maxlen=NOISE_STEPS + RULES["reward"].window)
        """(squared difference of the mean reward to the step before, assumed variance) of the newest steps."""
        self._best_reward, self._reward_version, self._windows = -math.inf, 0, 0
        self._gold: list[_Gold] = []
        self._best_gold: _Gold | None = None
        """The best three evaluations in a row, with the version in their middle; of equal ones the newest."""

    def add(self, version: int, values: Values) -> Finding | None:
        """Add the metrics of a step or an evaluation. Returns what the rules find; None if no rule is checked."""
        found = self._add_step(version, values) if "batch/episodes" in values else {}
        found |= self._add_gold(version, values) if "eval/gold" in values else {}
        measured = {name: each for name, each in found.items() if name in self._limits}
        if not measured:
            return None
        states = {name: self._is_broken(RULES[name], each) for name, each in measured.items()}
        broken = {name for name, is_broken in states.items() if is_broken}
        new = tuple(name for name in measured if name in broken - self._since.keys())
        over = {name: self._since.pop(name) for name in self._since.keys() & measured.keys() - broken}
        self._since |= dict.fromkeys(new, version)
        self._counts.update(broken)
        warns = self.accepted | (NO_GOLD if self._best_gold else set())
        trouble = tuple(name for name in new if name in ACTING - warns)
        finding = Finding(version, measured, states, new, trouble, over, self._back_to(trouble))
        self._said = finding.text(broken & ACTING) or self._said
        return finding

    def _is_broken(self, rule: Rule, each: Measurement) -> bool:
        """Return whether a value is beyond the limit of its rule. NaN counts as beyond."""
        limit = self._limits[rule.name]
        return not (each.value >= limit if rule.comparison in ("below", "share") else each.value <= limit)

    def _add_step(self, version: int, values: Values) -> dict[str, Measurement]:
        self._version = version
        self._sampled_by = max(0, version - 1 - math.ceil(values.get("staleness/mean", 0.0)))
        found = {}
        for name, rule in RULES.items():
            value = None if rule.metric == "eval/gold" else values.get(rule.metric)
            if value is not None and rule.window == 1:
                found[name] = Measurement(abs(value), value)
            elif value is not None and math.isfinite(value) and (each := self._of_window(rule, value, values)):
                found[name] = each
        return found

    def _of_window(self, rule: Rule, value: float, values: Values) -> Measurement | None:
        """Add the newest value of a rule's metric. Returns what the rule compares; None before a whole window is there.
        """
        recent = self._recent.setdefault(rule.name, deque(maxlen=rule.window + BEFORE))
        first = self._start.setdefault(rule.name, [])
        if rule.comparison == "fall":
            deviation = values.get("reward/std", 0.0)
            assumed = deviation**2 * self._group_size / max(1.0, values["batch/episodes"])
            self._squares += [((value - recent[-1]) ** 2, assumed)] if recent else []
            deviations = self._start.setdefault("deviation", [])
            deviations += [deviation] if len(deviations) < rule.window else []
        recent.append(value)
        if len(first) < rule.window:
            first.append(value)
        if len(recent) < rule.window:
            return None
        newest, start = list(recent)[-rule.window :], statistics.fmean(first)
        now = statistics.fmean(newest)
        match rule.comparison:
            case "fall":
                return self._fall(newest, now, start)
            case "growth":
                return self._growth(list(recent), rule.window)
            case "share":
                self._healthy = self._sampled_by if now >= HEALTHY * start else self._healthy
                return Measurement(now / start if start > 0 else 1.0, now, start)
        return Measurement(now, now, start)

    def _growth(self, recent: Sequence[float], window: int) -> Measurement | None:
        """Return the median of the newest `window` steps divided by the mean of the steps before; None: not checked."""
        rewards = list(self._recent.get("reward", ()))
        if self._windows < FIRST_GROWTH or len(recent) < window + BEFORE:
            return None
        now, before = statistics.median(recent[-window:]), statistics.fmean(recent[:-window])
        rises = statistics.fmean(rewards[-window:]) > statistics.fmean(rewards[:-window])
        return Measurement(now / before if rises and now > SMALL_KL and before > 0 else 0.0, now, before)

    def _fall(self, newest: Sequence[float], mean: float, start: float) -> Measurement:
        """Measure how far the newest rewards are below the best window. W = len(newest)

            value = max over n = 1..W of  (best - mean of the n newest - chance) / (noise sqrt(1/n + 1/W))
            chance = noise sqrt(2 ln windows) / sqrt(W)

        `noise` is the standard deviation of a batch mean, from differences of successive steps. `chance` is how far the
        best of so many windows is above the true mean if nothing changes. A fall counts only if it exceeds half of the
        gain, and a quarter of the standard deviation of single rewards at the start; else the value is 0.

        Args:
            newest: the mean rewards of the newest steps.
            mean, start: the mean over `newest`, and over the first window.
        """
        size = len(newest)
        self._windows += 1
        if mean >= self._best_reward:  # of equal ones the newest
            self._best_reward, self._reward_version = mean, self._sampled_by
        best, found = self._best_reward, Measurement(0.0, mean, start, self._best_reward)
        gain = max(best - start, statistics.fmean(self._start["deviation"]) / 2)
        means = {n: statistics.fmean(newest[-n:]) for n in range(1, size + 1)}
        if best - min(means.values()) <= gain / 2:
            return found
        before = list(self._squares)[:-size] or list(self._squares)
        assumed = ASSUMED_STEPS * statistics.fmean(each for _, each in before)
        squares = math.fsum(square for square, _ in before) / 2
        noise = math.sqrt((squares + assumed) / (len(before) + ASSUMED_STEPS))
        chance = noise * math.sqrt(2 * math.log(max(1.0, self._windows / size)) / size)
        for n, now in means.items():
            error = noise * math.sqrt(1 / n + 1 / size)
            if best - now > gain / 2 and error > 0 and (value := (best - now - chance) / error) > found.value:
                found = Measurement(value, now, start, best)
        return found

    def _add_gold(self, version: int, values: Values) -> dict[str, Measurement]:
        """Add an evaluation with gold rewards. From the third one on, return what the rule `gold` compares."""
        mean, squared, labels = values["eval/gold"], values["eval/gold_squared"], values["eval/gold_labels"]
        # a resumed run makes the evaluation of its checkpoint's version again
        window, before = RULES["gold"].window, [each for each in self._gold if each.version < version]
        self._best_gold = self._best_gold if len(before) == len(self._gold) else None
        self._gold = [*before, _Gold(version, labels, mean, squared)]
        for last in range(len(self._gold) if self._best_gold else window, len(self._gold) + 1):
            part = _joined(self._gold[last - window : last])
            if self._best_gold is None or part.mean >= self._best_gold.mean:
                self._best_gold = part
        return {"gold": self._gold_fall(window, self._best_gold)} if self._best_gold else {}

    def _gold_fall(self, window: int, best: _Gold) -> Measurement:
        """Measure how far the newest gold rewards are below the best three consecutive evaluations, as `_fall` does.

        The noise is the standard deviation over both together: one right answer of 192 against none is one standard
        error.
        """
        windows = max(1.0, (len(self._gold) - window + 1) / window)
        found = Measurement(0.0, _joined(self._gold[-window:]).mean, best=best.mean)
        for n in range(1, window + 1):
            now = _joined(self._gold[-n:])
            both = _joined([best, now])
            noise = math.sqrt(max(both.squared - both.mean**2, 0.0))
            chance = noise * math.sqrt(2 * math.log(windows) / best.labels)
            error = noise * math.sqrt(1 / best.labels + 1 / now.labels)
            if error > 0 and (value := (best.mean - now.mean - chance) / error) > found.value:
                found = Measurement(value, now.mean, best=best.mean)
        return found

    def _back_to(self, trouble: Sequence[str]) -> int:
        """Return the last version before the trouble.

        Args:
            trouble: the rules that have broken.
        """
        before = {
            "reward": self._reward_version, "diversity": self._healthy, "reference_kl": self._marks[0],
            "gold": self._best_gold.version if self._best_gold else 0,
        }
        return min((before[name] for name in trouble), default=self._version)

    @property
    def _marks(self) -> list[int]:
        last = self._version // MARK_EVERY * MARK_EVERY
        return [max(0, last - MARK_EVERY), last]

    def needed(self, checkpoints: Iterable[int]) -> set[int]:
        """Return those versions with a checkpoint to which the run may go back later, so that they are not pruned."""
        saved = sorted(checkpoints)
        wanted = [self._reward_version, *(self._marks if "reference_kl" in self._start else [])]
        wanted += [self._healthy] if "diversity" in self._start else []
        kept = {version for version in saved if version > self._sampled_by}  # answers of these are still to come
        if self._gold:
            newest = self._gold[-RULES["gold"].window :]
            wanted += [each.version for each in [*newest, *filter(None, [self._best_gold])]]
            later = [version for version in saved if version > newest[-1].version]
            kept |= {each for each in later if self._eval_every and each % self._eval_every == 0}
        return kept | {max((v for v in saved if v <= each), default=saved[0]) for each in wanted if saved}

    def sentence(self) -> str:
        """Return the alarms of the run as a sentence; "" if there were none."""
        said = [
            f"{name} {f'since step {self._since[name]}' if name in self._since else f'{count} times'}"
            for name, count in self._counts.items()
        ]
        begin = f"{self._said}. " if self._since.keys() & ACTING else ""
        return f"{begin}Alarms: {', '.join(said)} ({PAGE})" if said else ""


def _joined(evaluations: Sequence[_Gold]) -> _Gold:
    """Combine several evaluations to one, with the version in their middle."""
    labels = math.fsum(each.labels for each in evaluations)
    mean = math.fsum(each.labels * each.mean for each in evaluations) / labels
    squared = math.fsum(each.labels * each.squared for each in evaluations) / labels
    return _Gold(evaluations[len(evaluations) // 2].version, labels, mean, squared)
