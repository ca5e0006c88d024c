"""The building blocks of the schema: `Section`, `Block`, and the value types that fields share.

A `Section` is a typed group of known keys; a `Block` is a free mapping that belongs to the user. Both can be read by
attribute and by item (`config.ajet.rollout["num_repeat"]`, `config.frozen_lake.size`), because workflows written for
OmegaConf use either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MOST = 10**18
"""No count or size is larger; arithmetic with larger numbers leaves what floats and 64 bits hold."""
LONG_NUMBER = re.compile(r"\s*[+-]?[\d_]{19,}\s*$")
LONGEST_NAME = 200
OWN = "own"
"""The type of errors whose message says more than the type of the key."""


class Section(BaseModel):
    """A group of keys. An unknown key is an error; a field is documented by the string below it."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_assignment=True,
        protected_namespaces=(),
    )

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields or key in (self.model_extra or {})

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` if there is no such key or its value is null."""
        value = getattr(self, key) if key in self else None
        return default if value is None else value

    def keys(self) -> Iterator[str]:
        """The names of all keys."""
        yield from type(self).model_fields
        yield from self.model_extra or {}


class Block(dict[str, Any]):
    """A mapping that belongs to the user: any keys, readable as attributes, nested mappings included."""

    def __init__(self, values: dict[Any, Any] | None = None, /, **more: Any) -> None:
        super().__init__()
        for key, value in {**(values or {}), **more}.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, blocks_within(value))

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            known = ", ".join(map(str, self)) or "none"
            raise AttributeError(f"no key {key!r} in this block of the YAML (its keys: {known})") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __reduce__(self) -> tuple[type[Block], tuple[dict[str, Any]]]:
        return Block, (dict(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.dict_schema())


def blocks_within(value: Any) -> Any:
    """`value` with every mapping in it turned into a `Block`."""
    if isinstance(value, Block):
        return value
    if isinstance(value, dict):
        return Block(value)
    if isinstance(value, list):
        return [blocks_within(item) for item in value]
    return value


def _refuse_bool(value: Any) -> Any:
    """`true` isn't a number, although Python treats it as one."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_not_bool", "should be a number, not true or false")
    if (isinstance(value, int) and abs(value) > MOST) or (isinstance(value, str) and LONG_NUMBER.match(value)):
        raise PydanticCustomError(OWN, "should be a number of at most 18 digits")
    return value


def _number_as_text(value: Any) -> Any:
    """A name such as `2026` is text, although YAML reads a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _file_name(value: str) -> str:
    """A name that a folder can have, with what is put behind it (`-debug`, a time)."""
    if any(not character.isprintable() for character in value):
        raise PydanticCustomError(OWN, "should be a name without control characters")
    if "/" in value or value in (".", ".."):  # `ajet runs` and the viewer list one folder
        raise PydanticCustomError(OWN, "should be a name without / (experiment_dir takes a path)")
    if value.startswith("-"):
        raise PydanticCustomError(OWN, "should be a name that does not begin with -, as flags do")
    if len(value.encode()) > LONGEST_NAME:
        raise PydanticCustomError(OWN, f"should be a name of at most {LONGEST_NAME} bytes")
    return value


def as_list(value: Any) -> Any:
    """A single text in place of a list."""
    return [value] if isinstance(value, str) else value


NotBool = BeforeValidator(_refuse_bool)
OneOrMore = Annotated[list[str], BeforeValidator(as_list, str | list[str])]

Count = Annotated[int, Field(ge=0), NotBool]
Positive = Annotated[int, Field(ge=1), NotBool]
Real = Annotated[float, Field(allow_inf_nan=False), NotBool]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), NotBool]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False), NotBool]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NotBool]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), NotBool]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), NotBool]
TopK = Annotated[int, Field(ge=-1), NotBool]
Temperature = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False), NotBool]
Port = Annotated[int, Field(ge=0, le=65535), NotBool]
Name = Annotated[str, BeforeValidator(_number_as_text), Field(min_length=1), AfterValidator(_file_name)]
