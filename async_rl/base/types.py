"""The data types that all parts of the pipeline share. They have only derived properties, and do not import torch.

A field of GroupFacts, Row or EpisodeFacts that has a kind such as Number or Text is sent with its group,
checked, and kept in the journal. To add one, declare it here, and compute its value where the object is made. A field
without a kind stays in its process. A field whose meaning changes gets another name, so that old messages are refused.

Letters of the axes in every shape comment of the project:
    B  sequences in a (micro-)batch     G  episodes of one group
    T  tokens of a response             P  tokens of a prompt
    S  tokens of a whole sequence (P + T, padded)     V  vocabulary
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

MAX_INT = 2**62
MAX_INT32 = 2**31 - 1
MAX_NAME_CHARS = 200
MAX_CAUSE_CHARS = 2000
"""The longest text of the error of an episode or a group; the rest is cut off."""
MAX_METRICS = 64
"""The most metrics that the environment may log in one episode; their names have at most MAX_NAME_CHARS characters."""


class Kind:
    """The kind of a field: which values it may have, and how it is sent."""


class Scalar(Kind):
    """One value for a group, a row or an episode. It is a column in the journal's table."""


@dataclass(frozen=True, slots=True)
class Whole(Scalar):
    """A whole number in low..high."""

    low: int = 0
    high: int = MAX_INT32


@dataclass(frozen=True, slots=True)
class Number(Scalar):
    """A number that is finite and at least `low`.

    If `may_be_none`, it may be None instead; only fields of a group allow it.
    """

    low: float = -math.inf
    may_be_none: bool = False


@dataclass(frozen=True, slots=True)
class Flag(Scalar):
    """True or false."""


@dataclass(frozen=True, slots=True)
class Text(Scalar):
    """A text. A text that is too long or not valid Unicode is refused; if `is_cut`, its sender cuts it instead."""

    max_chars: int = MAX_NAME_CHARS
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Choice(Scalar):
    """One of the texts `names`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metrics(Scalar):
    """A map of at most MAX_METRICS names to finite numbers, stored as JSON in the journal. Not for fields of a group.
    """


@dataclass(frozen=True, slots=True)
class Texts(Kind):
    """A list of at most Limits.max_left_out texts of a group.

    `column` is the column for one text in the journal's table.
    """

    each: Text
    column: str


@dataclass(frozen=True, slots=True)
class ChatMessages(Kind):
    """Chat messages of a group: maps with the texts `role` and `content`. The journal stores them only in the payload.
    """


@dataclass(frozen=True, slots=True)
class Array(Kind):
    """Numbers in low..high of one numpy dtype (little-endian); floats are finite."""

    dtype: str
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class PerPromptToken(Array):
    """A number for each token of a group's prompt."""


@dataclass(frozen=True, slots=True)
class PerToken(Array):
    """A number for each token of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerTurn(Array):
    """A number for each turn that a row trains. `column` is the column in the journal's table of turns."""

    column: str


@dataclass(frozen=True, slots=True)
class PackedPerToken(Kind):
    """Several numbers for each token of a row, compressed in messages: see messages/packed.py. The value may be None.
    """


@dataclass(frozen=True, slots=True)
class TokenSets(PackedPerToken):
    """A `Support`: a set of token ids for each token of a row. Either all rows of a group have one, or none."""


class ExpertChoices(PackedPerToken):
    """The experts of each token of the prompt and the row, except the last.

    Either all rows of a group have them, or none.
    """


K = TypeVar("K", bound=Kind)


def kinds_of(declared: type, kind: type[K]) -> dict[str, K]:
    """Return the fields of a class whose kind is `kind`, by name, in their order."""
    hints = get_type_hints(declared, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, kind)
    }


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RoutingArray = npt.NDArray[Any]
"""[tokens, layers, k] the experts of each token in each layer with a router; uint8, or uint16 above 256 experts."""


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """For each of T tokens, the ids that it was drawn from, itself included. A token that was not sampled has no ids.
    """

    ids: IntArray
    """The ids of the first token, ascending, then the ids of the second, and so on."""
    offsets: npt.NDArray[np.int64]
    """[T + 1] Token t has the ids offsets[t]..offsets[t + 1] - 1; the first offset is 0."""
    logprobs: FloatArray | None = None
    """The logprob of each id among the ids of its token; None: not recorded."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[T] the number of ids of each token."""
        return np.diff(self.offsets)

    def cut(self, start: int, end: int) -> Support:
        """Return the support of the tokens start..end - 1."""
        offsets = self.offsets[start : end + 1]
        chosen = slice(offsets[0], offsets[-1])
        return Support(
            self.ids[chosen], offsets - offsets[0], None if self.logprobs is None else self.logprobs[chosen]
        )

    @classmethod
    def none(cls, tokens: int) -> Support:
        """Return the support of `tokens` tokens that were not sampled."""
        return cls(np.zeros(0, np.int32), np.zeros(tokens + 1, np.int64))

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]]) -> Support:
        """Return the support with these sets of ids, one for each token, each in any order."""
        return cls.of_arrays([np.unique(np.array([*each], np.int32)) for each in sets])

    @classmethod
    def of_arrays(cls, sets: Sequence[IntArray], logprobs: Sequence[FloatArray] = ()) -> Support:
        """Return the support with these arrays of ascending ids, one for each token.

        Args:
            logprobs: the logprobs of each token's ids; empty: not recorded.
        """
        sizes = [0, *map(len, sets)]
        of_ids = np.concatenate(logprobs) if logprobs else None
        return cls(np.concatenate([np.zeros(0, np.int32), *sets]), np.cumsum(sizes, dtype=np.int64), of_ids)

    @classmethod
    def joined(cls, parts: Sequence[Support]) -> Support:
        """Return one support with the tokens of all parts, in order."""
        sizes = np.concatenate([np.zeros(1, np.int64), *(part.sizes for part in parts)])
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]), np.cumsum(sizes),
            np.concatenate(logprobs) if logprobs else None,
        )


