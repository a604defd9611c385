"""The runs of benchmarks/collapse.py: those with which signals and limits were chosen, and those that judge them."""

from __future__ import annotations

from typing import Any

from benchmarks.collapsing_runs import WordsRun

Over = dict[str, Any]
NO_CORRECTION: Over = {"algorithm.correction.kind": "none"}
RISING: Over = {"learner.warmup_steps": 400}
FOUR: Over = {"algorithm.epochs": 4}
FOUR_RISING = RISING | FOUR
SORTED: Over = {"rule": "sorted", "letters": 5}


def fault(after: int, kind: str, value: float) -> Over:
    """Return the settings of a fault of FaultyAdamW, an argument of it, after so many optimizer steps."""
    params = f"{{after: {after}, {kind}: {value}}}"
    return {"learner.optimizer": "benchmarks.collapsing_runs:FaultyAdamW", "learner.optimizer_params": params}


def raised(after: int, factor: float) -> Over:
    """Return the settings of a learning rate that is raised by a factor after so many optimizer steps."""
    return fault(after, "factor", factor)


def growing(after: int, growth: float) -> Over:
    """Return the settings of a learning rate that grows by a factor with each optimizer step after so many."""
    return fault(after, "growth", growth)


def gradient(after: int, scale: float) -> Over:
    """Return the settings of advantages with the wrong sign or scale after so many optimizer steps."""
    return fault(after, "gradient", scale)


TWO: Over = {"algorithm.epochs": 2}
PARTS: Over = {"algorithm.minibatches": 4}
CISPO: Over = {"algorithm.preset": "cispo"}
RLOO: Over = {"algorithm.preset": "rloo"}
OTHER_BETAS: Over = {"learner.betas": "[0.9, 0.95]"}
ADAPTERS: Over = {"model.lora.rank": 4}

NO_CLIP: Over = {
    "algorithm.clip.low": 1.0, "algorithm.clip.high": ".inf", "algorithm.params.dual": 0.0, "learner.grad_clip": 1000.0,
}  # fmt: skip
EIGHT: Over = {"algorithm.epochs": 8}
THREE: Over = {"algorithm.epochs": 3}


def bonus(coef: float) -> Over:
    return {"algorithm.entropy_coef": coef}


