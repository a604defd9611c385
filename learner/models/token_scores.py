"""Computes log-probabilities and entropies of chosen tokens without the logits of a whole batch.

    z = states W^T / temperature        log p(y) = z_y - logsumexp(z)        H = logsumexp(z) - sum_v p_v z_v

The float32 logits in memory take at most LOGITS_BYTES at a time. Tensors computed from them, such as p, are made for an
eighth of their rows at a time. So the peak is 1.3 times LOGITS_BYTES; with bfloat16 weights, whose logits are
converted, 1.5 times. The backward pass computes the logits again, in the same chunks, unless one chunk held them all.
It adds the gradient of W, which has the size of W, in float32 if there are several chunks. The gradients are
d log p(y) / dz = [y = v] - p_v and dH / dz = -p_v (log p_v + H).

A token may be drawn from a part S of the vocabulary, its support. Then log p(y | S) = z_y - logsumexp_S(z), and the
entropy is that of p_v / p_S. The gradients are the same with p_v / p_S for p_v inside S, and 0 outside. S is a list of
ids: no mask [N, V] is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGITS_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}
"""[device] the most memory for float32 logits; more tokens are scored in chunks. On a GPU each chunk reads and writes
the whole gradient of the head, in float32, which takes longer than the rest of the chunk unless the chunk is large."""
FORBIDDEN = -1e30
"""The logit of a forbidden token. Its probability is 0, and 0 times its logarithm is not NaN."""
_PARTS = 8
"""Temporary tensors are made for one of this many parts of a chunk's rows at a time."""


@dataclass(frozen=True, slots=True)
class TokenSupports:
    """The support of each of N tokens: the ids it was drawn from. A token without ids: the whole vocabulary."""

    ids: Tensor
    """int64. The ids of the first token, then of the second, and so on. The ids of one token are all different.
    """
    offsets: Tensor
    """[N + 1] int64 in CPU memory. Token i has the ids offsets[i]..offsets[i + 1] - 1."""
    behaviour: Tensor | None = None
    """For each id the engine's logprob of it, over the ids of its token; None: not recorded."""

    @property
    def sizes(self) -> Tensor:
        """[N] number of ids of each token."""
        return self.offsets.diff().to(self.ids.device)

    @property
    def owners(self) -> Tensor:
        """The index of the token that each id belongs to."""
        return torch.repeat_interleave(self.sizes, output_size=len(self.ids))

    def places(self, owners: Tensor, width: int) -> Tensor:
        """Return the index of each id in a flattened [N, width] tensor, which is faster than an index of two parts.

        Args:
            owners: the property of that name.
        """
        return torch.add(self.ids, owners, alpha=width)

    def cut(self, start: int, end: int) -> TokenSupports:
        """Return the supports of the tokens start..end - 1."""
        offsets = self.offsets[start : end + 1]
        return TokenSupports(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, tokens: Tensor) -> TokenSupports:
        """Return the supports of the tokens with these indices, in this order."""
        tokens = tokens.cpu()
        sizes = self.offsets.diff()[tokens]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        shifts = (self.offsets[tokens] - offsets[:-1]).repeat_interleave(sizes)
        return TokenSupports(self.ids[(torch.arange(len(shifts)) + shifts).to(self.ids.device)], offsets)


def score_tokens(
    states: Tensor, head: Tensor, targets: Tensor, temperature: Tensor, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the N target tokens, entropies of their distributions), [N] float32 with gradient.

    Hidden states are [N, hidden], output embeddings [V, hidden], targets and temperature [N].

    Args:
        forbidden: ids of tokens that the distributions leave out. A target with such an id was not sampled, and gets
            the logprob 0.
    """
    scored: tuple[Tensor, Tensor] = _ScoreTokens.apply(states, head, targets, temperature, forbidden, None, False)
    return scored


def score_supports(
    states: Tensor, head: Tensor, targets: Tensor, temperature: Tensor, forbidden: Tensor | None,
    supports: TokenSupports,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log-probabilities, entropies, masses, of_ids) of N target tokens over their supports.

    The first two are as in `score_tokens`. Each target must be in its support.

    masses: [2, N] without gradient: the probability of each token's support, and of it without its least probable id.
    of_ids: the log-probability of each id of the supports, over the ids of its token. Empty if the supports have no
        `behaviour`, because then no loss reads it.
    """
    scored: tuple[Tensor, Tensor, Tensor, Tensor] = _ScoreTokens.apply(
        states, head, targets, temperature, forbidden, supports, supports.behaviour is not None
    )
    return scored


