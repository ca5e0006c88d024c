"""What vLLM's own processes run for us, in vLLM's Python. It imports nothing of ajet: its packages may be absent there.

`ServerKey` is an ASGI middleware in vLLM's server, which lets in only who has the key in `AJET_SERVER_KEY`: vLLM's own
`--api-key` leaves the routes open that load weights and call into the workers. Only health checks need none.
vLLM mixes `AjetWorker` into its worker class (`--worker-extension-cls`); `collective_rpc` calls it by name.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "AJET_SERVER_KEY"
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class ServerKey:
    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = b"Bearer " + os.environ[VARIABLE].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


class AjetWorker:
    """Methods that vLLM's workers get."""

    def ajet_reload_weights(self, weights_path: str) -> None:
        """Load new weights in place, from a folder.

        On a CPU, each linear layer multiplies by a packed copy of its weight. vLLM packs again the layers that it
        loaded, and so forgets an output layer that shares the embedding's weight: no file has it under its own name.
        """
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        for layer in worker.get_model().modules():
            if hasattr(layer, "cpu_linear") and hasattr(getattr(layer, "quant_method", None), "embedding"):
                layer.quant_method.process_weights_after_loading(layer)
