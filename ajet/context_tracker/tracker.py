"""`ContextTracker`: every model call of one episode, exactly as the engine saw it. Used on the service loop only.

`begin` turns a request into prompt ids: the recorded ids plus what is new, if the request extends a recorded call and
the chat template allows it; otherwise the whole conversation rendered. `commit` stores what the engine sampled.
`finish` balances the ledger and hands over all calls. Nothing that was sampled is ever decoded and encoded again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from ajet.context_tracker.abnormal import find_abnormal
from ajet.context_tracker.conversation import Audit, CallRecord, Conversations, Growth, MessageCalls, Node, Turn
from ajet.context_tracker.encoder import refuse_half_pairs
from ajet.context_tracker.messages import TrackerSettings, content_text, split_reasoning
from ajet.context_tracker.prompting import (
    Prompt,
    Prompting,
    PromptRequest,
    Renderer,
    TokenPrompt,
    changed_message,
    template_arguments,
)
from ajet.context_tracker.samples import Rewards, mask_calls
from ajet.context_tracker.template_probe import THOUGHT_END
from ajet.schema.chat import ChatReply, ChatRequest, Completion, JsonMessages, Message, Sampling, Tool, tools_key
from ajet.schema.episode import ROOT, Call, CallTree, DropReason, Fork, IntArray, Ledger, Outcome
from ajet.schema.errors import (
    AbnormalOutputError,
    ContextOverflowError,
    InvalidRequestError,
    ModelCallError,
    SessionClosedError,
    TooManyStepsError,
)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that is ready for the engine."""

    call_id: str
    prompt_ids: list[int]
    sampling: Sampling
    """As requested, with `max_tokens` clipped to the room left, and with the ids that end a reply."""
    extends: str | None
    """The call it continues."""