TUNING = (
    WordsRun("rising to 4e-3", 0, 4e-3, steps=150, over=RISING),
    WordsRun("rising to 4e-3", 1, 4e-3, steps=150, over=RISING),
    WordsRun("rising to 6e-3", 2, 6e-3, steps=120, over=RISING),
    WordsRun("rising to 6e-3", 3, 6e-3, steps=120, over=RISING),
    WordsRun("no correction, 5e-4", 4, 5e-4, 8, steps=100, over=NO_CORRECTION),
    WordsRun("no correction, 3e-4", 5, 3e-4, 8, steps=100, over=NO_CORRECTION),
    WordsRun("four epochs, 3e-4", 6, 3e-4, steps=60, over=FOUR),
    WordsRun("four epochs, 5e-4", 7, 5e-4, steps=60, over=FOUR),
    WordsRun("entropy bonus of 0.05", 8, 3e-4, steps=100, over={"algorithm.entropy_coef": 0.05}),
    WordsRun("entropy bonus of 0.1", 9, 3e-4, steps=100, over={"algorithm.entropy_coef": 0.1}),
    WordsRun("sorted, rising to 6e-3", 10, 6e-3, steps=120, over=RISING, **SORTED),
    WordsRun("stale, rising to 6e-3", 11, 6e-3, 8, steps=120, over=RISING),
    WordsRun("2e-3", 12, 2e-3, steps=40),
    WordsRun("four epochs, rising to 4e-3", 13, 4e-3, steps=60, over=FOUR_RISING),
    WordsRun("four epochs, rising to 4e-3", 14, 4e-3, steps=60, over=FOUR_RISING),
    WordsRun("four epochs, rising to 8e-3", 15, 8e-3, steps=50, over=FOUR_RISING),
    WordsRun("four epochs, rising to 8e-3", 16, 8e-3, steps=50, over=FOUR_RISING),
    WordsRun("sorted, four epochs, rising to 4e-3", 17, 4e-3, steps=60, over=FOUR_RISING, **SORTED),
    WordsRun("stale, four epochs, rising to 4e-3", 18, 4e-3, 4, steps=60, over=FOUR_RISING),
    WordsRun("stale, four epochs, rising to 8e-3", 19, 8e-3, 2, steps=50, over=FOUR_RISING),
    WordsRun("four epochs, raised by 10", 40, 3e-4, steps=65, over=FOUR | raised(160, 10)),
    WordsRun("four epochs, raised by 20", 41, 3e-4, steps=55, over=FOUR | raised(160, 20)),
    WordsRun("four epochs, raised by 5", 42, 3e-4, steps=65, over=FOUR | raised(160, 5)),
    WordsRun("four epochs, raised by 5", 43, 3e-4, steps=65, over=FOUR | raised(160, 5)),
    WordsRun("sorted, four epochs, raised by 10", 44, 3e-4, steps=65, over=FOUR | raised(160, 10), **SORTED),
    WordsRun("stale, four epochs, raised by 7", 45, 3e-4, 4, steps=65, over=FOUR | raised(160, 7)),
    WordsRun("raised by 15", 46, 3e-4, steps=95, over=raised(75, 15)),
    WordsRun("3e-4", 20, 3e-4),
    WordsRun("3e-4", 21, 3e-4),
    WordsRun("2e-4", 22, 2e-4),
    WordsRun("2e-4", 23, 2e-4),
    WordsRun("stale, 3e-4", 24, 3e-4, 2),
    WordsRun("stale, 2e-4", 25, 2e-4, 4),
    WordsRun("sorted, 2e-4", 26, 2e-4, **SORTED),
    WordsRun("sorted and stale, 2e-4", 27, 2e-4, 2, **SORTED),
    WordsRun("gspo, 3e-4", 28, 3e-4, over={"algorithm.preset": "gspo"}),
    WordsRun("adapters, 3e-3", 29, 3e-3, over={"model.lora.rank": 8}),
    WordsRun("KL penalty, 3e-4", 30, 3e-4, over={"algorithm.kl.kind": "k2_loss", "algorithm.kl.coef": 0.01}),
    WordsRun("two epochs, raised by 8", 100, 4e-4, steps=75, over=TWO | raised(100, 8)),
    WordsRun("two epochs, raised by 12", 101, 4e-4, steps=70, over=TWO | raised(100, 12)),
    WordsRun("gspo, raised by 12", 102, 4e-4, steps=85, over={"algorithm.preset": "gspo"} | raised(65, 12)),
    WordsRun("cispo, raised by 12", 103, 4e-4, steps=85, over=CISPO | raised(65, 12)),
    WordsRun("rloo, raised by 10", 104, 4e-4, steps=85, over=RLOO | raised(65, 10)),
    WordsRun("adapters, four epochs, raised by 10", 105, 3e-3, steps=65, over=ADAPTERS | FOUR | raised(160, 10)),
    WordsRun("sorted and stale, two epochs, raised by 8", 106, 4e-4, 2, steps=75, over=TWO | raised(100, 8), **SORTED),
    WordsRun("five letters, four epochs, raised by 6", 107, 3e-4, letters=5, steps=60, over=FOUR | raised(140, 6)),
    WordsRun("stale, four epochs, raised by 10", 108, 3e-4, 8, steps=70, over=FOUR | raised(160, 10)),
    WordsRun("no clip, two epochs, raised by 10", 109, 4e-4, steps=70,
             over=TWO | {"learner.grad_clip": 100.0} | raised(100, 10)),
    WordsRun("four minibatches, raised by 10", 110, 2e-4, steps=65, over=PARTS | raised(160, 10)),
    WordsRun("stale, two epochs, raised by 20", 111, 4e-4, 4, steps=70, over=TWO | raised(100, 20)),
    WordsRun("two epochs, 3e-4", 120, 3e-4, steps=60, over=TWO),
    WordsRun("two epochs, 2e-4", 121, 2e-4, steps=60, over=TWO),
    WordsRun("cispo, 3e-4", 122, 3e-4, over=CISPO),
    WordsRun("rloo, 3e-4", 123, 3e-4, over=RLOO),
    WordsRun("five letters, 3e-4", 124, 3e-4, letters=5),
    WordsRun("sorted, two epochs, 2e-4", 125, 2e-4, steps=60, over=TWO, **SORTED),
    WordsRun("stale, 3e-4", 126, 3e-4, 1),
    WordsRun("stale, 2e-4", 127, 2e-4, 6),
    WordsRun("four minibatches, 2e-4", 128, 2e-4, steps=60, over=PARTS),
    WordsRun("other betas, 3e-4", 129, 3e-4, over=OTHER_BETAS),
    WordsRun("adapters, two epochs, 2e-3", 130, 2e-3, steps=60, over=ADAPTERS | TWO),
    WordsRun("dppo_tv, 3e-4", 131, 3e-4, over={"algorithm.preset": "dppo_tv"}),
    WordsRun("three epochs, raised by 9", 200, 3e-4, steps=65, over=THREE | raised(120, 9)),
    WordsRun("stale, raised by 15", 201, 4e-4, 3, steps=75, over=raised(55, 15)),
    WordsRun("dppo_tv, two epochs, raised by 10", 202, 4e-4, steps=65,
             over=TWO | {"algorithm.preset": "dppo_tv"} | raised(90, 10)),
    WordsRun("growing by 5%", 203, 4e-4, steps=100, over=growing(40, 1.05)),
    WordsRun("stale, growing by 8%", 204, 4e-4, 2, steps=90, over=growing(45, 1.08)),
    WordsRun("sorted, two epochs, growing by 3%", 205, 3e-4, steps=80, over=TWO | growing(70, 1.03), **SORTED),
    WordsRun("cispo, growing by 15%", 206, 4e-4, steps=75, over=CISPO | growing(50, 1.15)),
    WordsRun("five letters, two epochs, growing by 6%", 207, 3e-4, letters=5, steps=70,
             over=TWO | growing(70, 1.06)),
    WordsRun("no clip, eight epochs", 208, 5e-4, steps=60, over=EIGHT | NO_CLIP),
    WordsRun("no clip, eight epochs, growing by 1%", 209, 3e-4, steps=60, over=EIGHT | NO_CLIP | growing(160, 1.01)),
    WordsRun("stale, no clip, four epochs", 210, 7e-4, 2, steps=60, over=FOUR | NO_CLIP),
    WordsRun("stale by 12, no correction, two epochs", 211, 4e-4, 12, steps=80, over=TWO | NO_CORRECTION),
    WordsRun("stale by 6, no correction, growing by 5%", 212, 3e-4, 6, steps=90,
             over=NO_CORRECTION | growing(45, 1.05)),
    WordsRun("wrong sign", 213, 3e-4, steps=70, over=gradient(50, -1)),
    WordsRun("stale, wrong sign", 214, 3e-4, 4, steps=75, over=gradient(50, -1)),
    WordsRun("sorted, two epochs, wrong sign", 215, 2e-4, steps=65, over=TWO | gradient(100, -1), **SORTED),
    WordsRun("rloo, advantages times 60", 216, 4e-4, steps=75, over=RLOO | gradient(55, 60)),
    WordsRun("two epochs, advantages times 100", 217, 3e-4, steps=70, over=TWO | gradient(90, 100)),
    WordsRun("entropy bonus of 0.25", 218, 4e-4, steps=100, over=bonus(0.25)),
    WordsRun("two epochs, entropy bonus of 0.4", 219, 4e-4, steps=80, over=TWO | bonus(0.4)),
    WordsRun("three epochs, 2e-4", 220, 2e-4, steps=60, over=THREE),
    WordsRun("stale, 4e-4", 221, 4e-4, 3),
    WordsRun("reinforce_pp_baseline, 3e-4", 222, 3e-4, over={"algorithm.preset": "reinforce_pp_baseline"}),
    WordsRun("dr_grpo, 3e-4", 223, 3e-4, over={"algorithm.preset": "dr_grpo"}),
    WordsRun("maxrl, 2e-4", 224, 2e-4, over={"algorithm.advantage": "maxrl"}),
    WordsRun("stale, icepop, 2e-4", 225, 2e-4, 5, over={"algorithm.preset": "icepop"}),
    WordsRun("stale, m2po, two epochs, 2e-4", 226, 2e-4, 2, steps=60, over=TWO | {"algorithm.preset": "m2po"}),
    WordsRun("entropy bonus of 0.02, 3e-4", 227, 3e-4, over=bonus(0.02)),
    WordsRun("warm-up and cosine, 4e-4", 228, 4e-4,
             over={"learner.warmup_steps": 10, "learner.decay_fraction": 1.0, "learner.decay": "cosine"}),
    WordsRun("five letters, two epochs, 2e-4", 229, 2e-4, letters=5, steps=60, over=TWO),
    WordsRun("sorted and stale, 3e-4", 230, 3e-4, 1, **SORTED),
    WordsRun("two minibatches, 3e-4", 231, 3e-4, steps=60, over={"algorithm.minibatches": 2}),
)  # fmt: skip
JUDGED = (
    WordsRun("four epochs, raised by 8", 300, 2e-4, steps=60, over=FOUR | raised(150, 8)),
    WordsRun("stale, two epochs, raised by 9", 301, 3e-4, 6, steps=70, over=TWO | raised(80, 9)),
    WordsRun("five letters, raised by 12", 302, 4e-4, letters=5, steps=80, over=raised(60, 12)),
    WordsRun("sorted, rloo, two epochs, raised by 7", 303, 3e-4, steps=65, over=RLOO | TWO | raised(80, 7), **SORTED),
    WordsRun("growing by 6%", 304, 3e-4, steps=100, over=growing(40, 1.06)),
    WordsRun("two epochs, growing by 4%", 305, 4e-4, steps=75, over=TWO | growing(60, 1.04)),
    WordsRun("stale, growing by 10%", 306, 4e-4, 4, steps=85, over=growing(40, 1.10)),
    WordsRun("gspo, growing by 12%", 307, 4e-4, steps=80, over={"algorithm.preset": "gspo"} | growing(45, 1.12)),
    WordsRun("sorted, growing by 7%", 308, 4e-4, steps=90, over=growing(40, 1.07), **SORTED),
    WordsRun("stale, four minibatches, growing by 3%", 309, 2e-4, 1, steps=70, over=PARTS | growing(120, 1.03)),
    WordsRun("two epochs, rising to 8e-3", 310, 8e-3, steps=80, over=RISING | TWO),
    WordsRun("stale, rising to 8e-3", 311, 8e-3, 2, steps=100, over=RISING),
    WordsRun("1e-3", 312, 1e-3, steps=80),
    WordsRun("two epochs, 1e-3", 313, 1e-3, steps=60, over=TWO),
    WordsRun("stale, 1e-3", 314, 1e-3, 3, steps=80),
    WordsRun("no clip, six epochs", 315, 3e-4, steps=60, over={"algorithm.epochs": 6} | NO_CLIP),
    WordsRun("stale, no clip, three epochs", 316, 4e-4, 3, steps=70, over=THREE | NO_CLIP),
    WordsRun("stale by 10, no correction", 317, 4e-4, 10, steps=100, over=NO_CORRECTION),
    WordsRun("wrong sign", 318, 4e-4, steps=70, over=gradient(45, -1)),
    WordsRun("stale, cispo, wrong sign", 319, 3e-4, 2, steps=75, over=CISPO | gradient(50, -1)),
    WordsRun("two epochs, advantages times 200", 320, 4e-4, steps=70, over=TWO | gradient(90, 200)),
    WordsRun("entropy bonus of 0.15", 321, 3e-4, steps=100, over=bonus(0.15)),
    WordsRun("3e-4", 322, 3e-4),
    WordsRun("four epochs, 2e-4", 323, 2e-4, steps=60, over=FOUR),
    WordsRun("stale, 3e-4", 324, 3e-4, 4),
    WordsRun("gspo, two epochs, 3e-4", 325, 3e-4, steps=60, over=TWO | {"algorithm.preset": "gspo"}),
    WordsRun("cispo, 4e-4", 326, 4e-4, over=CISPO),
    WordsRun("rloo, two epochs, 2e-4", 327, 2e-4, steps=60, over=RLOO | TWO),
    WordsRun("sorted, 3e-4", 328, 3e-4, **SORTED),
    WordsRun("five letters, stale, 3e-4", 329, 3e-4, 2, letters=5),
    WordsRun("four minibatches, 3e-4", 330, 3e-4, steps=60, over=PARTS),
    WordsRun("adapters, two epochs, 1e-3", 331, 1e-3, steps=60, over=ADAPTERS | TWO),
    WordsRun("entropy bonus of 0.01, 4e-4", 332, 4e-4, over=bonus(0.01)),
    WordsRun("rising to 2e-3", 333, 2e-3, steps=120, over=RISING),
    WordsRun("linear decay, 5e-4", 334, 5e-4, over={"learner.warmup_steps": 20, "learner.decay_fraction": 1.0}),
    WordsRun("KL penalty, two epochs, 3e-4", 335, 3e-4, steps=60,
             over=TWO | {"algorithm.kl.kind": "k2_loss", "algorithm.kl.coef": 0.02}),
)  # fmt: skip
"""Their settings were written down, and committed, before any of them was made."""

MECHANISMS = (
    "no clip", "no correction", "raised", "growing", "rising", "wrong sign", "advantages times", "entropy bonus",
)  # fmt: skip


def mechanism(name: str) -> str:
    """Return what makes a run of this name collapse: the first of MECHANISMS in it, or `a constant rate`."""
    return next((words for words in MECHANISMS if words in name), "a constant rate")
