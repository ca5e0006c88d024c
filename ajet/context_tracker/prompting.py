"""`Renderer` and `Prompting`: from a request to prompt ids. They append to a recorded call where that is right,
else render the whole conversation, and say why a call forked.

A request extends the latest recorded reply among its messages that ended by itself, was asked for with the same tools
and template arguments, and after which the template only appends. What ruled out a later one is the fork's reason; if
none was, but another call has gone on from there already, the first message that differs from it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ajet.context_tracker.conversation import Audit, CallRecord, Growth, Node, Turn
from ajet.context_tracker.messages import (
    ReasoningHistory,
    Shape,
    Skeleton,
    plain_messages,
    shape_after,
    split_reasoning,
    stable_json,
)
from ajet.context_tracker.template import ChatTemplate
from ajet.context_tracker.template_probe import NotStable, TemplateProbe, common_length
from ajet.schema.chat import Message, Tool
from ajet.schema.episode import ROOT, CallTree, Fork, IntArray
from ajet.schema.errors import InvalidRequestError


class Renderer:
    """Turns messages into token ids, and token ids into text. Belongs to the service loop and its one thread for long
    prompts."""

    def __init__(
        self, tokenizer: Any, *, reasoning_history: ReasoningHistory = "template", end_ids: Iterable[int] = ()
    ) -> None:
        """`end_ids`: ids that end a reply, besides the tokenizer's own and those of its template."""
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.encoder = self.template.encoder
        self.reasoning_history = reasoning_history
        self.probe = TemplateProbe(self.template, reasoning_history)
        ids = [tokenizer.convert_tokens_to_ids(token) for token in self.probe.end_tokens]
        self.end_ids: frozenset[int] = frozenset(
            i for i in (*ids, tokenizer.eos_token_id, *end_ids) if i is not None and i != tokenizer.unk_token_id
        )
        """Ids that end a reply."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a whole conversation, given in OpenAI's form."""
        plain = plain_messages(messages)
        return self.encoder.whole(self.text(plain, tools, template_kwargs or {}, generate=add_generation_prompt))

    def length(
        self, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, Any], most: int
    ) -> int:
        """How many ids a conversation has; if its beginning alone has more than `most`, how many that has."""
        text = self.text(plain_messages(messages), tools, template_kwargs)
        return self.encoder.beyond(text, most) or len(self.encoder.whole(text))

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, Any], *, generate: bool = True
    ) -> str:
        """The rendered text of plain messages, with a marker wherever a user's text imitates a control token."""
        fitted = self.template.fit(messages, first=True)
        return self.template.text(fitted, self.encoder.mark(list(tools)) or None, kwargs, generate=generate)

    def read_tokens(self, ids: Sequence[int]) -> TokenPrompt:
        """A prompt given as token ids. Raises InvalidRequestError."""
        return TokenPrompt(self, ids)

    def closing_ids(self, text: str, sampled: Sequence[int]) -> list[int] | NotStable:
        """The ids of appended text, without the end token if the model sampled it itself."""
        ids = self.encoder.continuation(text)
        control = self.encoder.first_control(text)
        if sampled and ids and sampled[-1] == ids[0] and text.startswith(control or "\0"):
            return ids[1:]
        if not sampled or sampled[-1] not in self.end_ids:
            return ids
        said, written = (self.tokenizer.decode(part) for part in (sampled[-1:], ids[:1]))
        return NotStable(f"the model ended its reply with {said!r}, where the template writes {written!r}")

    def decode(self, token_ids: Sequence[int], *, stopped_by: str | int | None = None) -> str:
        """The raw text of a reply, without its end token and cut at the stop string."""
        ids = list(token_ids)
        if ids and (ids[-1] in self.end_ids or ids[-1] == stopped_by):
            ids.pop()
        text: str = self.encoder.decode(ids)
        return text.partition(stopped_by)[0] if isinstance(stopped_by, str) else text


