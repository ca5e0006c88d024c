"""`as_anthropic_client`: Anthropic's own asynchronous client over the connection."""

from __future__ import annotations

from typing import Any

from ajet.schema.errors import MissingDependencyError
from ajet.tuner.connection import Connection


def anthropic_client(connection: Connection) -> Any:
    try:
        import anthropic
    except ImportError as error:
        raise MissingDependencyError(
            f"as_anthropic_client needs the anthropic package ({error}): pip install 'agentjet[anthropic]'"
        ) from error
    client_class: Any = anthropic.AsyncAnthropic
    return client_class(
        base_url=connection.base_url.removesuffix("/v1"),  # its client adds /v1 to each path
        api_key=connection.api_key,
        http_client=connection.async_client(anthropic.DefaultAsyncHttpxClient),
        timeout=None,
    )
