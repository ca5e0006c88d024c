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
Count = Annotated[int, NotBool, Field(ge=0)]
Positive = Annotated[int, NotBool, Field(ge=1)]
Real = Annotated[float, NotBool, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, NotBool, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, NotBool, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, NotBool, Field(ge=0, le=1, allow_inf_nan=False)]
TopP = Annotated[float, NotBool, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, NotBool, Field(ge=-1)]
Temperature = Annotated[float, NotBool, Field(ge=0, le=10, allow_inf_nan=False)]
Port = Annotated[int, NotBool, Field(ge=0, le=65535)]
Name = Annotated[str, BeforeValidator(_number_as_text), Field(min_length=1)]
