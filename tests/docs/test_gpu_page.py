"""The page on GPUs shows figures that the program computes, and says of each setting a value that it can have."""

from __future__ import annotations

import json
import re

import pytest

from async_rl.config.loading import load_config
from benchmarks.what_fits import CASES, CONFIG, report
from tests.kit.documents import DOCUMENTS, ROOT

AUDIT = DOCUMENTS["docs/gpu-audit.md"]
PAGE, RESULTS = DOCUMENTS["docs/gpu.md"], ROOT / "benchmarks" / "results" / "what_fits.md"


def test_the_table_of_memory_on_the_page_is_the_one_that_was_computed() -> None:
    (shown,) = re.findall(r"^    smallest GPU: (?:.+\n)+", PAGE, re.MULTILINE)
    assert shown in RESULTS.read_text()


def test_what_the_page_says_a_rank_needs_was_computed() -> None:
    sizes = re.findall(r"a rank needs (\d+ GiB)", PAGE)
    assert len(sizes) == 4
    assert {size for size in sizes if f"| {size}, with" not in RESULTS.read_text()} == set()


def test_what_the_page_says_the_host_keeps_was_computed() -> None:
    sizes = re.findall(r"(\d+) GiB of host memory", PAGE)
    assert len(sizes) == 5
    assert {size for size in sizes if f"| {size} + " not in RESULTS.read_text()} == set()


def test_what_the_pages_say_of_the_h100_is_what_was_measured_there() -> None:
    found = json.loads((ROOT / "benchmarks/results/gpu/first_contact.json").read_text())
    page = (ROOT / "benchmarks/results/gpu/first_contact.md").read_text()
    for case in found["memory"]:
        said, measured = case["said_mib"], case["measured_mib"]
        assert f"| {said} | {measured} | {said / measured - 1:+.1%} |" in page
        assert abs(said / measured - 1) < 0.03
    assert "within 3 %" in PAGE
    without, moments = (f"{found['held_between_steps_mib'][offload]:,}" for offload in ("none", "moments"))
    assert f"{without} MiB were held between steps without it and {moments} with it" in PAGE
    assert f"{without} MiB held between steps without it, {moments} with it" in page
    by_ipc, by_disk = found["push"]["rows"]
    assert f"{by_ipc['gb_per_s']:.1f} GB/s, pause {by_ipc['pause_ms']:.0f} ms" in page
    took_ms = [each["megabytes"] / each["gb_per_s"] for each in (by_ipc, by_disk)]
    times = re.search(r"245 MB took (\d+) ms\s+between two processes of the H100, by disk (\d+)\)", PAGE)
    assert times and [int(each) for each in times.groups()] == [round(each) for each in took_ms]
    start = next(each for each in found["logprobs"] if each["what"] == "start")
    assert f"mean of the differences {start['mean_abs']:.3f}".replace("0.", ".") in page


@pytest.mark.parametrize("settings", sorted({(*case.settings, *case.named) for case in CASES}))
def test_the_settings_of_a_case_are_a_configuration(settings: tuple[str, ...]) -> None:
    load_config(CONFIG, list(settings))


@pytest.mark.nightly
def test_the_results_are_what_the_program_computes_now() -> None:
    assert report() == RESULTS.read_text()


def test_the_table_of_the_audit_has_a_row_for_each_of_its_findings() -> None:
    findings = {f"{part}.{number}" for part, count in ((1, 7), (2, 12), (3, 10)) for number in range(1, count + 1)}
    assert set(re.findall(r"^\| (\d+\.\d+) \|", AUDIT, re.MULTILINE)) == findings


def test_each_row_of_the_audit_says_what_was_what_is_now_and_how_that_is_known() -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| \d.*$", AUDIT, re.MULTILINE)]
    assert {len(row) for row in rows} == {6}
    assert [row[0] for row in rows if not all(row[:5])] == []
    without_a_test = [row[:2] for row in rows if "`tests/" not in row[4]]
    assert without_a_test == [["3.5", "Servers of a 7B on a node of their own"]]  # a choice


def test_what_only_a_gpu_can_show_is_on_the_page_by_the_number_of_its_finding() -> None:
    last_cells = re.findall(r"^\| (\d+\.\d+) \|.*\| ([^|]*)\|$", AUDIT, re.MULTILINE)
    assert len(last_cells) == 30
    bullets = re.findall(r"^- (?:.+\n)(?:  .+\n)*", PAGE.partition("\n## What was never run\n")[2], re.MULTILINE)
    named = [number for bullet in bullets for number in re.findall(r"\((\d+\.\d+)\)", bullet)]
    assert sorted(named) == sorted({number for number, cell in last_cells if cell.strip()})


def test_the_tests_that_the_table_of_the_audit_names_are_there() -> None:
    named = set(re.findall(r"`(tests/[a-z0-9_/]+\.py)(?:::(\w+))?`", AUDIT))
    assert len({file for file, _ in named}) > 25
    assert {file for file, _ in named if not (ROOT / file).is_file()} == set()
    lacking = {(file, name) for file, name in named if name and f"\ndef {name}(" not in (ROOT / file).read_text()}
    assert lacking == set()
