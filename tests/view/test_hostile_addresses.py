"""Whatever address is asked for: no fault of the program, the security headers, and no script but the page's own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.kit.view.hostile_addresses import HostileClient, faults_of, random_attempt
from tests.kit.view.run_dirs import make_run

FEW, MANY = 300, 10_000


def problems_of(folder: Path, count: int, seed: int) -> list[str]:
    """The faults of the answers to `count` attempts, an eighth of which must be answered with a page or data."""
    source, found, statuses = random.Random(seed), [], []

    async def ask_all() -> None:
        client = HostileClient(folder)
        for _ in range(count):
            attempt = random_attempt(source)
            try:
                answer = await client.ask(attempt)
                faults = faults_of(answer)
                statuses.append(answer.status)
            except Exception as error:  # the application raises a fault again, after its answer
                faults = [repr(error)[:300]]
            if faults:
                found.append(f"{attempt.method} {attempt.target[:120]} {attempt.headers!r:.150}: {faults}")

    asyncio.run(ask_all())
    assert statuses.count(200) > count / 8, "too few addresses are those of a page"
    return found


def test_random_addresses_meet_no_fault_and_run_no_script(tmp_path: Path) -> None:
    assert problems_of(make_run(tmp_path / "run", steps=3), FEW, seed=0) == []


@pytest.mark.nightly
def test_ten_thousand_random_addresses_meet_no_fault_and_run_no_script(tmp_path: Path) -> None:
    assert problems_of(make_run(tmp_path / "run"), MANY, seed=random.SystemRandom().randrange(2**32)) == []
