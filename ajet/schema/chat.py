"""A chat request as a session takes it, and the reply it gives, whichever protocol or framework asked.

Messages and tools are plain dicts in OpenAI's form; the clients (OpenAI, Anthropic, AgentScope, LangChain) translate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ajet.schema.generation import Completion, Sampling

Message = dict[str, Any]


Tool = dict[str, Any]


ReplyFinish = Literal["stop", "length", "tool_calls", "abort"]

DEFAULT_AGENT = "default_agent"


DEFAULT_TARGET = "default_target"


SIDE_MODEL = "side-model"


"""The model name under which a program (`agent.type: cli`) makes calls that aren't trained: titles, summaries."""


@dataclass(slots=True)
class ChatRequest:
    """One call of the model by an agent."""

    messages: list[Message]
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
    """Tokens of prompt and reply as the server counted them, where it tells no token ids."""


PREFIXES = ("chatcmpl-", "msg_", "cmpl-", "resp_")


"""What each protocol puts before a call's id."""


def bare_call_id(response_id: str | None) -> str | None:
    """The call that a response's id stands for, in any protocol."""
    if not response_id:
        return None
    return next((response_id.removeprefix(one) for one in PREFIXES if response_id.startswith(one)), response_id)
