"""Sends metrics to wandb, trackio and TensorBoard. Their failures do not end a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import netrc
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from async_rl.base.config import Config
from async_rl.base.models_and_data.hub import cached_folder
from async_rl.base.run_dir.checkpoints import resumed_training_state
from async_rl.base.seams.lookup import lacking
from async_rl.base.telemetry.examples import COLUMNS, Example, ExampleTable
from async_rl.base.telemetry.metrics import Figures


class Tracker:
    """Sends metrics to the run object of a tracking library.

    After the first failure, which is reported by `note`, nothing more is sent.
    """

    library: ClassVar[str]

    def __init__(self, run: Any, note: Callable[[str], None]) -> None:
        self._run = run
        self._note = note
        self._failed = False

    def begin_lineage(self) -> None:
        """Called when a resume has made its first step or reached the end of the run, and will not be undone."""

    def close(self) -> None:
        """End the run at the tracking library."""
        self._attempt(self._run.finish)

    def _attempt(self, call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # nothing that a tracking library raises may end the run
            self._failed = True
            self._note(f"{self.library}: off from here on, the run goes on: {type(error).__name__}: {error}")


REACH_TIMEOUT_S = 3.0
INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0
TABLE_EVERY_S = 10.0
"""The least time between two tables of examples, because each is a file. A table has the examples of all steps since.
"""
SUMMARY_EVERY_S = 10.0
"""The least time between two summaries, because each has every metric."""

Mode = Literal["online", "offline", "disabled"]


def open_wandb_run(config: Config, run_dir: Path, note: Callable[[str], None]) -> WandbRun | None:
    """Return the wandb run for logging.wandb, or None if wandb is off or can't start.

    If wandb is offline or off although the user wanted more, `note` gets the reason.
    """
    mode, why = choose_mode(config.logging.wandb)
    if why:
        note(f"wandb: {why}")
    if mode == "disabled":
        return None
    id_file = run_dir / "wandb_id"  # with the same id, a resumed run continues the same wandb run
    if not id_file.is_file():
        id_file.write_text(secrets.token_hex(4))
    try:
        import wandb

        run = wandb.init(
            project=config.logging.project,
            name=config.run.name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(run_dir),
            config=dataclasses.asdict(config),
            mode=mode,
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=False,
                silent=True,
                console="off",
            ),
        )
        # wandb's own step counts every record, evaluations included; its own summary would be the last step's values.
        run.define_metric("*", step_metric="step", summary="none")
    except Exception as error:  # nothing that wandb raises may end the run
        note(f"wandb: off, it did not start: {type(error).__name__}: {error}")
        return None
    return WandbRun(run, note, ExampleTable(str(cached_folder(config.model.path) or config.model.path)))


class WandbRun(Tracker):
    """Sends the metrics of a run to wandb. `close` waits FINISH_TIMEOUT_S for uploads; `wandb sync` sends the rest."""

    library = "wandb"

    def __init__(self, run: Any, note: Callable[[str], None], table: ExampleTable) -> None:
        super().__init__(run, note)
        self._table = table
        self._waiting: list[Example] = []
        """The examples that are in no table yet."""
        self._table_s = -math.inf
        """time.monotonic() of the last table."""
        self._figures: Figures | None = None
        self._summary_s = -math.inf
        """time.monotonic() of the last summary."""

    def log(
        self, record: dict[str, float], examples: Sequence[Example] = (), figures: Figures | None = None
    ) -> None:
        """Send a record, and the examples in a table with the key `examples`, at most once in TABLE_EVERY_S.

        Args:
            figures: the figures of all steps so far. wandb's summary shows them every SUMMARY_EVERY_S and at the end.
        """
        if self._failed:
            return
        self._figures = figures or self._figures
        self._waiting += examples
        is_due = self._waiting and time.monotonic() - self._table_s >= TABLE_EVERY_S
        self._attempt(lambda: self._run.log(record | self._table_of_waiting() if is_due else record))
        if time.monotonic() - self._summary_s >= SUMMARY_EVERY_S:
            self._summarise(self._figures)

    def close(self) -> None:
        if self._waiting:
            self._attempt(lambda: self._run.log({"step": self._waiting[-1].step} | self._table_of_waiting()))
        self._summarise(self._figures)
        super().close()

    def _summarise(self, figures: Figures | None) -> None:
        if figures:
            self._summary_s = time.monotonic()
            self._attempt(lambda: self._run.summary.update(figures.all()))

    def _table_of_waiting(self) -> dict[str, Any]:
        import wandb

        rows = self._table.rows(self._waiting)
        self._waiting, self._table_s = [], time.monotonic()
        return {"examples": wandb.Table(columns=list(COLUMNS), data=rows)}

    def alert(self, text: str) -> None:
        self._attempt(lambda: self._run.alert(title="async-rl alarm", text=text))


def choose_mode(asked: Literal["auto", "online", "offline", "disabled"]) -> tuple[Mode, str]:
    """Return (wandb's mode for a value of logging.wandb, why that is less than the user wanted, or "").

    `auto` is off if wandb is missing or the user has no key. Without a connection, online becomes offline.
    """
    if asked == "disabled" or (asked == "auto" and os.environ.get("WANDB_MODE") == "disabled"):
        return "disabled", ""
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "" if asked == "auto" else "off, it is not installed. Run: pip install wandb"
    if asked == "offline" or (asked == "auto" and os.environ.get("WANDB_MODE") == "offline"):
        return "offline", ""
    if not is_logged_in():
        if asked == "auto":
            return "disabled", ""
        return "offline", "offline, there is no account. Run `wandb login` or set WANDB_API_KEY."
    if not is_reachable(_base_url()):
        return "offline", f"offline, {_base_url()} can't be reached. Send it later with `wandb sync`."
    return "online", ""


def is_logged_in() -> bool:
    """Return whether the user gave wandb a key: in WANDB_API_KEY, or by `wandb login`, which writes netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(_base_url()).hostname or "") is not None
    return False


