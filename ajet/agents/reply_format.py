"""How an agent and a model understand each other: native tool calls, or a text format for models without them.

A `ReplyFormat` says what to add to the system prompt and to the request, reads a reply, and words what the model is
told: results, and what was wrong with a reply. Replies stay in the conversation as the model wrote them, so that a
conversation in training continues exactly what was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from ajet.agents.call_grammar import CallSyntaxError, read_call, read_value
from ajet.agents.model_function import AgentReply, Message, ToolCall, ToolSchema
from ajet.schema.errors import TaskDataError


class ReplyFormat(Protocol):
    """How replies are written."""

    def introduction(self, tools: Sequence[ToolSchema]) -> str:
        """What the system prompt says about it. Empty: nothing."""

    def request(self, tools: Sequence[ToolSchema]) -> dict[str, Any]:
        """Arguments of the model function."""

    def parse(self, message: Message, tools: Sequence[ToolSchema]) -> AgentReply: ...

    def results(self, results: Sequence[tuple[ToolCall, str]]) -> list[Message]:
        """The messages that carry tool results, in the order of the calls."""

    def tell(self, text: str) -> Message:
        """A message from the agent to the model."""


class NativeFormat:
    """Tool calls as the model's API has them. A reply without one is the answer, except for what it thinks first."""

    def introduction(self, tools: Sequence[ToolSchema]) -> str:
        return ""

    def request(self, tools: Sequence[ToolSchema]) -> dict[str, Any]:
        return {"tools": list(tools)} if tools else {}

    def parse(self, message: Message, tools: Sequence[ToolSchema]) -> AgentReply:
        inline, text = split_thinking(str(message.get("content") or ""))
        asked = message.get("tool_calls") or []
        reasoning = str(message.get("reasoning_content") or "").strip()
        thought = "\n".join(filter(None, (reasoning, inline)))
        if not asked:
            malformed = getattr(message, "malformed", ())
            if malformed and tools:
                return AgentReply(thought, problem=f"Your tool call could not be read: {'; '.join(malformed)}")
            return AgentReply(thought, answer=text)
        calls = tuple(_native_call(call, index) for index, call in enumerate(asked))
        return AgentReply("\n".join(filter(None, (thought, text))), calls)

    def results(self, results: Sequence[tuple[ToolCall, str]]) -> list[Message]:
        return [{"role": "tool", "tool_call_id": call.call_id, "content": text} for call, text in results]

    def tell(self, text: str) -> Message:
        return {"role": "user", "content": text}


def _native_call(call: Any, index: int) -> ToolCall:
    function = call.get("function") or {} if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        arguments = "" if arguments is None else json.dumps(arguments, default=repr)
    name, call_id = function.get("name"), call.get("id") if isinstance(call, dict) else None
    return ToolCall(str(name or ""), arguments, str(call_id or f"call_{index}"))


TEXT_INTRODUCTION = """\
You work in steps. In each step write what you think, then what you do, in exactly this form:

Thought: what you know, and what to do next
Action: the name of one tool
Action Input: its arguments, as one JSON object

Then stop: the result comes back as "Observation: …". Once you know the answer, write instead:

Thought: why you know it
Final Answer: the answer

The tools, each with the JSON schema of its arguments:
"""

EXPECTED = (
    'Write "Thought: …", then either "Action: <tool>" and "Action Input: <JSON object>", or "Final Answer: <answer>".'
)
_OPENS = re.compile(r"<think(?:ing)?>", re.I)
_CLOSES = re.compile(r"</think(?:ing)?>", re.I)
_MARK = re.compile(
    r"</?think(?:ing)?>|(?:^|(?<=</think>)|(?<=</thinking>))[ \t*_#]*"
    r"(Thought|Action Input|Action|Final Answer|Observation)[ \t*_]*:[ \t*_]*",
    re.M | re.I,
)


