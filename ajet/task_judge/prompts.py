"""`Template`: a judge's prompt with placeholders, and what they stand for in an episode."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ajet.schema.errors import ConfigError, JudgeFault
from ajet.task_judge.group_judge import JudgedEpisode

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*(?:\.[\w-]+)?)\}")
NAMES = ("query", "answer", "reference", "conversation", "environment")
OPEN = ("task.", "output.")
CLOSING = re.compile(r"</(?=(?:query|answer|reference|conversation|environment)\b)", re.IGNORECASE)


class Template:
    """Text in which `{name}` is filled in. Braces around anything but a name stay as they are."""

    def __init__(self, text: str, key: str, *, more: tuple[str, ...] = ()) -> None:
        """`key`: of the YAML, for errors. `more`: names beside those of an episode."""
        self.text = text
        self.key = key
        self.names = set(PLACEHOLDER.findall(text))
        known = (*more, *NAMES)
        for name in sorted(self.names):
            if name not in known and not name.startswith(OPEN):
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {{{near[0]}}}?" if near else "write \\u007b in JSON only around quoted names"
                raise ConfigError(
                    f"{key}: unknown placeholder {{{name}}}; {hint} There are {', '.join(f'{{{n}}}' for n in known)}, "
                    "{task.KEY} and {output.KEY}"
                )

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with its placeholders filled in. What is filled in is not looked at again."""
        return PLACEHOLDER.sub(lambda found: values[found[1]] if found[1] in values else found[0], self.text)


def episode_values(
    judged: JudgedEpisode, names: set[str], *, answer_field: str, reference_field: str
) -> dict[str, str]:
    """What the names stand for in an episode. Raises JudgeFault for what the episode lacks."""
    task, output = judged.workflow_task.task, judged.workflow_output
    values: dict[str, str] = {}
    for name in names:
        group, _, field = name.partition(".")
        if name == "query":
            values[name] = task.main_query or _last_user_message(task.init_messages)
        elif name == "answer":
            values[name] = answer_of(judged, answer_field)
        elif name == "reference":
            values[name] = as_text(_field(task.metadata, reference_field, "the task's metadata", "reference_field"))
        elif name == "conversation":
            values[name] = conversation(judged)
        elif name == "environment":
            if "environment" not in judged.later.kept:
                raise JudgeFault(
                    "the judge's prompt has {environment}, and the episode has none: set ajet.rollout.environment, or "
                    "leave it out of the prompt"
                )
            values[name] = as_text(judged.later.kept["environment"])
        elif group == "task" and field:
            values[name] = as_text(_field(task.metadata, field, "the task's metadata", "prompt"))
        elif group == "output" and field:
            values[name] = as_text(_field(output.metadata, field, "the output's metadata", "prompt"))
    return {name: CLOSING.sub("<\\/", value) for name, value in values.items()}


def answer_of(judged: JudgedEpisode, field: str) -> str:
    """The answer that the workflow reports, or else the episode's last reply."""
    reported = judged.workflow_output.metadata.get(field)
    return judged.last_reply if reported is None else as_text(reported)


def conversation(judged: JudgedEpisode) -> str:
    """All calls of an episode, as text."""
    lines: list[str] = []
    for call in judged.calls:
        for message in (*call.messages, {**call.reply, "role": f"assistant ({call.agent})"}):
            said = as_text(message.get("content") or "")
            for tool_call in message.get("tool_calls") or []:
                said += f"\n[calls {json.dumps(tool_call.get('function', tool_call), ensure_ascii=False)}]"
            lines.append(f"{message.get('role', 'assistant')}: {said.strip()}")
    return "\n\n".join(lines)


def as_text(value: Any) -> str:
    """Text as it is; all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _field(values: Mapping[str, Any], field: str, where: str, key: str) -> Any:
    if values.get(field) is None:
        raise JudgeFault(
            f"the judge needs {field!r} in {where}, which has: {', '.join(map(str, values)) or 'nothing'}. Name the "
            f"right field in the judge's {key}, or leave it out of the prompt"
        )
    return values[field]


def _last_user_message(messages: list[dict[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role") == "user":
            return as_text(message.get("content") or "")
    return ""
