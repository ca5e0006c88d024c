"""Which function answers which path. Errors become answers here, in the shape of the protocol that was spoken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ajet.gateway import fields
from ajet.gateway.answer import Answer, Caller, json_answer, openai_error
from ajet.gateway.fields import BadField, json_body
from ajet.gateway.openai_chat import MODEL_PREFIX, chat_completions
from ajet.schema.chat import DEFAULT_AGENT
from ajet.schema.errors import ModelCallError

Endpoint = Callable[[dict[str, Any], Caller], Awaitable[Answer]]


def bare_call_id(response_id: str | None) -> str | None:
    """The call that a response's id names, in any protocol."""
    if not response_id:
        return None
    return response_id.removeprefix("chatcmpl-").removeprefix("msg_").removeprefix("cmpl-")


async def rewards(body: dict[str, Any], caller: Caller) -> Answer:
    """`POST /v1/rewards` `{"reward": 1.0, "call": "chatcmpl-…"?, "agent": "…"?}`"""
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField("reward", f"reward must be a number, not {fields.kind(value)}")
    call = bare_call_id(fields.text(body, "call"))
    agent = fields.text(body, "agent") or None
    if caller.agent is not None and agent not in (None, caller.agent):
        raise BadField("agent", f"this key speaks for agent {caller.agent!r} alone")
    caller.session.reward(float(value), call=call, agent=agent)
    return json_answer({"object": "reward", "reward": float(value), "call": call, "agent": agent})


async def models(body: dict[str, Any], caller: Caller) -> Answer:
    """`GET /v1/models`: the model, under the agent's name."""
    name = MODEL_PREFIX + (caller.agent or DEFAULT_AGENT)
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ajet"}
    return json_answer({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})


POST: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/rewards": rewards,
}
GET: dict[str, Endpoint] = {"/v1/models": models}


async def answer(method: str, path: str, body: bytes, caller: Caller) -> Answer:
    """Answer a request of somebody who may ask. Never raises for what a client or the model does."""
    table = POST if method == "POST" else GET if method == "GET" else {}
    endpoint = table.get(path)
    try:
        if endpoint is None:
            return not_found(method, path)
        return await endpoint(json_body(body) if method == "POST" else {}, caller)
    except ModelCallError as error:
        return openai_error(error)


def not_found(method: str, path: str) -> Answer:
    """404, or 405 for a known path with another method."""
    known = path in POST or path in GET
    message = f"{method:.20} is not allowed for {path:.200}" if known else f"there is no {path:.200}"
    code = "method_not_allowed" if known else "not_found"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json_answer({"error": error}, 405 if known else 404)
