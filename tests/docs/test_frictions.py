"""The table of frictions leaves none out, and names what shows each."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks" / "results" / "frictions.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| \d", line)]
IN_REVIEW = {1: 8, 2: 10, 3: 18, 4: 5, 5: 6, 6: 6, 7: 8, 8: 7}
"""The frictions of each section of the review; of its table of knobs and its mistakes each row is one."""


def test_every_friction_of_the_review_has_its_row() -> None:
    numbers = [cells[0].split()[0] for cells in ROWS]
    assert len(set(numbers)) == len(numbers)
    assert Counter(int(number.partition(".")[0]) for number in numbers) == IN_REVIEW


def test_each_friction_says_how_it_is_now_and_what_shows_it() -> None:
    for number, friction, _, now, shown in ROWS:
        assert friction and now, number
        files = re.findall(r"`([\w./-]+)`", shown)
        assert files, number
        assert [file for file in files if not (ROOT / file).exists()] == [], number


def test_a_friction_that_stays_has_a_reason() -> None:
    stays = [cells[3] for cells in ROWS if "**No**" in cells[3]]
    assert len(stays) >= 8
    for now in stays:
        assert re.search(r"\*\*No\*\*[^*]{20,}", now), now
