"""`EpisodeSession.complete(request)`: begin → generate → parse → commit. The one way from a chat request to a reply.

Lives on the service loop; nothing here may be called from another thread. Every call that was begun is either committed
once, whole, or aborted; never both, never neither.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ajet.engine.base import Engine
from ajet.schema.chat import ChatReply, ChatRequest, Message, Tool
from ajet.schema.errors import (
    AjetError,
    EngineError,
    GenerationTimeoutError,
    ModelCallError,
    SessionClosedError,
)
from ajet.schema.generation import Completion, GenerateRequest, TokenChunk
from ajet.session.decoding import IncrementalText
from ajet.session.reply_parser import PLAIN, Delta, ReplyParser
from ajet.session.response_format import ResponseFormat
from ajet.session.settings import SessionSettings

if TYPE_CHECKING:
    from ajet.context_tracker import ContextTracker, PreparedCall, Renderer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What became certain of one choice while it is drawn."""

    choice: int
    call_id: str
    delta: Delta


OnDelta = Callable[[ReplyDelta], None]
"""Called on the service loop."""


@runtime_checkable
class ChatModel(Protocol):
    """A model that isn't ours: takes chat requests, tells no tokens."""

    async def reply(self, request: ChatRequest) -> ChatReply: ...


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
        self.calls = 0
        self.engine_failure: EngineError | None = None
        """Why the latest call got no reply, where that was an engine's fault."""
        self._renderer = renderer
        self._engine = engine
        self._parser = parser
        self._deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        self._closed: ModelCallError | None = None
        self._in_flight: set[asyncio.Task[ChatReply]] = set()
        self._begun: set[str] = set()
        """Calls that are neither committed nor aborted."""
        self._calls_of: dict[str, int] = {}
        self._on_close: list[Callable[[], None]] = []

    # ------------------------------------------------------------ asking

    async def complete(self, request: ChatRequest, on_delta: OnDelta | None = None) -> list[ChatReply]:
        """One reply for each of `request.n`. Raises `ModelCallError`s only; cancelling the caller cancels the
        generation."""
        self.check_open()
        tasks = [asyncio.create_task(self._one(request, index, on_delta)) for index in range(request.n)]
        self._in_flight.update(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._in_flight.difference_update(tasks)
            if unfinished := [task for task in tasks if not task.done()]:
                for task in unfinished:
                    task.cancel()
                await asyncio.gather(*unfinished, return_exceptions=True)
        failed = [task for task in tasks if not task.cancelled() and task.exception() is not None]
        if failed:
            await failed[0]
        if any(task.cancelled() for task in tasks):
            raise self._closed or EngineError("the generation was cancelled by the engine")
        return [task.result() for task in tasks]

    def count_tokens(self, request: ChatRequest) -> int:
        """The length of the prompt that these messages and tools make, rendered whole. Records nothing."""
        self.check_open()
        tools = [] if self.settings.force_disable_toolcalls else request.tools
        return len(self._renderer.render(request.messages, tools, request.chat_template_kwargs or None))

    def encode(self, text: str) -> list[int]:
        """A raw prompt's tokens, its control tokens taken for what they are."""
        ids: list[int] = self._renderer.tokenizer.encode(text)
        return ids

    def decode_token(self, token_id: int) -> str:
        """The text of one token, for log-probabilities."""
        return self._renderer.decode([token_id])

    def reward(self, value: float, call: str | None = None, agent: str | None = None) -> None:
        """A reward for one call, one agent, or the episode."""
        self.check_open()
        self.tracker.reward(value, call=call, agent=agent)

    # ------------------------------------------------------------ closing

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def check_open(self) -> None:
        """Raise if the episode is over."""
        if self._closed is not None:
            raise self._closed

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this when the session is revoked (at once, if it already is)."""
        if self.closed:
            callback()
        else:
            self._on_close.append(callback)

    def revoke(self, error: ModelCallError | None = None) -> None:
        """End all calls in flight and refuse later ones with `error`. The tracker is at rest when this returns."""
        if self._closed is not None:
            return
        self._closed = error or SessionClosedError(f"episode {self.episode_id} is over: it takes no more model calls")
        for call_id in list(self._begun):
            self._abort(call_id, "the episode ended")
        for task in self._in_flight:
            task.cancel()
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    # ------------------------------------------------------------ one call

    async def _one(self, request: ChatRequest, choice: int, on_delta: OnDelta | None) -> ChatReply:
        trained = self.settings.trains(request.target) if request.trainable is None else request.trainable
        self.calls += 1
        chat_model = await self._chat_model()
        if chat_model is not None:
            return await self._guarded(chat_model.reply(request))
        index = self._calls_of[request.agent] = self._calls_of.get(request.agent, -1) + 1
        seed = self.settings.seed_key.of_call(request.agent, index)
        sampling = self.settings.sampling(request.sampling, trained=trained, seed=seed)
        wanted = ResponseFormat(request.response_format) if request.response_format else None
        tools = [] if self.settings.force_disable_toolcalls else request.tools
        if request.prompt_ids is not None:
            prepared = self.tracker.begin_tokens(
                request.agent, request.target, request.prompt_ids, sampling, trainable=trained, choice=choice
            )
        else:
            prepared = self.tracker.begin(
                request.agent,
                request.target,
                wanted.instruct(request.messages) if wanted else request.messages,
                tools,
                sampling,
                trainable=trained,
                template_kwargs=request.chat_template_kwargs or None,
                choice=choice,
            )
        self._begun.add(prepared.call_id)
        try:
            reader = _ReplyReader(
                self._renderer,
                self._parser if request.prompt_ids is None else PLAIN,
                tools if request.tool_choice != "none" else [],
                prepared,
                choice,
                on_delta,
            )
            completion = await self._generate(prepared, request.top_logprobs, reader)
            self.check_open()
            reply = reader.finish(completion)
            reply.malformed += _unmet(request, tools, wanted, reply.message)
        except BaseException as error:
            self._abort(prepared.call_id, _why(error))
            raise
        self._begun.discard(prepared.call_id)
        self.tracker.commit(prepared.call_id, completion, reply.message, text=reply.text, malformed=reply.malformed)
        return reply

    async def _chat_model(self) -> ChatModel | None:
        """The engine, if it can chat but can't report token ids."""
        engine = self._engine
        if engine.capabilities.exact_tokens or not isinstance(engine, ChatModel):
            return None
        await self._guarded(engine.ready())  # only then it knows what its server speaks
        return None if engine.capabilities.exact_tokens else engine

    async def _generate(self, prepared: PreparedCall, top_logprobs: int, reader: _ReplyReader) -> Completion:
        left = None
        if self._deadline is not None:
            left = self._deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise GenerationTimeoutError("the episode's deadline has passed")
        request = GenerateRequest(prepared.prompt_ids, prepared.sampling, self.episode_id, top_logprobs, left)
        on_tokens = reader.on_tokens if reader.streams else None
        completion = await self._guarded(self._engine.generate(request, on_tokens))
        _check(completion, prepared, top_logprobs)
        return completion

    async def _guarded(self, call: Coroutine[Any, Any, T]) -> T:
        """Whatever goes wrong inside an engine is an `EngineError` outside of it."""
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


class _ReplyReader:
    """Turns what the engine draws for one call into deltas and the reply."""

    def __init__(
        self,
        renderer: Renderer,
        parser: ReplyParser,
        tools: list[Tool],
        prepared: PreparedCall,
        choice: int,
        on_delta: OnDelta | None,
    ) -> None:
        opened = parser.markup.think_open
        tail = renderer.decode(prepared.prompt_ids[-8:]) if opened else ""
        self.streams = on_delta is not None
        self._renderer = renderer
        self._prepared = prepared
        self._choice = choice
        self._on_delta = on_delta
        self._stream = parser.stream(
            tools, call_id=prepared.call_id, in_reasoning=bool(opened) and tail.rstrip().endswith(opened)
        )
        self._text = IncrementalText(renderer, prepared.sampling.stop) if self.streams else None

    def on_tokens(self, chunk: TokenChunk) -> None:
        assert self._text is not None
        self._give(self._stream.feed(self._text.feed(chunk.token_ids)))

    def finish(self, completion: Completion) -> ChatReply:
        """The whole reply."""
        text = self._renderer.decode(completion.token_ids, stopped_by=completion.stopped_by)
        deltas = self._stream.feed(self._text.finish(text) if self._text else text)
        deltas += self._stream.finish()
        self._give(deltas)
        parsed = self._stream.reply()
        calls = parsed.message.get("tool_calls")
        return ChatReply(
            call_id=self._prepared.call_id,
            message=parsed.message,
            finish_reason="tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason,
            text=text,
            prompt_ids=self._prepared.prompt_ids,
            completion=completion,
            malformed=parsed.malformed,
        )

    def _give(self, deltas: list[Delta]) -> None:
        if self._on_delta is not None:
            for delta in deltas:
                self._on_delta(ReplyDelta(self._choice, self._prepared.call_id, delta))


def _check(completion: Completion, prepared: PreparedCall, top_logprobs: int) -> None:
    """A reply without its exact tokens is no reply."""
    if completion.finish_reason == "abort":
        raise EngineError("the engine aborted the generation")
    count = len(completion.token_ids)
    if len(completion.logprobs) != count:
        raise EngineError(f"the engine gave {count} tokens and {len(completion.logprobs)} log-probabilities")
    if not all(math.isfinite(value) and value <= 1e-3 for value in completion.logprobs):
        raise EngineError("the engine gave a log-probability that is no finite number ≤ 0")
    if not completion.versions or completion.versions[0][0] != 0:
        raise EngineError(
            f"the engine gave policy versions that do not start at the first token: {completion.versions}"
        )
    limit = prepared.sampling.max_tokens
    if limit is not None and count > limit:
        raise EngineError(f"the engine drew {count} tokens where {limit} were allowed")
    if not count:
        raise EngineError("the engine gave an empty reply")


def _unmet(request: ChatRequest, tools: list[Tool], wanted: ResponseFormat | None, message: Message) -> tuple[str, ...]:
    """What was asked for and can't be forced without leaving the policy's own distribution."""
    unmet = []
    called = {call["function"]["name"] for call in message.get("tool_calls", [])}
    if isinstance(request.tool_choice, dict):
        name = request.tool_choice["function"]["name"]
        if name not in called:
            unmet.append(f"tool_choice: {name} was not called")
    elif request.tool_choice == "required" and tools and not called:
        unmet.append("tool_choice: no tool was called")
    if wanted is not None and (violation := wanted.violation(message)):
        unmet.append(violation)
    return tuple(unmet)


def _why(error: BaseException) -> str:
    return "cancelled" if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}: {error}"