_ONE_LINE = re.compile(r"\s*[`\"']?([\w.-]+)[`\"']?[ \t]+Action Input[ \t]*:[ \t]*(.+)", re.I | re.S)


class TextFormat:
    """ReAct: `Thought:`, `Action:` with `Action Input:`, `Observation:`, `Final Answer:`.

    `Action: tool({"k": 1})` and `Action: tool(k=1)` are read as well, an input on the action's line, and several
    actions in one reply.
    """

    expected: ClassVar[str] = EXPECTED
    """What the model is told if its reply can't be read."""

    def introduction(self, tools: Sequence[ToolSchema]) -> str:
        described = [_described(tool) for tool in tools]
        return TEXT_INTRODUCTION + ("\n".join(described) if described else "(none: answer at once)")

    def request(self, tools: Sequence[ToolSchema]) -> dict[str, Any]:
        return {"stop": ["\nObservation:"]}  # the model must not write the results itself

    def parse(self, message: Message, tools: Sequence[ToolSchema]) -> AgentReply:
        reasoning = str(message.get("reasoning_content") or "").strip()
        text = str(message.get("content") or "")
        parts = _labelled(text)
        thoughts = [reasoning] if reasoning else []
        calls: list[ToolCall] = []
        for index, (label, body) in enumerate(parts):
            if label in ("", "thought"):
                thoughts.append(body)
            elif label == "final answer":
                if calls:
                    return AgentReply("\n".join(thoughts), problem="Give either actions or the final answer, not both")
                return AgentReply("\n".join(filter(None, thoughts)), answer=body)
            elif label == "action":
                after = parts[index + 1] if index + 1 < len(parts) else ("", "")
                found = self.action(body, after[1] if after[0] == "action input" else None, tools, len(calls))
                if isinstance(found, str):
                    return AgentReply("\n".join(filter(None, thoughts)), problem=f"{found}. {self.expected}")
                if found.name.lower() == "final answer":
                    return AgentReply("\n".join(filter(None, thoughts)), answer=str(found.arguments))
                calls.append(found)
        thought = "\n".join(filter(None, thoughts))
        if calls:
            return AgentReply(thought, tuple(calls))
        return AgentReply(thought, problem=f"The reply holds neither an action nor a final answer. {self.expected}")

    def action(self, body: str, given: str | None, tools: Sequence[ToolSchema], index: int) -> ToolCall | str:
        """The call that an `Action:` asks for (`given`: its `Action Input:`), or what is wrong with it."""
        call_id = f"call_{index}"
        answer = re.match(r"[`\"']?final answer[`\"']?\s*:?\s*", body, re.I)
        if answer is not None:
            said = body[answer.end() :]
            if not said and given is not None:
                said = _bare_answer(given)
            elif ":" not in answer[0]:
                said = _bare_answer(said)
            return ToolCall("final answer", said)
        if given is None and (one_line := _ONE_LINE.fullmatch(body)) is not None:
            body, given = one_line[1], one_line[2]
        name = body.strip().strip("`\"'")
        if given is not None:
            asked = _arguments_of(given)
            names = _parameters(tools, name) or ()
            if isinstance(asked, str) and len(names) == 1 and not asked.startswith("{"):  # it can mean nothing else
                return ToolCall(name, {names[0]: asked}, call_id)
            return ToolCall(name, asked, call_id)
        if re.fullmatch(r"[\w.-]+", name):
            return ToolCall(name, "{}", call_id)
        wanted = re.match(r"\s*([A-Za-z_][\w.-]*)\s*\(", body)
        parameters = _parameters(tools, wanted[1]) if wanted else None
        try:
            tool, arguments, end = read_call(body, parameters)
        except CallSyntaxError as error:
            return f"The action could not be read: {error}"
        if body[end:].strip().strip("`"):
            return f"There is more after the action: {body[end:].strip()[:60]!r}"
        return ToolCall(tool, arguments, call_id)

    def results(self, results: Sequence[tuple[ToolCall, str]]) -> list[Message]:
        several = len(results) > 1
        shown = [f"Observation{f' of {call.name}' if several else ''}: {text}" for call, text in results]
        return [{"role": "user", "content": "\n".join(shown)}]

    def tell(self, text: str) -> Message:
        return {"role": "user", "content": f"Observation: {text}"}


