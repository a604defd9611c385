"""The settings of a run that differ from the defaults."""

from __future__ import annotations

from async_rl.base.config.loading import dump_config, load_config, read_yaml
from async_rl.run.before_start.dry_run import changed_settings


def test_only_settings_that_differ_from_the_defaults_are_listed() -> None:
    config = load_config(None, ["model.path=none", "task.name=reasoning_gym/none", "staleness.max=2"])
    found = {key: (value, default) for key, value, default in changed_settings(read_yaml(dump_config(config))[0])}
    assert found["staleness.max"] == (2, 1)
    assert "learner.lr" not in found


def test_the_name_of_a_task_is_listed_only_where_it_is_set() -> None:
    found = changed_settings({"task": {"name": "", "env": "a:B"}, "model": {"path": "models/a"}})
    assert ("model.path", "models/a", ...) in found
    assert ("task.env", "a:B", "") in found
    assert all(key != "task.name" for key, _, _ in found)
