"""`as_langchain_model`: LangChain's own OpenAI chat model over the connection, for `invoke` and `ainvoke`."""

from __future__ import annotations

from typing import Any

from ajet.schema.errors import MissingDependencyError
from ajet.tuner.connection import Connection


def langchain_model(connection: Connection, options: dict[str, Any]) -> Any:
    try:
        from langchain_openai import ChatOpenAI
    except ImportError as error:
        raise MissingDependencyError(
            f"as_langchain_model needs langchain-openai ({error}): pip install 'agentjet[langchain]'"
        ) from error
    import openai

    model_class: Any = ChatOpenAI
    clients: dict[str, Any] = {}
    if connection.crossing is not None:
        clients["http_client"] = connection.blocking_client(openai.DefaultHttpxClient)
        clients["http_async_client"] = connection.async_client(openai.DefaultAsyncHttpxClient)
    return model_class(
        **{
            "model": connection.model,
            "base_url": connection.base_url,
            "api_key": connection.api_key,
            "timeout": None,
            **clients,
            **options,
        }
    )
