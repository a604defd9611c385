"""The functions and classes of `import async_rl`, with which scripts and notebooks train and evaluate.

A run has its own thread, so that it can be started where an event loop is running, as in a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.loading import text_override
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.hub_names import find_model
from async_rl.base.run_dir.checkpoints import run_dir_of_model
from async_rl.run.before_start.chosen_run import Configuration, config_of, config_to_start, nothing_left
from async_rl.run.processes.signals import RunControl, StopSignals

SIGNALS_EVERY_S = 1.0
"""How often a wait for the next step wakes up, because Python may miss a signal that comes just before the wait."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedStep:
    """One learner step of a run, as it was logged."""

    version: int
    """The policy version that the step produced: 1 after the first step."""
    metrics: Mapping[str, float]
    """The step's record in metrics.jsonl, by name, with the eval/... metrics of evaluations that ended since the
    last step."""
    run: TrainingRun
    """The run, for its methods `end` and `save`."""


Callback = Callable[[TrainedStep], object]


class TrainingRun:
    """A training run: a context manager that starts it, and an iterable of its steps.

        with async_rl.TrainingRun("quickstart.yaml") as run:
            for step in run:
                if step.metrics["reward/mean"] > 0.9:
                    run.end("the reward is above 0.9")
        print(run.summary)

    The run does not wait for the program: while the program handles a step, the next steps are trained. Ctrl-C ends the
    run after its step, with a checkpoint; a second one ends it immediately. An error of the program also ends it after
    its step. If the program leaves its loop over the steps by `break`, the end of the `with` block ends the run as
    `end` does; without a loop the block waits for all of run.steps. An object is one run.

    Args:
        config: the configuration; None: the configuration of the run to continue.
        overrides: settings on top of it, such as "staleness.max=2".
        resume: a run directory to continue from its newest checkpoint, or one of its checkpoints. "auto": start the
            run of `config`, or continue it if it has a checkpoint; if it is complete, there are no steps, only its
            summary.

    Raises:
        ConfigError: a setting can't work.
    """

    def __init__(
        self, config: Configuration | None = None, overrides: Sequence[str] = (), resume: str | Path = ""
    ) -> None:
        self.config, self._complete_dir = config_to_start(config, overrides, resume)
        self.summary: dict[str, Any] = {}
        """The content of summary.json, once the run has ended."""
        self._events: queue.SimpleQueue[TrainedStep | None] = queue.SimpleQueue()
        self._control = RunControl(lambda version, metrics: self._events.put(TrainedStep(version, metrics, self)))
        self._signals, self._handlers = StopSignals(), contextlib.ExitStack()
        self._thread = threading.Thread(target=self._train, name="async-rl run", daemon=True)
        self._error: BaseException | None = None
        self._is_watched = self._has_ended = False

    @property
    def run_dir(self) -> Path:
        """The directory of the run. Before the run starts: the directory that it will get unless the name is taken."""
        return self._control.run_dir or self._complete_dir or self.config.run_dir

    def end(self, reason: str = "the program ended the run") -> None:
        """End the run after its current step as if run.steps were reached: it is evaluated, saved and summed up.

        May be called from any thread, also before the first step.

        Args:
            reason: why; shown on the console and in the summary.
        """
        self._control.end(reason or "the program ended the run")

    def save(self) -> None:
        """Write a checkpoint after the current step. checkpoint.keep_last counts it like any other."""
        self._control.save()

    def __enter__(self) -> TrainingRun:
        if self._thread.ident:
            raise RuntimeError(
                f"a TrainingRun is one run, and that in {self.run_dir} has begun already: make another TrainingRun, "
                f"with resume={str(self.run_dir)!r} to go on with that run"
            )
        with contextlib.ExitStack() as handlers:
            handlers.enter_context(self._signals)
            handlers.enter_context(self._signals.deferred())
            self._thread.start()
            self._handlers = handlers.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the end of the run, and raise its error. An error of the program, except Ctrl-C, takes precedence.

        Raises:
            AsyncRLError, KeyboardInterrupt: as `async_rl.pipeline.run`.
        """
        with self._handlers:
            if error is not None:
                self._signals.request()
            elif self._is_watched and not self._has_ended:
                self.end("the program left its loop over the steps")
            while self._next() is not None:
                pass
            self._thread.join()
        if self._error is not None and (error is None or isinstance(error, KeyboardInterrupt)):
            raise self._error

    def __iter__(self) -> Iterator[TrainedStep]:
        """Yield each step once it is logged, until the run has ended."""
        if not self._thread.ident:
            raise RuntimeError("the run has not begun: iterate within `with async_rl.TrainingRun(config) as run:`")
        self._is_watched = True
        while (step := self._next()) is not None:
            yield step

    def _next(self) -> TrainedStep | None:
        """Return the next step; None at the end. A second Ctrl-C is not raised here, but by the run, which ends."""
        while not self._has_ended:
            try:
                step = self._events.get(timeout=SIGNALS_EVERY_S)
            except (queue.Empty, KeyboardInterrupt):
                continue  # without an end: the waits of the run have their limits, and its end is told
            if step is not None:
                return step
            self._has_ended = True
        return None

    def _train(self) -> None:
        from async_rl.base.telemetry.metrics_logger import format_summary
        from async_rl.pipeline import run

        try:
            if self._complete_dir:
                print(nothing_left(self.config, self._complete_dir))
                self.summary = json.loads((self.run_dir / "summary.json").read_text())
                return
            self.summary = run(self.config, self._signals, control=self._control)
            print(format_summary(self.summary), end="")
        except BaseException as error:
            self._error = error
        finally:
            self._events.put(None)


def train(
    config: Configuration | None = None, overrides: Sequence[str] = (), *, resume: str | Path = "",
    callbacks: Iterable[Callback] = (),
) -> dict[str, Any]:  # fmt: skip
    """Train, and return the content of summary.json.

    Args:
        config, overrides, resume: as for `TrainingRun`.
        callbacks: called in order with each `TrainedStep` once it is logged, in the caller's thread. If one raises, the
            run ends after its step, with a checkpoint, and the error is raised here.

    Raises:
        ConfigError: a setting can't work, and nothing was started.
        AsyncRLError: the run failed.
        KeyboardInterrupt: after Ctrl-C; says how to resume.
    """
    callbacks = tuple(callbacks)
    with TrainingRun(config, overrides, resume) as run:
        for step in run:
            for callback in callbacks:
                callback(step)
    return run.summary


def evaluate(model: str | Path, config: Configuration | None = None, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Evaluate a model on the held-out prompts of a configuration, and return the metrics `eval/...`.

    Args:
        model: a Hugging Face folder, such as RUN_DIR/model, or the name of a model on the hub.
        config: the configuration; None: the configuration of the run in whose folder the model is.
        overrides: settings on top of it, such as "eval.samples_per_prompt=4".

    Raises:
        ConfigError: there is no such folder or configuration, or a setting can't work.
    """
    from rollout_server.worker.eval_command import evaluate_model

    return _in_own_loop(evaluate_model(evaluation_config(model, config, overrides)))


