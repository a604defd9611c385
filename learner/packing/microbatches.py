"""Makes the tensors of a micro-batch: for its forward pass, for its loss, and those computed at step start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_rl.base.types import Batch, FloatArray
from learner.loop.episodes import reward_at_tokens, tokens_by_episode
from learner.packing.plan import Piece, needs_mask

PADDING = -1
"""The segment number of padding. The prompts and rows of a pack are numbered from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """The tokens of a forward pass, and the N places where its hidden states are read."""

    tokens: Tensor  # [B, S] int64
    segments: Tensor | None  # [2, B, S] int64 of each token and of its prompt; None: all packs are plain causal
    positions: Tensor | None  # [B, S] int64; None where segments is
    where: Tensor  # [N] index into B * S of the token whose output predicts the response token


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs(PackedTokens):
    """The tensors that a network needs for a forward pass. N is the number of response tokens, row after row."""

    targets: Tensor  # [N] int64 response tokens
    temperature: Tensor  # [N] float32 logged temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTokens:
    """The N response tokens of k rows, as the loss needs them; nothing here depends on a network.
    """

    behaviour: Tensor  # [N] float32 behaviour logprobs, 0 where not trained
    trained: Tensor  # [N] bool
    comparable: Tensor  # [N] bool: sampled by version `batch.version` and from KV of the same version
    old_kv: Tensor  # [N] bool: sampled by version `batch.version`, but maybe from KV of older ones
    staleness: Tensor  # [N] int64, batch.version - token version
    advantages: Tensor  # [N] float32; zeros with a critic, whose advantages follow from its values
    rows: Tensor  # [N] int64 index of each token's row, 0..k-1
    places: Tensor  # [N] int64: place of each token in the batch, the same however the batch is split
    rewards: Tensor  # [N] float32 reward that is given at the token, 0 where not trained
    counted: Tensor  # [k] float32 number of tokens by which a mean over each row's episode divides
    lengths: tuple[int, ...]
    """Number of response tokens T of each row; their sum is N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The tokens of one forward pass on one rank, with the logprobs and values computed at step start, if needed."""

    inputs: ForwardInputs
    response: ResponseTokens
    rows: tuple[tuple[int, int], ...]
    """Indices (group, row) of each row in the batch; empty if the micro-batch only keeps a rank in step."""
    proximal: Tensor | None = None  # [N] logprobs of the policy, 0 where not trained
    values: Tensor | None = None  # [N] of the critic
    reference: Tensor | None = None  # [N] logprobs of the frozen reference, 0 where not trained


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's micro-batches of one optimizer step, and numbers that are the same on all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    """Number of trained tokens of all ranks, at least 1. The critic's summed loss is divided by this."""
    normaliser: float
    """The policy's summed loss is divided by this."""
    whitening: tuple[float, float] = (0.0, 1.0)
    """(mean, scale) of the batch's advantages: a token's advantage is (A - mean) * scale."""
    m2po_limit: tuple[float, int] = (math.inf, 2**63 - 1)
    """The last token that the M2PO mask keeps, see corrections.m2po_limit; by default all are kept."""
    mean_weight: float = 1.0
    """Importance weights are divided by this. It is their mean if correction.batch_normalised is set, else 1."""


