"""The final configuration of Trinity: its own defaults, our settings, the user's pass-through. Needs Trinity."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ajet.backbone.ray.settings import flatten
from ajet.schema.errors import ConfigError


def compose_trinity_config(settings: Mapping[str, Any]) -> Any:
    """Trinity's configuration object with these settings. A key that Trinity does not have is an error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from trinity.common.config import Config

    schema = OmegaConf.structured(Config)
    plain = OmegaConf.to_container(schema, resolve=False)
    assert isinstance(plain, dict)
    known = {key for key, _ in flatten({str(key): value for key, value in plain.items()})}
    for key, value in settings.items():
        try:
            schema = OmegaConf.merge(schema, _nested(key, value))
        except OmegaConfBaseException as error:
            near = get_close_matches(key, known, n=1)
            hint = f": did you mean {near[0]}?" if near and near[0] != key else ""
            first = str(error).splitlines()[0]
            raise ConfigError(f"Trinity can't take {key} = {value!r} ({first}){hint}") from error
    return OmegaConf.to_object(schema)


def _nested(key: str, value: Any) -> dict[str, Any]:
    nested = value
    for name in reversed(key.split(".")):
        nested = {name: nested}
    assert isinstance(nested, dict)
    return nested