def evaluation_config(model: str | Path, config: Configuration | None, overrides: Sequence[str] = ()) -> Config:
    """Return the Config for `evaluate`. It takes the same arguments and raises the same errors."""
    if config is None:
        config = run_dir_of_model(Path(os.path.abspath(model))) / "config.yaml"
        if not config.is_file():
            if not Path(model).is_dir() and not find_model(str(model), "MODEL"):
                raise ConfigError(f"MODEL must be a folder, e.g. RUN_DIR/model, got {model}: there is no such folder")
            if (Path(model) / "config.yaml").is_file():
                raise ConfigError(
                    f"MODEL must be a model's folder, got {model}: that is a run. Name {Path(model) / 'model'}, which "
                    "is written at its end"
                )
            if not any(each.startswith("eval.suite=") for each in overrides):
                raise ConfigError(
                    f"async-rl eval needs a CONFIG with the task, or eval.suite=[gsm8k]: there is no {config} beside "
                    "the model"
                )
            config = {"task": {"name": "rollout_server.tasks.suites:BenchmarksAlone"}}
    return config_of(config, [*overrides, text_override("model.path", model)])


def _in_own_loop(work: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    """Run a coroutine in a new event loop and thread, because the caller's thread may have a loop; return its result.

    KeyboardInterrupt cancels the coroutine, and is raised once it has ended.
    """
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[dict[str, float]]]] = []

    async def in_thread() -> dict[str, float]:
        task = asyncio.ensure_future(work)
        tasks.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1, "async-rl") as threads:
        result = threads.submit(asyncio.run, in_thread())
        try:
            return result.result()  # no time limit: each request and each reward has its own
        except KeyboardInterrupt:
            for loop, task in tasks:
                loop.call_soon_threadsafe(task.cancel)
            raise
