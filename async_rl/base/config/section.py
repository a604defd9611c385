"""The decorator and types that declare a section of the configuration, a frozen pydantic dataclass.

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

from async_rl.base.config.schema import explain
from async_rl.base.seams import find_entry

T = TypeVar("T")

_RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def section(key: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that makes a frozen, validated dataclass. The string under a field is its description.

    The dataclass raises SettingsError for unknown names, values of another type, infinite numbers and values outside of
    the field's range. `key` is where the section stands, e.g. `algorithm.clip`; empty for the whole configuration.
    """

    def decorate(kind: type[T]) -> type[T]:
        kind.__get_pydantic_core_schema__ = classmethod(_from_mapping)  # type: ignore[attr-defined]
        validated: Any = dataclass(frozen=True, kw_only=True, config=_RULES)(kind)
        construct = validated.__init__

        def __init__(self: Any, **settings: Any) -> None:
            try:
                construct(self, **settings)
            except ValidationError as error:
                raise explain(error, validated, key) from None

        validated.__init__ = __init__
        return validated

    return decorate


def _from_mapping(kind: type, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Return pydantic's schema of a section, which accepts a dict as its value although its fields are strict."""
    schema = handler(source)
    resolved: Any = handler.resolve_ref_schema(schema)
    resolved["strict"] = False
    return schema


class Named:
    """Annotates a text field: it must be a name in `table`, one of `also`, or `module:name` of an importable entry."""

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
    """Return a validator for the `Annotated[...]` of a field; it refuses values for which `is_allowed` is false.

    The error says that the value must be `allowed`.
    """

    def validate(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError(allowed)
        return value

    return AfterValidator(validate)


Section = Annotated[T, BeforeValidator(lambda given: {} if given is None else given)]
"""The type of a field that is a section, or a dict of free names. Left empty in YAML, it has its defaults."""
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""The type of a field that is the path of a file or folder; a leading ~ is the home directory."""
List = Annotated[T, Strict(False)]
"""The type of a field that is a tuple and is written as a list in YAML."""
Unbounded = Annotated[float, Field(allow_inf_nan=True, json_schema_extra={"mayBeInfinite": True})]
"""The type of a field that is a limit, which .inf turns off."""
