"""`ajet schema`: the JSON schema of configs, for completion and checks in an editor."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ajet.system.command_line import CommandParser


def run(argv: Sequence[str]) -> int:
    """Print it."""
    CommandParser("ajet schema", description=__doc__).parse_args(argv)
    from ajet.config.docs import editor_schema

    print(json.dumps(editor_schema(), indent=2, ensure_ascii=False))
    return 0
