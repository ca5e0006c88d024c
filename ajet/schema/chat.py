"""Messages and replies, as text and as tokens, independent of the protocol or framework that a request came from.

Messages and tools are plain dicts in OpenAI's form; the clients (OpenAI, Anthropic, AgentScope, LangChain) translate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ajet.schema.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
GREEDY_BELOW = 1e-5
"""Lower temperatures are 0: dividing logits by less would overflow float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0
    """0 is greedy, and so is anything below `GREEDY_BELOW`, which is stored as 0. See `logprob_temperature`."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the reply. They cut the text, never the ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the reply, besides the model's own end tokens. If one is sampled, it is part of `token_ids`."""
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, int | float) and 0 < self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def logprob_temperature(self) -> float:
        """The temperature at which logprobs are recorded and trained. For greedy replies it is 1."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to sample one reply."""

    prompt_ids: list[int]
    sampling: Sampling
    session_id: str = ""
    """The episode. Engines with several replicas keep an episode on one of them, so that its prefix stays cached."""
    top_logprobs: int = 0
    deadline_s: float | None = None
    """Seconds left rather than a clock time, because it may cross machines."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens as they appear, for streaming."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Completion:
    """One sampled reply.

    `logprobs[i]` = log_softmax(logits / T)[token_ids[i]] over the full vocabulary, before truncation and penalties.
    """

    token_ids: list[int]
    """Everything sampled, a sampled end token or stop string included."""
    logprobs: list[float]
    finish_reason: FinishReason
    stopped_by: str | int | None = None
    """The stop string or the end token's id, when `finish_reason` is `stop`."""
    versions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """[(index of first token, policy version), …]"""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_prompt_tokens: int = 0
    experts: NDArray[np.int16] | None = None
    """With `rollout.routing_replay`: [token, layer, chosen], of all tokens of prompt and reply that were computed."""


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine supports. A setting that it can't honour is refused, or reported at the start of the run, but
    never silently ignored."""

    name: str
    exact_tokens: bool = True
    """Takes token ids and returns sampled ids with logprobs. An engine without this can serve helpers but can't be used
    for training."""
    load_weights: bool = False
    max_model_len: int | None = None


Message = dict[str, Any]
Tool = dict[str, Any]
ReplyFinish = Literal["stop", "length", "tool_calls", "abort"]

DEFAULT_AGENT = "default_agent"
DEFAULT_TARGET = "default_target"
SIDE_MODEL = "side-model"
"""The model name under which a program (`agent.type: cli`) makes calls that aren't trained: titles, summaries."""


class JsonMessages(Sequence[Message]):
    """The messages of a request as the JSON array that the client sent. They are decoded when they are needed, and
    those that a tracker knows by their bytes (`repeats`) usually never are."""

    def __init__(self, source: bytes, decode: Callable[[bytes], list[Any]]) -> None:
        """`decode` reads a JSON array. Raises InvalidRequestError."""
        self.source = source
        self.end = len(source[:-1].rstrip(b" \t\r\n"))
        """Where the last message ends."""
        self._decode = decode
        self._before: bytes | None = None
        """The source of an earlier request, which this one begins with."""
        self._known, self._rest = 0, source
        """How many messages need not be decoded, and the JSON of the others."""
        self._new: list[Message] | None = None
        """Those, once they are decoded."""

    def repeats(self, before: bytes, end: int, count: int) -> bool:
        """Whether it begins with all `count` messages of an earlier request, byte for byte: `before`, up to `end`."""
        if before is self._before:
            return True
        if not self.source.startswith(memoryview(before)[:end]):
            return False
        rest = self.source[end:].lstrip(b" \t\r\n")
        if rest[:1] not in (b",", b"]"):
            return False
        self._before = before
        if self._new is None or self._known:
            self._new, self._known, self._rest = None, count, b"[" + rest.removeprefix(b",")
        return True

    def _from(self, index: int) -> list[Message]:
        """The messages after the first `_known`, which are no more than `index`."""
        if index < self._known:
            self._new, self._known, self._rest = None, 0, self.source
        if self._new is None:
            self._new = self._decode(self._rest)
        return self._new

    def __bool__(self) -> bool:
        return self.end > 1

    def __len__(self) -> int:
        return self._known + len(self._from(self._known))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= self._known:
            return self._from(index)[index - self._known]
        return self._from(0)[index]


class FixedTools(list[Tool]):
    """A list of tools that nobody changes any more. Its key is computed once."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.key = tools_key(tools)


def tools_key(tools: Sequence[Tool]) -> bytes:
    """The comparison key of a tool list: its JSON. Order matters to a template, even that of keys."""
    if isinstance(tools, FixedTools):
        return tools.key
    try:
        return msgspec.json.encode(tools) if tools else b""
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"tools must be JSON: {error}") from error


@dataclass(slots=True)
class ChatRequest:
    """One model call that an agent makes."""

    messages: Sequence[Message]
    """Empty if the prompt is given as `prompt_ids`."""
    tools: list[Tool] = field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    allowed_tools: tuple[str, ...] | None = None
    """The only tools that the reply may call; None: all of them. Like `tool_choice`, asked for but not forced."""
    parallel_tool_calls: bool = True
    """False: the reply may call one tool at most."""
    sampling: Sampling = field(default_factory=Sampling)
    agent: str = DEFAULT_AGENT
    target: str = DEFAULT_TARGET
    trainable: bool | None = None
    """False: this call is context only. None: `Workflow.trainable_targets` decides."""
    n: int = 1
    top_logprobs: int = 0
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] | None = None
    """The prompt itself instead of messages: no template is applied, and the reply is plain text."""


@dataclass(slots=True)
class ChatReply:
    """One choice of a call."""

    call_id: str
    message: Message
    """role, content, reasoning_content?, tool_calls? as the reply parser read them."""
    finish_reason: ReplyFinish
    text: str
    """The raw text before parsing, cut at a stop string."""
    prompt_ids: list[int]
    completion: Completion
    malformed: tuple[str, ...] = ()
    """What the parser could not read and left as text."""
    counted: tuple[int, int] = (0, 0)
    """Prompt and reply tokens as counted by a server that doesn't return token ids."""

    @property
    def spent(self) -> tuple[int, int]:
        """How many tokens prompt and reply have."""
        return (len(self.prompt_ids), len(self.completion.token_ids)) if self.prompt_ids else self.counted


PREFIXES = ("chatcmpl-", "msg_", "cmpl-", "resp_")
"""The prefix that each protocol adds to a call's id."""


def plain_text(content: Any) -> str:
    """The text of a message's content, whatever else is in it: of several parts, their texts, a line break between."""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return "" if content is None else str(content)


def bare_call_id(response_id: str | None) -> str | None:
    """The call id inside a response's id, whatever the protocol."""
    if response_id is None:
        return None
    return next((response_id.removeprefix(one) for one in PREFIXES if response_id.startswith(one)), response_id)
