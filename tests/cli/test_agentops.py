"""`ajet agentops`: a real server, spoken to as AgentOps' client does."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ajet.cli.main import main
from ajet.task_reader.tracing import exchanges

KEY = "0b6f1f0e-6f3c-4f5e-9d5c-2f6f3f1f2a11"
TRACE = {
    "resourceSpans": [
        {
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "a" * 32,
                            "spanId": "b" * 16,
                            "name": "openai.chat.completion",
                            "startTimeUnixNano": "1",
                            "endTimeUnixNano": "2",
                            "attributes": [
                                {"key": key, "value": {"stringValue": value}}
                                for key, value in {
                                    "gen_ai.prompt.0.role": "user",
                                    "gen_ai.prompt.0.content": "2 + 2?",
                                    "gen_ai.completion.0.role": "assistant",
                                    "gen_ai.completion.0.content": "4",
                                }.items()
                            ],
                        }
                    ]
                }
            ]
        }
    ]
}


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    program = subprocess.Popen(
        [sys.executable, "-m", "ajet", "agentops", "--port", "0", *arguments],
        cwd=folder, env={**os.environ, "AJET_AGENTOPS_KEY": KEY}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert program.stdout is not None
        said = []
        for line in program.stdout:
            said.append(line.strip())
            if "Ctrl-C" in line:
                break
        yield next(line.partition("=")[2] for line in said if line.startswith("AGENTOPS_API_ENDPOINT=")), program
    finally:
        program.kill()
        program.wait()


def test_spans_become_a_file_that_the_tracing_reader_takes(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, program), httpx.Client(base_url=url, trust_env=False) as client:
        token = client.post("/v3/auth/token", json={"api_key": KEY}).json()["token"]
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        assert client.post("/v1/traces", json=TRACE, headers=headers).json() == {}
        packed = gzip.compress(json.dumps(TRACE).encode())
        sent = client.post("/v1/traces", content=packed, headers={**headers, "content-encoding": "gzip"})
        assert sent.status_code == 200
        assert client.post("/v4/logs/upload/", content=b"printed", headers=headers).status_code == 200
        for path, given, status in (
            ("/v3/auth/token", {"api_key": "x"}, 401),
            ("/v3/auth/token", [], 401),
            ("/v1/traces", {"resourceSpans": 3}, 400),
            ("/v1/metrics", {}, 404),
        ):
            assert client.post(path, json=given, headers=headers).status_code == status, path
        assert client.post("/v1/traces", json=TRACE, headers={"authorization": "Bearer x"}).status_code == 401
        assert client.post("/v1/traces", content=b"{", headers=headers).status_code == 400
        assert client.post("/v1/traces", content=b"x", headers={**headers, "content-type": "text/x"}).status_code == 415
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 0
        assert program.stdout is not None and program.stdout.read() == "2 spans\n"
    found = list(exchanges(tmp_path / "spans.jsonl"))
    assert [(one.query, one.reply) for one in found] == [("2 + 2?", "4")]


def test_a_full_disk_is_told_to_senders_and_costs_no_whole_line(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, program), httpx.Client(base_url=url, trust_env=False) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        assert client.post("/v1/traces", json=TRACE, headers=headers).status_code == 200
        size = (tmp_path / "spans.jsonl").stat().st_size
        resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        refused = client.post("/v1/traces", json=TRACE, headers=headers)
        assert (refused.status_code, refused.json()["error"]["message"].split(" (")[0]) == (
            503, "spans.jsonl can't be written",
        )  # fmt: skip
        resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert client.post("/v1/traces", json=TRACE, headers=headers).status_code == 200
    first, second = (tmp_path / "spans.jsonl").read_text().splitlines()
    assert first == second


def test_a_file_that_can_not_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agentops", "--port", "0", "--out", "/proc/none/x.jsonl"]) == 2
    assert "--out /proc/none/x.jsonl" in capsys.readouterr().err
