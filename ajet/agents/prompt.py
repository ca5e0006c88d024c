"""What an agent may be given as its task, as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ajet.agents.model_function import Message
from ajet.schema.errors import TaskDataError

NAMES = ("prompt", "question", "problem", "problem_statement", "query", "content", "description", "task")
"""The keys under which a mapping may hold the task, most telling first."""


def prompt_messages(prompt: Any) -> list[Message]:
    """The messages of a text, a list of messages, a `Task`, a `WorkflowTask`, or a mapping that holds one of them."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if hasattr(prompt, "task"):
        prompt = prompt.task
    if hasattr(prompt, "main_query"):
        return _of_task(list(prompt.init_messages), prompt.main_query)
    if isinstance(prompt, Mapping):
        if isinstance(prompt.get("messages"), list):
            return prompt_messages(prompt["messages"])
        for name in NAMES:
            if isinstance(prompt.get(name), str | list):
                return prompt_messages(prompt[name])
        raise TaskDataError(
            f"a task holds none of {', '.join(('messages', *NAMES))}: {json.dumps(dict(prompt), default=repr):.200}"
        )
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return [dict(message) for message in prompt]
    raise TaskDataError(
        "a prompt must be text, a non-empty list of messages ({'role': …, 'content': …}), a task, or a mapping, not "
        f"{prompt!r:.200}"
    )


def _of_task(messages: list[Message], query: str) -> list[Message]:
    """A task's first messages; its question, unless they end with it."""
    if messages and (not query or messages[-1].get("role") == "user"):
        return [dict(message) for message in messages]
    return [*(dict(message) for message in messages), {"role": "user", "content": query}]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