class TokenPrompt:
    """A prompt of token ids, checked, and read as text no more than once however many choices are asked for."""

    def __init__(self, renderer: Renderer, ids: Sequence[int]) -> None:
        size = len(renderer.tokenizer)
        if not ids or not all(type(token) is int and 0 <= token < size for token in ids):
            raise InvalidRequestError(f"the prompt must be at least one token id, each from 0 to {size - 1}")
        self.ids: IntArray = np.asarray(ids, np.int32)
        self._renderer = renderer
        self._texts: dict[int, str] = {}

    def text_from(self, start: int) -> str:
        """What the ids from `start` on say."""
        if start not in self._texts:
            self._texts[start] = self._renderer.decode(self.ids[start:].tolist())
        return self._texts[start]


RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)
"""Arguments of the rendering itself, which a request may not set as arguments of its template."""


def template_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request's arguments of the template. Raises InvalidRequestError."""
    if given and (taken := RESERVED & given.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs may not set {', '.join(sorted(taken))}: that is not an argument of the template"
        )
    return dict(given or {})


CANDIDATES = 3
"""How many recorded replies, latest first, are tried before a request is rendered whole."""
AUDIT_FACTOR = 4
"""Besides each new shape of conversation, each that has grown to this many times the messages of its last whole
rendering is rendered whole and compared."""
FIRST_AUDIT = 8
"""A shorter first prompt counts as this many messages: short conversations are compared for their shape only."""
EXCERPT = 60
"""Characters of a changed text that are shown."""
LOOK_BACK = 16
"""How many of an agent's latest calls are compared with a call that extends none."""
TOP_REASONS = 5


class PromptRequest(NamedTuple):
    """The part of a request that decides its prompt."""

    agent: str
    turn: Turn
    """Its last message."""
    tools: Sequence[Tool]
    toolset: int
    kwargs: Mapping[str, Any]
    kwargs_key: str
    restated: int
    """What `Conversations.restated` is."""


class Prompt(NamedTuple):
    """What the engine will be given, and where it comes from."""

    ids: list[int] | None
    """None: those of its parent, and `added`. See `ids_of`."""
    parent: CallRecord | None
    """The call that the request extends."""
    origin: Node
    """The run that `added` follows."""
    added: list[int]
    shape: Skeleton
    """The shape of its messages."""
    fork: Fork | None
    audit: Audit

    @property
    def length(self) -> int:
        """How many ids it has."""
        return self.origin.end + len(self.added)


