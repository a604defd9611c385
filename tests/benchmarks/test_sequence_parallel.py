"""Two ranks that split rows keep half of what one keeps, and the benchmark that shows it makes its page."""

from __future__ import annotations

import pytest

from benchmarks.sequence_parallel import SplitCase, differences, measure, report


@pytest.mark.processes
def test_two_ranks_keep_half_of_the_activations_embeddings_and_head() -> None:
    whole, split = (measure("memory", SplitCase("heads", 1, sequence), 1024, vocab=2000) for sequence in (1, 2))
    assert split["table_bytes"] == whole["table_bytes"] / 2 == 2000 * 64 * 4
    # the output of attention is kept once more, as it is sent
    assert 0.5 <= split["kept_bytes"] / whole["kept_bytes"] < 0.56


@pytest.mark.processes
def test_the_differences_from_one_process_are_those_of_rounding() -> None:
    cases = [SplitCase("keys", 1, 2), SplitCase("keys")]
    split, whole = (measure("equality", case, 4096) for case in cases)
    found = differences(split, whole)
    assert max(found.values()) < 2e-5 and max(found["loss"], found["logprob"], found["gradient"]) < 3e-6
    page = report({cases[0]: found}, {cases[1]: {"kept_bytes": 2**20, "table_bytes": 2**19}}, "Made here.")
    assert "| 1 x 2 | 9, 3 of keys: keys gathered | no |" in page and "| 1 | none | no | 1.0 | 0.5 |" in page
