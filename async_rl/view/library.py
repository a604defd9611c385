"""Holds the runs that one server shows: the run of its folder, or the cells of the sweep in it."""

from __future__ import annotations

import threading
from pathlib import Path

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.view.prediction import Predictor
from async_rl.view.run_files import RunFiles, is_run
from async_rl.view.sweep_files import SweepFiles, is_sweep
from async_rl.view.text_index import TextIndex
from async_rl.view.token_texts import TokenTexts

MAX_NAMED = 8


class UnknownRunError(AsyncRLError):
    """The page's address names a cell of the sweep that has no run directory; it is answered with status 404."""


class OpenRun:
    """A run that the page shows, with its tokenizer and the index for searching its texts, both made at first use.

    Args:
        simulating: the lock under which the runs of one server are simulated.
    """

    def __init__(self, files: RunFiles, simulating: threading.Lock) -> None:
        self.files = files
        self.predictor = Predictor(files, simulating)
        self._lock = threading.Lock()
        self._texts: TokenTexts | None = None
        self._index: TextIndex | None = None

    @property
    def texts(self) -> TokenTexts:
        with self._lock:
            if self._texts is None:
                self._texts = TokenTexts(self.files)
            return self._texts

    @property
    def index(self) -> TextIndex:
        """The index of texts; the first use begins the work of filling it."""
        texts = self.texts
        with self._lock:
            if self._index is None:
                self._index = TextIndex(self.files.journal, texts)
        self._index.start()
        return self._index

    def close(self) -> None:
        if self._index is not None:
            self._index.close()


class Library:
    """Opens the runs of the folder that is shown: of a sweep each cell by its name, of a single run that one by "".

    Raises:
        ConfigError: the folder is neither a run nor a sweep.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self.folder = folder
        self.sweep = SweepFiles(folder) if is_sweep(folder) else None
        self._lock = threading.Lock()
        self._simulating = threading.Lock()
        self._runs: dict[str, OpenRun] = {}

    def run(self, cell: str) -> OpenRun:
        """Return the run of a cell, or of the folder itself if `cell` is empty.

        Raises:
            UnknownRunError: there is no such cell.
        """
        folder = self._folder_of(cell)
        with self._lock:
            if cell not in self._runs:
                self._runs[cell] = OpenRun(RunFiles(folder), self._simulating)
            return self._runs[cell]

    def _folder_of(self, cell: str) -> Path:
        if not cell and self.sweep is None:
            return self.folder
        names = {path.name: path for path in (self.folder / "cells").glob("*") if is_run(path)}
        if cell not in names:  # a name with `..` or a slash is never one of them
            raise UnknownRunError(f"The sweep {self.folder} has no cell {cell!r} with a run directory.")
        return names[cell]

    def close(self) -> None:
        for run in self._runs.values():
            run.close()


def check_folder(folder: Path) -> None:
    """Check that a folder is the directory of a run or of a sweep.

    Raises:
        ConfigError: it is neither; the message names runs below it.
    """
    if not folder.exists():
        raise ConfigError(f"RUN_OR_SWEEP must be a folder, got {folder}: there is no such folder")
    if not folder.is_dir():
        raise ConfigError(f"RUN_OR_SWEEP must be a folder, got the file {folder}. Give the folder that holds it")
    if is_run(folder) or is_sweep(folder):
        return
    below = sorted(path for path in folder.iterdir() if path.is_dir() and (is_run(path) or is_sweep(path)))
    names = ", ".join(str(path) for path in below[:MAX_NAMED]) + (", ..." if len(below) > MAX_NAMED else "")
    advice = f"Give one of {names}" if below else "Runs are in run.dir/run.name, e.g. runs/quickstart"
    raise ConfigError(
        f"RUN_OR_SWEEP must be the directory of a run or a sweep, got {folder}: it has no config.yaml, metrics.jsonl, "
        f"trajectories.sqlite or sweep.json. {advice}"
    )
