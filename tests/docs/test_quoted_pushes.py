"""The figures of weight pushes that documents quote are those of the committed results."""

from __future__ import annotations

import pytest

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


def test_the_quoted_pushes_to_an_sglang_server_are_the_measured_ones() -> None:
    rows = {row["transport"]: row for row in results_of("weight_push_sglang")["rows"]}
    shared, disk = rows["cuda_ipc"], rows["disk"]
    assert (
        f"{shared['megabytes']:.0f} MB: {shared['gb_per_s']:.1f} GB/s by `cuda_ipc`, which shares host memory there, "
        f"paused for {shared['pause_ms']:.0f} ms; {disk['gb_per_s']:.1f} GB/s by disk, paused for "
        f"{disk['pause_ms']:.0f} ms"
    ) in text_of("docs/results.md")


def test_the_quoted_pauses_of_staged_pushes_are_the_measured_ones() -> None:
    guide, gpu = map(text_of, ("docs/guide.md", "docs/gpu.md"))
    pauses, times = [], []
    for name in ("staged_push", "staged_push_vllm"):
        rows = {row["staging"]: row for row in results_of(name)["rows"]}
        assert rows["none"]["megabytes"] * 2**20 == pytest.approx(0.5e9, rel=0.1)
        pauses.append([f"{rows[staging]['pause_ms']:.0f}" for staging in ("none", "device", "host")])
        times += [rows[staging]["push_ms"] / rows["none"]["push_ms"] for staging in ("device", "host")]
    sglang, vllm = pauses
    assert (
        "SGLang stands still for {} ms without staging, {} ms with `device` and {} ms with `host`".format(*sglang)
    ) in guide
    assert "vLLM for {}, {} and {} ms".format(*vllm) in guide
    assert f"a staged push takes {min(times):.1f} to {max(times):.1f} times as long as one without" in guide
    assert "{} ms without staging and {} ms with `device` of SGLang, ".format(*sglang) in gpu
    assert "{} and {} ms of vLLM".format(*vllm) in gpu


def test_the_quoted_shares_and_sizes_of_sparse_pushes_are_the_measured_ones() -> None:
    rows = results_of("changed_shares")["rows"]
    low, high = ([row for row in rows if row["lr"] == lr] for lr in (1e-6, 1e-5))
    shares = [[100 * share for row in each for share in row["changed"]] for each in (low, high)]
    largest = [max(number for row in each for number in row["bytes"]) for each in (low, high)]
    whole, guide = rows[0]["whole_bytes"][0], text_of("docs/guide.md")
    assert f"{min(shares[0]):.2f} to {max(shares[0]):.2f} % at a learning rate of 1e-6" in guide
    assert f"and {min(shares[1]):.1f} to {max(shares[1]):.1f} % at 1e-5" in guide
    sizes = [number / 2**20 for number in (*largest, whole)]
    assert "at most {:.1f} and {:.1f} MB in place of {:.0f}".format(*sizes) in guide
    seconds = [number * 8 / 1e9 for number in (*largest, whole)]
    assert "these bytes take {:.2f} and {:.2f} s in place of {:.1f}".format(*seconds) in guide


def test_the_quoted_times_and_sizes_of_compact_pushes_are_the_measured_ones() -> None:
    rows = {(row["transport"], row["form"]): row for row in results_of("compact_push")["rows"]}
    forms = ["whole", "adapter, rank 16", "delta, 0.39 %", "delta, 4.5 %"]
    times = [f"{rows[transport, form]['push_ms']:.0f}" for form in forms for transport in ("gloo", "disk")]
    sizes = [f"{rows['gloo', form]['bytes'] / 2**20:.1f}" for form in forms[1:]]
    seconds = [f"{rows['gloo', form]['sites_s']:.2f}" for form in forms]
    whole = rows["gloo", "whole"]["bytes"] / 2**20
    assert (
        "a push of all of them takes {} ms over gloo and {} ms by disk, one of adapters {} and {} ms, a sparse one of "
        "0.39 % of the values {} and {} ms, of 4.5 % {} and {} ms. ".format(*times)
        + "Their bytes, {}, {} and {} MB in place of ".format(*sizes) + f"{whole:.0f}, take "
        + "{}, {} and {} s over 1 Gb/s in place of {} s (".format(*seconds[1:], seconds[0])
    ) in text_of("docs/guide.md")
