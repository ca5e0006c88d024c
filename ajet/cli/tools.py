"""`ajet tools`: the tools that agents can be given, with descriptions and schemas."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser

WIDTH = 100


def run(argv: Sequence[str]) -> int:
    """List tools."""
    parser = CommandParser("ajet tools", description="The tools that agents can be given.")
    parser.add_argument(
        "tools",
        nargs="*",
        help="entries of a YAML's list of tools: names, module->object, file.py->object, '{mcp: {command: …}}' "
        "(default: all that come with ajet)",
    )
    parser.add_argument("--json", action="store_true", help="print the schemas as the model gets them")
    arguments = parser.parse_args(argv)

    import asyncio

    from ajet.agents.tools import get_global_tool_registry, make_tools, schemas_of
    from ajet.config.yaml_source import parse_value

    specs = [parse_value(text, "TOOL") if text.lstrip().startswith("{") else text for text in arguments.tools]
    schemas = asyncio.run(schemas_of(make_tools(specs or get_global_tool_registry().listed())))
    if arguments.json:
        print(printable(json.dumps(schemas, indent=2, ensure_ascii=False)))
    else:
        print(printable("\n\n".join(_shown(schema["function"]) for schema in schemas)))
    return 0


def _shown(function: dict[str, Any]) -> str:
    from ajet.agents.tools import type_of

    lines = [function["name"], *_wrapped(function["description"], "  ")]
    properties: dict[str, Any] = function["parameters"].get("properties", {})
    required = function["parameters"].get("required", [])
    for name, schema in properties.items():
        optional = "" if name in required else ", optional"
        lines += _wrapped(f"{name} ({type_of(schema)}{optional}): {schema.get('description', '')}".rstrip(": "), "    ")
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