class Prompting:
    """The prompts of one episode."""

    def __init__(
        self, renderer: Renderer, growth: Growth, records: Sequence[CallRecord], call_ids: Container[str]
    ) -> None:
        """`call_ids`: of all tool calls in the episode's messages so far."""
        self._renderer = renderer
        self._growth = growth
        self._records = records
        self._call_ids = call_ids

    def prompt(self, request: PromptRequest) -> Prompt:
        """The prompt of a request. Raises TemplateRefusal."""
        if (twin := _twin(request)) is not None:
            parent = None if twin.call.extends < 0 else self._records[twin.call.extends]
            return Prompt(twin.prompt_ids, parent, twin.prompt, [], twin.shape, None, twin.audit)
        parent, appended, fork = self._find_parent(request)
        depth = request.turn.depth
        if parent is None or parent.reply is None:
            messages = [turn.resolved() for turn in request.turn.path()]
            text = self._renderer.text(messages, request.tools, request.kwargs)
            ids = self._renderer.encoder.whole(text)
            return Prompt(
                ids, None, self._growth.root, ids, shape_after((), messages), fork, Audit(text, max(FIRST_AUDIT, depth))
            )
        audit = parent.audit if depth < AUDIT_FACTOR * parent.audit.messages else Audit(parent.audit.opening, depth)
        new = [turn.resolved() for turn in request.turn.since(parent.turn.depth + 1)]
        return Prompt(None, parent, parent.reply, appended, shape_after(parent.shape, [parent.said, *new]), fork, audit)

    def ids_of(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt that is asked. The call that it extends no longer holds its own afterwards.

        A list that nobody else holds any more grows in place: copying it at every call would take time with the square
        of the conversation's length.
        """
        parent, added = prompt.parent, prompt.added
        if prompt.ids is not None:
            return prompt.ids
        assert parent is not None and parent.reply is not None
        shared = self._renderer.encoder.shared
        if not parent.prompt_ids:
            return [*shared(self._growth.path_ids(parent.reply)), *added]
        ids, parent.prompt_ids = parent.prompt_ids, []
        if sys.getrefcount(ids) > 2:  # this variable, and the argument here
            ids = ids.copy()
        ids += shared(parent.reply.ids.tolist())
        ids += added
        return ids

    def _find_parent(self, request: PromptRequest) -> tuple[CallRecord | None, list[int], Fork | None]:
        """(the call that the request extends, the ids to append, why it doesn't extend a nearer call)."""
        fork: Fork | None = None
        for spoken in islice(_with_replies(request.turn), CANDIDATES):
            usable, why = self._usable(request, spoken)
            for record in usable:
                appended = self._appended(request, record, spoken)
                if not isinstance(appended, NotStable):
                    return record, appended, fork
                fork = fork or Fork("template_not_stable", record.index, appended.why)
            fork = fork or Fork(why, spoken.replies[-1].index, "")
        return None, [], fork

    def _usable(self, request: PromptRequest, spoken: Turn) -> tuple[list[CallRecord], str]:
        """The recorded calls whose reply this message is and that may be extended, best first; why others may not."""
        why = ""
        usable = []
        for record in spoken.replies:
            if record.call.finish_reason != "stop":
                why = why or "reply_cut_by_length"
            elif record.call.tools != request.toolset and self._renderer.template.takes_tools:
                why = why or "tools_changed"
            elif record.kwargs_key != request.kwargs_key:
                why = why or "template_arguments_changed"
            elif not self._thought_as_sent(request, record):
                why = why or "reasoning_changed"
            else:
                usable.append(record)
        return sorted(usable, key=lambda record: (record.call.agent != request.agent, record.reply_key)), why

    def _thought_as_sent(self, request: PromptRequest, record: CallRecord) -> bool:
        """Whether the replies up to this one have the reasoning that the client sends with them, if it sends any: those
        of another call may have the same texts."""
        while record.reply_turn is not None:
            sent = record.reply_turn.reasoning.strip()
            if sent and sent != record.reasoning:
                return False
            if record.call.extends == ROOT or record.restated == request.restated:
                break
            record = self._records[record.call.extends]
        return True

    def _appended(self, request: PromptRequest, record: CallRecord, spoken: Turn) -> list[int] | NotStable:
        probe = self._renderer.probe
        new: list[Message] = [step.resolved() for step in request.turn.since(spoken.depth)]
        shape = Shape.of(
            record.shape, record.said, record.call_marks, new, bool(request.tools), request.kwargs_key, self._call_ids
        )
        appended = probe.appended(shape, record.said, new, request.kwargs, empty_thought=record.empty_thought)
        grown = request.turn.depth >= AUDIT_FACTOR * record.audit.messages
        if isinstance(appended, str) and (grown or not probe.trusts(shape, appended)):
            appended = self._found_in_whole(request, record, new, shape, appended)
        if isinstance(appended, NotStable):
            return appended
        assert record.reply is not None
        return self._renderer.closing_ids(appended, record.reply.ids[-1:].tolist())

    def _found_in_whole(
        self, request: PromptRequest, record: CallRecord, new: Sequence[Message], shape: Shape, appended: str
    ) -> str | NotStable:
        """What to append, taken from the whole conversation as the template renders it."""
        renderer, tools, kwargs = self._renderer, request.tools, request.kwargs
        history = [step.resolved() for step in record.turn.path()]
        whole = renderer.text([*history, record.said, *new], tools, kwargs)
        before = ""
        if renderer.reasoning_history == "template":  # else what came before may differ
            if not whole.startswith(record.audit.opening):
                return NotStable("the template has changed how it begins this conversation (a date, or its length)")
            before = renderer.text(history, tools, kwargs)
        return renderer.probe.found_in(whole, before, shape, appended)


def _twin(request: PromptRequest) -> CallRecord | None:
    """An earlier call of the same request (a retry or a further choice) whose prompt is still held."""
    for record in request.turn.prompts:
        same = record.call.agent == request.agent and record.call.tools == request.toolset
        same = same and record.kwargs_key == request.kwargs_key and record.restated == request.restated
        if same and record.prompt_ids:
            return record
    return None


def _with_replies(turn: Turn) -> Iterator[Turn]:
    """The recorded replies in a request's messages, latest first."""
    current: Turn | None = turn
    while current is not None:
        if current.replies:
            yield current
        current = current.parent


# ------------------------------------------------------------ forks


def changed_message(agent_calls: Sequence[CallRecord], turn: Turn, known: int) -> Fork | None:
    """Why a request that resembles a recorded conversation does not go on with it.

    The first `known` messages are those of earlier calls. The nearest call is the agent's latest that shares the most.
    """
    path = turn.path()
    if known >= len(path):
        return None  # a retry, or a request that is part of another
    nearest: CallRecord | None = None
    best: tuple[int, int] = (0, -1)
    for record in agent_calls[-LOOK_BACK:]:
        if record.reply_turn is None:
            continue
        shared = _shared_depth(record.reply_turn, path)
        if (shared, record.index) > best:
            nearest, best = record, (shared, record.index)
    says_what_was_said = any(step.message["role"] == "assistant" for step in path[best[0] :])
    if nearest is None or nearest.reply_turn is None or (not best[0] and not says_what_was_said):
        return None
    before = nearest.reply_turn.path()
    at = best[0]
    if at >= len(before) or at >= len(path):
        return None
    now, was = path[at].message, before[at].message
    if before[at].replies and now["role"] == "assistant":
        reason = "reply_changed"
    elif len(path) < len(before) and now["role"] == was["role"]:
        reason = "history_rewritten"
    else:
        reason = "message_changed"
    return Fork(reason, nearest.index, f"messages[{at}]{_changed_field(was, now)}")


def _shared_depth(turn: Turn, path: list[Turn]) -> int:
    current: Turn | None = turn
    while current is not None and current.depth:
        if current.depth <= len(path) and path[current.depth - 1] is current:
            return current.depth
        current = current.parent
    return 0


def _changed_field(was: Message, now: Message) -> str:
    if was["role"] != now["role"]:
        return f".role: {was['role']!r} became {now['role']!r}"
    if was["role"] == "assistant":
        before, after = split_reasoning(was)[1], split_reasoning(now)[1]
        if before.strip() == after.strip():
            calls = [stable_json([c["function"] for c in m.get("tool_calls", ())]) for m in (was, now)]
            return f".tool_calls: {_difference(*calls)}"
        return f".content: {_difference(before.strip(), after.strip())}"
    for name in ("content", "name", "tool_call_id"):
        if was.get(name, "") != now.get(name, ""):
            return f".{name}: {_difference(was.get(name, ''), now.get(name, ''))}"
    return ""


def _difference(was: str, now: str) -> str:
    at = common_length(was, now)
    start = max(0, at - 16)
    return f"{was[start : at + EXCERPT]!r} became {now[start : at + EXCERPT]!r} (from character {at})"


def describe_reasons(trees: Iterable[CallTree]) -> list[str]:
    """The most expensive fork reasons of many episodes: how often, what they cost, and an example."""
    forks: dict[str, list[Fork]] = defaultdict(list)
    for call in (call for tree in trees for call in tree.calls):
        if call.fork is not None:
            forks[call.fork.reason].append(call.fork)
    costs = {reason: sum(fork.tokens for fork in found) for reason, found in forks.items()}
    lines = []
    for reason in sorted(forks, key=lambda reason: (-costs[reason], reason))[:TOP_REASONS]:
        line = f"{len(forks[reason])} × {reason} ({costs[reason]} tokens rendered again)"
        example = max(forks[reason], key=lambda fork: fork.tokens).detail
        lines.append(f"{line}, e.g. {example}" if example else line)
    return lines
