"""The certificate of a run from its numbers: sound ones at the sizes of the facts, and each fault by its name."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.base.telemetry.certificate import ParityAxis, certificate, format_certificate, is_broken

SOUND = {
    32: {"mean_abs": 4e-7, "p99_abs": 2e-6, "max_abs": 3e-6, "ratio_var": 3e-13, "slope": -7e-9, "slope_var": 2e-13},
    16: {"mean_abs": 9e-3, "p99_abs": 0.035, "max_abs": 0.2, "ratio_var": 2e-4, "slope": -3e-5, "slope_var": 1e-4},
}
REST = {"tokens": 10_000.0, "ratio_mean": 1.0, "explained": 0.01, "surprise": 0.001, "surprise_var": 1.0}
COMPARED = {"parity/weights/compared": 4.0, "staleness/max": 0.0}


def figures(bits: int, /, more: dict[str, float] | None = None, **changes: float) -> dict[str, float]:
    values = {**SOUND[bits], **REST, "bits": float(bits), **changes}
    return {f"parity/precision/{name}": value for name, value in values.items()} | (COMPARED if more is None else more)


def by_name(given: dict[str, float]) -> dict[str, ParityAxis]:
    return {axis.name: axis for axis in certificate(given)}


def test_a_sound_run_is_exact_in_float32_and_bounded_in_bfloat16() -> None:
    for bits, state in ((32, "exact"), (16, "bounded")):
        found = by_name(figures(bits))
        assert found["precision"].state == state and found["weights"].state == "exact"
        assert found["age of KV"].state == "not measured"
        assert not is_broken([*found.values()])


@pytest.mark.parametrize(
    ("bits", "changes", "more", "named"),
    [
        (32, {"mean_abs": 0.1, "ratio_mean": 0.927, "ratio_var": 0.001}, None, "support"),
        (16, {"ratio_mean": 0.98, "ratio_var": 1e-3}, None, "support"),
        (32, {"surprise": 0.3}, None, "support"),
        (32, {"mean_abs": 0.011, "slope": -0.01, "explained": 0.98}, None, "temperature"),
        (16, {"mean_abs": 0.012, "slope": -8e-3, "explained": 0.5}, None, "temperature"),
        (32, {"p99_abs": 0.018, "max_abs": 0.12}, None, "prefix cache"),
        (16, {"p99_abs": 0.13, "slope": 4e-3}, None, "prefix cache"),
        (32, {"p99_abs": 0.13}, {}, "other weights"),
        (16, {"mean_abs": 0.029, "p99_abs": 0.15, "slope": 8e-3}, {}, "other weights"),
    ],
)
def test_a_fault_is_named(bits: int, changes: Any, more: Any, named: str) -> None:
    axis = by_name(figures(bits, more, **changes))["precision"]
    assert axis.state == "broken" and named in axis.finding


def test_likely_tokens_among_chosen_answers_and_slopes_within_errors_are_no_faults() -> None:
    counts = {"buffer/dropped_zero_variance": 3.0, "buffer/dropped_late/reward": 1.0}
    dropped = figures(32, {**COMPARED, **counts}, surprise=0.3)
    assert by_name(dropped)["precision"].state == "exact"
    assert by_name(figures(32, {"staleness/max": 2.0}, surprise=0.3))["precision"].state == "exact"  # first come
    assert by_name(figures(32, {**COMPARED, "buffer/dropped_late": 0.0}, surprise=0.3))["precision"].state == "broken"
    assert by_name(figures(16, slope=4e-3, slope_var=1e-2, explained=0.5))["precision"].state == "bounded"


def test_a_server_with_other_weights_breaks_the_axis_of_weights_alone() -> None:
    found = by_name(figures(32, {"parity/weights/compared": 3.0, "parity/weights/unequal": 1.0}))
    assert found["weights"].state == "broken" and found["precision"].state == "exact"
    nothing = certificate({})
    assert {axis.state for axis in nothing} == {"not measured"}
    assert len(format_certificate(nothing).splitlines()) == 1 + len(nothing)


def test_wrong_supports_are_a_fault_unless_they_are_few() -> None:
    worth = {"tokens": 10_000.0, "mass": 0.8, "wrong": 0.005, "mean_abs": 0.22, "p99_abs": 0.31, "ratio_var": 4e-3}
    supports = {f"parity/support/{name}": value for name, value in worth.items()}
    for bits, state in ((32, "exact"), (16, "bounded")):
        axis = by_name(figures(bits, {**COMPARED, **supports}))["support"]
        assert axis.state == state and all(number in axis.finding for number in ("2.2e-01", "3.1e-01", "4.0e-03"))
        wrong = {**COMPARED, **supports, "parity/support/wrong": 0.02}
        assert by_name(figures(bits, wrong))["support"].state == "broken"


def test_experts_of_other_weights_are_a_fault_unless_weights_have_moved() -> None:
    far = {"mean_abs": 1.0, "p99_abs": 6.0, "slope": -0.33, "explained": 0.4}
    for bits, changed, state in ((32, 0.0, "exact"), (32, 0.02, "broken"), (16, 0.054, "bounded"), (16, 0.6, "broken")):
        more = {**COMPARED, "routing/changed_fraction": changed}
        assert by_name(figures(bits, more))["routing"].state == state
        if state == "broken":
            assert "routing" in by_name(figures(bits, more, **far))["precision"].finding
        assert by_name(figures(bits, {**more, "staleness/max": 2.0}))["routing"].state == "bounded"


def test_tokens_on_older_kv_have_numbers_and_no_limit() -> None:
    old = {f"parity/old_kv/{name}": value for name, value in {**SOUND[16], **REST, "p99_abs": 0.9}.items()}
    assert by_name(figures(32, {**COMPARED, **old}))["age of KV"].state == "bounded"
