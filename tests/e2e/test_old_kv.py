"""With `weight_sync.on_update: in_place` an answer goes on from KV of older weights: how far that is from a recompute.

    python -m pytest -m nightly tests/e2e/test_old_kv.py       writes benchmarks/results/old_kv.md
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.config.loading import load_config
from async_rl.tools.sweeps.machine import describe_machine
from rollout_server.question import Question
from tests.kit.assembled import run_assembled

STEPS, A_ROW, TOKENS = 16, 4, 96
RATES = (3e-4, 1e-3, 3e-3)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "old_kv.md"


def vowels(question: Question, response: str) -> float:
    """A reward that differs between the answers of an untrained model."""
    return sum(letter in "aeiou" for letter in response) / TOKENS


@pytest.mark.e2e
@pytest.mark.nightly
def test_only_old_kv_separates_in_place_tokens_from_a_recompute(smoke_yaml: Path, tmp_path: Path) -> None:
    """On the hf engine. SGLang's logprobs over mixed KV are the same to 1e-4: test_server_updates.py."""
    old, fresh, moved = ({rate: [math.nan] * STEPS for rate in RATES} for _ in range(3))
    for rate in RATES:
        config = load_config(smoke_yaml, [
            f"run.dir={tmp_path}", f"run.name=rate-{rate}", f"run.steps={STEPS}", "staleness.max=1",
                "eval.num_prompts=0",
            f"rollout.max_response_tokens={TOKENS}", f"learner.lr={rate}",
            "task.reward=tests.e2e.test_old_kv:vowels", "rollout.engine=hf", "weight_sync.transport=disk",
        ])
        for i, step in enumerate(run_assembled(config).steps):
            old[rate][i] = step.get("parity/old_kv/mean_abs", math.nan)
            fresh[rate][i] = step.get("parity/precision/mean_abs", math.nan)
            moved[rate][i] = step.get("by_staleness/1/kl_behaviour_proximal_k3", math.nan)
        assert np.nanmax(fresh[rate]) < 1e-4, "engine and learner compute the same where the KV is of one version"
        assert np.nanmean(old[rate]) > 10 * np.nanmean(fresh[rate])
    note_result(old, fresh, moved)


Table = dict[float, list[float]]
"""[learning rate][step]"""


def note_result(old: Table, fresh: Table, moved: Table) -> None:
    machine = describe_machine()
    where = ", ".join(machine[key] for key in ("processor", "system", "commit")) + f", {machine['cores']} cores"
    same_kv = max(np.nanmax(values) for values in fresh.values())
    lines = [
        "How far logprobs of tokens sampled in place after a push, from new weights on KV of older ones, are from a",
        "recompute from scratch by the same weights: mean |difference| in nats a token, as the metric",
        "`parity/old_kv/mean_abs` has it. An untrained tiny model on the hf engine, answers of up to",
        f"{TOKENS} tokens, staleness.max 1, Adam at three learning rates; nothing where no answer went on over a push.",
        "Beside it what one update does to the policy (KL divergence, k3, of tokens of staleness 1). Where all KV is",
        f"of one version the same comparison (`parity/precision/mean_abs`) gives at most {same_kv:.0e}.",
        "",
        "| steps | " + " | ".join(f"lr {rate:g} | KL of an update" for rate in RATES) + " |",
        "| --- |" + " ---: |" * (2 * len(RATES)),
    ]
    for first in range(0, STEPS, A_ROW):
        part = slice(first, first + A_ROW)
        cells = [f"{mean(table[rate][part])}" for rate in RATES for table in (old, moved)]
        lines.append(f"| {first + 1}..{first + A_ROW} | " + " | ".join(cells) + " |")
    lines += ["", f"Command: `python -m pytest -m nightly tests/e2e/test_old_kv.py`. {where}."]
    RESULTS.write_text("\n".join(lines) + "\n")


def mean(values: list[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{np.mean(known):.4f}" if known else ""
