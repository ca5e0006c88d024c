"""An OpenAI-compatible endpoint whose replies come from a function instead of a model, on this machine only.

The tutorials' rule-based helpers stand on it: with them an example runs, and its curve can be measured, without a large
model. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY = 1_000_000
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


class Unanswerable(ValueError):
    """The rules don't know this question."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Callable[[str], str]

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 < length <= MAX_BODY:
                raise Unanswerable(f"a body of 1 to {MAX_BODY} bytes is expected")
            body = json.loads(self.rfile.read(length))
            text = type(self).answer(str(body["messages"][-1]["content"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            self.close_connection = True  # the rest of the body may still be coming
            self._send(400, {"error": {"message": f"{type(error).__name__}: {error}", "type": "invalid_request_error"}})
            return
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        kind = "chat.completion"
        self._send(200, {"id": "1", "object": kind, "created": 0, "model": "rules", "choices": choices, "usage": USAGE})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing for each request."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def make_server(answer: Callable[[str], str], port: int = 0) -> ThreadingHTTPServer:
    """A server at `http://127.0.0.1:PORT/v1`; `answer` gets the text of the last message. Port 0: any free one."""
    return _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"answer": staticmethod(answer)}))


def main(answer: Callable[[str], str], what: str, port: int = 8123) -> None:
    """The command line of a rule-based helper; `port` is its default."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--port", type=int, default=port)
    server = make_server(answer, parser.parse_args().port)
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
