"""Which family a model belongs to, told by the marks that its chat template writes."""

from __future__ import annotations

from typing import Any

from ajet.session.parsers.base import ReplyParser
from ajet.session.parsers.deepseek import DEEPSEEK
from ajet.session.parsers.hermes import HERMES
from ajet.session.parsers.kimi import KIMI
from ajet.session.parsers.llama import LLAMA
from ajet.session.parsers.mistral import MISTRAL
from ajet.session.parsers.tagged_arguments import GLM, QWEN_XML

FAMILIES = {parser.name: parser for parser in (HERMES, QWEN_XML, LLAMA, MISTRAL, DEEPSEEK, GLM, KIMI)}

_MARKS = (
    ("<｜tool▁call▁begin｜>", DEEPSEEK),
    ("<arg_key>", GLM),
    ("<function=", QWEN_XML),
    ("<|tool_call_begin|>", KIMI),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ("<tool_call>", HERMES),
    ("<|start_header_id|>", LLAMA),
)
"""The first that a template contains decides: from the most particular to the most general."""


def pick_parser(source: Any) -> ReplyParser:
    """The parser for a chat template (or for a tokenizer, by its template). Hermes/Qwen, the most common form, if it
    shows none."""
    template = source if isinstance(source, str) else getattr(source, "chat_template", None)
    if isinstance(template, dict):
        template = "".join(map(str, template.values()))
    for mark, parser in _MARKS:
        if mark in (template or ""):
            return parser
    return HERMES
