"""Actions and observations as messages and text: what agents and services exchange with environments."""

from __future__ import annotations

import json
from typing import Any

from ajet.environment.environment import Action, Observation

NOTHING_OBSERVED = "(The environment answered with nothing.)"
"""What an agent is told in place of an empty observation: an empty message helps no model."""


def action_message(action: Action) -> dict[str, Any]:
    """An action as an assistant message with text as its content."""
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    if hasattr(action, "model_dump"):  # a client's message object
        action = action.model_dump(exclude_none=True)
    if not isinstance(action, dict):
        return {"role": "assistant", "content": json.dumps(action, default=str)}
    message = {"role": "assistant", **action}
    message["content"] = _content_text(message.get("content"))
    return message


def action_text(action: Action) -> str:
    """The text of an action."""
    text: str = action_message(action)["content"]
    return text


def observation_messages(observation: Observation) -> list[dict[str, Any]]:
    """An observation as the messages that begin a conversation."""
    if isinstance(observation, list) and observation and all(_is_message(item) for item in observation):
        return [dict(item) for item in observation]
    if _is_message(observation):
        return [dict(observation)]
    return [{"role": "user", "content": observation_text(observation)}]


def observation_text(observation: Observation) -> str:
    """An observation as one text."""
    if isinstance(observation, str):
        return observation
    if _is_message(observation):
        return _content_text(observation.get("content"))
    if isinstance(observation, list) and observation and all(_is_message(item) for item in observation):
        return "\n\n".join(_content_text(item.get("content")) for item in observation)
    return json.dumps(observation, ensure_ascii=False, default=str)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _content_text(content: Any) -> str:
    """A message's content as text: of a list of parts, the first text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return texts[0] or "" if texts else ""
    return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
