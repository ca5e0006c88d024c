"""`make_config`: a config from Python instead of a YAML file, for notebooks and tests."""

from __future__ import annotations

from typing import Any

from ajet.config.root import Config


def make_config(overrides: dict[str, Any] | None = None, /, **blocks: Any) -> Config:
    """The defaults, with overrides such as `{"rollout.num_repeat": 2}` (keys as on the command line).

    Keyword arguments are the user's own top-level blocks. Types and ranges are checked, files are not.
    """
    tree: dict[str, Any] = {"ajet": {}, **blocks}
    for key, value in (overrides or {}).items():
        parts = key.removeprefix("ajet.").split(".")
        place = tree["ajet"]
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    return Config.model_validate(tree)
