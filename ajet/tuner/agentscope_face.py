"""`as_agentscope_model`: AgentScope's own OpenAI model, in 1.0.x and in 2.x, over the connection."""

from __future__ import annotations

import inspect
from typing import Any

from ajet.schema.errors import MissingDependencyError
from ajet.tuner.connection import Connection


def agentscope_model(connection: Connection, *, context_size: int, stream: bool) -> Any:
    """An `OpenAIChatModel` of the AgentScope that is installed."""
    try:
        from agentscope import model as models
    except ImportError as error:
        raise MissingDependencyError(
            f"as_agentscope_model needs AgentScope ({error}): pip install 'agentjet[agentscope]'"
        ) from error
    import openai

    client: dict[str, Any] = {"timeout": None}
    if (http_client := connection.async_client(openai.DefaultAsyncHttpxClient)) is not None:
        client["http_client"] = http_client
    model_class: Any = models.OpenAIChatModel  # its signature depends on the version
    parameters = inspect.signature(model_class.__init__).parameters
    if "credential" not in parameters:  # 1.0.x
        name = "client_kwargs" if "client_kwargs" in parameters else "client_args"
        client["base_url"] = connection.base_url
        return model_class(model_name=connection.model, api_key=connection.api_key, stream=stream, **{name: client})
    from agentscope import credential as credentials

    credential: Any = credentials.OpenAICredential
    return model_class(
        credential=credential(api_key=connection.api_key, base_url=connection.base_url),
        model=connection.model,
        stream=stream,
        max_retries=0,  # the client below retries what is worth it
        context_size=context_size,
        client_kwargs=client,
    )
