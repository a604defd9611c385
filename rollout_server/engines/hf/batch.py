"""Continuous batching for the hf engine: each reply is a row of a batch; rows are added and removed between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from async_rl.base.types import RoutingArray
from rollout_server.engines.base import GenerationRequest, PartialReply, SampledReply, StopTexts

if TYPE_CHECKING:
    from async_rl.base.models_and_data.routing import Routing

PREFILL_TOKENS = 16_384
"""The largest number of padded prompt tokens in one prefill forward, which bounds the memory of its activations."""
_GROWTH = 64
"""How many columns a full cache grows."""
_COMPACT_FRACTION = 0.125
"""Finished rows are removed once they exceed this share: copying the other rows costs more than a few idle rows."""
Item = TypeVar("Item")


class WindowLayer(CacheLayerMixin):
    """The KV cache of one model layer for all rows, right-aligned: every row's newest token is in column `end - 1`."""

    is_sliding = False
    keys: Tensor  # type: ignore[assignment]  # [B, H, capacity, D]
    values: Tensor  # type: ignore[assignment]  # [B, H, capacity, D]

    def __init__(self) -> None:
        super().__init__()
        self.end = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, 0, width)
        self.values = value_states.new_zeros(rows, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.end + key_states.shape[2]
        if end > self.keys.shape[2]:
            spare = end + _GROWTH - self.keys.shape[2]
            self.keys, self.values = (pad(states, (0, 0, 0, spare)) for states in (self.keys, self.values))
        self.keys[:, :, self.end : end] = key_states
        self.values[:, :, self.end : end] = value_states
        self.end = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.end + query_length, 0

    def get_seq_length(self) -> int:
        return self.end

    def get_max_cache_shape(self) -> int:
        return -1

    def keep(self, rows: Tensor, width: int) -> None:
        """Keep only the last `width` columns of the given rows, in the given order; a row may be given several times.
        """
        self.keys = self.keys[:, :, self.end - width : self.end].index_select(0, rows)
        self.values = self.values[:, :, self.end - width : self.end].index_select(0, rows)
        self.end = width

    def append(self, other: WindowLayer) -> None:
        """Add the rows of `other`, the same layer's cache of new replies. The narrower cache is padded on the left."""
        width = max(self.end, other.end)
        both = [(part, (0, 0, width - part.end, 0)) for part in (self, other)]
        self.keys, self.values = (
            torch.cat([pad(part.keys[:, :, : part.end], padding) for part, padding in both]),
            torch.cat([pad(part.values[:, :, : part.end], padding) for part, padding in both]),
        )
        self.end = width


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request to the hf engine, with its complete replies so far and the future for all replies."""

    request: GenerationRequest
    complete: dict[int, SampledReply] = field(default_factory=dict)
    """The complete replies by their number in the group."""
    cancelled: bool = False
    future: Future[list[SampledReply]] = field(default_factory=Future)
    """Its result is `replies`, set once all are complete."""

    @property
    def replies(self) -> list[SampledReply]:
        return [self.complete[sample] for sample in sorted(self.complete)]


@dataclass(eq=False, slots=True, kw_only=True)
class _OpenReply(PartialReply):
    """A reply that is being sampled: one row of the batch, with its own random numbers."""

    group: OpenRequest
    uniforms: npt.NDArray[np.float64]  # [max_tokens]

    @property
    def length(self) -> int:
        """The number of tokens whose keys and values are cached: the prompt and all sampled tokens except the newest.
        """
        return len(self.group.request.prompt.tokens) + len(self.tokens) - 1

    @property
    def cached_tokens(self) -> npt.NDArray[np.int32]:
        return np.concatenate([self.group.request.prompt.tokens, np.array(self.tokens[:-1], np.int32)])


class DecodingBatch:
    """The replies that are being sampled, one per row, with their KV cache. `step` samples one token for each.

    Args:
        end_tokens: ids that end a reply.
        forbidden: tokens that are never sampled; logprobs are computed without them.
        stop: texts that end a reply; None: none do.
        routing: the routers of `model`. Their choices are recorded for requests that want the routing.
    """

    def __init__(
        self, model: PreTrainedModel, end_tokens: frozenset[int], forbidden: Sequence[int] = (),
        stop: StopTexts | None = None, routing: Routing | None = None,
    ) -> None:
        self._model = model
        self._routing = routing
        self._forbidden = torch.tensor(forbidden, dtype=torch.long, device=model.device)
        self._end_tokens = end_tokens
        self._stop = stop
        self._rows: list[_OpenReply] = []
        self._cache: list[WindowLayer] = []
        self._retracted: list[_OpenReply] = []
        """Unfinished rows whose KV was dropped."""
        self._sampling: _Sampling | None = None
        """The settings with which the rows are sampled, as tensors; None after the rows have changed."""

    def __len__(self) -> int:
        return len(self._rows) + len(self._retracted)

    def retract(self) -> None:
        """Drop the KV cache of all rows. The next `step` recomputes it with the model's weights at that time."""
        self._retracted += [row for row in self._rows if not row.finish_reason]
        self._rows, self._cache, self._sampling = [], [], None

    def add(self, groups: list[OpenRequest], version: int) -> list[OpenRequest]:
        """Prefill the prompts of new requests, and sample the first token of each reply, tagged with `version`.

        Returns the requests whose replies all ended with their first token.
        """
        complete: list[OpenRequest] = []
        for chunk in _chunks(groups, [len(group.request.prompt.tokens) for group in groups]):
            cache, logits, fed = self._prefill([group.request.prompt.tokens for group in chunk])
            source = [i for i, group in enumerate(chunk) for _ in range(group.request.n)]
            rows = [_new_row(group, sample) for group in chunk for sample in range(group.request.n)]
            _note(rows, None if fed is None else [fed[i, -len(chunk[i].request.prompt.tokens) :] for i in source])
            complete += self._record(rows, logits[source], version, _sampling(rows, logits.device))
            keep = [i for i, row in enumerate(rows) if not row.finish_reason]
            if keep:
                rows = [rows[i] for i in keep]
                _keep(cache, [source[i] for i in keep], max(row.length for row in rows))
                self._join(rows, cache)
        return complete

    def step(self, version: int) -> list[OpenRequest]:
        """Sample one token for every row, tagged with `version`; return the requests whose last reply ended with it."""
        device = self._model.device
        self._recompute()
        self._compact()
        if not self._rows:
            return []
        newest = torch.tensor([[row.tokens[-1]] for row in self._rows], device=device)
        positions = torch.tensor([[row.length] for row in self._rows], device=device)
        mask = _mask([row.length + 1 for row in self._rows], self._cache[0].end + 1, device)
        logits, fed = self._forward(newest, positions, self._cache, mask)
        _note(self._rows, fed)
        if self._sampling is None:
            self._sampling = _sampling(self._rows, device)
        return self._record(self._rows, logits, version, self._sampling)

    def _recompute(self) -> None:
        """Put the rows that `retract` removed back into the batch, with KV computed by the current weights."""
        rows = [row for row in self._retracted if not row.group.cancelled]
        self._retracted = []
        for chunk in _chunks(rows, [row.length for row in rows]):
            cache, *_ = self._prefill([row.cached_tokens for row in chunk])
            self._join(chunk, cache)

    def _prefill(self, prompts: list[npt.NDArray[np.int32]]) -> tuple[list[WindowLayer], Tensor, RoutingArray | None]:
        """Run the model over the prompts, padded on the left.

        Returns the KV cache, the next-token logits [B, V], and the experts [B, S, layers, k] (None without `routing`).
        """
        device = self._model.device
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        tokens, positions = np.zeros((2, len(prompts), width), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            tokens[i, width - len(prompt) :] = prompt
            positions[i, width - len(prompt) :] = np.arange(len(prompt))
        cache = [WindowLayer() for _ in range(self._model.config.get_text_config().num_hidden_layers)]
        logits, fed = self._forward(
            torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device), cache,
            _mask(lengths, width, device),
        )
        return cache, logits, fed

    def _forward(
        self,
        tokens: Tensor,  # [B, S]
        positions: Tensor,  # [B, S]
        cache: list[WindowLayer],
        mask: Tensor | None,  # [B, cached + S]
    ) -> tuple[Tensor, RoutingArray | None]:
        """Run the model over the tokens and append their KV to `cache`.

        Returns the logits of the last column [B, V], and the tokens' experts [B, S, layers, k] (None without
        `routing`).
        """
        compute = partial(
            self._model, input_ids=tokens, attention_mask=mask, position_ids=positions,
            past_key_values=Cache(layers=[*cache]), use_cache=True, logits_to_keep=1,
        )
        if self._routing is None:
            return compute().logits[:, -1], None
        with self._routing.recording() as chosen:
            logits = compute().logits[:, -1]
        return logits, chosen().unflatten(0, tokens.shape).cpu().numpy().astype(self._routing.experts.dtype)

    def _record(
        self,
        rows: list[_OpenReply],
        logits: Tensor,  # [B, V]
        version: int,
        sampling: _Sampling,
    ) -> list[OpenRequest]:
        """Sample a token for each row from `logits` and append it; return the requests whose last reply ended with it.
        """
        # A finished row that is still in the batch is sampled too; its token is ignored.
        drawn = np.array([[row.uniforms[min(len(row.tokens), len(row.uniforms) - 1)]] for row in rows])
        logits = logits.index_fill(1, self._forbidden, -torch.inf) if len(self._forbidden) else logits
        tokens, logprobs, kept = sample_tokens(logits, *sampling, torch.from_numpy(drawn).to(logits.device))
        is_recorded = any(row.group.request.wants_support for row in rows)
        nothing = [(np.zeros(0, np.int32), np.zeros(0, np.float32))] * len(rows)
        sets = token_sets(kept) if is_recorded else nothing
        complete = []
        for row, token, logprob, (ids, of_ids) in zip(rows, tokens.tolist(), logprobs.tolist(), sets, strict=True):
            if row.finish_reason:
                continue
            if row.group.request.wants_support:
                row.sets.append(ids)
            if row.group.request.wants_support_logprobs:
                row.set_logprobs.append(of_ids)
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            stopped = token in self._end_tokens or (self._stop is not None and self._stop.is_reached(row.tokens))
            if stopped or len(row.tokens) >= row.group.request.max_tokens:
                row.finish_reason = "stop" if stopped else "length"
                row.group.complete[row.sample] = row.reply()
                if len(row.group.complete) == row.group.request.n:
                    complete.append(row.group)
        return complete

    def _join(self, rows: list[_OpenReply], cache: list[WindowLayer]) -> None:
        if self._rows:
            for old, new in zip(self._cache, cache, strict=True):
                old.append(new)
        else:
            self._cache = cache
        self._rows = self._rows + rows
        self._sampling = None

    def _compact(self) -> None:
        """Remove finished and cancelled rows once they exceed _COMPACT_FRACTION, and columns that no other row uses."""
        keep = [i for i, row in enumerate(self._rows) if not (row.finish_reason or row.group.cancelled)]
        idle = len(self._rows) - len(keep)
        if not keep:
            self._rows, self._cache, self._sampling = [], [], None
        elif idle > _COMPACT_FRACTION * len(self._rows):
            self._rows = [self._rows[i] for i in keep]
            _keep(self._cache, keep, max(row.length for row in self._rows))
            self._sampling = None


def _note(rows: list[_OpenReply], fed: Sequence[RoutingArray] | RoutingArray | None) -> None:
    """Append to each row the experts of its newly fed tokens, if its request wants them.

    Args:
        fed: one array [n, layers, k] for each row; None: nothing was recorded.
    """
    for row, experts in zip(rows, () if fed is None else fed, strict=fed is not None):
        if row.group.request.wants_routing and not row.finish_reason:
            row.fed.append(experts)


def _new_row(group: OpenRequest, sample: int) -> _OpenReply:
    request = group.request
    numbers = uniforms(request.seed, request.prompt.index, sample, request.max_tokens)
    return _OpenReply(group=group, sample=sample, uniforms=numbers)


class Narrowing(NamedTuple):
    """The settings top_p, top_k and min_p of each row, which leave improbable tokens out of sampling."""

    top_p: Tensor  # [B, 1] float32
    top_k: Tensor  # [B, 1] int64; 0: no limit
    min_p: Tensor  # [B, 1] float32
    is_recorded: Tensor  # [B, 1] bool: the logprob is over the tokens that are kept


class _Sampling(NamedTuple):
    temperature: Tensor  # [B, 1] float32
    narrowing: Narrowing | None  # None: no row leaves tokens out


def _sampling(rows: list[_OpenReply], device: torch.device) -> _Sampling:
    requests = [row.group.request for row in rows]

    def column(name: str) -> Tensor:
        return torch.tensor([[getattr(request, name)] for request in requests], device=device)

    narrows = any(request.sampling.narrows or request.wants_support for request in requests)
    narrowing = Narrowing(*map(column, ("top_p", "top_k", "min_p", "wants_support"))) if narrows else None
    return _Sampling(column("temperature").float(), narrowing)


def _mask(lengths: list[int], width: int, device: torch.device) -> Tensor | None:
    """Return the attention mask [B, width], which is True in the last `length` columns of a row. None: True everywhere.
    """
    if all(length == width for length in lengths):
        return None
    first = width - torch.tensor(lengths, device=device)
    return torch.arange(width, device=device) >= first[:, None]


def _keep(cache: list[WindowLayer], rows: list[int], width: int) -> None:
    index = torch.tensor(rows, device=cache[0].keys.device)
    for layer in cache:
        layer.keep(index, width)


def _chunks(items: list[Item], lengths: list[int]) -> list[list[Item]]:
    """Split `items` into consecutive lists for one prefill each: at most PREFILL_TOKENS with padding, or one item.

    Args:
        lengths: the tokens of each item.
    """
    chunks: list[list[Item]] = []
    longest = 0
    for item, length in zip(items, lengths, strict=True):
        if chunks and max(longest, length) * (len(chunks[-1]) + 1) <= PREFILL_TOKENS:
            longest = max(longest, length)
            chunks[-1].append(item)
        else:
            longest = length
            chunks.append([item])
    return chunks


_WORD = 2**64


def uniforms(seed: int, prompt_index: int, sample: int, count: int) -> npt.NDArray[np.float64]:
    """Return the first `count` random numbers in [0, 1) of one reply. They depend only on seed, prompt and sample.

    Number t decides the reply's token t. Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
    is a function of key and counter; the sample is the counter's highest word, so streams never overlap.
    """
    key = (seed % _WORD) | (prompt_index % _WORD) << 64
    return np.random.Generator(np.random.Philox(key=key, counter=(sample % _WORD) << 192)).random(count)


def sample_tokens(
    logits: Tensor,  # [B, V]
    temperature: Tensor,  # [B, 1] float32
    narrowing: Narrowing | None,  # None: from the whole vocabulary
    uniform: Tensor,  # [B, 1] float64 in [0, 1)
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row.

    The token is the one whose interval of the cumulative distribution contains `uniform`. Its logprob comes from
    log_softmax(logits / temperature). If the row records its support, the logprob is over the support alone.

    Returns:
        The tokens [B], their logprobs [B], and the logprobs [B, V] of the tokens that narrowing keeps (-inf: left out).
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    probabilities, narrowed = logprobs.exp(), logprobs
    if narrowing is not None:
        probabilities = _narrowed(probabilities, narrowing)
        narrowed = logprobs.masked_fill(probabilities <= 0, -torch.inf)
        narrowed -= narrowed.logsumexp(dim=-1, keepdim=True)
        logprobs = torch.where(narrowing.is_recorded, narrowed, logprobs)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))  # rounding may lift it
    tokens = torch.searchsorted(cumulative, below, right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1), narrowed


