"""What every chat protocol shares: a request's fields, checked one by one, `Caller`, and `ReplyStream`.

Each function that reads a field names it in its error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

from ajet.gateway.chat import EpisodeSession, ReplyDelta
from ajet.schema.chat import DEFAULT_AGENT, ChatReply, ChatRequest, Sampling, Tool
from ajet.schema.errors import InvalidRequestError, ModelCallError
from ajet.system.http_messages import (
    INTERNAL_ERROR,
    InvalidBodyError,
    InvalidKeyError,
    json_object,
    kind,
    narrow,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class BadField(InvalidRequestError):
    """One field of a request is wrong; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def json_body(body: bytes, most_nodes: int) -> dict[str, Any]:
    """The request's JSON object, which may hold so many objects and arrays."""
    try:
        return json_object(body, most_nodes)
    except InvalidBodyError as error:
        raise BadField("body", str(error)) from None


def number(body: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField(key, f"{key} must be a number, not {kind(value)}")
    if not (low <= value <= high) or not math.isfinite(value):
        said = f"{value:g}" if isinstance(value, float) or abs(value) < 10**15 else "that"
        raise BadField(key, f"{key} must be from {low:g} to {high:g}, not {said}")
    return float(value)


def integer(body: dict[str, Any], key: str, low: int, high: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadField(key, f"{key} must be an integer, not {kind(value)}")
    if not low <= value <= high:
        raise BadField(key, f"{key} must be from {low} to {high}")
    return value


def of_type(value: Any, where: str, wanted: type[T], named: str) -> T:
    """The value, if it is of this type. `where` it stands, and how the type is `named`, are said if it isn't."""
    if not isinstance(value, wanted):
        raise BadField(where, f"{where} must be {named}, not {kind(value)}")
    return value


def flag(body: dict[str, Any], key: str, default: bool = False) -> bool:
    value = body.get(key)
    return default if value is None else of_type(value, key, bool, "a boolean")


def text(body: dict[str, Any], key: str, default: str = "") -> str:
    value = body.get(key)
    return default if value is None else of_type(value, key, str, "a string")


def mapping(body: dict[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    return {} if value is None else of_type(value, key, dict, "an object")


def array(body: dict[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    return [] if value is None else of_type(value, key, list, "an array")


NO_EFFECT = "this server can't honour it, and ignoring it would change the meaning of the request"
_FORCED = "replies are sampled as the policy gives them; use response_format, which is asked for and checked"
_RENDERED = "the prompt is rendered by the model's own chat template"

UNSET: tuple[Any, ...] = (None, False, "", [], {})

_WHY = {
    ("functions", "function_call"): "use tools and tool_choice",
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"): _FORCED,
    ("structural_tag", "structured_outputs"): _FORCED,
    ("add_generation_prompt", "continue_final_message", "chat_template", "documents"): _RENDERED,
    ("truncate_prompt_tokens",): "prompts are taken whole or refused",
    ("logit_bias", "logits_processors", "allowed_token_ids", "bad_words", "min_tokens", "use_beam_search"): NO_EFFECT,
    ("length_penalty", "prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens"): NO_EFFECT,
    ("web_search_options", "audio", "prediction", "echo", "suffix", "mcp_servers", "container"): NO_EFFECT,
}
REFUSED = {key: why for keys, why in _WHY.items() for key in keys}
"""Fields that can't be honoured, and why."""
NEUTRAL = {"length_penalty": 1, "add_generation_prompt": True, "skip_special_tokens": True}
"""Values of them that ask for nothing, besides those that are unset."""


def refuse_unsupported(body: dict[str, Any], choices: int = 1) -> None:
    """Raise BadField for the first field that can't be honoured. `choices`: the request's `n`."""
    for key in REFUSED.keys() & body.keys():
        value, neutral = body[key], NEUTRAL.get(key)
        if value is False and neutral is True:
            raise BadField(key, f"{key}: false is not supported: {REFUSED[key]}")
        if value not in UNSET and value != neutral:
            raise BadField(key, f"{key} is not supported: {REFUSED[key]}")
    if body.get("best_of") not in (None, choices):
        raise BadField("best_of", f"best_of is not supported: {NO_EFFECT}")


_WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


class ToolChoice(NamedTuple):
    """Which tools the reply should call."""

    choice: Literal["auto", "none", "required"] | Tool = "auto"
    allowed: tuple[str, ...] | None = None
    """The only tools that may be called; None: all on offer."""


def read_tool_choice(value: Any, tools: list[Tool]) -> ToolChoice:
    """`auto`, `none`, `required` (or `any`), one function, or `allowed_tools`."""
    if value is None:
        return ToolChoice()
    names = {tool["function"]["name"] for tool in tools}
    if isinstance(value, str):
        return ToolChoice(_word(value, names))
    choice = value.get("type") if isinstance(value, dict) else None
    if choice == "allowed_tools":
        nested = value.get("allowed_tools")
        return _allowed(nested if isinstance(nested, dict) else value, names)
    if choice == "function" or (isinstance(value, dict) and choice is None):
        return ToolChoice({"type": "function", "function": {"name": _name(value, names)}})
    if isinstance(value, dict):
        raise BadField("tool_choice", f"tool_choice of type {choice!r:.40} is not supported: only functions are")
    raise BadField("tool_choice", f"tool_choice must be a string or an object, not {kind(value)}")


def _word(value: Any, tools: set[str]) -> Literal["auto", "none", "required"]:
    word = _WORDS.get(value) if isinstance(value, str) else None
    if word is None:
        raise BadField("tool_choice", f"tool_choice must be auto, none, required or a function, not {value!r:.40}")
    if word == "required" and not tools:
        raise BadField("tool_choice", f"tool_choice is {value!r} but no tools are given")
    return cast(Literal["auto", "none", "required"], word)


def _allowed(value: dict[str, Any], tools: set[str]) -> ToolChoice:
    named = value.get("tools")
    if not isinstance(named, list) or not all(isinstance(tool, dict) for tool in named):
        raise BadField("tool_choice", "tool_choice of type 'allowed_tools' needs a list of tools")
    names = tuple(_name(tool, tools) for tool in named)
    return ToolChoice(_word(value.get("mode", "auto"), tools), names)


def _name(value: dict[str, Any], tools: set[str]) -> str:
    """The function's name, beside `type` or inside `function`."""
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadField("tool_choice", 'tool_choice must be a string or {"type": "function", "function": {"name": …}}')
    if name not in tools:
        raise BadField("tool_choice", f"tool_choice names {name!r:.60}, which is not among the tools")
    return name


MAX_STOPS = 16


def stops(body: dict[str, Any], key: str) -> tuple[str, ...]:
    """The strings that end a reply: one, or a list of them."""
    value = body.get(key)
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise BadField(key, f"{key} must be a non-empty string or a list of them")
    if len(values) > MAX_STOPS:
        raise BadField(key, f"{key} takes at most {MAX_STOPS} strings")
    return tuple(values)


def read_sampling(body: dict[str, Any], default: Sampling) -> Sampling:
    """The client's sampling parameters, with `default` for those it leaves out."""
    limits = (integer(body, key, 1, 10**9) for key in ("max_tokens", "max_completion_tokens"))
    stop_ids = array(body, "stop_token_ids")
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in stop_ids):
        raise BadField("stop_token_ids", "stop_token_ids must be a list of token ids")
    top_k = integer(body, "top_k", -1, 10**9)
    return Sampling(
        temperature=number(body, "temperature", default.temperature, 0.0, 2.0),
        top_p=number(body, "top_p", default.top_p, 1e-6, 1.0),
        top_k=default.top_k if top_k is None else top_k,
        min_p=number(body, "min_p", default.min_p, 0.0, 1.0),
        presence_penalty=number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=number(body, "repetition_penalty", 1.0, 0.01, 10.0),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=stops(body, "stop"),
        stop_token_ids=tuple(stop_ids),
        seed=integer(body, "seed", -(2**63), 2**63 - 1),
        ignore_eos=flag(body, "ignore_eos"),
    )


MODEL_PREFIX = "ajet-"
"""`model: ajet-<agent>` in a request names the agent."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An episode's session, and which of its agents is calling."""

    session: EpisodeSession
    agent: str | None = None
    """None: the request names it."""
    target: str | None = None
    named: str = ""
    """The agent that the request's header names."""
    control: bool = False
    """It was sent with the episode's control key, which gives rewards and can't call the model."""


class KeyScopeError(InvalidRequestError):
    """A valid key, but not for this."""

    http_status = 403
    code = "permission_denied"
    error_type = "permission_error"


def agent_scope(scope: Any) -> tuple[str | None, str | None]:
    """The agent and target of a key made by `agent_key`. Raises InvalidKeyError for any other scope: a holder of the
    episode's key can write anything into it."""
    match scope:
        case None:
            return None, None
        case [str(agent), str(target)]:
            return agent, target
    raise InvalidKeyError("this key's scope is not [agent, target]")


def agent_key(episode_key: str, agent: str, target: str) -> str:
    """A key for one agent of the episode alone. Anyone who holds the episode's key can make it."""
    return narrow(episode_key, [agent, target])


_PREFIXES = (MODEL_PREFIX, "ajet/")
"""The second for old clients: many take what comes before a slash for a provider's name."""
AGENT_HEADER = b"x-ajet-agent"
"""Names the agent for clients whose model name is fixed."""
MAX_AGENT_NAME = 200
MAX_MODEL_NAME = 4096
"""A path, at most. Each chunk of a stream repeats it."""


class RequestedModel(NamedTuple):
    """The model and the agent that a request names."""

    name: str
    """As the client wrote it."""
    agent: str
    trainable: bool | None
    """False: `rollout.untrained_models` says so. None: not decided here."""


def read_model(body: dict[str, Any], caller: Caller) -> RequestedModel:
    """The agent is the key's or the header's, else the one in the model's name."""
    name = text(body, "model", MODEL_PREFIX + (caller.agent or DEFAULT_AGENT))
    if len(name) > MAX_MODEL_NAME:
        raise BadField("model", f"model has at most {MAX_MODEL_NAME} characters")
    named = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), "")
    if len(named) > MAX_AGENT_NAME:
        raise BadField("model", f"an agent's name has at most {MAX_AGENT_NAME} characters")
    trainable = False if caller.session.settings.untrained_model(name) else None
    if caller.agent is None:
        return RequestedModel(name, caller.named or named or DEFAULT_AGENT, trainable)
    if foreign := next((other for other in (caller.named, named) if other not in ("", caller.agent)), ""):
        raise KeyScopeError(f"this key is for agent {caller.agent!r} only, not for {foreign!r}")
    return RequestedModel(name, caller.agent, trainable)


def read_agent_header(value: bytes) -> str:
    """The agent that the header names; an empty string without one."""
    try:
        name = value.strip().decode()
    except UnicodeDecodeError:
        raise BadField(AGENT_HEADER.decode(), f"{AGENT_HEADER.decode()} is not UTF-8") from None
    if len(name) > MAX_AGENT_NAME:
        raise BadField(AGENT_HEADER.decode(), f"an agent's name has at most {MAX_AGENT_NAME} characters")
    return name


Event = ReplyDelta | list[ChatReply] | ModelCallError


class InternalError(ModelCallError):
    """A defect of ours."""

    http_status = 500
    code = "internal_error"
    error_type = "server_error"


class ReplyStream:
    """The events of one call: deltas, then the replies or an error. Closing it cancels the generation."""

    def __init__(self, request: ChatRequest, session: EpisodeSession) -> None:
        self._request = request
        self._session = session
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            self._events.put_nowait(await self._session.complete(self._request, self._events.put_nowait))
        except ModelCallError as error:
            self._events.put_nowait(error)
        except Exception:  # our fault: the client gets an error like any other, and the server lives on
            log.exception("internal error in a streamed call of agent %r", self._request.agent)
        finally:
            self._events.put_nowait(InternalError(INTERNAL_ERROR))  # nobody reads it if another end came before

    async def first(self) -> Event:
        """The first event. An error is raised, so that the client gets its HTTP status."""
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if isinstance(event, ModelCallError):
            raise event
        return event

    async def next(self) -> Event:
        return await self._events.get()

    def close(self) -> None:
        self._task.cancel()


def unreadable_call(why: str) -> dict[str, Any]:
    """What ends a call in a stream that turned out to be unreadable."""
    return {"type": "unreadable_tool_call", "message": f"{why}: the call can't be read, and its text follows"}
