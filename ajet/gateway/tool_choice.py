"""`tool_choice` and the tools it names, in OpenAI's chat and Responses forms.

A choice is never forced: what a reply lacks is named in its `malformed`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

from ajet.gateway.fields import BadField, kind
from ajet.schema.chat import Tool

_WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


class ToolChoice(NamedTuple):
    """Which tools the reply should call."""

    choice: Literal["auto", "none", "required"] | Tool = "auto"
    allowed: tuple[str, ...] | None = None
    """The only tools that may be called; None: all on offer."""


def read_tool_choice(value: Any, tools: list[Tool]) -> ToolChoice:
    """`auto`, `none`, `required` (or `any`), one function, or `allowed_tools`."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        return ToolChoice(_word(value, tools))
    choice = value.get("type") if isinstance(value, dict) else None
    if choice == "allowed_tools":
        nested = value.get("allowed_tools")
        return _allowed(nested if isinstance(nested, dict) else value, tools)
    if choice == "function" or (isinstance(value, dict) and choice is None):
        return ToolChoice({"type": "function", "function": {"name": _name(value, tools)}})
    if isinstance(value, dict):
        raise BadField("tool_choice", f"tool_choice of type {choice!r:.40} is not supported: only functions are")
    raise BadField("tool_choice", f"tool_choice must be a string or an object, not {kind(value)}")


def _word(value: Any, tools: list[Tool]) -> Literal["auto", "none", "required"]:
    word = _WORDS.get(value) if isinstance(value, str) else None
    if word is None:
        raise BadField("tool_choice", f"tool_choice must be auto, none, required or a function, not {value!r:.40}")
    if word == "required" and not tools:
        raise BadField("tool_choice", f"tool_choice is {value!r} but no tools are given")
    return cast(Literal["auto", "none", "required"], word)


def _allowed(value: dict[str, Any], tools: list[Tool]) -> ToolChoice:
    named = value.get("tools")
    if not isinstance(named, list) or not all(isinstance(tool, dict) for tool in named):
        raise BadField("tool_choice", "tool_choice of type 'allowed_tools' needs a list of tools")
    names = tuple(_name(tool, tools) for tool in named)
    return ToolChoice(_word(value.get("mode", "auto"), tools), names)


def _name(value: dict[str, Any], tools: list[Tool]) -> str:
    """The function's name, beside `type` or inside `function`."""
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadField("tool_choice", 'tool_choice must be a string or {"type": "function", "function": {"name": …}}')
    if name not in {tool["function"]["name"] for tool in tools}:
        raise BadField("tool_choice", f"tool_choice names {name!r:.60}, which is not among the tools")
    return name
