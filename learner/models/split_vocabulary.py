"""Head and embeddings split by rows over the n ranks of a sequence group, so that no rank ever gathers them whole.

Each rank has V / n rows. FSDP2 shards these over the other ranks that have the same rows, and gathers and averages
there. So gradients here belong to one share of the batch, while gradients of hidden states are n times as large; see
sequence.py.

    embeddings   for each rank of the group in turn: all ranks look up its tokens, and the sum is sent to it
    scores       for each rank of the group in turn, in chunks: it sends its hidden states, all ranks compute logits of
                 their rows of the head, and maximum and sums of exponentials are added up over the group

The formulas are in token_scores.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from learner.models import token_scores
from learner.models.token_scores import (
    TokenSupports,
    grad_of_logits,
    grads_inside,
    largest_of,
    least_of,
    scaled_logits,
    split_rows,
    sum_of,
    without_supports,
)


def split_vocabulary(lm: Any, ranks: DeviceMesh) -> list[list[nn.Module]]:
    """Split embeddings and head, if there is one, in place. Returns the modules of each unit for FSDP2 to shard.

    Afterwards the embeddings take this rank's slice of tokens, and the head takes the arguments of `_split_scores` from
    `states` on. Parameters keep their names; they are DTensors with the shape of the whole.
    """
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    embeddings.weight = _split(embeddings.weight, ranks)
    embeddings.forward = partial(_split_embeddings, embeddings, ranks)
    if head is None:
        return [[embeddings]]
    head.weight = embeddings.weight if is_tied else _split(head.weight, ranks)
    head.forward = partial(_split_scores, head, ranks)
    return [[embeddings, head]] if is_tied else [[embeddings], [head]]


def _split(weight: Tensor, ranks: DeviceMesh) -> nn.Parameter:
    rows = distribute_tensor(weight.detach(), ranks, [Shard(0)], src_data_rank=None)
    return nn.Parameter(rows, requires_grad=weight.requires_grad)


def _split_embeddings(module: Any, ranks: DeviceMesh, tokens: Tensor) -> Tensor:
    """Return the embeddings of this rank's slice of tokens. [B, s] -> [B, s, hidden]"""
    all_tokens = [torch.empty_like(tokens) for _ in range(ranks.size())]
    dist.all_gather(all_tokens, tokens.contiguous(), group=ranks.get_group())
    weight = module.weight
    states: Tensor = _SplitEmbeddings.apply(_own_rows(weight), all_tokens, _first_row(weight, ranks),
                                            module.padding_idx, ranks)
    return states