def largest_of(values: Tensor, supports: TokenSupports) -> Tensor:
    """Return the largest value of each token, given one value for each id of the supports; -inf without ids. [N]"""
    return torch.segment_reduce(values, "max", lengths=supports.sizes, unsafe=True)


def least_of(values: Tensor, supports: TokenSupports) -> Tensor:
    """Return the least value of each token, given one value for each id of the supports; inf without ids. [N]"""
    return torch.segment_reduce(values, "min", lengths=supports.sizes, unsafe=True)


def sum_of(values: Tensor, supports: TokenSupports) -> Tensor:
    """Return the sum of the values of each token, given one value for each id of the supports; 0 without ids. [N]"""
    return torch.segment_reduce(values, "sum", lengths=supports.sizes, unsafe=True)


def _inside(logp: Tensor, supports: TokenSupports) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log p_S, entropy of p_v / p_S, p_S without its least probable id) of each token, [n] each; 0 without ids.

    Args:
        logp: [n, V] log p.
    """
    owners = supports.owners
    inside = logp.view(-1).index_select(0, supports.places(owners, logp.shape[1]))
    top = largest_of(inside, supports)
    inside.sub_(top.index_select(0, owners))
    weights = inside.exp()
    total = sum_of(weights, supports)
    least = least_of(weights, supports)
    entropies = total.log() - sum_of(weights.mul_(inside), supports) / total
    is_any = supports.sizes > 0
    without_least = (top.exp() * (total - least)).where(is_any, 0.0)
    return (top + total.log()).where(is_any, 0.0), entropies.where(is_any, 0.0), without_least


def without_supports(grads: Tensor | None, supports: TokenSupports) -> Tensor | None:
    """Return the gradients [n] of tokens, with 0 for each token that has a support. None stays None."""
    return None if grads is None else grads.masked_fill(supports.sizes > 0, 0.0)


def grads_inside(
    of_logprobs: Tensor | None, of_entropies: Tensor | None, logp: Tensor, supports: TokenSupports, log_mass: Tensor,
    entropies: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (places of the ids in [n * V], numbers to add there to the gradient of the logits).

    It is the gradient of `grad_of_logits` with p_v / p_S for p_v. The part of the targets is left out.

    Args:
        of_logprobs, of_entropies: [n] gradients of the results; None for zeros.
        logp: [n, V] log p, or z.
        log_mass: [n] log of the sum of the exponentials of each token's ids.
        entropies: [n] of p_v / p_S.
    """
    owners = supports.owners
    places = supports.places(owners, logp.shape[1])
    log_shares = logp.view(-1).index_select(0, places).sub_(log_mass.index_select(0, owners))
    grads = log_shares.exp().neg_()
    slope = torch.zeros_like(log_mass) if of_logprobs is None else of_logprobs
    if of_entropies is None:
        return places, grads.mul_(slope.index_select(0, owners))
    slope = slope + of_entropies * entropies
    log_shares.mul_(of_entropies.index_select(0, owners)).add_(slope.index_select(0, owners))
    return places, grads.mul_(log_shares)


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, targets: Tensor, temperature: Tensor, forbidden: Tensor | None,
        supports: TokenSupports | None, scores_ids: bool,
    ) -> tuple[Tensor, ...]:
        size = max(1, LOGITS_BYTES[head.device.type] // (4 * head.shape[0]))
        scores, masses, edges, of_ids = [], list[Tensor](), list[Tensor](), list[Tensor]()
        for start in range(0, max(1, len(states)), size):
            part = slice(start, start + size)
            x, y, t = states[part], targets[part], temperature[part]
            logp = _log_softmax(x, head, t, forbidden)
            chosen = logp.gather(1, y[:, None])[:, 0]
            if forbidden is not None:
                chosen.masked_fill_(torch.isin(y, forbidden), 0.0)
            kept = logp if len(states) <= size and (states.requires_grad or head.requires_grad) else None
            entropy = torch.cat([-torch.linalg.vecdot(part.exp(), part) for part in split_rows(logp)])
            if supports is not None:
                own = supports.cut(start, start + len(x))
                mass, inside, without_least = _inside(logp, own)
                edges.append(torch.stack([mass.exp(), without_least]))
                chosen, entropy = chosen - mass, inside.where(own.sizes > 0, entropy)
                masses.append(mass)
                if scores_ids:
                    owners = own.owners
                    of_all = logp.view(-1).index_select(0, own.places(owners, logp.shape[1]))
                    of_ids.append(of_all.sub_(mass.index_select(0, owners)))
            scores.append((chosen, entropy))
            del logp  # before the next chunk is made
        logprobs, entropies = (torch.cat(parts) for parts in zip(*scores, strict=True))
        ctx.size, ctx.kept, ctx.forbidden = size, kept, forbidden
        ctx.supports, ctx.masses = supports, masses
        ctx.save_for_backward(states, head, targets, temperature, entropies)
        ctx.set_materialize_grads(False)
        if supports is None:
            return logprobs, entropies
        both = torch.cat(edges, 1)
        ctx.mark_non_differentiable(both)
        return logprobs, entropies, both, torch.cat(of_ids) if of_ids else logprobs.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        states, head, targets, temperature, entropies = ctx.saved_tensors
        of_states = torch.empty_like(states)
        # Each chunk rounds the sum once more: forty chunks in bfloat16 would more than double the gradient's error.
        summed = head.dtype if len(states) <= ctx.size else torch.promote_types(head.dtype, torch.float32)
        of_head = torch.zeros_like(head, dtype=summed) if ctx.needs_input_grad[1] else None
        for start in range(0, len(states), ctx.size):
            part = slice(start, start + ctx.size)
            kept = ctx.kept
            logp = _log_softmax(states[part], head, temperature[part], ctx.forbidden) if kept is None else kept
            ctx.kept = kept = None
            # of z times the temperature: divided here they need no pass over the logits
            of_logprobs, of_entropies = (None if g is None else g[part] / temperature[part] for g in grads[:2])
            inside, of_ids, of_whole = None, None, (of_logprobs, of_entropies)
            if ctx.supports is not None:
                own = ctx.supports.cut(start, start + len(logp))
                mass, of_sets = ctx.masses[start // ctx.size], of_logprobs
                if grads[3] is not None and len(grads[3]):
                    first = int(ctx.supports.offsets[start])
                    of_ids = grads[3][first : first + len(own.ids)] / temperature[part].index_select(0, own.owners)
                    of_sets = sum_of(of_ids, own) + (0 if of_logprobs is None else of_logprobs)
                inside = grads_inside(of_sets, of_entropies, logp, own, mass, entropies[part])
                of_whole = without_supports(of_logprobs, own), without_supports(of_entropies, own)
            of_logits = grad_of_logits(logp, entropies[part], *of_whole)
            del logp  # of_logits has its memory, until it is converted
            if inside is not None:
                of_logits.view(-1).scatter_add_(0, *inside)
            if inside is not None and of_ids is not None:
                of_logits.view(-1).scatter_add_(0, inside[0], of_ids)
            if of_logprobs is not None:
                of_logits.scatter_add_(1, targets[part, None], of_logprobs[:, None])
            of_logits = of_logits.to(head.dtype)
            torch.mm(of_logits, head, out=of_states[part])
            if of_head is not None and summed == head.dtype:
                of_head.addmm_(of_logits.T, states[part])
            elif of_head is not None:
                of_head += of_logits.T @ states[part]
            del of_logits  # before the next chunk is made
        return of_states, None if of_head is None else of_head.to(head.dtype), None, None, None, None, None


def _log_softmax(states: Tensor, head: Tensor, temperature: Tensor, forbidden: Tensor | None) -> Tensor:
    """Return log_softmax(states head^T / temperature), [n, V], in float32 or better. Forbidden tokens have FORBIDDEN.
    """
    logits = scaled_logits(states, head, temperature)
    if forbidden is not None:
        logits.index_fill_(1, forbidden, FORBIDDEN)
    for part in split_rows(logits):
        part.sub_(part.logsumexp(1, keepdim=True))
    return logits


def scaled_logits(states: Tensor, head: Tensor, temperature: Tensor) -> Tensor:
    """Return states head^T / temperature, [n, V], in float32 or better."""
    logits = states @ head.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature[:, None])


def split_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """Return views of a tensor's rows in at most _PARTS parts."""
    return rows.split(max(1, -(-len(rows) // _PARTS)))


def grad_of_logits(
    logp: Tensor, entropies: Tensor, of_logprobs: Tensor | None, of_entropies: Tensor | None
) -> Tensor:
    """Return the gradient of the logits z, -g_y p_v - g_H p_v (log p_v + H), [n, V], without the targets' part.

    The caller adds g_y at each target. g_y and g_H are the gradients [n] of log p(y) and H (`of_logprobs`,
    `of_entropies`), None for zeros. `logp` [n, V] is overwritten.
    """
    slope = torch.zeros_like(entropies) if of_logprobs is None else -of_logprobs
    if of_entropies is None:
        return logp.exp_().mul_(slope[:, None])
    for part, h, of_h, k in zip(*map(split_rows, (logp, entropies, of_entropies, slope)), strict=True):
        p = part.exp()
        part.add_(h[:, None]).mul_(-of_h[:, None]).add_(k[:, None]).mul_(p)
    return logp
