"""The value types that fields share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def _refuse_bool(value: Any) -> Any:
    """`true` is no number, although Python says so."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_not_bool", "should be a number, not true or false")
    return value


def _number_as_text(value: Any) -> Any:
    """A name such as `2026` is text, although YAML reads a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _one_as_list(value: Any) -> Any:
    """A single value where a list is meant."""
    return [value] if isinstance(value, str) else value


NotBool = BeforeValidator(_refuse_bool)
OneOrMore = BeforeValidator(_one_as_list)

Int = Annotated[int, NotBool]
Count = Annotated[int, Field(ge=0), NotBool]
Positive = Annotated[int, Field(ge=1), NotBool]
Real = Annotated[float, Field(allow_inf_nan=False), NotBool]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), NotBool]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False), NotBool]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NotBool]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), NotBool]
TopK = Annotated[int, Field(ge=-1), NotBool]
Temperature = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False), NotBool]
Port = Annotated[int, Field(ge=0, le=65535), NotBool]
Name = Annotated[str, BeforeValidator(_number_as_text), Field(min_length=1)]
