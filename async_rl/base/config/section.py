"""Declares sections of the configuration as frozen pydantic dataclasses, and reads the `params` of exchangeable parts.

Values are checked strictly: none is converted to another type, except whole numbers to floats.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from async_rl.base.config.check import Problem, SettingsError
from async_rl.base.errors import ConfigError
from async_rl.base.seams import find_entry
from async_rl.base.seams.lookup import implementation

T = TypeVar("T")

_RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def section(key: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that makes a frozen, validated dataclass. The string under a field is its description.

    The dataclass raises SettingsError for unknown names, values of another type, infinite numbers and values outside
    the field's range.

    Args:
        key: the key of the section, e.g. `algorithm.clip`; empty for the whole configuration.
    """

    def decorate(kind: type[T]) -> type[T]:
        kind.__get_pydantic_core_schema__ = classmethod(_from_mapping)  # type: ignore[attr-defined]
        validated: Any = dataclass(frozen=True, kw_only=True, config=_RULES)(kind)
        construct = validated.__init__

        def __init__(self: Any, **settings: Any) -> None:
            try:
                construct(self, **settings)
            except ValidationError as error:
                from async_rl.base.config.schema import explain

                raise explain(error, validated, key) from None

        validated.__init__ = __init__
        return validated

    return decorate


def _from_mapping(kind: type, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Return pydantic's schema of a section. It accepts a dict for the section, although the fields are strict."""
    schema = handler(source)
    resolved: Any = handler.resolve_ref_schema(schema)
    resolved["strict"] = False
    return schema


class Named:
    """An annotation for a text field whose value must be a name in `table` or in `also`, or `module:name` of an entry.

    Args:
        key: the field's configuration key, for error messages.
    """

    def __init__(self, table: Mapping[str, Any], key: str, also: Sequence[str] = ()) -> None:
        self.table, self.key, self.also = table, key, also

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        outside = {"pattern": r"^[\w.]+:\w+$", "description": "module:name of an entry"}
        return {"type": "string", "anyOf": [{"enum": [*self.also, *self.table]}, outside]}

    def _check(self, name: str) -> str:
        find_entry({**self.table, **dict.fromkeys(self.also)}, name, self.key)
        return name


def checked(is_allowed: Callable[[Any], bool], allowed: str) -> AfterValidator:
    """Return a validator for a field's `Annotated[...]`. It refuses values for which `is_allowed` is false.

    The error says that the value must be `allowed`.
    """

    def validate(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError(allowed)
        return value

    return AfterValidator(validate)


Section = Annotated[T, BeforeValidator(lambda given: {} if given is None else given)]
"""The type of a field with a section, or a dict with free names. If YAML leaves it empty, it has its defaults."""
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""The type of a field with the path of a file or folder. A leading ~ becomes the home directory."""
List = Annotated[T, Strict(False)]
"""The type of a field with a tuple, which is a list in YAML."""
Unbounded = Annotated[float, Field(allow_inf_nan=True, json_schema_extra={"mayBeInfinite": True})]
"""The type of a field with a limit that .inf turns off."""


class OnePart:
    """Base class of a section with an exchangeable part (an engine, a transport). `params` are the part's settings."""

    params: dict[str, Any]

    @property
    def part(self) -> tuple[str, str, Any]:
        """(the part's configuration key, such as rollout.engine; its name; what its entry declares as `settings`)."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        if settings := self.settings:
            object.__setattr__(self, "params", dataclasses.asdict(settings))

    @property
    def settings(self) -> Any:
        """The part's settings, made from `params`: an instance of the class that its entry declares, or None."""
        key, name, declared = self.part
        part = f"{key} {name}"
        return read_params(f"{key.partition('.')[0]}.params", self.params, {part: declared}).get(part)


def read_params(key: str, params: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Create the settings objects of exchangeable parts from their common `params`.

    Returns {part: an instance of its settings class}, without the parts that declare no settings.

    Args:
        key: the configuration key of `params`, such as `algorithm.params`.
        declared: for each part, such as `algorithm.loss ppo_clip`: its settings class, made by
            async_rl.base.config.section.section, or `module:name` of that class; None: it has no settings.

    Raises:
        SettingsError: a name in `params` is a setting of no part or of two parts, or a value is not allowed.
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