FINISH_REASONS = ("stop", "length", "timeout")
EpisodeEnd = Literal["done", "length", "turns", "timeout", "error"]
"""How a trained episode may have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of a task. Its `index` determines it: the same index gives the same prompt in every process.

    Training prompts and held-out prompts are numbered separately, each from 0.
    """

    index: int
    tokens: IntArray  # [P]
    text: str
    """The text that was tokenized, with the chat template applied."""
    messages: tuple[dict[str, str], ...] = ()
    """The chat messages in `text`; () if an environment or an agent writes them."""
    question: Any
    """The value that the reward function compares an answer with (an answer string, a dataset entry, ...)."""
    source: str = ""
    """The field `data_source` of the prompt's data row, or the task's name."""
    data_row: int = -1
    """The number of the question in the task's own order: the row of task.path, from 0. -1: not known."""
    origin: str = ""
    """A description of `data_row` for messages: `row 7 of data/train.parquet`."""
    is_held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The permission to start one group, which the buffer grants to a worker."""

    group_id: int
    """The number of the group, unique in a run and ascending in the order of grants."""
    prompt_index: int
    start_version: int
    """The served version at the time of the grant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row to train on: an answer, or one path through the conversation of a multi-turn episode.

    Its arrays have one entry for each of the T >= 1 tokens after the prompt. The last token is trained.
    """

    tokens: Annotated[IntArray, PerToken("<i4", low=0)]  # [T]
    logprobs: Annotated[FloatArray, PerToken("<f4", high=0)]
    """[T] behaviour logprobs at the recorded temperature; 0 where the model did not sample."""
    versions: Annotated[IntArray, PerToken("<i4")]
    """[T] token versions, non-decreasing. A token that was not sampled has the version of the sampled token before it.
    """
    mask: Annotated[BoolArray, PerToken("|b1")]
    """[T] True where the token is trained: the model sampled it, and no earlier row trains it."""
    reward: Annotated[float, Number()]
    """The reward of the whole episode, equal in all its rows."""
    rewards: Annotated[Mapping[str, float], Metrics()] = field(default_factory=dict)
    """The episode's scores by the names of the rewards, and their metrics as <reward>/<metric>."""
    finish_reason: Annotated[str, Choice(FINISH_REASONS)]
    """`stop` (the model ended its last reply), `length` (a limit on tokens or turns ended it), or `timeout`."""
    turn_ends: Annotated[tuple[int, ...], PerTurn("<i4", column="end_token")] = ()
    """The position of the last token of each turn that the row trains. Empty: one turn, with the whole reward."""
    turn_rewards: Annotated[tuple[float, ...], PerTurn("<f8", column="reward")] = ()
    """The reward of each turn in `turn_ends`. Over all rows of an episode they add up to its reward."""
    support: Annotated[Support | None, TokenSets()] = None
    """The ids that each trained token was drawn from; other tokens have none. The behaviour logprobs are then
    over these ids. None: all tokens were drawn from the whole vocabulary, or `algorithm.support` is `ignore`."""
    routing: Annotated[RoutingArray | None, ExpertChoices()] = None
    """[P + T - 1, layers, k] the experts that each token of prompt and row was fed through when it was sampled,
    in the layers with experts. The last token was not fed. None: the engine recorded no experts."""
    too_old: BoolArray | None = None
    """[T] True where a token is masked only because it is too old (`staleness.on_late: mask`). None: nowhere."""

    @property
    def sampled(self) -> BoolArray:
        """[T] True where the model sampled the token and no earlier row has it, even if it is too old to train."""
        return self.mask if self.too_old is None else self.mask | self.too_old


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """What is recorded of a multi-turn episode besides its tokens: counts of rows, turns and calls, times, and its end.
    """

    rows: Annotated[int, Whole(1)]
    """The number of rows, at least 1. It is more than one if the conversation was forked or rewritten."""
    turns: Annotated[int, Whole(1)]
    """The number of replies of the model."""
    tool_calls: Annotated[int, Whole()]
    """The number of tool calls in the replies."""
    generate_s: Annotated[float, Number(0.0)]
    """The time that the engine took, summed over all replies."""
    tool_s: Annotated[float, Number(0.0)]
    """The time that tools took, summed over all calls."""
    duration_s: Annotated[float, Number(0.0)]
    end: Annotated[str, Choice(get_args(EpisodeEnd))]
    """`done`, `length` or `turns` (a limit on tokens or turns ended it), `timeout` or `error` (the agent raised)."""
    metrics: Annotated[Mapping[str, float], Metrics()] = field(default_factory=dict)
    """The numbers that the environment logged."""
    error: Annotated[str, Text(MAX_CAUSE_CHARS, is_cut=True)] = ""
    """The reason for an `end` other than `done`, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What is recorded of a group besides its rows and episodes."""

    group_id: Annotated[int, Whole(0, MAX_INT)]
    prompt_index: Annotated[int, Whole(0, MAX_INT)]
    start_version: Annotated[int, Whole()]
    temperature: Annotated[float, Number(0.0)]
    """Above 0."""
    prompt_tokens: Annotated[IntArray, PerPromptToken("<i4", low=0)]
    """[P] the tokens with which all rows begin. None of them was sampled."""
    duration_s: Annotated[float, Number(0.0)]
    """The time from the grant of the slot to the last reward."""
    worker: Annotated[str, Text()] = ""
    baseline_reward: Annotated[float | None, Number(may_be_none=True)] = None
    """The reward of a greedy answer, which is not trained on; None unless the advantage needs it (remax)."""
    keeps_kv: Annotated[bool, Flag()] = False
    """Whether the answers kept their KV cache over weight updates (`weight_sync.on_update: in_place`)."""
    data_row: Annotated[int, Whole(-1, MAX_INT)] = -1
    """The `data_row` of the prompt."""
    left_out: Annotated[tuple[str, ...], Texts(Text(MAX_CAUSE_CHARS, is_cut=True), column="error")] = ()
    """The errors of the episodes that have no rows, because they failed, were dropped or got no verdict."""
    messages: Annotated[tuple[dict[str, str], ...], ChatMessages()] = ()
    """The `messages` of the prompt, for a reward model with its own tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(GroupFacts):
    """The `group_size` episodes of one prompt. It is the unit of admission, transport, staleness and training."""

    rows: tuple[Row, ...]
    """The rows: one for each answer. With multi-turn episodes: all rows of the first episode, then of the second, ...
    """
    episodes: tuple[EpisodeFacts, ...] = ()
    """The multi-turn episodes. Empty if each row is a single-turn episode, the answer to a question."""

    def old_kv(self, row: Row) -> BoolArray:
        """Return bools [T]: True where a token may have been sampled on KV cache of older weights than its version's.

        The behaviour logprob of such a token is right, but recomputing it from scratch gives another value. Only tokens
        of the start version are sure to have KV of their own version.

        If newer weights recompute the KV, tokens sampled by these weights have KV of their own version. But in a row
        with `routing` the tokens before them keep the experts of the older weights, so there they count as well.
        """
        if self.keeps_kv:
            return row.versions > self.start_version
        return (row.versions > row.versions[0]) & (row.routing is not None)

    @property
    def episode_rows(self) -> tuple[int, ...]:
        """The number of rows of each episode, in order."""
        return tuple(episode.rows for episode in self.episodes) or (1,) * len(self.rows)

    @property
    def episode_rewards(self) -> list[float]:
        """The reward of each episode, in order."""
        firsts = itertools.accumulate(self.episode_rows[:-1], initial=0)
        return [self.rows[first].reward for first in firsts]

    @property
    def oldest_version(self) -> int:
        """The lowest version of a trained token."""
        return min(int(r.versions[r.mask.argmax()]) for r in self.rows)

    @property
    def num_tokens(self) -> int:
        """The number of trained tokens of all rows."""
        return sum(int(r.mask.sum()) for r in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The `prompts_per_step` groups that the learner trains on in one step."""

    version: int
    """The version of the policy that is trained on the batch; training yields version + 1."""
    groups: tuple[Group, ...]
    finished_versions: tuple[int, ...]
    """For each group, the served version when it reached the buffer. It splits staleness into in flight and in queue.
    """
    counters: dict[str, float] = field(default_factory=dict)
    """The buffer's counts since the start of the run, such as `buffer/trained`, when it returned the batch."""
    gauges: dict[str, float] = field(default_factory=dict)
    """The buffer's state at that time, such as `buffer/depth`, and how long it waited for the batch."""
