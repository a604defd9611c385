"""Token sampling as a pure function of logits and counter-based random numbers: timing never changes a reply."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WORD = 2**64


def uniforms(seed: int, prompt_index: int, sample: int, count: int) -> npt.NDArray[np.float64]:
    """Return the first `count` random numbers in [0, 1) of the stream of one reply: of (seed, prompt, sample).

    Number t decides the reply's token t. Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
    is a function of key and counter; the sample is the counter's highest word, so streams never overlap.
    """
    key = (seed % _WORD) | (prompt_index % _WORD) << 64
    return np.random.Generator(np.random.Philox(key=key, counter=(sample % _WORD) << 192)).random(count)


def sample_tokens(
    logits: Tensor,  # [B, V]
    temperature: Tensor,  # [B, 1] float32
    top_p: Tensor | None,  # [B, 1] float32; None: full support
    uniform: Tensor,  # [B, 1] float64 in [0, 1)
) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return the tokens [B] and their logprobs [B].

    The token is the one whose interval of the cumulative distribution contains `uniform`. The logprob is that of
    log_softmax(logits / temperature), also under top_p, which only narrows the choice, as in SGLang.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    probabilities = logprobs.exp()
    if top_p is not None:
        probabilities = _nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))  # rounding may lift it
    tokens = torch.searchsorted(cumulative, below, right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def _nucleus(
    probabilities: Tensor,  # [B, V]
    top_p: Tensor,  # [B, 1]
) -> Tensor:
    """Return `probabilities` [B, V] with 0 outside the smallest set of most probable tokens that reaches `top_p`."""
    descending, order = probabilities.sort(dim=-1, descending=True)
    before = descending.cumsum(dim=-1) - descending  # mass of the more probable tokens
    return torch.zeros_like(probabilities).scatter(1, order, descending.masked_fill(before >= top_p, 0.0))
