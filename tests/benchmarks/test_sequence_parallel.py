"""Two ranks that split rows keep half of what one keeps, and the benchmark that shows it makes its page."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.sequence_parallel import differences, measure, missed
from benchmarks.split_rows import ASKED, SplitCase, misses_text, report
from tests.kit.documents import DOCUMENTS, ROOT, results_of


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
    assert "differ by more than" not in page
    assert "| 1 x 2 | 9, 3 of keys: keys gathered | no |" in page and "| 1 | none | no | 1.0 | 0.5 |" in page


def test_a_gradient_that_misses_what_was_asked_is_named_beside_float64() -> None:
    def numbers(*bias: float) -> dict[str, dict[str, torch.Tensor]]:
        return {"gradients": {"weight": torch.tensor([1.0, 2.0]), "bias": torch.tensor(bias)}}

    found = missed(numbers(1.0 - 3e-6), numbers(1.0), numbers(1.0 - 2e-6))
    assert list(found) == ["bias"]
    assert found["bias"] == pytest.approx((3e-6, 2e-6, 1e-6), rel=0.1)  # in float32, where 1.0 has neighbours at 1e-7
    page = report({}, {}, "Made here.", misses_text({SplitCase("heads", 2, 2): found}, 4e-7))
    assert "## Gradients that differ by more than 1e-06" in page and "by at most 4.0e-07" in page
    assert "| 2 x 2 | 8, 4 of keys: exchanged | no | bias | 3.0e-06 | 2.0e-06 | 9.5e-07 |" in page


def test_the_guide_quotes_by_how_much_less_a_rank_keeps() -> None:
    kept = {
        (case["exchange"], case["sequence"]): case["kept_bytes"]
        for case in results_of("sequence_parallel")["memory"] if not case["recomputes"]
    }  # fmt: skip
    two, four, keys = (kept["heads", 1] / kept[case] for case in (("heads", 2), ("heads", 4), ("keys", 4)))
    exchanged = f"factors of {two:.2f} with 2 ranks and {four:.2f} with 4 where ranks exchange heads"
    assert f"{exchanged}, and of {keys:.1f} with 4" in " ".join(DOCUMENTS["docs/guide.md"].split())


def test_the_guide_names_the_gradients_that_missed_what_was_asked() -> None:
    missed_by: dict[str, list[tuple[float, float]]] = {}
    for case in results_of("sequence_parallel")["missed"]:
        for name, (size, of_one_process, _) in case["gradients"].items():
            if case["sequence"] > 1:
                missed_by.setdefault(name, []).append((size, of_one_process))
    assert list(missed_by) == ["critic.lm.score.bias", "policy.lm.model.layers.0.self_attn.k_norm.weight"]
    (bias, bias_alone), (norm, norm_alone) = map(max, missed_by.values())
    page = (ROOT / "benchmarks" / "results" / "sequence_parallel.md").read_text()
    (in_float64,) = re.findall(r"differ from one process by at most (\S+),", page)
    assert float(in_float64) < ASKED
    assert (
        f"the bias of the critic's head, a single number, by {bias:.1e}, and a norm of keys by {norm:.1e}; one process "
        f"is {bias_alone:.1e} and {norm_alone:.1e} from float64 there, and in float64 all agree to {in_float64}"
    ) in " ".join(DOCUMENTS["docs/guide.md"].split())
