"""`POST /v1/embeddings`: passed on to the helper's endpoint. Nothing is recorded or trained."""

from __future__ import annotations

from typing import Any

from ajet.gateway.caller import Caller
from ajet.gateway.fields import BadField
from ajet.schema.errors import EngineError, ModelCallError
from ajet.system.http_messages import Answer, json_answer

_FIELDS = ("input", "dimensions", "encoding_format", "user")


class NoEmbeddingsError(ModelCallError):
    """Nobody was configured to make embeddings."""

    http_status = 501
    code = "not_implemented"
    error_type = "invalid_request_error"


async def embeddings(body: dict[str, Any], caller: Caller) -> Answer:
    """The model is always `helper.embedding_model`, whatever the client calls it."""
    endpoint = caller.session.settings.embeddings
    if endpoint is None:
        raise NoEmbeddingsError("no embedding model is configured: set ajet.helper.embedding_model and helper.base_url")
    if not isinstance(body.get("input"), str | list) or not body["input"]:
        raise BadField("input", "input must be a non-empty string or a list")
    caller.session.check_open()
    from openai import APIStatusError, AsyncOpenAI, OpenAIError

    asked = {**{key: body[key] for key in _FIELDS if key in body}, "model": endpoint.model}
    try:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            answer: dict[str, Any] = await client.post("/embeddings", body=asked, cast_to=dict[str, Any])
    except APIStatusError as error:
        if error.status_code == 400:
            raise BadField("input", f"the embedding model refused the request: {error}") from None
        raise EngineError(f"the embedding model failed: {error}") from error
    except OpenAIError as error:
        raise EngineError(f"the embedding model failed: {type(error).__name__}: {error}") from error
    return json_answer(answer)