@dataclass(frozen=True, slots=True)
class FinishedCalls:
    """All calls of a finished episode, and what they are worth."""

    tree: CallTree
    ledger: Ledger
    reward: float | None = None
    """None: the episode failed, or was given no reward."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()


class ContextTracker:
    """Grows the call tree of one episode."""

    def __init__(self, renderer: Renderer, settings: TrackerSettings) -> None:
        self.renderer = renderer
        self.settings = settings
        self._started = time.monotonic()
        self.began = time.time()
        """Unix time; calls count their times from here."""
        self._clock = 0
        self._records: list[CallRecord] = []
        self._by_id: dict[str, CallRecord] = {}
        self._conversations = Conversations()
        self._growth = Growth()
        self._prompting = Prompting(renderer, self._growth, self._records, self._conversations.call_names)
        self._toolsets: list[list[Tool]] = []
        self._toolset_index: dict[bytes, int] = {b"": ROOT}
        self._last_clipped: tuple[Sampling | None, Sampling] = (None, Sampling())
        self._steps: Counter[str] = Counter()
        self._outcomes: set[Outcome] = set()
        self._rewards = Rewards()
        self._messages = MessageCalls()
        self._abnormal: str | None = None
        self._finished = False

    # ------------------------------------------------------------------ one call

    def begin(
        self,
        agent: str,
        target: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling: Sampling,
        *,
        trainable: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        choice: int = 0,
    ) -> PreparedCall:
        """Record a request and return what the engine is to be given.

        `choice` > 0: a further choice of the same request (`n` > 1), which isn't counted as a step.
        """
        self._check_open(agent, choice)
        if not messages:
            raise InvalidRequestError("messages is empty: send at least one message")
        kwargs = template_arguments(template_kwargs)
        kwargs_key = json.dumps(kwargs, sort_keys=True, default=str) if kwargs else ""
        walk = self._conversations.walk(agent, messages)
        toolsets = len(self._toolsets)
        try:
            restated = self._conversations.restated
            request = PromptRequest(agent, walk.turn, tools, self._toolset(tools), kwargs, kwargs_key, restated)
            prompt = self._prompting.prompt(request)
            self.check_room(prompt.length)
        except ModelCallError:  # nothing of a refused request is kept
            self._conversations.forget(agent, walk.fresh)
            for key in list(self._toolset_index)[toolsets + 1 :]:
                del self._toolset_index[key]
            del self._toolsets[toolsets:]
            raise
        fork = prompt.fork if prompt.added else None  # in any case: credit reads from it which reply was gone on from
        branches = prompt.parent is None or not prompt.parent.prompt_ids  # else it goes on from a tip
        if self.settings.detect_forks and prompt.added and fork is None and branches:
            fork = changed_message([r for r in self._records if r.call.agent == agent], walk.turn, walk.known)
        replied = 0 if prompt.parent is None or prompt.parent.reply_turn is None else prompt.parent.reply_turn.depth
        new = [turn.resolved() for turn in walk.turn.since(replied)]
        return self._record(request, prompt, fork, new, target, sampling, trainable, choice)

    def begin_tokens(
        self,
        agent: str,
        target: str,
        prompt: TokenPrompt,
        sampling: Sampling,
        *,
        trainable: bool = True,
        choice: int = 0,
    ) -> PreparedCall:
        """Record a request made of token ids. It extends the longest recorded call whose tokens it begins with."""
        self._check_open(agent, choice)
        ids = prompt.ids
        self.check_room(len(ids))
        ends = [(record.reply, record) for record in self._records if record.reply is not None]
        ends.sort(key=lambda end: end[0].end, reverse=True)
        origin, parent = next((end for end in ends if self._begins(ids, end[0])), (self._growth.root, None))
        added = ids[origin.end :].tolist()
        message = {"role": "user", "content": prompt.text_from(origin.end)}
        before = (parent and parent.reply_turn) or self._conversations.root
        before.seen = self._conversations.serial = self._conversations.serial + 1
        end, _ = self._growth.add_context(origin, added)
        asked = (record.turn for record in self._records if record.prompt is end and not record.shape)
        turn = next(asked, Turn(message, before, before.depth + 1))  # no chat request continues it: nothing leads to it
        request = PromptRequest(agent, turn, (), ROOT, {}, "", 0)
        whole = Prompt(ids.tolist(), parent, origin, added, (), None, Audit("", 1))
        return self._record(request, whole, None, [message], target, sampling, trainable, choice)

    def _record(
        self,
        request: PromptRequest,
        prompt: Prompt,
        fork: Fork | None,
        new_messages: list[Message],
        target: str,
        sampling: Sampling,
        trainable: bool,
        choice: int,
    ) -> PreparedCall:
        """Grow the tree by a prompt, and record its call."""
        node, shared = self._growth.add_context(prompt.origin, prompt.added)
        if fork is not None:
            fork.tokens = len(prompt.added) - shared
        ids, parent = self._prompting.ids_of(prompt), prompt.parent
        if parent is not None:
            parent.prompt_ids = []
        self._clock += 1
        self._steps[request.agent] += choice == 0
        call = Call(
            name=f"{self.settings.call_prefix}-{len(self._records)}",
            agent=request.agent,
            target=target,
            turn=0 if parent is None else parent.call.turn + 1,
            prompt_run=ROOT,
            prompt_tokens=len(ids),
            sampling=self._clip(sampling, len(ids)),
            trainable=trainable,
            extends=ROOT if parent is None else parent.index,
            new_messages=new_messages,
            tools=request.toolset,
            template_kwargs=dict(request.kwargs),
            fork=fork,
            started_s=time.monotonic() - self._started,
        )
        record = CallRecord(
            len(self._records),
            call,
            request.turn,
            node,
            request.kwargs_key,
            prompt.shape,
            prompt.audit,
            ids,
            self._clock,
            choice == 0,
            request.restated,
        )
        request.turn.prompts.append(record)
        self._records.append(record)
        self._by_id[call.name] = record
        return PreparedCall(call.name, ids, call.sampling, None if parent is None else parent.call.name)

    def _begins(self, ids: IntArray, reply: Node) -> bool:
        """Whether these tokens begin with everything up to the end of a reply."""
        said = np.array_equal(ids[reply.start : reply.end], reply.ids)  # quickly told
        return said and np.array_equal(self._growth.path_ids(reply), ids[: reply.end])

    def commit(
        self,
        call_id: str,
        completion: Completion,
        reply: Message,
        *,
        text: str | None = None,
        malformed: Sequence[str] = (),
    ) -> None:
        """Record what the engine sampled, and `reply` as the parser read it. Raises AbnormalOutputError afterwards.

        `text`: the raw text, if already known. `malformed`: what the parser could not read.
        """
        record = self._in_flight(call_id)
        ids = completion.token_ids
        if text is None:
            text = self.renderer.decode(ids, stopped_by=completion.stopped_by)
        call = record.call
        self._clock += 1
        record.ended = self._clock
        record.requests_before = self._conversations.serial
        call.seconds = time.monotonic() - self._started - call.started_s
        call.finish_reason = completion.finish_reason
        call.versions = list(completion.versions)
        call.reply = dict(reply)
        call.logprobs = np.asarray(completion.logprobs, np.float32)
        call.mask = np.full(len(ids), call.trainable)
        call.keep_experts(completion.experts, None if call.extends == ROOT else self._records[call.extends].call)
        record.reply = self._growth.add_sampled(record.prompt, ids, record.index)
        record.reply_turn = self._conversations.add_reply(record.turn, reply, record)
        record.reasoning = split_reasoning(record.said)[0].strip()
        record.empty_thought = not record.reasoning and THOUGHT_END in text
        call.drop = None if call.trainable else "not_trainable"
        if self.settings.checks:
            self._check_output(record, reply, text, malformed)

    def begin_messages(self, agent: str, choice: int = 0) -> float:
        """Begin a call to a model that doesn't report tokens. Returns its start time, for `commit_messages`."""
        self._check_open(agent, choice)
        self._steps[agent] += choice == 0
        return time.monotonic() - self._started

    def abort_messages(self, agent: str, choice: int) -> None:
        """Such a call got no reply."""
        self._steps[agent] -= choice == 0

    def commit_messages(self, request: ChatRequest, reply: ChatReply, began: float) -> None:
        """Record the reply to such a call, under a name of ours."""
        reply.call_id = f"{self.settings.call_prefix}-{len(self._messages.calls)}"
        seconds = time.monotonic() - self._started - began
        self._messages.add(reply.call_id, request, reply, self._toolset(request.tools), began, seconds)

    def abort(self, call_id: str, why: str) -> None:
        """The call got no reply (cancelled, engine failure)."""
        record = self._in_flight(call_id)
        self._clock += 1
        record.ended = self._clock
        record.prompt_ids = []
        record.call.finish_reason = "abort"
        record.call.drop = "aborted"
        record.call.seconds = time.monotonic() - self._started - record.call.started_s
        record.call.reply = {"role": "assistant", "content": "", "aborted": why}
        self._steps[record.call.agent] -= record.is_step

    def reward(self, value: float, call: str | None = None, agent: str | None = None, *, replace: bool = False) -> None:
        """Give a reward to one call, to one agent, or (with neither) to the episode.

        A call's reward adds to the outcome; with `replace` it stands in for it.
        """
        calls = {call.name: call for call in (*self.calls, *self._messages.calls)}
        self._rewards.give(value, call, agent, calls, self._steps, replace=replace)

    # ------------------------------------------------------------------ the episode

    @property
    def context_overflow(self) -> bool:
        """Whether a prompt left no room for a reply."""
        return Outcome.OVERFLOW in self._outcomes

    @property
    def outcomes(self) -> set[Outcome]:
        """What the model has done so far that may cut the episode short."""
        cut = (last := self._last_call) is not None and last.finish_reason == "length"
        return self._outcomes | ({Outcome.LENGTH} if cut else set())

    @property
    def calls(self) -> list[Call]:
        """The calls so far, in the order they began."""
        return [record.call for record in self._records]

    @property
    def last_reply(self) -> str:
        """The text of the latest reply; empty if there is none."""
        last = self._last_call
        return content_text(last.reply.get("content"), "reply") if last is not None and last.reply else ""

    @property
    def _last_call(self) -> Call | None:
        """The latest call that got a reply."""
        last = max((r for r in self._records if r.ended and r.reply), key=lambda r: r.ended, default=None)
        return last.call if last is not None else next(reversed(self._messages.calls), None)

    @property
    def in_flight(self) -> list[str]:
        """Calls that have begun but not ended."""
        return [record.call.name for record in self._records if not record.ended]

    @property
    def tree(self) -> CallTree:
        """The call tree as it is now."""
        tree = self._growth.export([(r.call, r.prompt, r.reply) for r in self._records], self._toolsets)
        tree.calls += self._messages.calls  # a model reports the tokens of all calls, or of none
        return tree

    def finish(
        self,
        reward: float | Sequence[float] | None,
        *,
        failed: bool = False,
        output: str | None = None,
        otherwise: float | None = None,
        masked: bool = False,
    ) -> FinishedCalls:
        """End the episode. A list holds one reward for each call that got a reply; None takes the one that the
        workflow gave by `reward`, else `otherwise`. If the episode `failed`, nothing counts that the workflow gave.

        `output` is the text that the workflow returned: it shows which of several replies to one prompt was used.
        `masked`: the episode keeps its reward, but none of its tokens is trained.
        """
        if self._finished:
            raise SessionClosedError("the episode is already finished")
        for name in self.in_flight:
            self.abort(name, "the episode ended first")
        total = self._rewards.total(reward, self._records, self._messages.calls, failed=failed, otherwise=otherwise)
        self._finished = True
        for record in self._records:
            record.prompt_ids = []  # the tree holds them
        tree = self.tree
        untrained: DropReason | None = "failed_episode" if total is None else "failure_reward" if masked else None
        ledger = mask_calls(tree, self._records, self.settings, untrained=untrained, output=output)
        return FinishedCalls(tree, ledger, total, self._rewards.by_agent, tuple(sorted(self.outcomes)))

    # ------------------------------------------------------------------ limits and checks

    def _toolset(self, tools: Sequence[Tool]) -> int:
        key = tools_key(tools)
        index = self._toolset_index.get(key)
        if index is None:
            index = self._toolset_index[key] = len(self._toolsets)
            self._toolsets.append(msgspec.json.decode(key))
        return index

    def new_bytes(self, agent: str, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        """How much a request adds to what the agent sent before: the size of its new messages, and of unknown tools."""
        before = self._conversations.repeated(agent, messages)
        if isinstance(messages, JsonMessages):
            new = messages.end - (before.end if before is not None else 0)
        else:
            sent = messages[before.turn.depth if before is not None else 0 :]
            try:
                new = len(msgspec.json.encode(sent, enc_hook=str))
            except UnicodeEncodeError as error:
                refuse_half_pairs(error.object)
                raise
        key = tools_key(tools)
        return new + (0 if key in self._toolset_index else len(key))

    def _check_open(self, agent: str, choice: int) -> None:
        if self._finished:
            raise SessionClosedError("the episode is over: it takes no further model calls")
        if self._abnormal is not None and self.settings.terminate_on_abnormal:
            raise AbnormalOutputError(f"the episode was ended after an abnormal reply: {self._abnormal}")
        if choice == 0 and self._steps[agent] >= self.settings.max_steps:
            self._outcomes.add(Outcome.MAX_STEPS)
            raise TooManyStepsError(
                f"agent {agent!r} has used up its {self.settings.max_steps} model calls "
                "(ajet.rollout.multi_turn.max_steps): end the episode here, or raise the limit"
            )

    def check_room(self, tokens: int, *, asked: bool = True, counted: bool = True) -> None:
        """Raises ContextOverflowError if a prompt of this length, or more, has no room; an outcome if `asked`."""
        limit = self.settings.max_model_len
        if tokens >= limit:
            self._outcomes |= {Outcome.OVERFLOW} if asked else set()
            raise ContextOverflowError(
                f"This model's maximum context length is {limit} tokens (ajet.rollout.max_model_len). However, your "
                f"messages resulted in {'' if counted else 'at least '}{tokens} tokens. Please reduce the length."
            )

    def _clip(self, sampling: Sampling, prompt_tokens: int) -> Sampling:
        limit = min(self.settings.max_response_length_in_one_turn, self.settings.max_model_len - prompt_tokens)
        if sampling.max_tokens is not None:
            limit = min(limit, sampling.max_tokens)
        asked, clipped = self._last_clipped
        if asked == sampling and clipped.max_tokens == limit:
            return clipped
        ends = () if sampling.ignore_eos else sorted(self.renderer.end_ids - set(sampling.stop_token_ids))
        clipped = replace(sampling, max_tokens=limit, stop_token_ids=(*sampling.stop_token_ids, *ends))
        self._last_clipped = (sampling, clipped)
        return clipped

    def _check_output(self, record: CallRecord, reply: Message, text: str, malformed: Sequence[str]) -> None:
        tools = [] if record.call.tools == ROOT else self._toolsets[record.call.tools]
        found = find_abnormal(text, reply, tools, self.settings.checks, self.renderer.encoder.controls, malformed)
        if found is None:
            return
        self._outcomes.add(Outcome.ABNORMAL)
        if self.settings.terminate_on_abnormal:
            self._abnormal = found
            raise AbnormalOutputError(
                f"the model's reply failed a check of compute_madness_checklist: {found} (random weights write such "
                "replies: for them, set ajet.rollout.compute_madness_checklist: [])"
            )

    def _in_flight(self, call_id: str) -> CallRecord:
        record = self._by_id.get(call_id)
        if self._finished or record is None or record.ended:
            raise SessionClosedError(
                f"{call_id} is not in flight: it never began, it has ended, or its episode is over"
            )
        return record
