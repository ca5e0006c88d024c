"""An HTTP server on a real socket whose answers a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], Any]
"""Status, headers, content. A list is sent as a stream of events, bytes as they are, anything else as JSON."""
Handle = Callable[[str, dict[str, Any], str], Answer]


class Server:
    """An HTTP server whose answers a test decides."""

    def __init__(self, handle: Handle, get: Callable[[str], Any] | None = None) -> None:
        """`get`: what a GET of a path is answered with."""
        self.handle = handle
        self.seen: list[tuple[str, dict[str, Any], str]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                key = self.headers.get("authorization", "").removeprefix("Bearer ")
                owner.seen.append((self.path, body, key))
                status, headers, content = owner.handle(self.path, body, key)
                self.send(status, headers, content)

            def do_GET(self) -> None:
                self.send(200 if get else 405, {}, get(self.path) if get else {})

            def send(self, status: int, headers: dict[str, str], content: Any) -> None:
                data = events(content) if isinstance(content, list) else content
                data = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


def events(contents: list[Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in contents) + b"data: [DONE]\n\n"
