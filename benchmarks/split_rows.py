"""The cases and the page of benchmarks/sequence_parallel.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from async_rl.sweeps.tables import Table

HEADS = {"heads": (8, 4), "keys": (9, 3)}
"""By what ranks exchange, the heads of queries and of keys."""
MEMORY_VOCAB, MEMORY_TOKENS = 32_000, 3072
ASKED = 1e-6
"""Gradients are to differ by no more than this share of their tensor's largest number."""


class SplitCase(NamedTuple):
    """How ranks divide the work."""

    exchange: str
    data: int = 1
    sequence: int = 1
    recomputes: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.sequence


EQUALITY = [
    SplitCase(exchange, data, sequence, recomputes)
    for exchange in HEADS
    for data, sequence, recomputes in ((2, 1, False), (1, 2, False), (1, 4, False), (2, 2, False), (2, 2, True))
]
MEMORY = [
    SplitCase(exchange, 1, sequence, recomputes)
    for recomputes in (False, True) for exchange, sequence in (("heads", 1), ("heads", 2), ("heads", 4), ("keys", 4))
]  # fmt: skip


def misses_text(found: dict[SplitCase, dict[str, tuple[float, ...]]], in_float64: float) -> str:
    """Return the section about gradients that differ by more than ASKED."""
    rows = [
        [*_words(case), name, *(f"{size:.1e}" for size in sizes)]
        for case, tensors in found.items() for name, sizes in tensors.items()
    ]  # fmt: skip
    columns = ["gradient of", "difference", "one process from float64", "these ranks from float64"]
    return f"""
## Gradients that differ by more than {ASKED:.0e}

No more was asked for; these do. Beside it how far either is from passes in float64, which the rounding of float32 alone
makes. In float64 itself 2 x 2 ranks differ from one process by at most {in_float64:.1e}, of which gradients that are
kept in float32 have their part. A gradient of one number is a sum over all tokens, whose terms may nearly cancel.

{Table(["data x sequence", "heads", "recomputed", *columns], rows).markdown()}"""


def _words(case: SplitCase) -> list[str]:
    names = {"heads": "8, 4 of keys: exchanged", "keys": "9, 3 of keys: keys gathered"}
    return [f"{case.data} x {case.sequence}", names[case.exchange], "yes" if case.recomputes else "no"]


def report(
    equal: dict[SplitCase, dict[str, float]], kept: dict[SplitCase, dict[str, Any]], header: str, misses: str = ""
) -> str:
    """Return the page: a table of differences from one process, and one of bytes by rank."""
    rows = [[*_words(case), *(f"{value:.1e}" for value in found.values())] for case, found in equal.items()]
    first = Table(["data x sequence", "heads", "recomputed", "loss", "logprob", "gradient", "weights"], rows)
    rows = [
        [str(case.sequence), case.exchange if case.sequence > 1 else "none", "yes" if case.recomputes else "no",
         *(f"{found[key] / 2**20:.1f}" for key in ("kept_bytes", "table_bytes"))]
        for case, found in kept.items()
    ]  # fmt: skip
    columns = ["sequence ranks", "exchange", "recomputed", "kept for backward, MiB", "embeddings and head, MiB"]
    return f"""# Rows split over ranks

{header}

## The largest differences from one process

Policy, critic and reference, shared prompts, masks. Loss of the policy; logprobs of the first pass; gradients of policy
and critic, each as a share of its tensor's largest number; weights after two steps of AdamW at 1e-3, which makes a step
of full size of a gradient's rounding. The ranks of 2 x 1 split no row: so much comes from adding in another order.

{first.markdown()}{misses}
## What a rank keeps

One pass over {MEMORY_TOKENS} tokens in four documents, by a model of 4 layers, hidden size 256 and a vocabulary of
{MEMORY_VOCAB}. Weights and the mask are not counted.

{Table(columns, rows).markdown()}"""