def is_reachable(url: str, timeout_s: float = REACH_TIMEOUT_S) -> bool:
    """Return whether a server at `url` answers within `timeout_s`, through the environment's proxy, if any."""
    answered = threading.Event()

    def ask() -> None:
        with suppress(OSError, HTTPException):
            with suppress(HTTPError):  # an answer with an error status counts too
                urlopen(Request(url, method="HEAD"), timeout=timeout_s).close()
            answered.set()

    # The request runs in a thread, because its timeout does not cover the look-up of the host name.
    asking = threading.Thread(target=ask, daemon=True, name="wandb-reach")
    asking.start()
    asking.join(timeout_s)
    return answered.is_set()


def _base_url() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


FLUSH_EVERY_S = 10


def open_tensorboard_run(config: Config, run_dir: Path, note: Callable[[str], None]) -> TensorboardRun | None:
    """Return the TensorBoard writer for logging.tensorboard, or None if it is off or not installed.

    If it is on but not installed, `note` gets the reason.
    """
    if not config.logging.tensorboard:
        return None
    if text := lacking("tensorboard"):
        note(f"tensorboard: off, it {text}")
        return None
    saved = resumed_training_state(config)
    run = TensorboardRun(partial(_open_writer, run_dir / "tensorboard", saved.version + 1 if saved else 0), note)
    if saved is None:
        run.begin_lineage()
    return run


def _open_writer(folder: Path, first_step: int) -> Any:
    """Return a SummaryWriter to a new file in `folder`.

    Args:
        first_step: the first step of a resume: TensorBoard hides what earlier files have from it on. 0: a new run.
    """
    from tensorboardX import SummaryWriter

    suffix = f".{len(list(folder.glob('events.*')))}"  # a name has the second of its start, in which another may be
    purge_step = first_step or None
    return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_EVERY_S, filename_suffix=suffix)


class TensorboardRun(Tracker):
    """Writes the metrics of a run to TensorBoard, with a SummaryWriter. A resumed run adds a file to the same folder.

    Args:
        open_writer: returns the SummaryWriter. Its file hides the later steps in older files, so it is opened only by
            `begin_lineage`, when the resume can no longer be undone. Records logged before are kept until then.
        note: called with a message if writing fails.
    """

    library = "tensorboard"

    def __init__(self, open_writer: Callable[[], Any], note: Callable[[str], None]) -> None:
        super().__init__(None, note)
        self._open_writer = open_writer
        self._early: list[Mapping[str, float]] = []

    def begin_lineage(self) -> None:
        if self._run is None:
            self._attempt(self._begin)

    def log(self, record: Mapping[str, float]) -> None:
        """Write a record. Its key `step` is the step; values that are not finite are left out."""
        self._attempt(lambda: self._write(record))

    def close(self) -> None:
        if self._run is not None:
            self._attempt(self._run.close)

    def _begin(self) -> None:
        self._run = self._open_writer()
        while self._early:
            self._write(self._early.pop(0))

    def _write(self, record: Mapping[str, float]) -> None:
        if self._run is None:
            self._early.append(record)
            return
        for key, value in record.items():
            if key != "step" and math.isfinite(value):
                self._run.add_scalar(key, value, int(record["step"]))


def open_trackio_run(config: Config, run_dir: Path, note: Callable[[str], None]) -> TrackioRun | None:
    """Return the trackio run for logging.trackio, or None if it is off, not installed or does not start.

    If the user wanted it and it is off, `note` gets the reason.
    """
    if not config.logging.trackio:
        return None
    # trackio tells runs apart by their names alone, and run.name is unique in its run.dir alone. With the name in this
    # file, a resumed run continues the same trackio run, and no other does.
    name_file = run_dir / "trackio_name"
    if not name_file.is_file():
        name_file.write_text(f"{config.run.name}-{secrets.token_hex(4)}")
    try:
        import trackio

        run = trackio.init(
            project=config.logging.project, name=name_file.read_text(), config=dataclasses.asdict(config),
            resume="allow",
        )  # fmt: skip
    except ImportError:
        note("trackio: off, it is not installed. Run: pip install trackio")
        return None
    except Exception as error:  # nothing that trackio raises may end the run
        note(f"trackio: off, it did not start: {type(error).__name__}: {error}")
        return None
    return TrackioRun(run, note)


class TrackioRun(Tracker):
    """Sends the metrics of a run to trackio."""

    library = "trackio"

    def log(self, record: Mapping[str, float]) -> None:
        """Send a record. Its key `step` is the step; values that are not finite are left out."""
        values = {key: value for key, value in record.items() if key != "step" and math.isfinite(value)}
        self._attempt(lambda: self._run.log(values, step=int(record["step"])))
