"""`Prompting`: from a request to prompt ids. Appends to a recorded call where that is right, else renders the whole.

A request goes on from the latest recorded reply among its messages that ended by itself, was asked for with the same
tools and template arguments, and behind which the template appends. What stood in the way of a nearer one is the fork.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ajet.context_tracker.conversation import Turn
from ajet.context_tracker.growth import Growth, Node
from ajet.context_tracker.record import Audit, CallRecord
from ajet.context_tracker.renderer import NotStable, Renderer
from ajet.schema.call_tree import Fork
from ajet.schema.chat import Message, Tool

CANDIDATES = 3
"""How many recorded calls, latest first, are tried before a request is rendered whole."""
FIRST_AUDIT = 8
"""Messages at which appended text is first compared with the whole conversation's, and then at each multiple of it."""
AUDIT_FACTOR = 4


class Request(NamedTuple):
    """A request, as far as its prompt depends on it."""

    agent: str
    turn: Turn
    """Its last message."""
    tools: Sequence[Tool]
    toolset: int
    kwargs: Mapping[str, Any]
    kwargs_key: str


class Prompt(NamedTuple):
    """What the engine is to be given, and where it comes from."""

    ids: list[int]
    parent: CallRecord | None
    """The call that the request extends."""
    origin: Node
    """The run behind which `added` comes."""
    added: list[int]
    fork: Fork | None
    audit: Audit


class Prompting:
    """The prompts of one episode."""

    def __init__(self, renderer: Renderer, growth: Growth, records: Sequence[CallRecord]) -> None:
        self._renderer = renderer
        self._growth = growth
        self._records = records

    def prompt(self, request: Request) -> Prompt:
        """The prompt of a request; raises TemplateRefusal."""
        if (twin := _twin(request)) is not None:
            parent = None if twin.call.extends < 0 else self._records[twin.call.extends]
            return Prompt(twin.held_prompt(), parent, twin.prompt, [], None, twin.audit)
        parent, appended, fork = self._find_parent(request)
        depth = request.turn.depth
        if parent is None or appended is None or parent.reply is None:
            messages = [turn.resolved() for turn in request.turn.path()]
            text = self._renderer.text(messages, request.tools, request.kwargs)
            ids = self._renderer.encoder.whole(text)
            return Prompt(ids, None, self._growth.root, ids, fork, Audit(text, max(FIRST_AUDIT, depth)))
        added = self._renderer.closing_ids(appended, parent.reply.ids[-1:].tolist())
        if parent.ids is not None:
            ids = [*parent.ids[0], *parent.ids[1], *added]
        else:
            ids = self._renderer.encoder.shared(self._growth.path_ids(parent.reply)) + added
        audit = parent.audit if depth < AUDIT_FACTOR * parent.audit.messages else Audit(parent.audit.opening, depth)
        return Prompt(ids, parent, parent.reply, added, fork, audit)

    def _find_parent(self, request: Request) -> tuple[CallRecord | None, str | None, Fork | None]:
        """(the call that the request extends, the text to append, why it does not extend a nearer one)."""
        fork: Fork | None = None
        for spoken in islice(_with_replies(request.turn), CANDIDATES):
            record, why = self._usable(request, spoken)
            detail = ""
            if record is not None:
                appended = self._appended(request, record, spoken)
                if isinstance(appended, str):
                    return record, appended, fork
                why, detail = "template_not_stable", appended.why
            fork = fork or Fork(why, (record or spoken.replies[-1]).index, detail)
        return None, None, fork

    def _usable(self, request: Request, spoken: Turn) -> tuple[CallRecord | None, str]:
        """The recorded call whose reply this message is and which may be gone on from, or why there is none."""
        why = ""
        usable = []
        for record in spoken.replies:
            if not record.closed:
                why = why or ("reply_cut_by_length" if record.call.finish_reason == "length" else "reply_aborted")
            elif record.call.tools != request.toolset and self._renderer.supports_tools:
                why = why or "tools_changed"
            elif record.kwargs_key != request.kwargs_key:
                why = why or "template_arguments_changed"
            elif spoken.reasoning and spoken.reasoning.strip() != record.reasoning:
                why = why or "reasoning_changed"
            else:
                usable.append(record)
        if not usable:
            return None, why
        return min(usable, key=lambda record: (record.call.agent != request.agent, record.reply_key)), ""

    def _appended(self, request: Request, record: CallRecord, spoken: Turn) -> str | NotStable:
        renderer, tools, kwargs = self._renderer, request.tools, request.kwargs
        new: list[Message] = [step.resolved() for step in request.turn.since(spoken.depth)]
        appended = renderer.appended(record.turn.skeleton, spoken.message, new, bool(tools), kwargs)
        if isinstance(appended, NotStable) or request.turn.depth < AUDIT_FACTOR * record.audit.messages:
            return appended
        history = [step.resolved() for step in record.turn.path()]
        whole = renderer.text([*history, spoken.message, *new], tools, kwargs)
        if not whole.startswith(record.audit.opening):
            return NotStable("the template has changed how it begins this conversation (a date, or its length)")
        keeps = renderer.reasoning_history == "keep" or whole.startswith(renderer.text(history, tools, kwargs))
        if keeps and whole.endswith(appended):
            return appended
        return renderer.probe.forbid(record.turn.skeleton, spoken.message, new, bool(tools), kwargs)


def _twin(request: Request) -> CallRecord | None:
    """An earlier call of the same request (a retry, a further choice) whose prompt is at hand."""
    for record in request.turn.prompts:
        same = record.call.agent == request.agent and record.call.tools == request.toolset
        if same and record.kwargs_key == request.kwargs_key and record.held_prompt():
            return record
    return None


def _with_replies(turn: Turn) -> Iterator[Turn]:
    """The recorded replies in a request's messages, latest first."""
    current: Turn | None = turn
    while current is not None:
        if current.replies:
            yield current
        current = current.parent
