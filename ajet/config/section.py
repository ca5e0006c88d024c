"""The two bases of a config: `Section`, a typed group of known keys, and `Block`, a user's own free mapping.

Both answer to attributes and to items (`config.ajet.rollout["num_repeat"]`, `config.frozen_lake.size`), because
workflows written for OmegaConf use either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """A group of keys. An unknown key is an error; each field's documentation is the string under it."""

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
        """The value of `key`, or `default` where there is no such key (or it is null)."""
        value = getattr(self, key) if key in self else None
        return default if value is None else value

    def keys(self) -> Iterator[str]:
        """The names of all keys."""
        yield from type(self).model_fields
        yield from self.model_extra or {}


class Block(dict[str, Any]):
    """A mapping that belongs to the user: any keys, readable as attributes, nested mappings too."""

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
            raise AttributeError(f"no key {key!r} in this block of the YAML (there: {known})") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __reduce__(self) -> tuple[type[Block], tuple[dict[str, Any]]]:
        return Block, (dict(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.dict_schema())


def blocks_within(value: Any) -> Any:
    """`value` with each mapping in it as a `Block`."""
    if isinstance(value, Block):
        return value
    if isinstance(value, dict):
        return Block(value)
    if isinstance(value, list):
        return [blocks_within(item) for item in value]
    return value
