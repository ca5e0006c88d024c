"""A stand-in for vLLM's server that has a real model: the embedded engine behind as much of vLLM's protocol as we use.

    torch_vllm_server.py LOG -m vllm.entrypoints.openai.api_server --port 1234 --model FOLDER …

What it is told between requests goes to LOG, one JSON line each, and its process id with the first. `vllm_python` makes
the "Python" that `rollout.vllm.python` names.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np


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

    def __init__(self, folder: str, length: int, notes_experts: bool) -> None:
        from ajet.engine.torch.commands import TorchEngineSettings
        from ajet.engine.torch.engine import TorchEngine

        self.base = folder
        self.adapter = ""
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = TorchEngine(
            folder, TorchEngineSettings(max_model_len=length, dtype="float32", notes_experts=notes_experts)
        )
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
        if reply.experts is not None and not body.get("stream"):  # as vLLM, which doesn't stream them
            choice["routed_experts"] = self._of_all_layers(reply.experts)
        return {"choices": [choice]}

    def _of_all_layers(self, experts: Any) -> str:
        """As vLLM notes them: nothing but 0 in layers without a router."""
        config = json.loads(Path(self.base, "config.json").read_text())
        dense = config.get("mlp_only_layers", [])
        routed = [layer for layer in range(config["num_hidden_layers"]) if layer not in dense]
        noted = np.zeros((len(experts), config["num_hidden_layers"], experts.shape[2]), np.uint8)
        noted[:, routed] = experts
        buffer = io.BytesIO()
        np.save(buffer, noted, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()

    def reload(self, folder: str) -> None:
        from ajet.engine.model_source import ModelSource

        self._serve(dict(ModelSource.resolve(folder).model().state_dict()))  # it knows the names of stored experts

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
            self.answer(self.model.complete(body), streamed=body.get("stream", False))
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
    notes_experts = "--enable-return-routed-experts" in arguments
    Handler.model = Model(given("model"), int(given("max-model-len")), notes_experts)
    ThreadingHTTPServer(("127.0.0.1", int(given("port"))), Handler).serve_forever(0.01)


if __name__ == "__main__":
    main()
