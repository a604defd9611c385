"""A search in local text files as a tool. A module of your own makes it for a folder, and `task.tools` names it:

    search = TextFolder("notes").search
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cached_property
from pathlib import Path

from async_rl.base.errors import ConfigError

SUFFIXES = (".txt", ".md")
MAX_PASSAGES = 5
_WORD = re.compile(r"\w+")
_BLANK_LINES = re.compile(r"\n\s*\n")
_K1, _B = 1.5, 0.75


class TextFolder:
    """The paragraphs of all .txt and .md files in a folder and its subfolders.

    Raises:
        ConfigError: the folder holds no such file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files = sorted(file for file in self._folder.rglob("*") if file.suffix in SUFFIXES)
        if not self._files:
            raise ConfigError(f"{self._folder.absolute()} must be a folder with {' or '.join(SUFFIXES)} files")

    def search(self, query: str, count: int = 3) -> str:
        """Search the text files for passages.

        Args:
            query: A few words that the passages should contain.
            count: The number of passages.
        """
        words = set(_words(query))
        scores = [self._score(words, position) for position in range(len(self._passages))]
        best = sorted(range(len(scores)), key=lambda position: -scores[position])[: max(1, min(count, MAX_PASSAGES))]
        found = [self._passages[position] for position in best if scores[position] > 0]
        return "\n\n".join(f"[{name}] {text}" for name, text in found) or "no passage contains any of these words"

    @cached_property
    def _passages(self) -> list[tuple[str, str]]:
        """The name of the file and the text of each paragraph."""
        return [
            (str(file.relative_to(self._folder)), paragraph.strip())
            for file in self._files
            for paragraph in _BLANK_LINES.split(file.read_text(encoding="utf-8", errors="replace"))
            if paragraph.strip()
        ]

    @cached_property
    def _counts(self) -> list[Counter[str]]:
        """How often each word occurs in each paragraph."""
        return [Counter(_words(f"{name} {text}")) for name, text in self._passages]

    @cached_property
    def _num_containing(self) -> Counter[str]:
        """The number of paragraphs that contain each word."""
        return Counter(word for counts in self._counts for word in counts)

    @cached_property
    def _mean_length(self) -> float:
        return sum(map(Counter.total, self._counts)) / len(self._counts)

    def _score(self, words: set[str], position: int) -> float:
        """Return the BM25 score of a paragraph (Robertson and Zaragoza 2009, section 3):

        sum over words of log(1 + (N - n + .5) / (n + .5)) * f (k1 + 1) / (f + k1 (1 - b + b length / mean length))
        """
        counts = self._counts[position]
        size = 1 - _B + _B * counts.total() / self._mean_length
        score = 0.0
        for word in words & counts.keys():
            n, f = self._num_containing[word], counts[word]
            score += math.log(1 + (len(self._counts) - n + 0.5) / (n + 0.5)) * f * (_K1 + 1) / (f + _K1 * size)
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
