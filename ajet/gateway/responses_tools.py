"""The tools of a Responses request, as function tools of a chat request, and their calls back in the request's form.

- A `namespace` holds functions: `name` in namespace `ns` is offered as `ns.name`.
- A `custom` tool takes free text: it is offered as a function with one string, `input`. Its grammar is described to the
  model, not enforced.
- `web_search` and `tool_search` are left out: clients such as Codex send them with every request, and a model that
  isn't offered a tool does without it.
- All other hosted tools are refused by name.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ajet.gateway.fields import BadField, kind
from ajet.schema.chat import Tool

LEFT_OUT = ("web_search", "web_search_preview", "tool_search")


class ToolForm(NamedTuple):
    """How a tool was given."""

    name: str
    namespace: str = ""
    custom: bool = False


class ResponsesTools(NamedTuple):
    """The tools of one request."""

    tools: list[Tool]
    forms: dict[str, ToolForm]
    """By the name under which the model knows them; plain functions aren't in here."""

    def call_item(self, call: dict[str, Any]) -> dict[str, Any]:
        """What an item says about a call: its type, its name and its arguments."""
        function = call["function"]
        form = self.forms.get(function["name"], ToolForm(function["name"]))
        if form.custom:
            text = custom_input(function["arguments"])
            return {"type": "custom_tool_call", "call_id": call["id"], "name": form.name, "input": text}
        item = {"type": "function_call", "call_id": call["id"], "name": form.name, "arguments": function["arguments"]}
        return {**item, "namespace": form.namespace} if form.namespace else item


def joined_name(name: str, namespace: Any) -> str:
    """The name under which the model knows a function."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def custom_input(arguments: str) -> str:
    """The text that a call gives to a custom tool."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    """The arguments of a call that gives this text to a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def read_tools(values: list[Any], where: str = "tools", namespace: str = "") -> ResponsesTools:
    """Check the tools."""
    read = ResponsesTools([], {})
    for index, value in enumerate(values):
        _read_tool(value, f"{where}[{index}]", namespace, read)
    return read


def _read_tool(value: Any, where: str, namespace: str, read: ResponsesTools) -> None:
    if not isinstance(value, dict):
        raise BadField(where, f"{where} must be an object, not {kind(value)}")
    tool_type = value.get("type")
    if tool_type in LEFT_OUT:
        return
    if tool_type not in ("function", "custom", "namespace"):
        raise BadField(
            f"{where}.type", f"{where}: only function, custom and namespace tools are supported, not {tool_type!r:.40}"
        )
    name, description = value.get("name"), value.get("description")
    if not isinstance(name, str) or not name:
        raise BadField(f"{where}.name", f"{where} needs a name")
    if not isinstance(description, str | None):
        raise BadField(f"{where}.description", f"{where}.description must be a string")
    if tool_type == "namespace":
        nested = value.get("tools")
        if not isinstance(nested, list):
            raise BadField(f"{where}.tools", f"{where}.tools must be an array, not {kind(nested)}")
        inner = read_tools(nested, f"{where}.tools", name)
        read.tools.extend(inner.tools)
        read.forms.update(inner.forms)
        return
    known = joined_name(name, namespace)
    function = _custom(value, where) if tool_type == "custom" else _function(value, where)
    if namespace or tool_type == "custom":
        read.forms[known] = ToolForm(name, namespace, tool_type == "custom")
    read.tools.append({"type": "function", "function": {**function, "name": known}})


def _function(value: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(value.get("parameters"), dict | None):
        raise BadField(f"{where}.parameters", f"{where}.parameters must be a JSON schema")
    return {key: value[key] for key in ("name", "description", "parameters", "strict") if key in value}


def _custom(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Free text as a function's only argument."""
    form = value.get("format")
    if not isinstance(form, dict | None):
        raise BadField(f"{where}.format", f"{where}.format must be an object, not {kind(form)}")
    description = value.get("description") or ""
    if form and form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        description = f"{description}\n\nIts input follows this {syntax} grammar:\n{definition}".strip()
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": value["name"], "description": description, "parameters": schema}
