"""A reply: the settings that it is sampled with, how it is read while it is generated (`ReplyReader`), and whether it
has the form asked for (`ResponseFormat`).

While training, the YAML decides temperature, top_p and top_k of trained calls (the client's own are ignored, which is
logged once): the recorded log-probabilities then match what the loss assumes. Calls that aren't trained keep their
client's settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ajet.gateway.chat.reply_parser import CallPiece, Delta, ReplyParser
from ajet.schema.chat import SIDE_MODEL, ChatReply, ChatRequest, Completion, Message, Sampling, TokenChunk, Tool
from ajet.schema.errors import EngineError, InvalidRequestError
from ajet.system.json_schemas import SchemaRefused, breach, check_schema, on_loop

if TYPE_CHECKING:
    from ajet.context_tracker import PreparedCall, Renderer

log = logging.getLogger(__name__)

# ------------------------------------------------------------ settings

_decided = attrgetter(
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
)
"""The parameters that the YAML decides while training."""


@cache
def _warn_once(temperature: float, top_p: float, top_k: int) -> None:
    """Thousands of calls may ask for another sampling."""
    log.warning(
        "While training, the YAML decides the sampling (temperature %s, top_p %s, top_k %s, no penalties, our own "
        "seeds); what a client asks for instead is ignored.",
        *(temperature, top_p, top_k),
    )


class SeedKey(NamedTuple):
    """The seed of the randomness in an episode's replies."""

    seed: int = 0
    step: int = 0
    task: str = ""
    repeat: int = 0
    occurrence: int = 0
    """The index of this group among the task's groups in the step."""

    def of_call(self, agent: str, index: int) -> int:
        """The seed of an agent's `index`-th call, of 48 bits: exact in any JSON reader."""
        group = (self.occurrence,) if self.occurrence else ()  # a task's only group keeps its previous seed
        text = "\x1f".join(map(str, (self.seed, self.step, self.task, self.repeat, agent, index, *group)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


class EmbeddingEndpoint(NamedTuple):
    """An OpenAI-compatible endpoint that makes embeddings."""

    base_url: str | None
    """None: the environment's `OPENAI_BASE_URL`, else OpenAI's own."""
    api_key: str
    model: str

    @classmethod
    def from_config(cls, config: Any) -> EmbeddingEndpoint | None:
        """`helper.embedding_model` at the helper's address; None if there is none."""
        helper = config.ajet.helper
        if helper.embedding_model is None:
            return None
        return cls(
            helper.base_url, helper.api_key or os.environ.get("OPENAI_API_KEY") or "none", helper.embedding_model
        )


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How the replies of an episode are sampled."""

    training: bool = True
    """The YAML's sampling overrides the client's on trained calls."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    trainable_targets: tuple[str, ...] = ()
    """The targets that are trained; empty: all."""
    untrained_models: tuple[str, ...] = ()
    """Patterns of requested model names whose calls aren't trained."""
    embeddings: EmbeddingEndpoint | None = None
    """The endpoint that answers requests for embeddings."""
    force_disable_toolcalls: bool = False
    log_tool_format_check: bool = False
    """Log each reply with a malformed tool call."""
    log_tool_format_error_detail: bool = False
    """Also log what was wrong with it."""
    seed_key: SeedKey = field(default_factory=SeedKey)

    @classmethod
    def from_config(
        cls, config: Any, seed_key: SeedKey, trainable_targets: tuple[str, ...], *, validation: bool
    ) -> SessionSettings:
        """Read a loaded `Config`. `validation` uses `rollout.val_kwargs`, and lets clients choose for themselves."""
        rollout = config.ajet.rollout
        temperature, top_p, top_k = rollout.temperature, rollout.top_p, rollout.top_k
        if validation:
            val = rollout.val_kwargs
            temperature, top_p, top_k = validation_temperature(config), val.top_p, val.top_k
        return cls(
            training=not validation,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            trainable_targets=trainable_targets,
            untrained_models=(*rollout.untrained_models, SIDE_MODEL),
            embeddings=EmbeddingEndpoint.from_config(config),
            force_disable_toolcalls=rollout.force_disable_toolcalls,
            log_tool_format_check=config.ajet.context_tracker.log_tool_format_check,
            log_tool_format_error_detail=config.ajet.context_tracker.log_tool_format_error_detail,
            seed_key=seed_key,
        )

    def log_tool_format(self, episode_id: str, agent: str, malformed: Sequence[str]) -> None:
        """Log the malformed tool calls of a reply, if the configuration asks for it."""
        bad = [why for why in malformed if why.startswith("tool call")]
        if bad and (self.log_tool_format_check or self.log_tool_format_error_detail):
            detail = f": {'; '.join(bad)}" if self.log_tool_format_error_detail else ""
            log.warning("episode %s: malformed tool call by %s%s", episode_id, agent, detail)

    def trains(self, target: str) -> bool:
        """Whether calls of this target are trained."""
        return not self.trainable_targets or target in self.trainable_targets

    def untrained_model(self, name: str) -> bool:
        """Whether a requested model name means that the call isn't trained."""
        return any(fnmatchcase(name, pattern) for pattern in self.untrained_models)

    @property
    def default_sampling(self) -> Sampling:
        """The sampling of a call whose client sets no parameters."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def sampling(self, asked: Sampling, *, trained: bool, seed: int) -> Sampling:
        """The sampling of one call. `max_tokens` stays as requested: the tracker knows how much room is left."""
        if not (self.training and trained):
            return replace(asked, seed=seed if asked.seed is None else asked.seed)
        ours = Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            seed=seed,
            ignore_eos=asked.ignore_eos,
        )
        if _decided(asked) != (self.temperature, self.top_p, self.top_k, 0.0, 0.0, 0.0, 1.0, None):
            _warn_once(self.temperature, self.top_p, self.top_k)
        return ours


def validation_temperature(config: Any) -> float:
    """The temperature of validation; 0 where it is greedy. `val_pass_n` above 1 asks for replies that differ."""
    val, pass_n = config.ajet.rollout.val_kwargs, config.ajet.trainer_common.val_pass_n
    sampled = (pass_n or 1) > 1 if val.do_sample is None else val.do_sample
    if not sampled:
        return 0.0
    return float(config.ajet.rollout.temperature if val.temperature is None else val.temperature)


# ------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """A piece of one choice that later tokens can't change."""

    choice: int
    call_id: str
    delta: Delta


OnDelta = Callable[[ReplyDelta], None]
"""Called on the service loop."""


def whole_reply(message: Message) -> Iterator[Delta]:
    """The pieces of a reply that came at once."""
    if reasoning := message.get("reasoning_content"):
        yield Delta(reasoning=reasoning)
    if content := message.get("content"):
        yield Delta(content)
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield Delta(call=CallPiece(index, True, True, call["id"], function["name"], function["arguments"]))


class ReplyReader:
    """Turns the tokens of one call into deltas and the reply."""

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
            tools,
            call_id=prepared.call_id,
            in_reasoning=bool(opened) and tail.rstrip().endswith(opened),
            pieces=self.streams,
        )
        self._text = IncrementalText(renderer, prepared.sampling) if self.streams else None

    def on_tokens(self, chunk: TokenChunk) -> None:
        """Take the next tokens, and emit the text that is now final."""
        assert self._text is not None
        self._give(self._stream.feed(self._text.feed(chunk.token_ids)))

    def finish(self, completion: Completion) -> ChatReply:
        """Emit the rest, and return the whole reply."""
        text = self._renderer.decode(completion.token_ids, stopped_by=completion.stopped_by)
        self._give(self._stream.finish(self._text.finish(text) if self._text else text))
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


class IncrementalText:
    """Decodes a growing reply. A character whose bytes are incomplete, and a possible stop string, are held back; what
    stops the reply is no part of its text.

    Each piece is decoded together with the few tokens before it, so the cost per token doesn't grow with the reply, and
    leading spaces come out as they do in the whole text.
    """

    def __init__(self, renderer: Renderer, sampling: Sampling) -> None:
        self._renderer = renderer
        self._stop = sampling.stop
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._hold = max((len(text) for text in self._stop), default=1) - 1
        self._ids: list[int] = []
        self._from = 0
        self._until = 0
        self._text = ""
        self._given = 0

    def feed(self, token_ids: list[int]) -> str:
        """The text that is final with these tokens."""
        self._ids.extend(takewhile(lambda token: token not in self._stop_ids, token_ids))
        before = self._renderer.decode(self._ids[self._from : self._until])
        after = self._renderer.decode(self._ids[self._from :])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self._text += after[len(before) :]
            self._from, self._until = self._until, len(self._ids)
        stops = [at for text in self._stop if (at := self._text.find(text, self._given)) >= 0]
        end = min([len(self._text) - self._hold, *stops])
        if end <= self._given:
            return ""
        piece, self._given = self._text[self._given : end], end
        return piece

    def finish(self, text: str) -> str:
        """The part of the reply's text that hasn't been emitted yet."""
        rest = text[self._given :]
        self._given = len(text)
        return rest


class ResponseFormat:
    """A checked `response_format`."""

    def __init__(self, given: dict[str, Any]) -> None:
        """Raises InvalidRequestError. The schema itself is validated later, by `check`."""
        self.kind = given.get("type")
        self._schema: dict[str, Any] | None = None
        if self.kind not in ("text", "json_object", "json_schema"):
            raise InvalidRequestError("response_format.type must be text, json_object or json_schema")
        if self.kind == "json_schema":
            named = given.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequestError("response_format.json_schema needs a schema (object)")
            self._schema = schema

    def instruct(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with the format requested at the end of the system message."""
        if self.kind == "text":
            return list(messages)
        first, *rest = messages
        if not isinstance(first, Mapping):
            raise InvalidRequestError(f"messages[0] must be an object, not {type(first).__name__}")
        said = first.get("content") if first.get("role") in ("system", "developer") else None
        if isinstance(said, str):
            return [{**first, "content": f"{said}\n\n{self._wanted}"}, *rest]
        if isinstance(said, list):  # a line break is put between parts
            return [{**first, "content": [*said, {"type": "text", "text": f"\n{self._wanted}"}]}, *rest]
        return [{"role": "system", "content": self._wanted}, *messages]

    @cached_property
    def _wanted(self) -> str:
        if self._schema is None:
            return "Answer with JSON only."
        schema = json.dumps(self._schema, ensure_ascii=False)
        return f"Answer with JSON only, valid under this JSON schema:\n{schema}"

    async def check(self) -> None:
        """Raises InvalidRequestError if the schema isn't one."""
        if self._schema is None:
            return
        try:
            await on_loop(check_schema, self._schema)
        except SchemaRefused as error:
            raise InvalidRequestError(
                f"response_format.json_schema.schema is not a JSON schema: {error!s:.200}"
            ) from None

    async def violation(self, message: Message) -> str:
        """How a reply violates the format, or an empty string. Tool calls are exempt."""
        if self.kind == "text" or message.get("tool_calls"):
            return ""
        try:
            value = msgspec.json.decode(message.get("content") or "")
        except (msgspec.DecodeError, RecursionError) as error:
            return f"response_format: not JSON: {error}"
        if self._schema is None:
            return "" if isinstance(value, dict) else "response_format: not a JSON object"
        try:
            found = await on_loop(breach, self._schema, value)
        except SchemaRefused as problem:
            return f"response_format: the schema can't be applied: {problem!s:.200}"
        return f"response_format: {found.path}: {found.message[:200]}" if found is not None else ""


def unmet(request: ChatRequest, tools: list[Tool], message: Message) -> tuple[str, ...]:
    """What the request demanded and the reply lacks. Enforcing it would change the policy's distribution."""
    lacks = []
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    called = set(calls)
    if isinstance(request.tool_choice, dict):
        name = request.tool_choice["function"]["name"]
        if name not in called:
            lacks.append(f"tool_choice: {name} was not called")
    elif request.tool_choice == "required" and tools and not called:
        lacks.append("tool_choice: no tool was called")
    if request.allowed_tools is not None and (others := sorted(called - set(request.allowed_tools))):
        lacks.append(f"tool_choice: {', '.join(others)} is not among the allowed tools")
    if not request.parallel_tool_calls and len(calls) > 1:
        lacks.append(f"parallel_tool_calls: {len(calls)} tools were called at once")
    return tuple(lacks)


def check_completion(completion: Completion, prepared: PreparedCall) -> None:
    """Refuse a reply without its exact tokens. Raises EngineError."""
    if completion.finish_reason == "abort":
        raise EngineError("the engine aborted the generation")
    count = len(completion.token_ids)
    if len(completion.logprobs) != count:
        raise EngineError(f"the engine returned {count} tokens but {len(completion.logprobs)} log-probabilities")
    # a sum isn't finite if a part of it isn't
    if count and not (math.isfinite(sum(completion.logprobs)) and max(completion.logprobs) <= 1e-3):
        raise EngineError("the engine returned a log-probability that isn't a finite number ≤ 0")
    if not completion.versions or completion.versions[0][0] != 0:
        raise EngineError(
            f"the engine returned policy versions that don't start at the first token: {completion.versions}"
        )
    limit = prepared.sampling.max_tokens
    if limit is not None and count > limit:
        raise EngineError(f"the engine generated {count} tokens, but only {limit} were allowed")
    if not count:
        raise EngineError("the engine returned an empty reply")
