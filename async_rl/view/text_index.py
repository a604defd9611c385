"""Full-text search over prompts and answers: a thread decodes the run's tokens into an index outside the run directory.

The index is an FTS5 table in a temporary file, which ends with the server. It holds the newest groups whose tokens are
kept, as many as have room.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from async_rl.errors import AsyncRLError
from async_rl.view.journal_reader import JournalReader
from async_rl.view.token_texts import TokenTexts

GROUPS_A_ROUND = 64
MAX_CHARS = 200_000_000
"""Once the index holds this much text it takes in newer groups alone, for each of which the oldest ones go."""
IDLE_S = 1.0
"""The time between two looks for new groups, once all are in the index."""
BEGIN_AFTER_S = 2.0
"""The first page is shown before the work begins; a search begins it at once."""
SHARE_OF_TIME = 0.5
"""The thread works for at most this share of the time, so that pages come quickly while it does."""
MAX_HITS = 2000
LEAST_CHARS = 3
"""The shortest text that an index of three-letter parts can find."""
JOIN_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: the ids of the groups found, the snippet of each by its id, and a note to the user."""

    group_ids: list[int]
    """The groups with the text, the newest first, at most MAX_HITS."""
    snippets: dict[int, str]
    note: str
    """One sentence about groups that are not searched, or why nothing can be searched; else empty."""


class TextIndex:
    """Indexes the prompts and answers of one run, for `search`. `start` begins that work, `close` removes the index."""

    def __init__(self, journal: JournalReader, texts: TokenTexts) -> None:
        self._journal = journal
        self._texts = texts
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._inode: int | None = None
        """That of the journal whose groups are in the index."""
        self._chars: dict[int, int] = {}
        """[group id] the characters of each group that is indexed."""
        self._total_chars = 0
        self._waiting: int | None = None
        """The number of groups that are not indexed yet; None before the first look."""
        self._folder = tempfile.TemporaryDirectory(prefix="async-rl-view-")
        self._db = sqlite3.connect(f"{self._folder.name}/texts.sqlite", check_same_thread=False)
        self.missing = texts.missing
        """One sentence that says why there is no search; else empty."""
        try:
            self._db.execute("CREATE VIRTUAL TABLE texts USING fts5(text, tokenize='trigram')")
        except sqlite3.OperationalError as error:
            self.missing = f"The text can't be searched: this Python's SQLite has no FTS5 ({error})."

    def start(self) -> None:
        """Start the thread that indexes, unless it has started or `missing` says why it can't be done."""
        with self._lock:
            if self._thread is None and not self.missing:
                self._thread = threading.Thread(target=self._work, daemon=True, name="view-text-index")
                self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._wanted.set()
        if self._thread:
            self._thread.join(JOIN_LIMIT_S)
        with self._lock:
            self._db.close()
        self._folder.cleanup()

    def search(self, text: str) -> Found:
        """Find `text`, whatever its case, in the prompts and answers indexed so far; `Found.note` says what is not."""
        if self.missing:
            return Found([], {}, self.missing)
        if len(text) < LEAST_CHARS:
            return Found([], {}, f"A text to search for needs at least {LEAST_CHARS} characters, got {len(text)}.")
        if "\0" in text:
            return Found([], {}, "A text to search for can't hold the character NUL, with code 0.")
        self._wanted.set()
        phrase = '"' + text.replace('"', '""') + '"'
        query = (
            "SELECT rowid, snippet(texts, 0, char(1), char(2), ' … ', 24) FROM texts WHERE texts MATCH ? "
            "ORDER BY rowid DESC LIMIT ?"
        )
        with self._lock:
            rows = self._db.execute(query, (phrase, MAX_HITS)).fetchall()
            done, waiting, is_full = len(self._chars), self._waiting, self._is_full
        note = ""
        if is_full:
            note = f"Searched are the newest {done:,} groups: the index is full."
        elif waiting is None:
            note = "The texts are being read for the first time; search again in a moment."
        elif waiting:
            note = f"{done:,} groups are searched so far, {waiting:,} still have to be read; search again in a moment."
        return Found([row[0] for row in rows], {row[0]: row[1] for row in rows}, note)

    def _work(self) -> None:
        """Index the groups whose tokens are kept, until `close`. A journal that can't be read now is read later."""
        self._wanted.wait(BEGIN_AFTER_S)
        while not self._closing.is_set():
            is_idle = True
            with suppress(AsyncRLError, sqlite3.Error, OSError):
                is_idle = not self._index_some()
            if is_idle:
                self._closing.wait(IDLE_S)

    @property
    def _is_full(self) -> bool:
        return self._total_chars >= MAX_CHARS

    def _index_some(self) -> bool:
        """Index the newest GROUPS_A_ROUND groups not indexed yet; return False if there is none or no more room."""
        self._begin_again_if_replaced()
        kept = [row["group_id"] for row in self._journal.rows("SELECT group_id FROM payloads ORDER BY group_id DESC")]
        self._remove(self._chars.keys() - kept)
        missing = [group_id for group_id in kept if group_id not in self._chars]
        if self._is_full:
            missing = [group_id for group_id in missing if group_id > min(self._chars)]
        for group_id in missing[:GROUPS_A_ROUND]:
            if self._closing.is_set():
                return False
            while self._is_full and (oldest := min(self._chars)) < group_id:
                self._remove([oldest])
            if self._is_full:
                break
            began_s = time.monotonic()
            text = ""
            with suppress(AsyncRLError):  # one group of another version does not end the search for the others
                text = self._text(group_id)
            with self._lock:
                if text:
                    self._db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (group_id, text))
                self._chars[group_id] = len(text)
                self._total_chars += len(text)
            self._closing.wait((time.monotonic() - began_s) * (1 / SHARE_OF_TIME - 1))
        with self._lock:
            self._db.commit()
        self._waiting = len(missing[GROUPS_A_ROUND:])
        return bool(missing)

    def _remove(self, group_ids: Iterable[int]) -> None:
        with self._lock:
            for group_id in list(group_ids):
                self._db.execute("DELETE FROM texts WHERE rowid = ?", (group_id,))
                self._total_chars -= self._chars.pop(group_id)

    def _begin_again_if_replaced(self) -> None:
        """Empty the index if a resume has begun a new journal, in which other groups may have the same ids."""
        inode = self._journal.inode
        if inode is None or inode == self._inode:
            return
        with self._lock:
            self._db.execute("DELETE FROM texts")
            self._chars.clear()
            self._inode, self._total_chars, self._waiting = inode, 0, None

    def _text(self, group_id: int) -> str:
        group = self._journal.payload(group_id)
        if group is None:
            return ""
        parts = [group.prompt_tokens, *(row.tokens for row in group.rows)]
        return "\n".join(self._texts.decode(part.tolist()) or "" for part in parts)
