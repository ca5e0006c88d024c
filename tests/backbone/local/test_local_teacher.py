"""The configured teacher: loaded or asked over HTTP, refused if it speaks of other tokens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from ajet.backbone.checks import check_teacher, model_problems
from ajet.backbone.local.learner import ServerTeacher, teacher_of
from ajet.config import make_config
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import ConfigError
from ajet.task_runner.runtime import Runtime
from ajet.trainer.executor import ModelTeacher
from support.random_batches import credited_batch


class Loop:
    """What a teacher needs of a runtime."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()


@pytest.fixture
def server(tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A server that answers as vLLM does: the logprob of token `t` is -t / 100."""
    behaviour: dict[str, Any] = {"shift": 0, "asked": []}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize":
                ids = tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
                answer: dict[str, Any] = {"tokens": [token + behaviour["shift"] for token in ids]}
            else:
                behaviour["asked"].append((self.path, body))
                scores = [None, *({str(t): {"logprob": -t / 100, "rank": 1}} for t in body["prompt"][1:])]
                answer = {"choices": [{"text": "", "prompt_logprobs": scores}]}
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/v1", behaviour
    http.shutdown()


def test_a_server_gives_the_logprobs_of_the_trained_tokens(server: Any, tokenizer: Any) -> None:
    address, behaviour = server
    teacher = ServerTeacher(address, cast("Runtime", Loop()))
    teacher.check_vocabulary(tokenizer)
    batch = credited_batch(4)
    found = teacher.logprobs(batch)
    trained = {
        (episode, index)
        for episode, (tree, credit) in enumerate(batch)
        for index, call in enumerate(tree.calls)
        if credit.calls[index].entries and call.mask.any()
    }
    assert found.keys() == trained
    for (episode, index), values in found.items():
        tree = batch[episode][0]
        call = tree.calls[index]
        assert values == pytest.approx(-tree.runs[call.run].ids[call.mask] / 100)
    assert {path for path, _ in behaviour["asked"]} == {"/v1/completions"}


def test_a_model_is_loaded_where_the_trainer_is(tokenizer: Any) -> None:
    config = make_config({"trainer_common.algorithm.distillation.teacher": "tiny:qwen2-0.3m"})
    teacher = teacher_of(config, cast("Runtime", Loop()), tokenizer, 512, "meta")
    assert isinstance(teacher, ModelTeacher) and teacher._model.device.type == "meta"


def test_a_teacher_that_is_not_there_is_named_with_its_key(tmp_path: Path, tokenizer: Any) -> None:
    for teacher, says in (
        (f"{tmp_path}/none", "does not exist"),
        ("tiny:none", "none"),
        (str(tmp_path), "config.json"),
    ):
        config = make_config({"trainer_common.algorithm.distillation.teacher": teacher})
        with pytest.raises(ConfigError, match=rf"^ajet\.trainer_common\..*distillation\.teacher: .*{says}") as late:
            teacher_of(config, cast("Runtime", Loop()), tokenizer, 512, "meta")
        config.ajet.backbone = "local"
        with pytest.raises(ConfigError) as early:
            check_teacher(config)
        assert str(early.value) == str(late.value)
        assert list(model_problems(config, "torch")) == [str(early.value)]


def test_a_server_with_another_vocabulary_is_refused(server: Any, tokenizer: Any) -> None:
    address, behaviour = server
    behaviour["shift"] = 1
    with pytest.raises(ConfigError, match=r"distillation\.teacher.*another vocabulary"):
        ServerTeacher(address, cast("Runtime", Loop())).check_vocabulary(tokenizer)
