"""`ajet chat`, `ajet serve` and `ajet vllm` as a user runs them: real processes, real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import in_process

AJET = [sys.executable, "-m", "ajet"]


def ajet(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AJET, *arguments], input=said, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_chat_answers_line_by_line_and_shows_tokens() -> None:
    done = ajet("chat", "tiny:qwen2", "--max-tokens", "6", "--temperature", "0", said="hello\n/tokens\n/new\nhi\n")
    assert done.returncode == 0, done.stderr
    assert "tiny:qwen2" in done.stdout
    assert len(re.findall(r"^ +\d+ +-\d+\.\d{3}  ", done.stdout, re.MULTILINE)) == 6


def test_chat_with_a_model_that_is_not_there_is_a_users_error() -> None:
    done = ajet("chat", "./nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr


@pytest.mark.slow
def test_a_yaml_needs_no_workflow_and_may_name_an_engine_that_only_talks(tmp_path: Path) -> None:
    (tmp_path / "replies.yaml").write_text("- good morning\n")
    rollout = f"rollout: {{engine: scripted, scripted_replies: {tmp_path}/replies.yaml}}"
    conf = tmp_path / "talk.yaml"
    conf.write_text(f"ajet:\n  model: {{path: 'tiny:qwen2'}}\n  {rollout}\n")
    done = ajet("chat", str(conf), said="hello\n")
    assert done.returncode == 0, done.stderr
    assert "good morning" in done.stdout


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    command = [*AJET, "serve", "tiny:qwen2", "--port", "0", "--api-key", "sesame"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    address = re.search(r"http://\S+", process.stdout.readline())
    assert address is not None
    yield address.group()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def post(url: str, body: dict[str, Any], key: str = "sesame") -> dict[str, Any]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


@pytest.mark.slow
def test_serve_speaks_openais_protocol(served: str) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    first, second = (post(f"{served}/chat/completions", body) for _ in range(2))
    assert first["choices"][0]["message"]["role"] == "assistant"
    assert first["usage"]["completion_tokens"] <= 5
    assert first["choices"][0]["message"] != second["choices"][0]["message"]  # no seed was asked for
    assert first["id"] != second["id"], "clients tell replies by their ids"
    seeded = [post(f"{served}/chat/completions", {**body, "seed": 1})["choices"][0]["message"] for _ in range(2)]
    assert seeded[0]["content"] == seeded[1]["content"]


@pytest.mark.slow
def test_serve_wants_its_key(served: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        post(f"{served}/chat/completions", {"messages": []}, key="wrong")


@pytest.mark.slow
def test_serve_lets_other_machines_in_only_with_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        done = in_process.ajet(tmp_path, "serve", "tiny:qwen2", "--host", host)
        assert done.returncode == 2 and "--api-key" in done.stderr


@pytest.mark.slow
def test_a_certificate_that_is_not_there_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    done = in_process.ajet(tmp_path, "serve", "./no-model-either", "--tls-cert", "/no/such.pem", "--tls-key", "/no/key")
    assert done.returncode == 2 and "--tls-cert and --tls-key: no file /no/such.pem" in done.stderr


@pytest.mark.slow
def test_serve_at_a_port_that_is_taken_is_a_users_error(served: str, tmp_path: Path) -> None:
    port = served.split(":")[2].split("/")[0]
    for wrong in (port, "99999"):
        done = in_process.ajet(tmp_path, "serve", "tiny:qwen2", "--port", wrong)
        assert done.returncode == 2
        assert f"can't listen on 127.0.0.1:{wrong}: " in done.stderr and "0: any free one" in done.stderr
        assert "Traceback" not in done.stderr


def test_vllm_shows_the_command_it_would_run() -> None:
    done = ajet("vllm", "serve", "tiny:qwen2", "--show", "--python", "/opt/vllm/bin/python", "--enforce-eager")
    assert done.returncode == 0, done.stderr
    assert "/opt/vllm/bin/python -m vllm" in done.stdout
    assert "--logprobs-mode processed_logprobs" in done.stdout
    assert done.stdout.strip().endswith("--enforce-eager")


def test_vllm_without_its_python_is_a_users_error() -> None:
    done = ajet("vllm", "serve", "tiny:qwen2", "--python", "/no/such/python")
    assert done.returncode == 2
    assert "--python" in done.stderr


def test_vllm_finds_its_python_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python-with-vllm"
    program.write_text('#!/bin/sh\n[ "$1" = -c ] || echo started "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = ajet("vllm", "serve", "tiny:qwen2", "--python", program.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("started -m vllm")


def test_vllm_with_a_python_that_lacks_it_is_a_users_error(tmp_path: Path) -> None:
    bare = tmp_path / "env"
    venv.create(bare, with_pip=False)
    done = ajet("vllm", "serve", "tiny:qwen2", "--python", str(bare / "bin" / "python"))
    assert done.returncode == 2
    assert "has no vLLM" in done.stderr and "--python" in done.stderr