def collate(
    batch: Batch, packs: Sequence[Sequence[Piece]], advantages: Sequence[Sequence[FloatArray]], device: torch.device,
    is_trained: bool = True,
) -> MicroBatch:
    """Return the micro-batch that holds these packs, with its tensors on `device`.

    Args:
        advantages: [group][row], [T] each.
        is_trained: False: no token is trained, and the micro-batch only keeps a rank in step with others' collectives.
    """
    width = max(sum(piece.length for piece in pack) for pack in packs)
    tokens = np.zeros((len(packs), width), np.int64)
    segments = np.full((2, len(packs), width), PADDING, np.int64)
    positions = np.zeros((len(packs), width), np.int64)
    where: list[np.ndarray] = []
    rows: list[tuple[int, int]] = []
    for b, pack in enumerate(packs):
        start = segment = 0
        for piece in pack:
            group, root = batch.groups[piece.group], segment
            # After an empty prompt the first token is not trained, so any place will do for its prediction.
            prompt_last = max(start + len(group.prompt_tokens) - 1, start)
            for fed in (group.prompt_tokens, *(group.rows[i].tokens[:-1] for i in piece.rows)):
                end = start + len(fed)
                first_position = 0 if segment == root else len(group.prompt_tokens)
                tokens[b, start:end] = fed
                segments[:, b, start:end] = [[segment], [root]]
                positions[b, start:end] = np.arange(first_position, first_position + end - start)
                if segment > root:
                    where.append(b * width + np.concatenate([[prompt_last], np.arange(start, end)]))
                start, segment = end, segment + 1
            rows += [(piece.group, i) for i in piece.rows]
    targets = np.concatenate([batch.groups[g].rows[i].tokens for g, i in rows])
    lengths = [len(batch.groups[g].rows[i].tokens) for g, i in rows]
    temperatures = np.repeat([batch.groups[g].temperature for g, _ in rows], lengths)
    masked = needs_mask(packs)
    inputs = ForwardInputs(
        tokens=_tensor(tokens, torch.int64, device),
        segments=_tensor(segments, torch.int64, device) if masked else None,
        positions=_tensor(positions, torch.int64, device) if masked else None,
        where=_tensor(np.concatenate(where), torch.int64, device),
        targets=_tensor(targets, torch.int64, device),
        temperature=_tensor(temperatures, torch.float32, device),
    )
    response = _response_tokens(batch, rows, advantages, device, is_trained)
    return MicroBatch(inputs=inputs, response=response, rows=tuple(rows) if is_trained else ())


def _response_tokens(
    batch: Batch, rows: Sequence[tuple[int, int]], advantages: Sequence[Sequence[FloatArray]],
    device: torch.device, is_trained: bool,
) -> ResponseTokens:
    pairs = [(batch.groups[g], batch.groups[g].rows[i]) for g, i in rows]
    lengths = [len(row.tokens) for _, row in pairs]
    trained = np.concatenate([row.mask for _, row in pairs]) & is_trained
    behaviour = np.concatenate([row.logprobs for _, row in pairs])
    staleness = batch.version - np.concatenate([row.versions for _, row in pairs])
    old_kv = np.concatenate([group.old_kv(row) for group, row in pairs])
    groups = {g: batch.groups[g] for g, _ in rows}
    rewards = {g: reward_at_tokens(group) for g, group in groups.items()}
    counted = {g: np.repeat(tokens_by_episode(group), group.episode_rows) for g, group in groups.items()}
    places = [(g << 44) + (i << 28) + np.arange(length) for (g, i), length in zip(rows, lengths, strict=True)]
    return ResponseTokens(
        behaviour=_tensor(np.where(trained, behaviour, 0.0), torch.float32, device),
        trained=_tensor(trained, torch.bool, device),
        comparable=_tensor((staleness == 0) & ~old_kv, torch.bool, device),
        old_kv=_tensor((staleness == 0) & old_kv, torch.bool, device),
        staleness=_tensor(staleness, torch.int64, device),
        advantages=_tensor(np.concatenate([advantages[g][i] for g, i in rows]), torch.float32, device),
        rows=_tensor(np.repeat(np.arange(len(pairs)), lengths), torch.int64, device),
        places=_tensor(np.concatenate(places), torch.int64, device),
        rewards=_tensor(
            np.where(trained, np.concatenate([rewards[g][i] for g, i in rows]), 0.0), torch.float32, device
        ),
        counted=_tensor(np.array([counted[g][i] for g, i in rows]), torch.float32, device),
        lengths=tuple(lengths),
    )


def _tensor(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, dtype, non_blocking=True)
