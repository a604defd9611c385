"""The runs that earlier sweeps have left in the folders of cells: kept, continued, or out of the way of a new one."""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from pathlib import Path

from async_rl.config import Config
from async_rl.config.loading import dump_config, load_config
from async_rl.config.yaml_text import YAMLError, read_yaml
from async_rl.errors import ConfigError
from async_rl.storage.checkpoints import list_checkpoints
from async_rl.storage.hub_names import hub_repos, recorded_name, with_name
from async_rl.sweeps.cells import Cell, sets_one_of
from async_rl.sweeps.records import COUNTED_KEYS, PLACE_KEYS, RESULTLESS_KEYS, leaves
from async_rl.telemetry.metrics import read_metrics

SET_ASIDE = "set_aside"
"""The folder of a sweep with the runs that had other settings than its cells, or do not say which."""
WRITTEN_AT = ("time/written_at_s", "eval/written_at_s")
"""The metrics that say when a line of a run was written, in seconds of all the run's time."""


def run_seconds(run_dir: Path) -> float:
    """Return the time that a run has taken, its start-ups included, until its last line of metrics."""
    times = [record.get(key) for record in read_metrics(run_dir / "metrics.jsonl") for key in WRITTEN_AT]
    return max((each for each in times if each is not None), default=0.0)


def changed_setting(cell: Cell, config: Config) -> str:
    """Return a setting in which the run in the folder of a cell differs from `config`, with both values; "": in none.

    The place, resumes, rollbacks and what changes no result are left out. A run of an earlier version of the program
    has the defaults of keys that it did not know, and the commits that it has written down of the repositories that the
    settings name on the hub.
    """
    if not (text := _recorded(cell)):
        return ""
    is_known = False
    try:
        of_run = load_config(cell.folder / "config.yaml")
        for repo in hub_repos(config):
            config = with_name(config, repo.key, repo.name, recorded_name(of_run, repo) or repo.name)
        text, is_known = dump_config(of_run), True
    except ConfigError:  # another version of the program may have keys that this one does not know
        pass
    began, planned = (leaves(read_yaml(each)[0]) for each in (text, dump_config(config)))
    for key in {**planned, **began} if is_known else planned.keys() & began.keys():
        then, now = (of.get(key, "nothing") for of in (began, planned))
        if then != now and not sets_one_of(key, (*PLACE_KEYS, *COUNTED_KEYS, *RESULTLESS_KEYS)):
            return f"{key} {then} then and {now} now"
    return ""


def has_settings(cell: Cell, config: Config) -> bool:
    """Return whether the run in the folder of a cell says that it has the settings of `config`."""
    return bool(_recorded(cell)) and not changed_setting(cell, config)


def make_way(cell: Cell, config: Config) -> None:
    """Have no folder at the place of a cell that starts anew: what is left of its run goes, but one with other
    settings, or a trained one that does not say with which, is moved aside, and told.
    """
    if change := changed_setting(cell, config):
        why = f"as it began with other settings: {change}"
    elif not _recorded(cell) and _is_trained(cell.folder):
        why = "as it has no whole config.yaml, which would say with which settings it began"
    else:
        shutil.rmtree(cell.folder, ignore_errors=True)
        return
    aside = cell.folder.parent.parent / SET_ASIDE
    aside.mkdir(exist_ok=True)
    names = (f"{cell.name}-{number}" for number in itertools.count(1))
    kept = next(aside / name for name in names if not (aside / name).exists())
    cell.folder.rename(kept)
    print(f"{cell.name} starts anew, {why}. Its run is in {kept}", flush=True)


def _recorded(cell: Cell) -> str:
    """Return the text of the config.yaml of the run in a cell's folder; "" if there is none, or no whole one."""
    file = cell.folder / "config.yaml"
    text = file.read_text() if file.is_file() else ""
    with suppress(YAMLError):
        return text if isinstance(read_yaml(text)[0], dict) else ""
    return ""


def _is_trained(run_dir: Path) -> bool:
    return (run_dir / "summary.json").is_file() or bool(list_checkpoints(run_dir))
