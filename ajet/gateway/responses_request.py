"""Reads a request of OpenAI's Responses protocol: the chat request it means, and the form its answer should take.

Fields are honoured, known to be without effect on the model, or refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ajet.gateway import fields
from ajet.gateway.caller import Caller
from ajet.gateway.fields import BadField
from ajet.gateway.model_name import read_model
from ajet.gateway.openai_chat import read_sampling
from ajet.gateway.refused_fields import NO_EFFECT, REFUSED, UNSET, refuse_unsupported
from ajet.gateway.responses_items import read_input, read_text_format
from ajet.gateway.responses_tools import ResponsesTools, read_tools
from ajet.gateway.tool_choice import read_tool_choice
from ajet.schema.chat import DEFAULT_TARGET, ChatRequest, Message

_HONOURED = frozenset(
    {
        "model", "input", "instructions", "previous_response_id", "store", "stream", "tools", "tool_choice",
        "parallel_tool_calls", "text", "temperature", "top_p", "max_output_tokens", "truncation", "background",
        "include", "top_logprobs", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "stop", "stop_token_ids", "seed", "ignore_eos", "chat_template_kwargs", "return_token_ids",
    }
)  # fmt: skip
_WITHOUT_EFFECT = frozenset(
    {
        "metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning", "stream_options", "priority", "client_metadata",
    }
)  # fmt: skip
"""They say nothing to the model, or are hints (`reasoning.effort`)."""
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", LOGPROBS)
"""What `include` may ask for. The reasoning is always there, in plain text."""


@dataclass(slots=True)
class ResponseCall:
    """A request, and what its answer repeats or depends on."""

    request: ChatRequest
    body: dict[str, Any]
    model: str
    tools: ResponsesTools
    logprobs: bool
    """The text comes with its log-probabilities."""
    before: list[Message]
    """The conversation that `previous_response_id` stands for."""
    new: list[Message]
    """The messages of `input`."""
    store: bool
    stream: bool
    token_ids: bool


def read_response_call(body: dict[str, Any], caller: Caller) -> ResponseCall:
    """Check a request's body."""
    _refuse(body)
    asked = read_model(body, caller)
    before = _previous(body, caller)
    new = read_input(body.get("input"), partial(caller.session.responses.item, agent=caller.agent))
    instructions = fields.text(body, "instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += before + new
    if not new and not before:
        raise BadField("input", "input must be a string or a list of at least one item")
    tools = read_tools(fields.array(body, "tools"))
    choice = read_tool_choice(body.get("tool_choice"), tools.tools)
    limit = fields.integer(body, "max_output_tokens", 1, 10**9)
    logprobs = fields.integer(body, "top_logprobs", 0, 20) or 0
    request = ChatRequest(
        messages=messages,
        tools=tools.tools,
        tool_choice=choice.choice,
        allowed_tools=choice.allowed,
        parallel_tool_calls=fields.flag(body, "parallel_tool_calls", True),
        sampling=read_sampling({**body, "max_tokens": limit}, caller.session.settings.default_sampling),
        agent=asked.agent,
        target=caller.target or DEFAULT_TARGET,
        trainable=asked.trainable,
        top_logprobs=logprobs,
        response_format=read_text_format(fields.mapping(body, "text")),
        chat_template_kwargs=fields.mapping(body, "chat_template_kwargs"),
    )
    return ResponseCall(
        request=request,
        body=body,
        model=asked.name,
        tools=tools,
        logprobs=bool(logprobs) or LOGPROBS in fields.array(body, "include"),
        before=before,
        new=new,
        store=fields.flag(body, "store", True),
        stream=fields.flag(body, "stream"),
        token_ids=fields.flag(body, "return_token_ids"),
    )


def _refuse(body: dict[str, Any]) -> None:
    refuse_unsupported(body)
    for key in body.keys() - _HONOURED - _WITHOUT_EFFECT - REFUSED.keys() - {"best_of"}:
        if body[key] not in UNSET:
            raise BadField(key, f"{key:.60} is not supported: {NO_EFFECT}")
    if fields.flag(body, "background"):
        raise BadField("background", "background is not supported: a response is complete when it is answered")
    if fields.text(body, "truncation", "disabled") != "disabled":
        raise BadField("truncation", "truncation must be 'disabled': conversations are taken whole or refused")
    for value in fields.array(body, "include"):
        if value not in _INCLUDED:
            raise BadField("include", f"include: {value!r:.60} is not supported; only {', '.join(_INCLUDED)}")


def _previous(body: dict[str, Any], caller: Caller) -> list[Message]:
    """The conversation of `previous_response_id`. An agent's key reaches that agent's responses only."""
    response_id = fields.text(body, "previous_response_id")
    if not response_id:
        return []
    stored = caller.session.responses.get(response_id, caller.agent)
    if stored is None:
        raise BadField(
            "previous_response_id",
            f"there is no stored response {response_id!r:.80} in this episode: send the whole conversation as input",
        )
    return stored.messages
