"""A process that speaks as much of vLLM's HTTP protocol as the engine uses, without vLLM.

A prompt that starts with 666 makes it exit, one with 665 makes it say why in vLLM's words and exit, one with 667 makes
it deaf. Replies are 7, 8, … as long as asked for, one token an event. What it is told between requests goes to the file
named as second argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DYING = """\
(APIServer pid=11) WARNING 11-23 18:50:39 [utils.py:255] This can cause errors like `OSError: [Errno 24] Too many`.
(Worker pid=13) ERROR 11-23 18:53:13 [executor.py:1063] RuntimeError: no kernel for this shape
(EngineCore pid=12) ERROR 11-23 18:53:13 [core.py:15] RuntimeError: Worker failed, please check the stack trace above
(APIServer pid=11) ERROR 11-23 18:53:13 [serving.py:500] EngineDeadError: EngineCore died. See stack trace (above).
INFO:     Application shutdown complete."""
deaf = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        while deaf:
            time.sleep(1)
        self.answer({})

    def do_POST(self) -> None:
        global deaf
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {os.environ['AJET_SERVER_KEY']}":  # as `in_worker` has it
            self.send_error(401)
            return
        if self.path != "/v1/completions":
            with open(sys.argv[2], "a") as log:
                log.write(json.dumps([self.path, body]) + "\n")
            self.answer({})
            return
        if body["prompt"][0] == 665:
            print(DYING, flush=True)
        if body["prompt"][0] in (665, 666):
            os._exit(3)
        if body["prompt"][0] == 667:
            deaf = True
        if not body.get("stream"):
            ids = list(range(7, 7 + body["max_tokens"]))
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "length"}
            self.answer({"choices": [choice]})
            return
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        for index in range(body["max_tokens"]):
            last = index == body["max_tokens"] - 1
            choice = {"token_ids": [7 + index], "logprobs": {"token_logprobs": [-0.5]}}
            choice["finish_reason"] = "length" if last else None
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.001)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    print("listening", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever(0.01)
