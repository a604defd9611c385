"""A search in local text files as a tool. Create it for a folder in your own module, and name that in `task.tools`:

    search = TextFolder("notes").search
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

from async_rl.base.errors import ConfigError

SUFFIXES = (".txt", ".md")
MAX_PASSAGES = 5
_WORD = re.compile(r"\w+")
_BLANK_LINES = re.compile(r"\n\s*\n")
_K1, _B = 1.5, 0.75


class TextFolder:
    """A search index over the paragraphs of all .txt and .md files in a folder and its subfolders.

    Raises:
        ConfigError: the folder has no such file.
    """

    def __init__(self, folder: str | Path) -> None:
        root = Path(folder)
        files = sorted(file for file in root.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise ConfigError(f"{root.absolute()} must be a folder with {' or '.join(SUFFIXES)} files")
        self._passages = [
            f"[{file.relative_to(root)}] {paragraph.strip()}"
            for file in files
            for paragraph in _BLANK_LINES.split(file.read_text(encoding="utf-8", errors="replace"))
            if paragraph.strip()
        ]
        self._counts = [Counter(_words(passage)) for passage in self._passages]
        self._num_containing = Counter(word for counts in self._counts for word in counts)
        self._mean_length = sum(map(Counter.total, self._counts)) / max(1, len(self._counts))

    def search(self, query: str, count: int = 3) -> str:
        """Search the text files for passages.

        Args:
            query: A few words that the passages should contain.
            count: The number of passages.
        """
        words = set(_words(query))
        scores = [self._score(words, counts) for counts in self._counts]
        best = sorted(range(len(scores)), key=lambda position: -scores[position])[: max(1, min(count, MAX_PASSAGES))]
        found = [self._passages[position] for position in best if scores[position] > 0]
        return "\n\n".join(found) or "no passage contains any of these words"

    def _score(self, words: set[str], counts: Counter[str]) -> float:
        """Return the BM25 score of a passage (Robertson and Zaragoza 2009, section 3):

        sum over words of log(1 + (N - n + .5) / (n + .5)) * f (k1 + 1) / (f + k1 (1 - b + b length / mean length))
        """
        size = 1 - _B + _B * counts.total() / self._mean_length
        score = 0.0
        for word in words & counts.keys():
            n, f = self._num_containing[word], counts[word]
            score += math.log(1 + (len(self._counts) - n + 0.5) / (n + 0.5)) * f * (_K1 + 1) / (f + _K1 * size)
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
