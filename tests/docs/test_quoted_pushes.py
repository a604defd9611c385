"""The figures of weight pushes that documents quote are those of the committed results."""

from __future__ import annotations

from tests.kit.documents import DOCUMENTS, results_of


def text_of(name: str) -> str:
    """The document as one line."""
    return " ".join(DOCUMENTS[name].split())


def test_the_quoted_rate_of_a_push_is_the_measured_one() -> None:
    found = results_of("weight_push")
    rows = {(row["transport"], row["megabytes"]): row for row in found["rows"]}
    large, small = rows["gloo", 1024], rows["gloo", 1]
    assert (
        f"over gloo, at {found['machine']['commit']}: {large['gb_per_s']:.1f} GB/s, {large['of_plain']:.2f} of a plain "
        f"broadcast of the same bytes, generation paused for {large['pause_of_plain']:.2f} of its time. At 1 MB the "
        f"HTTP calls around it decide: it pauses for {small['pause_ms']:.0f} ms"
    ) in text_of("docs/results.md")
