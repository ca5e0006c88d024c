"""Messages and tools of an OpenAI chat request."""

from __future__ import annotations

from typing import Any, Literal, cast

from ajet.gateway.fields import BadField, kind
from ajet.schema.chat import Message, Tool


def read_messages(values: list[Any], key: str = "messages") -> list[Message]:
    """The messages as they came: what is in them is checked where they are read, by the tracker."""
    if not values:
        raise BadField(key, f"{key} must hold at least one message")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise BadField(f"{key}[{index}]", f"{key}[{index}] must be an object, not {kind(value)}")
    return values


def read_tools(values: list[Any]) -> list[Tool]:
    """The functions offered."""
    tools = []
    for index, value in enumerate(values):
        where = f"tools[{index}]"
        if not isinstance(value, dict):
            raise BadField(where, f"{where} must be an object, not {kind(value)}")
        if value.get("type", "function") != "function":
            raise BadField(f"{where}.type", f"{where}.type must be 'function', not {value.get('type')!r:.40}")
        function = value.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadField(f"{where}.function", f"{where}.function must be an object with a name")
        if not isinstance(function.get("description", ""), str | None):
            raise BadField(f"{where}.function.description", f"{where}.function.description must be a string")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise BadField(f"{where}.function.parameters", f"{where}.function.parameters must be a JSON schema")
        tools.append({"type": "function", "function": function})
    return tools


def read_tool_choice(value: Any, tools: list[Tool]) -> Literal["auto", "none", "required"] | Tool:
    """`auto`, `none`, `required`, or the one function to call."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise BadField("tool_choice", f"tool_choice must be auto, none, required or a function, not {value!r:.40}")
        if value == "required" and not tools:
            raise BadField("tool_choice", "tool_choice is 'required' but no tools are given")
        return cast(Literal["auto", "none", "required"], value)
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadField("tool_choice", 'tool_choice must be a string or {"type": "function", "function": {"name": …}}')
    if name not in {tool["function"]["name"] for tool in tools}:
        raise BadField("tool_choice", f"tool_choice names {name!r:.60}, which is not among the tools")
    return {"type": "function", "function": {"name": name}}
