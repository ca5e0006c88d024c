"""Which web pages may call the gateway from a browser: those of `gateway.allowed_origins`, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from ajet.gateway.model_name import AGENT_HEADER
from ajet.system.http_messages import Answer, HttpRequest

PREFLIGHT_S = 600
"""How long a browser may remember that it was allowed."""
_REQUEST_HEADERS = f"authorization, content-type, x-api-key, anthropic-version, {AGENT_HEADER.decode()}"


class AllowedOrigins:
    """The origins on the list; `*` stands for all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: HttpRequest) -> dict[str, str]:
        """The headers that let the page read an answer; none if it may not."""
        origin = request.headers.get(b"origin", b"").decode("latin-1")
        if not origin or not self._origins & {origin, "*"}:
            return {}
        return {"access-control-allow-origin": origin, "vary": "origin"}

    def preflight(self, request: HttpRequest) -> Answer | None:
        """The answer to a browser that asks whether it may send a request; None if this is no such question or the
        page may not."""
        headers = self.headers(request)
        if request.method != "OPTIONS" or not headers:
            return None
        asked = request.headers.get(b"access-control-request-headers", b"").decode("latin-1")
        return Answer(
            204,
            b"",
            {
                **headers,
                "access-control-allow-methods": "GET, POST",
                "access-control-allow-headers": asked or _REQUEST_HEADERS,
                "access-control-max-age": str(PREFLIGHT_S),
            },
        )
