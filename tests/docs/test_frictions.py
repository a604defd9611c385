"""The table of frictions leaves none out, and names what shows each."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks" / "results" / "frictions.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| \d", line)]
IN_REVIEW = {1: 8, 2: 10, 3: 18, 4: 5, 5: 6, 6: 6, 7: 8, 8: 8}
"""The frictions of each section of the review; of its table of knobs and its mistakes each row is one. 8.8 is from the
review's words on memory, above its table."""


def test_every_friction_of_the_review_has_its_row() -> None:
    numbers = [cells[0].split()[0] for cells in ROWS]
    assert len(set(numbers)) == len(numbers)
    assert Counter(int(number.partition(".")[0]) for number in numbers) == IN_REVIEW


def test_each_friction_says_how_it_was_how_it_is_and_what_shows_it() -> None:
    for number, friction, before, now, shown in ROWS:
        assert friction and before and now, number
        pointers = re.findall(r"`([\w./:-]+)`", shown)
        assert pointers, number
        for file, _, function in (pointer.partition("::") for pointer in pointers):
            assert (ROOT / file).exists(), (number, file)
            assert not function or f"\ndef {function}(" in (ROOT / file).read_text(), (number, file, function)


def test_a_test_file_is_named_with_the_test_that_shows_a_friction() -> None:
    for number, *_, shown in ROWS:
        pointers = re.findall(r"`(tests/[\w./:-]+)`", shown)
        assert [pointer for pointer in pointers if "::test_" not in pointer] == [], number


def test_a_friction_that_stays_has_a_reason() -> None:
    stays = [cells[3] for cells in ROWS if "**No**" in cells[3]]
    assert len(stays) >= 8
    for now in stays:
        assert re.search(r"\*\*No\*\*[^*]{20,}", now), now


def test_a_friction_is_shown_by_a_test_or_by_a_document() -> None:
    """A source file alone shows that code is there, not what it does."""
    for number, *_, shown in ROWS:
        files = re.findall(r"`([\w./:-]+)`", shown)
        assert any(file.startswith(("tests/", "docs/")) for file in files), number


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("metrics", "versions between the oldest trained token of an answer or episode and the learner"),  # 6.1
        ("guide", "`staleness.max` is the deadline: no token that is older is trained on"),  # 6.2
        ("staleness", "`offpolicy/ess`"), ("staleness", "(algorithms.md#metrics-and-alarms)"),  # 6.3
        ("not-learning", "`learner.lr: auto`, the default, goes by the number of weights"),  # 6.4
        ("staleness", "`occupancy/rollout`"),  # 6.5
        ("not-learning", "go on from a checkpoint before the fall"),  # 6.6
        ("metrics", "`WANDB_TAGS`, `WANDB_RUN_GROUP`, `WANDB_ENTITY`"),  # 3.16
    ],
)
def test_what_a_document_shows_stands_in_it(document: str, said: str) -> None:
    assert said in " ".join((ROOT / "docs" / f"{document}.md").read_text().split())
