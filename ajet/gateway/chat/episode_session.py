"""`EpisodeSession.complete(request)`: begin → generate → parse → commit. Every chat request is answered this way.

Lives on the service loop: nothing here may be called from another thread. Every call that begins is either committed
exactly once or aborted, never both.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec.structs import replace

from ajet.gateway.chat.reply import (
    IncrementalText,
    OnDelta,
    ReplyDelta,
    ReplyReader,
    ResponseFormat,
    SessionSettings,
    check_completion,
    unmet,
    whole_reply,
)
from ajet.gateway.chat.reply_parser import PLAIN, ReplyParser
from ajet.gateway.chat.session_log import SpanLog, StoredResponses
from ajet.observe.tracing import NOT_COUNTED, call_of, reward_of, with_valid_reward
from ajet.schema.chat import ChatReply, ChatRequest, Completion, GenerateRequest, Message, Sampling, Tool
from ajet.schema.errors import (
    AjetError,
    EngineError,
    GenerationTimeoutError,
    InvalidRequestError,
    ModelCallError,
    RewardError,
    SessionClosedError,
)
from ajet.schema.span import Span

if TYPE_CHECKING:
    from ajet.context_tracker import ContextTracker, PreparedCall, Renderer, TokenPrompt
    from ajet.engine.base import Engine

T = TypeVar("T")
log = logging.getLogger(__name__)

LONG_TEXT = 8192
"""Bytes that take about two milliseconds to render and encode: more are rendered and encoded on a thread, ahead."""
BYTES_PER_ID = 4
BYTES_PER_TOKEN = 32
"""No request needs more of them for each token of the model's context, even of indented code escaped as JSON."""
LEAST_REQUEST_BYTES = 65_536
LEAST_REQUEST_NODES = 16_384
"""Messages, their parts and tool calls, and what the tools' schemas consist of."""
MAX_TEMPLATE_KWARGS_BYTES = 16_384
MAX_EPISODE_BYTES = 512 * 1024 * 1024
"""The most that an episode's requests may add to what was known: 400 KB, written anew at each of 1,000 calls, pass."""


@functools.cache
def _long_prompts() -> ThreadPoolExecutor:
    """The thread that renders and encodes long prompts, so that nothing else on the service loop waits for them."""
    return ThreadPoolExecutor(1, "long-prompts")


os.register_at_fork(after_in_child=_long_prompts.cache_clear)  # in a forked process, the thread isn't there


@runtime_checkable
class ChatModel(Protocol):
    """A model that answers chat requests but doesn't report token ids."""

    async def reply(self, request: ChatRequest) -> ChatReply: ...


class _Preparation(NamedTuple):
    """What the choices of a request share."""

    chat_model: ChatModel | None
    """The engine, if it can chat but can't report token ids."""
    wanted: ResponseFormat | None
    tokens: TokenPrompt | None = None
    """The prompt, if it was given as token ids."""


