"""Caches verdicts in SQLite, for rewards that are functions of their input: no answer is scored twice in a run.

Errors and missing verdicts are not cached. All workers of a host share the file, and a resumed run reuses it. Changed
code or settings of a reward change its keys.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import sqlite3
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward, RewardResult

FILE_NAME = "rewards.sqlite"
LOCK_LIMIT_S = 5.0
"""How long a worker waits for another worker's write. After that it works without the cache, for this access only."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS verdicts (
    key BLOB PRIMARY KEY, reward TEXT, ground_truth TEXT, answer TEXT, score REAL, metrics TEXT
) WITHOUT ROWID
"""


class VerdictCache:
    """The cached verdicts of a run, in run_dir/rewards.sqlite. Its methods block, and any thread may call them.

    If the file can't be used, a warning is logged and all verdicts are computed.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE_NAME
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._is_broken = False

    @staticmethod
    def key(identity: bytes, question: Question, answer: str) -> bytes | None:
        """Return the cache key of the verdict on an answer; None if the question has a value that JSON can't express.

        Args:
            identity: the digest of the reward; see the function `identity`.
        """
        fields = [question.messages, question.ground_truth, question.extra, question.source]
        try:
            asked = json.dumps(fields, sort_keys=True)
        except (TypeError, ValueError):
            return None
        return _digest(identity.hex(), asked, answer)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, RewardResult]:
        """Return the cached verdicts by key, without the keys that have none."""
        marks = ", ".join("?" * len(keys))
        found = self._execute(f"SELECT key, score, metrics FROM verdicts WHERE key IN ({marks})", [tuple(keys)])
        return {key: RewardResult(score, json.loads(metrics)) for key, score, metrics in found}

    def put(self, reward: str, question: Question, verdicts: Mapping[bytes, tuple[str, RewardResult]]) -> None:
        """Cache verdicts on answers to a question, except those that are missing or not final.

        Args:
            reward: the reward's name.
            verdicts: {key: (answer, verdict)}.
        """
        truth = _text(question.ground_truth)
        rows = [
            (key, reward, truth, answer, verdict.score, json.dumps(dict(verdict.metrics)))
            for key, (answer, verdict) in verdicts.items() if verdict.score is not None and verdict.is_final
        ]
        if rows:
            self._execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database, self._is_broken = None, True

    def _execute(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Run an SQL statement and return the selected rows.

        A query takes the values of one row, a change takes a list of rows.
        """
        with self._lock:
            if self._is_broken:
                return []
            try:
                database = self._database = self._database or self._open()
                if statement.startswith("SELECT"):
                    return database.execute(statement, rows[0]).fetchall()
                with database:
                    database.executemany(statement, rows)
            except sqlite3.OperationalError as error:
                warnings.warn(f"{self._file}: {error}. Verdicts are computed again", stacklevel=2)
            except sqlite3.Error as error:
                self._is_broken = True
                warnings.warn(f"{self._file} can't be used: {error}. No verdict is kept", stacklevel=2)
            return []

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._file, timeout=LOCK_LIMIT_S, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")  # what a crash of the machine loses is computed again
        database.execute(_SCHEMA)
        return database


def identity(place: str, reward: Reward, settings: Any, inputs: Any = None) -> bytes:
    """Return a digest of a reward: its `module:name`, its code, its settings, and its `inputs`.

    The code is that of the module in `place`, of the modules that define the function or `open` (also inside a
    decorator or a functools.partial, whose arguments count too), and of `reward.modules`.

    Args:
        place: the reward's `module:name` or built-in name.
        inputs: the value of `reward.inputs`.

    Raises:
        ConfigError: one of the modules can't be imported, or an argument of a partial can't be put into the digest.
    """
    names, arguments = _modules_and_arguments(reward.function or reward.open, place)
    modules = {name: sys.modules[name] for name in names if name in sys.modules}
    if ":" in place:
        module = _imported(place.partition(":")[0], place)
        modules[module.__name__] = module
    code = [_source(modules[name]) for name in sorted(modules)]
    for name in sorted(reward.modules):
        code += _sources(_imported(name, place))
    told = asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else None
    return _digest(place, _text(told), _text(inputs), _text(arguments), *code)


def _modules_and_arguments(function: Any, place: str) -> tuple[set[str], list[Any]]:
    """Return the modules that define a function and everything it wraps, and the arguments of its partials."""
    modules, arguments = set[str](), list[Any]()
    while function is not None:
        if isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                modules |= _modules_of(value) if callable(value) else set()
            keywords = {name: _lasting(value, place) for name, value in function.keywords.items()}
            arguments.append([[_lasting(value, place) for value in function.args], keywords])
            function = function.func
            continue
        modules |= _modules_of(function)
        function = getattr(function, "__wrapped__", None)
    return modules, arguments


def _modules_of(function: Any) -> set[str]:
    """Return the modules that define a callable: a function, a method and its object's class, or an object's class.

    Modules of Python's standard library are left out.
    """
    own = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
    of_object = type(function.__self__).__module__ if inspect.ismethod(function) else None
    return {name for name in (own, of_object) if name and name.partition(".")[0] not in sys.stdlib_module_names}


def _lasting(value: Any, place: str) -> Any:
    """Return an argument of a partial in a form that later runs share: JSON, or a function's or class's name.

    Raises:
        ConfigError: it is another object, which a later run could not compare.
    """
    if callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return {"module": value.__module__, "name": value.__qualname__}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the reward {place!r} declares is_function_of_input, so the arguments of its functools.partial must be "
            f"values as in JSON, or functions and classes of a module, got {value!r:.200}. Give it in `settings`, or "
            "make the reward a `def` that uses it"
        ) from None
    return value


def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # it has no source file
        return ""


def _sources(module: ModuleType) -> list[str]:
    """Return the names and source texts of a module, or of all modules of a package."""
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = sorted((file.relative_to(folder).as_posix(), file) for folder in folders for file in folder.rglob("*.py"))
    return [text for path, file in files for text in (path, file.read_text())] or [module.__name__, _source(module)]


def _imported(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            f"the reward {place!r} needs the module {name!r} for the keys of its verdicts, which can't be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def _digest(*texts: str) -> bytes:
    """Return a digest of 16 bytes of a list of texts."""
    hashed = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()[:16]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)