def _split_scores(
    module: Any, ranks: DeviceMesh, states: Tensor, targets: Tensor, temperature: Tensor, owners: Tensor,
    supports: TokenSupports | None = None,
) -> tuple[Tensor, ...]:
    """Return on every rank the logprobs and entropies of all N tokens, as `score_tokens` does. Collective.

    With `supports` they are over each token's support, and the `masses` of `score_supports` follow.

    Args:
        states: [m, hidden] of the m tokens that `owners` [N] assigns to this rank.
        targets, temperature: [N] of all tokens.
        supports: of all tokens.
    """
    weight = module.weight
    chunk = max(1, token_scores.LOGITS_BYTES[weight.device.type] // (4 * -(-weight.shape[0] // ranks.size())))
    chunks = list(_chunks(owners, chunk, ranks))
    scored: tuple[Tensor, ...] = _SplitScores.apply(
        states, _own_rows(weight), targets - _first_row(weight, ranks), temperature, chunks, ranks,
        None if supports is None else TokenSupports(supports.ids - _first_row(weight, ranks), supports.offsets),
    )
    return scored


def _own_rows(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _first_row(weight: Tensor, ranks: DeviceMesh) -> int:
    return ranks.get_local_rank() * -(-weight.shape[0] // ranks.size())


def _chunks(owners: Tensor, size: int, ranks: DeviceMesh) -> Iterator[tuple[int, Tensor, slice]]:
    """Yield for each chunk (owner, indices of its tokens among all N, slice of its tokens among the owner's)."""
    for owner in range(ranks.size()):
        indices = (owners == owner).nonzero()[:, 0]
        for start in range(0, len(indices), size):
            yield owner, indices[start : start + size], slice(start, start + size)


class _SplitEmbeddings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, all_tokens: list[Tensor], first: int, padding: int | None, ranks: DeviceMesh
    ) -> Tensor:
        ctx.all_tokens, ctx.first, ctx.padding, ctx.ranks = all_tokens, first, padding, ranks
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        own = weight.new_empty(0)
        for owner, tokens in enumerate(all_tokens):
            rows = tokens - first
            is_here = (rows >= 0) & (rows < ctx.rows)
            part = F.embedding(rows.clamp(0, ctx.rows - 1), weight).masked_fill_(~is_here[..., None], 0.0)
            dist.reduce(part, group=ranks.get_group(), group_dst=owner)
            if owner == ranks.get_local_rank():
                own = part
        return own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_weight = grad.new_zeros(ctx.rows, grad.shape[-1], dtype=torch.float32)
        for owner, tokens in enumerate(ctx.all_tokens):
            is_own = owner == ctx.ranks.get_local_rank()
            part = grad.contiguous() if is_own else grad.new_empty(*tokens.shape, grad.shape[-1])
            dist.broadcast(part, group=ctx.ranks.get_group(), group_src=owner)
            rows = tokens - ctx.first
            is_here = (rows >= 0) & (rows < ctx.rows)
            if ctx.padding is not None:
                is_here &= tokens != ctx.padding
            # one row more takes what belongs to other ranks, and is left out
            rows = rows.where(is_here, ctx.rows)
            summed = torch.ops.aten.embedding_dense_backward(part, rows, ctx.rows + 1, ctx.rows, False)
            of_weight += summed[: ctx.rows]
        return of_weight.div_(ctx.ranks.size()).to(ctx.dtype), None, None, None, None


class _SplitScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, rows: Tensor, temperature: Tensor,
        chunks: list[tuple[int, Tensor, slice]], ranks: DeviceMesh, supports: TokenSupports | None,
    ) -> tuple[Tensor, ...]:
        """See `_split_scores`.

        `rows` [N] are the targets, counted from this rank's first row of the head [V / n, hidden]. So are the ids of
        the supports."""
        logprobs, entropies, total = (torch.zeros_like(temperature, dtype=torch.float32) for _ in range(3))
        inside = None if supports is None else torch.zeros_like(total)
        masses = total.new_zeros(2, len(total))
        for owner, indices, part in chunks:
            logits = scaled_logits(_sent(states, owner, indices, part, ranks), head, temperature[indices])
            own = None if supports is None else _own_supports(supports.take(indices), head)
            top = logits.amax(1)
            if own is not None:
                places = own.places(owners := own.owners, logits.shape[1])
                tops = torch.stack([top, largest_of(logits.view(-1).index_select(0, places), own)])
                dist.all_reduce(tops, dist.ReduceOp.MAX, ranks.get_group())
                top, top_inside = tops
                top_inside -= top
            else:
                dist.all_reduce(top, dist.ReduceOp.MAX, ranks.get_group())
            logits.sub_(top[:, None])
            here, row = _in_head(rows[indices], head)
            chosen = logits.gather(1, row[:, None])[:, 0].masked_fill_(~here, 0.0)
            parts = [*_weight_sums(logits), chosen]
            if own is not None:
                shifted = logits.view(-1).index_select(0, places).sub_(top_inside.index_select(0, owners))
                weights = shifted.exp()
                least = least_of(weights, own)
                dist.all_reduce(least, dist.ReduceOp.MIN, ranks.get_group())
                parts += [sum_of(weights, own), sum_of(weights.mul_(shifted), own)]
            sums = torch.stack(parts)
            del logits  # before the next chunk is made
            dist.all_reduce(sums, group=ranks.get_group())
            log_sum = sums[0].log()
            total[indices] = log_sum + top
            logprobs[indices] = sums[2] - log_sum
            entropies[indices] = log_sum - sums[1] / sums[0]
            if inside is not None:
                is_any = sums[3] > 0  # a token without ids has a sum of 0
                log_inside = sums[3].log() + top_inside
                inside[indices] = log_inside + top
                shares = torch.stack([sums[3], sums[3] - least]) * (top_inside - log_sum).exp()
                masses[:, indices] = shares.where(is_any, 0.0)
                logprobs[indices] = (sums[2] - log_inside).where(is_any, logprobs[indices])
                entropies[indices] = (sums[3].log() - sums[4] / sums[3]).where(is_any, entropies[indices])
        ctx.chunks, ctx.ranks, ctx.supports, ctx.inside = chunks, ranks, supports, inside
        ctx.save_for_backward(states, head, rows, temperature, entropies, total)
        ctx.set_materialize_grads(False)
        if supports is None:
            return logprobs, entropies
        ctx.mark_non_differentiable(masses)
        return logprobs, entropies, masses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        states, head, rows, temperature, entropies, total = ctx.saved_tensors
        of_states = torch.zeros_like(states)
        of_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for owner, indices, part in ctx.chunks:
            sent = _sent(states, owner, indices, part, ctx.ranks)
            logits = scaled_logits(sent, head, temperature[indices])
            of_logprobs, of_entropies = (
                None if grad is None else grad[indices] / temperature[indices] for grad in grads[:2]
            )
            inside, of_whole = None, (of_logprobs, of_entropies)
            if ctx.supports is not None:
                whole = ctx.supports.take(indices)
                own = _own_supports(whole, head)
                inside = grads_inside(
                    of_logprobs, of_entropies, logits, own, ctx.inside[indices], entropies[indices]
                )
                of_whole = without_supports(of_logprobs, whole), without_supports(of_entropies, whole)
            logp = logits.sub_(total[indices, None])
            of_logits = grad_of_logits(logp, entropies[indices], *of_whole)
            if inside is not None:
                of_logits.view(-1).scatter_add_(0, *inside)
            if of_logprobs is not None:
                here, row = _in_head(rows[indices], head)
                of_logits.scatter_add_(1, row[:, None], (of_logprobs * here)[:, None])
            del logits, logp  # of_logits has their memory, until it is converted
            of_logits = of_logits.to(head.dtype)
            of_sent = (of_logits @ head).float()
            dist.reduce(of_sent, group=ctx.ranks.get_group(), group_dst=owner)
            if owner == ctx.ranks.get_local_rank():
                of_states[part] = (of_sent * ctx.ranks.size()).to(states.dtype)
            if of_head is not None:
                of_head += of_logits.T @ sent
            del of_logits  # before the next chunk is made
        return of_states, None if of_head is None else of_head.to(head.dtype), None, None, None, None, None


def _own_supports(supports: TokenSupports, head: Tensor) -> TokenSupports:
    """Return the supports with only the ids that are rows of this rank's part of the head."""
    is_here = (supports.ids >= 0) & (supports.ids < len(head))
    owners = supports.owners[is_here].cpu()
    sizes = torch.bincount(owners, minlength=len(supports.offsets) - 1)
    return TokenSupports(supports.ids[is_here], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


def _in_head(rows: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return (whether this rank has each row, the row's index on this rank; any valid index where it has not)."""
    return (rows >= 0) & (rows < len(head)), rows.clamp(0, len(head) - 1)


def _sent(states: Tensor, owner: int, indices: Tensor, part: slice, ranks: DeviceMesh) -> Tensor:
    """Return on every rank the hidden states [n, hidden] of a chunk, which the rank `owner` sends. Collective.

    Args:
        indices: the chunk's tokens among all N.
        part: the chunk's tokens among the owner's tokens.
    """
    is_own = owner == ranks.get_local_rank()
    sent = states[part].contiguous() if is_own else states.new_empty(len(indices), states.shape[1])
    dist.broadcast(sent, group=ranks.get_group(), group_src=owner)
    return sent


def _weight_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of exp(z), sum of z exp(z)) over each row of the logits z, [n] each."""
    sums = []
    for part in split_rows(logits):
        weights = part.exp()
        sums.append(torch.stack([weights.sum(1), torch.linalg.vecdot(weights, part)]))
    of_weights, of_products = torch.cat(sums, 1)
    return of_weights, of_products
