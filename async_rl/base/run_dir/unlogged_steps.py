"""Keeps the metrics of steps that the driver has not logged when it is killed: each checkpoint has the last steps'
metrics.

    run_dir/checkpoints/step_40/step_metrics.jsonl     one line a step, as learner rank 0 measured it

The driver logs a step some time after the learner has trained it. Without this file, steps between the last line of
metrics.jsonl and the checkpoint from which the run is resumed would be in no file.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

FILE_NAME = "step_metrics.jsonl"
LEAST_STEPS = 10
RESTORED = "log/restored"
"""The metric, always 1, of a step whose record was taken from a checkpoint."""


class RecentSteps:
    """The metrics of the last steps of a run, for the next checkpoint.

    Args:
        kept_s: the steps of so many seconds are kept, and LEAST_STEPS at least.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._steps: deque[tuple[int, float, str]] = deque()
        """(step, time.monotonic() when it was added, line of JSON)"""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of a step, in place of those that were added for it before."""
        if self._steps and self._steps[-1][0] == step:
            self._steps.pop()
        now_s = time.monotonic()
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._steps.append((step, now_s, json.dumps({"step": step, **finite}) + "\n"))
        while len(self._steps) > LEAST_STEPS and self._steps[0][1] < now_s - self._kept_s:
            self._steps.popleft()

    def text(self) -> str:
        """Return the content of the file."""
        return "".join(line for _, _, line in self._steps)


def write_step_metrics(folder: Path, text: str) -> None:
    (folder / FILE_NAME).write_text(text)


def missing_steps(logged: Sequence[Mapping[str, float | None]], version: int) -> list[int]:
    """Return the steps up to `version` that have no record in `logged`, the records of metrics.jsonl."""
    found = {record["step"] for record in logged if record.get("time/written_at_s") is not None}
    return [step for step in range(1, version + 1) if step not in found]


def restored_records(
    checkpoint: Path, steps: Sequence[int], logged: Sequence[Mapping[str, float | None]]
) -> list[dict[str, float | None]]:
    """Return the records of the `steps` whose metrics the folder of a checkpoint has, in order.

    They lack what only the driver knows: the metrics of rollout workers, and utilisation. `time/written_at_s` goes on
    from the last record in `logged` by the time of each step. `time/since_first_step_s` is 0 at step 1, whose warm-up
    counts in no time of the run, and missing at the others.
    """
    file = checkpoint / FILE_NAME
    lines = file.read_text().splitlines() if file.is_file() else []
    kept = {record["step"]: record for record in map(json.loads, lines)}
    written_at_s = max((record.get("time/written_at_s") or 0.0 for record in logged), default=0.0)
    found = []
    for step in steps:
        if record := kept.get(step):
            written_at_s += record.get("time/step_s") or 0.0
            began = {"time/since_first_step_s": 0.0} if step == 1 else {}
            found.append({**record, **began, "time/written_at_s": round(written_at_s, 3), RESTORED: 1.0})
    return found


def numbers_text(steps: Sequence[int]) -> str:
    """Return ascending step numbers as text with ranges, e.g. `3, 7 to 9`."""
    parts: list[str] = []
    first = last = steps[0]
    for step in [*steps[1:], math.inf]:
        if step == last + 1:
            last = int(step)
            continue
        parts.append(f"{first}" if first == last else f"{first} to {last}")
        first = last = step  # type: ignore[assignment]
    return ", ".join(parts)