def _described(tool: ToolSchema) -> str:
    function = tool.get("function") or {}
    schema = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return f"- {function.get('name')}: {function.get('description', '')}\n  {schema}"


def split_thinking(text: str) -> tuple[str, str]:
    """What a reply thinks in tags before it begins, and the rest. The opening tag may have been the prompt's."""
    begin, closed = _OPENS.match(text.lstrip()), _CLOSES.search(text)
    if closed is None:
        return (_OPENS.sub("", text, 1).strip(), "") if begin else ("", text.strip())
    before = text[: closed.start()]
    if begin is None and _OPENS.search(before):
        return "", text.strip()
    return (_OPENS.sub("", before, 1) if begin else before).strip(), text[closed.end() :].strip()


def _labelled(text: str) -> list[tuple[str, str]]:
    """The parts of a reply, each with its label in lower case; up to an observation, which only we may write.

    A label inside the arguments of a call belongs to them, and a final answer goes on to the end. What is inside tags
    of thinking has no label, nor has what comes before a closing tag without an opening one, which was the prompt's.
    """
    parts: list[tuple[str, str]] = []
    label, begin, at = "", 0, 0
    while (mark := _MARK.search(text, at)) is not None:
        found, at = (mark[1] or mark[0]).lower(), mark.end()
        to_the_end = label == "observation" or (label == "final answer" and found != "observation")
        if found.startswith("</"):
            parts, label, begin = [("", text[: mark.start()])], "", at
        elif found.startswith("<"):
            closed = _CLOSES.search(text, at)
            inside, at = text[at : closed.start() if closed else None], closed.end() if closed else len(text)
            if not to_the_end:
                parts += [("", inside), (label, text[begin : mark.start()])]  # an action stays next to its input
                label, begin = "", at
        elif not to_the_end:
            parts.append((label, text[begin : mark.start()]))
            label, begin = found, at
            at = _end_of_call(label, text, at)
    parts.append((label, text[begin:]))
    stripped = [(label, body.strip()) for label, body in parts if label != "observation"]
    return [part for part in stripped if part[0] or part[1]]


def _end_of_call(label: str, text: str, start: int) -> int:
    """Where the arguments end that begin here, if they can be read; else `start`."""
    try:
        if label == "action input" or (label == "action" and text.startswith("{", start)):
            return read_value(text, start)[1]
        return read_call(text, start=start)[2] if label == "action" else start
    except CallSyntaxError:
        return start


def _bare_answer(text: str) -> str:
    """An answer that was given like a tool's argument: `"7"`, `("7")`, `{"answer": 7}`. All else is text as it is."""
    bare = text.strip()
    if bare.startswith("(") and bare.endswith(")"):
        bare = bare[1:-1].strip()
    try:
        value, end = read_value(bare)
    except CallSyntaxError:
        return bare
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) and end == len(bare) else bare


def _arguments_of(text: str) -> str | dict[str, Any]:
    """An `Action Input`: JSON, also in a fence, or a Python literal. Anything else is left to the tool's schema."""
    bare = re.sub(r"^```\w*\n(.*?)\n?```$", r"\1", text.strip(), flags=re.S)
    try:
        value, end = read_value(bare)
    except CallSyntaxError:
        return bare
    return value if isinstance(value, dict) and not bare[end:].strip() else bare


def _parameters(tools: Sequence[ToolSchema], name: str) -> tuple[str, ...] | None:
    """The names of a tool's arguments, in order. None: there is no such tool."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            return tuple((function.get("parameters") or {}).get("properties") or {})
    return None


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
