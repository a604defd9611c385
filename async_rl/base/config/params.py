"""The settings of exchangeable parts: an entry of a seam's table declares their class, `params` gives their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from async_rl.base.config.check import Problem, SettingsError
from async_rl.base.errors import ConfigError
from async_rl.base.seams.lookup import implementation


class OnePart:
    """Base of a section whose `params` are the settings that one exchangeable part declares."""

    params: dict[str, Any]

    @property
    def part(self) -> tuple[str, str, Any]:
        """Return the key of the part, such as rollout.engine, its name, and what its entry declares as `settings`."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        if settings := self.settings:
            object.__setattr__(self, "params", dataclasses.asdict(settings))

    @property
    def settings(self) -> Any:
        """The settings of the part, made of `params`: an instance of the class that its entry declares, or None."""
        key, name, declared = self.part
        part = f"{key} {name}"
        return read_params(f"{key.partition('.')[0]}.params", self.params, {part: declared}).get(part)


def read_params(key: str, params: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return {part: its settings, an instance of the class that it declares}, with the values that `params` gives.

    Parts without settings are left out.

    Args:
        key: the configuration key of `params`, such as `algorithm.params`.
        declared: [part] its class of settings, made by async_rl.base.config.section.section, or the place of that class
        as `module:name`; None: it has none. A part is named as in `algorithm.loss ppo_clip`.

    Raises:
        SettingsError: no part has a setting of a name in `params`, two have one of the same name, or a value is not
            allowed.
        ConfigError: a part declares settings by something else than a class made by `section`.
    """
    classes = {part: _settings_class(part, code) for part, code in declared.items() if code}
    names = {part: [field.name for field in dataclasses.fields(kind)] for part, kind in classes.items()}
    takers: dict[str, list[str]] = {name: [] for name in params}
    for part, own in names.items():
        for name in own:
            takers.setdefault(name, []).append(part)
    problems = []
    for name, parts in takers.items():
        if not parts:
            told = "; ".join(f"{part} takes {', '.join(names.get(part, ())) or 'none'}" for part in declared)
            problems.append(Problem(f"{key}.{name}", f"unknown key {key}.{name}", f"; {told}"))
        elif len(parts) > 1:
            text = f"{key}.{name} must be a setting of one part, got one of {' and of '.join(parts)}"
            problems.append(Problem(f"{key}.{name}", text, ". Rename it in one of them."))
    if problems:
        raise SettingsError(problems)
    return {
        part: kind(**{name: params[name] for name in names[part] if name in params}) for part, kind in classes.items()
    }


def _settings_class(part: str, code: Any) -> type:
    kind: Any = implementation(code, part)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and hasattr(kind, "__pydantic_validator__")):
        raise ConfigError(
            f"{part}: the settings that its entry declares must be a class with the decorator "
            f"async_rl.base.config.section.section, got {kind!r:.100}"
        )
    return kind