class EpisodeSession:
    """The model calls of one episode."""

    def __init__(
        self,
        *,
        episode_id: str,
        tracker: ContextTracker,
        renderer: Renderer,
        engine: Engine,
        parser: ReplyParser,
        settings: SessionSettings,
        deadline_s: float | None = None,
    ) -> None:
        """`deadline_s`: seconds from now after which no call is answered."""
        self.episode_id = episode_id
        self.tracker = tracker
        self.settings = settings
        self.responses = StoredResponses()
        self.spans = SpanLog(episode_id)
        self.engine_failure: EngineError | None = None
        """The engine's error, if it caused the latest call to fail."""
        self._renderer = renderer
        self._engine = engine
        self._parser = parser
        self._deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        self._closed: ModelCallError | None = None
        self._in_flight: set[asyncio.Task[list[ChatReply]]] = set()
        self._begun: set[str] = set()
        """Calls that have begun and are neither committed nor aborted yet."""
        self._calls_of: dict[str, int] = {}
        self._on_close: list[Callable[[], None]] = []
        self._prompt_bytes = 0
        """What the episode's requests have added so far."""

    # ------------------------------------------------------------ asking

    async def complete(self, request: ChatRequest, on_delta: OnDelta | None = None) -> list[ChatReply]:
        """One reply for each of `request.n` choices. Raises only `ModelCallError`s; cancelling the caller cancels the
        generation."""
        self.check_open()
        task = asyncio.create_task(self._choices(request, on_delta))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise self._closed or EngineError("the generation was cancelled by the engine") from None
        finally:
            self._in_flight.discard(task)

    async def _choices(self, request: ChatRequest, on_delta: OnDelta | None) -> list[ChatReply]:
        """The replies, in one task for a single choice, as nearly all are. The first failure ends the others."""
        preparation = await self._prepare(request)
        if request.n == 1:
            return [await self._one(request, 0, on_delta, preparation)]
        tasks = [asyncio.create_task(self._one(request, index, on_delta, preparation)) for index in range(request.n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def count_tokens(self, request: ChatRequest) -> int:
        """The length of the prompt that these messages and tools render to; of a text that is much too long, the length
        of its beginning. Records nothing. Raises a ModelCallError."""
        self.check_open()
        tools = [] if self.settings.force_disable_toolcalls else request.tools
        return await self._length(request.messages, tools, request.chat_template_kwargs, asked=False)

    async def encode(self, text: str) -> list[int]:
        """Tokenize a raw prompt, including control tokens. Raises a ModelCallError."""
        return self._encode(text) if len(text) <= LONG_TEXT else await _on_thread(self._encode, text)

    @property
    def most_bytes(self) -> int | None:
        """The largest request that can fit into the model's context. None: unknown, because the engine counts its
        tokens itself."""
        exact = self._engine.capabilities.exact_tokens or not isinstance(self._engine, ChatModel)
        return self._most_bytes if exact else None

    def check_size(self, size: int, *, asked: bool = True) -> None:
        """Refuse a request by its size, before it is read. `asked`: not only counted. Raises ContextOverflowError."""
        if size > self._most_bytes:
            self.tracker.check_room(size // BYTES_PER_TOKEN, asked=asked, counted=False)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._renderer.tokenizer

    def decode_token(self, token_id: int) -> str:
        """The text of one token, for log-probabilities."""
        return self._renderer.decode([token_id])

    def incremental_text(self) -> IncrementalText:
        """Turns a reply's tokens into text as they arrive. The last token of a character adds the whole character."""
        return IncrementalText(self._renderer, Sampling())

    def reward(self, value: float, call: str | None = None, agent: str | None = None, *, replace: bool = False) -> None:
        """A reward for one call, one agent, or the episode. `replace`: the call's reward stands in for the outcome."""
        self.check_open()
        self.tracker.reward(value, call=call, agent=agent, replace=replace)

    def add_spans(self, spans: Sequence[Span], *, rewards_count: bool) -> None:
        """Keep spans with the episode. A reward among them is the episode's, or that of the call it
        names, as by `reward`, if its sender may give rewards. Once the episode is over, they are dropped."""
        if self.closed:
            return
        for span in map(with_valid_reward, spans) if rewards_count else spans:
            if (reward := reward_of(span)) is not None:
                why = "it was sent without the control key"
                try:
                    if rewards_count:
                        self.tracker.reward(reward.value, call=call_of(span))
                        why = ""
                except RewardError as error:
                    why = str(error)
                    log.warning("episode %s: an emitted reward doesn't count: %s", self.episode_id, error)
                if why:
                    span = replace(span, attributes={**span.attributes, NOT_COUNTED: why})
            self.spans.add(span)

    # ------------------------------------------------------------ closing

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def check_open(self) -> None:
        """Raise if the episode is over."""
        if self._closed is not None:
            raise self._closed.with_traceback(None)  # else it would keep the frames of all whom it has refused

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this when the session is revoked (at once if it already is)."""
        if self.closed:
            callback()
        else:
            self._on_close.append(callback)

    def revoke(self, error: ModelCallError | None = None) -> None:
        """End all calls in flight and refuse later ones with `error`. Afterwards the tracker no longer changes."""
        if self._closed is not None:
            return
        self._closed = error or SessionClosedError(f"episode {self.episode_id} is over: it accepts no more model calls")
        for call_id in list(self._begun):
            self._abort(call_id, "the episode ended")
        for task in self._in_flight:
            task.cancel()
        self.responses.clear()
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    # ------------------------------------------------------------ one call

    async def _prepare(self, request: ChatRequest) -> _Preparation:
        """Do the slow preparation before a call begins, once for all choices."""
        sampling = request.sampling
        ids, stop_ids = len(request.prompt_ids or ()), len(sampling.stop_token_ids)
        self._count(BYTES_PER_ID * ids + BYTES_PER_TOKEN * stop_ids + sum(map(len, sampling.stop)))
        if (chat_model := await self._chat_model()) is not None:
            if request.prompt_ids is not None:
                raise InvalidRequestError(
                    "prompt needs a model whose server returns token ids: send messages to this one"
                )
            return _Preparation(chat_model, None)
        if request.prompt_ids is not None:
            self.tracker.check_room(len(request.prompt_ids))
            return _Preparation(None, None, self._renderer.read_tokens(request.prompt_ids))
        wanted = ResponseFormat(request.response_format) if request.response_format else None
        if wanted is not None:
            await wanted.check()
        tools = [] if self.settings.force_disable_toolcalls else request.tools
        messages = wanted.instruct(request.messages) if wanted else request.messages
        await self._render_ahead(request.agent, messages, tools, request.chat_template_kwargs)
        self.check_open()
        return _Preparation(None, wanted)

    async def _render_ahead(
        self, agent: str, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Any]
    ) -> None:
        """Check the sizes of a request, then render what is long on the thread. Afterwards `ContextTracker.begin` finds
        its pieces in the encoder's cache. Raises a ModelCallError if `begin` would."""
        if kwargs and len(msgspec.json.encode(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
            raise InvalidRequestError(f"chat_template_kwargs has more than {MAX_TEMPLATE_KWARGS_BYTES} bytes")
        size = self.tracker.new_bytes(agent, messages, tools)
        self.check_size(size)
        if size > LONG_TEXT:
            length = await self._length(messages, tools, kwargs, asked=True)
            if length > self._most_tokens:
                self.tracker.check_room(length, counted=False)
        self._count(size)

    def _count(self, size: int) -> None:
        """Add to what the episode's requests hold, all of which is kept. Raises InvalidRequestError."""
        if self._prompt_bytes + size > MAX_EPISODE_BYTES:
            raise InvalidRequestError(f"this episode's requests hold more than {MAX_EPISODE_BYTES >> 20} MB in all")
        self._prompt_bytes += size

    async def _length(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Any], *, asked: bool
    ) -> int:
        fewest = await _on_thread(len, messages)  # each has a token at least
        self.tracker.check_room(fewest, asked=asked, counted=False)
        return await _on_thread(self._renderer.length, messages, tools, kwargs, self._most_tokens)

    def _encode(self, text: str) -> list[int]:
        self.tracker.check_room(self._renderer.encoder.beyond(text, self._most_tokens), counted=False)
        return list(self._renderer.tokenizer.encode(text))

    @property
    def _most_bytes(self) -> int:
        return LEAST_REQUEST_BYTES + BYTES_PER_TOKEN * self.tracker.settings.max_model_len

    @property
    def most_nodes(self) -> int:
        """Objects and arrays that a request may hold: each of them takes a token of the context at least."""
        return max(LEAST_REQUEST_NODES, self.tracker.settings.max_model_len)

    @property
    def _most_tokens(self) -> int:
        """A longer rendering has no room, even if it extends a recorded call, which may be a little shorter."""
        limit = self.tracker.settings.max_model_len
        return limit + limit // 8

    async def _one(
        self, request: ChatRequest, choice: int, on_delta: OnDelta | None, preparation: _Preparation
    ) -> ChatReply:
        chat_model, wanted, tokens = preparation
        if chat_model is not None:
            began = self.tracker.begin_messages(request.agent, choice)
            try:
                reply = await self._guarded(chat_model.reply(request))
                self.check_open()
            except BaseException:
                self.tracker.abort_messages(request.agent, choice)
                raise
            self.tracker.commit_messages(request, reply, began)
            if on_delta is not None:
                for delta in whole_reply(reply.message):
                    on_delta(ReplyDelta(choice, reply.call_id, delta))
            return reply
        tools = [] if self.settings.force_disable_toolcalls else request.tools
        prepared = self._begin(request, tools, wanted, tokens, choice)
        self._begun.add(prepared.call_id)
        try:
            parser = self._parser if tokens is None else PLAIN
            offered = tools if request.tool_choice != "none" else []
            reader = ReplyReader(self._renderer, parser, offered, prepared, choice, on_delta)
            completion = await self._generate(prepared, request.top_logprobs, reader)
            self.check_open()
            reply = reader.finish(completion)
            reply.malformed += unmet(request, tools, reply.message)
            if wanted is not None and (violation := await wanted.violation(reply.message)):
                self.check_open()
                reply.malformed += (violation,)
        except BaseException as error:
            self._abort(prepared.call_id, _why(error))
            raise
        self._begun.discard(prepared.call_id)
        self.settings.log_tool_format(self.episode_id, request.agent, reply.malformed)
        self.tracker.commit(prepared.call_id, completion, reply.message, text=reply.text, malformed=reply.malformed)
        return reply

    def _begin(
        self,
        request: ChatRequest,
        tools: list[Tool],
        wanted: ResponseFormat | None,
        tokens: TokenPrompt | None,
        choice: int,
    ) -> PreparedCall:
        """Record the call with the sampling that applies to it."""
        trained = self.settings.trains(request.target) if request.trainable is None else request.trainable
        index = self._calls_of[request.agent] = self._calls_of.get(request.agent, -1) + 1
        seed = self.settings.seed_key.of_call(request.agent, index)
        sampling = self.settings.sampling(request.sampling, trained=trained, seed=seed)
        if tokens is not None:
            return self.tracker.begin_tokens(
                request.agent, request.target, tokens, sampling, trainable=trained, choice=choice
            )
        return self.tracker.begin(
            request.agent,
            request.target,
            wanted.instruct(request.messages) if wanted else request.messages,
            tools,
            sampling,
            trainable=trained,
            template_kwargs=request.chat_template_kwargs or None,
            choice=choice,
        )

    async def _chat_model(self) -> ChatModel | None:
        """The engine, if it can chat but can't report token ids."""
        engine = self._engine
        if engine.capabilities.exact_tokens or not isinstance(engine, ChatModel):
            return None
        await self._guarded(engine.ready())  # until then it doesn't know its server's protocol
        return None if engine.capabilities.exact_tokens else engine

    async def _generate(self, prepared: PreparedCall, top_logprobs: int, reader: ReplyReader) -> Completion:
        left = None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()
        if left is not None and left <= 0:
            raise GenerationTimeoutError("the episode's deadline has passed")
        request = GenerateRequest(prepared.prompt_ids, prepared.sampling, self.episode_id, top_logprobs, left)

        async def generate() -> Completion:
            completion = await self._engine.generate(request, reader.on_tokens if reader.streams else None)
            check_completion(completion, prepared)
            return completion

        return await self._guarded(generate())

    async def _guarded(self, call: Coroutine[Any, Any, T]) -> T:
        """Turn any exception inside an engine into an `EngineError`."""
        try:
            reply = await call
        except EngineError as error:
            self.engine_failure = error
            raise
        except AjetError:
            raise
        except TimeoutError as error:
            self.engine_failure = GenerationTimeoutError(f"the engine did not answer in time: {error}")
            raise self.engine_failure from error
        except Exception as error:
            self.engine_failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            raise self.engine_failure from error
        self.engine_failure = None
        return reply

    def _abort(self, call_id: str, why: str) -> None:
        if call_id in self._begun:
            self._begun.discard(call_id)
            self.tracker.abort(call_id, why)


async def _on_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_long_prompts(), function, *arguments)


def _why(error: BaseException) -> str:
    return "cancelled" if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}: {error}"
