"""A stand-in for vLLM's server that has a real model: the embedded engine behind as much of vLLM's protocol as we use.

    torch_vllm_server.py LOG -m vllm.entrypoints.openai.api_server --port 1234 --model FOLDER …

What it is told between requests goes to LOG, one JSON line each, and its process id with the first. `vllm_python` makes
the "Python" that `rollout.vllm.python` names.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def vllm_python(folder: Path) -> Path:
    """A program that starts the stand-in when it is called like a Python that has vLLM. Its log is `folder/told`."""
    script = folder / "vllm_python"
    which_build = '[ "$1" = -c ] && exit'  # asked of every Python: that of a GPU, which needs nothing of its own
    script.write_text(f'#!/bin/sh\n{which_build}\nexec {sys.executable} {__file__} {folder / "told"} "$@"\n')
    script.chmod(0o755)
    return script


def told(folder: Path) -> list[list[Any]]:
    """What the stand-ins of this folder were told."""
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


class Model:
    """The embedded engine on a loop of its own."""

    def __init__(self, folder: str, length: int) -> None:
        from ajet.engine.torch.commands import TorchEngineSettings
        from ajet.engine.torch.engine import TorchEngine

        self.base = folder
        self.adapter = ""
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = TorchEngine(folder, TorchEngineSettings(max_model_len=length, dtype="float32"))
        self.version = 0
        self.wait(self.engine.ready())

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        from ajet.schema.chat import GenerateRequest, Sampling

        asked = ("temperature", "top_p", "top_k", "max_tokens", "seed", "ignore_eos")
        given = {key: body[key] for key in asked if body.get(key) is not None}
        sampling = Sampling(**given, stop_token_ids=tuple(body.get("stop_token_ids") or ()))
        reply = self.wait(self.engine.generate(GenerateRequest(body["prompt"], sampling)))
        choice = {"token_ids": reply.token_ids, "logprobs": {"token_logprobs": reply.logprobs}}
        choice |= {"finish_reason": reply.finish_reason, "stop_reason": reply.stopped_by}
        return {"choices": [choice]}

    def reload(self, folder: str) -> None:
        self._serve(folder)

    def load_adapter(self, folder: str) -> None:
        from peft import PeftModel

        from ajet.engine.model_source import ModelSource

        merged = PeftModel.from_pretrained(ModelSource.resolve(self.base).model(), folder).merge_and_unload()
        self._serve(dict(merged.state_dict()))

    def _serve(self, source: Any) -> None:
        self.version += 1
        self.wait(self.engine.load_weights(source, self.version))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: Model
    log: Path

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/completions":
            self.answer(self.model.complete(body), streamed=True)
            return
        note(self.log, self.path, body)
        if self.path == "/collective_rpc":
            self.model.reload(body["kwargs"]["weights_path"])
        elif self.path == "/v1/load_lora_adapter":
            self.model.load_adapter(body["lora_path"])
        self.answer({})

    def answer(self, content: Any, streamed: bool = False) -> None:
        data = json.dumps(content).encode()
        data = b"data: " + data + b"\n\ndata: [DONE]\n\n" if streamed else data
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def note(log: Path, name: str, body: Any) -> None:
    with log.open("a") as stream:
        stream.write(json.dumps([name, body]) + "\n")


def main() -> None:
    log, arguments = Path(sys.argv[1]), sys.argv[2:]

    def given(name: str) -> str:
        return arguments[arguments.index(f"--{name}") + 1]

    Handler.log = log
    note(log, "start", {"pid": os.getpid(), "arguments": arguments})
    Handler.model = Model(given("model"), int(given("max-model-len")))
    ThreadingHTTPServer(("127.0.0.1", int(given("port"))), Handler).serve_forever(0.01)


if __name__ == "__main__":
    main()
