"""Messages and tools of an OpenAI chat request: checked, and stripped of what the model never sees."""

from __future__ import annotations

from typing import Any, Literal, cast

from ajet.gateway.fields import BadField, kind
from ajet.schema.chat import Message, Tool
from ajet.schema.errors import UnsupportedContentError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def read_messages(values: list[Any], key: str = "messages") -> list[Message]:
    """The messages in the form the tracker takes: role, content, reasoning_content, tool_calls, tool_call_id, name."""
    if not values:
        raise BadField(key, f"{key} must hold at least one message")
    return [_message(value, f"{key}[{index}]") for index, value in enumerate(values)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadField(where, f"{where} must be an object, not {kind(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadField(f"{where}.role", f"{where}.role must be one of {', '.join(sorted(ROLES))}, not {role!r:.40}")
    message: Message = {"role": role, "content": _content(value, where)}
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        if value.get("tool_calls"):
            message["tool_calls"] = _tool_calls(value["tool_calls"], f"{where}.tool_calls")
        if value.get("function_call"):
            raise BadField(f"{where}.function_call", "function_call is not supported: use tool_calls")
    elif message["content"] is None:
        raise BadField(f"{where}.content", f"{where}.content is missing")
    for name in ("name", "tool_call_id"):
        if (text := value.get(name)) is not None:
            if not isinstance(text, str):
                raise BadField(f"{where}.{name}", f"{where}.{name} must be a string, not {kind(text)}")
            message[name] = text
    return message


def _content(message: dict[str, Any], where: str) -> str | None:
    """Text, or the text of a list of parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(
            f"{where}.content", f"{where}.content must be a string or an array of parts, not {kind(content)}"
        )
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        place = f"{where}.content[{index}]"
        if not isinstance(part, dict):
            raise BadField(place, f"{place} must be an object, not {kind(part)}")
        part_type = part.get("type")
        if part_type == "refusal":
            part_text = part.get("refusal")
        elif part_type == "text":
            part_text = part.get("text")
        else:
            raise UnsupportedContentError(f"{place}: only parts of type text are supported, not {part_type!r:.40}")
        if not isinstance(part_text, str):
            raise BadField(f"{place}.text", f"{place}.text must be a string, not {kind(part_text)}")
        texts.append(part_text)
    return "".join(texts)


def _tool_calls(values: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(values, list):
        raise BadField(where, f"{where} must be an array, not {kind(values)}")
    calls = []
    for index, value in enumerate(values):
        place = f"{where}[{index}]"
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict):
            raise BadField(place, f"{place} must be an object with a function")
        name, arguments = function.get("name"), function.get("arguments", "")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise BadField(f"{place}.function", f"{place}.function needs a name and arguments, both strings")
        call_id = value.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise BadField(f"{place}.id", f"{place}.id must be a string, not {kind(call_id)}")
        calls.append({"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


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
