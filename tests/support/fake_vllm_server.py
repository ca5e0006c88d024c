"""A process that speaks as much of vLLM's HTTP protocol as the engine uses, without vLLM.

A prompt that starts with 666 makes it exit, one with 667 makes it deaf. Replies are 7, 8, … as long as asked
for, one token an event. What it is told between requests goes to the file named as second argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
        if body["prompt"][0] == 666:
            os._exit(3)
        if body["prompt"][0] == 667:
            deaf = True
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