def _narrowed(
    probabilities: Tensor,  # [B, V]
    narrowing: Narrowing,
) -> Tensor:
    """Return `probabilities` [B, V] with 0 for each token that top_p, top_k or min_p leaves out, as in SGLang.

    top_p keeps the most probable tokens until their sum reaches it; 1 keeps all.
    """
    descending, order = probabilities.sort(dim=-1, descending=True)
    before = descending.cumsum(dim=-1) - descending  # mass of the more probable tokens
    is_out = (before >= narrowing.top_p) & (narrowing.top_p < 1)
    places = torch.arange(probabilities.shape[1], device=probabilities.device)
    is_out |= (narrowing.top_k > 0) & (places >= narrowing.top_k)
    is_out |= descending < narrowing.min_p * descending[:, :1]
    return torch.zeros_like(probabilities).scatter(1, order, descending.masked_fill(is_out, 0.0))


def token_sets(
    kept: Tensor,  # [B, V] logprobs, -inf for tokens that are left out
) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """Return for each row the ids that it keeps, ascending, and their logprobs.

    Args:
        kept: [B, V] logprobs; -inf where a token is left out.
    """
    rows, ids = (kept > -torch.inf).nonzero(as_tuple=True)
    ends = np.cumsum(torch.bincount(rows, minlength=len(kept)).cpu().numpy())[:-1]
    logprobs = kept[rows, ids].to("cpu", torch.float32).numpy()
    return [*zip(np.split(ids.to("cpu", torch.int32).numpy(), ends), np.split(logprobs, ends), strict=True)]
