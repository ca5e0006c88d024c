"""Who may use a vLLM server of ours: nobody without its key, on any route but the health check."""

from __future__ import annotations

import sys

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from ajet.engine.vllm.server import (
    KEY_VARIABLE,
    SERVER_KEY,
    WORKER_FOLDER,
    VllmServer,
    VllmSettings,
    server_environment,
    vllm_command,
)


def open_to_all(request: Request) -> Response:
    return PlainTextResponse("done")


def test_only_the_key_opens_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = SERVER_KEY.rpartition(".")
    monkeypatch.setattr(sys, "path", [str(WORKER_FOLDER), *sys.path])
    monkeypatch.setenv(KEY_VARIABLE, "right")
    paths = ("/health", "/collective_rpc", "/pause", "/v1/completions")
    app = Starlette(routes=[Route(path, open_to_all, methods=["GET", "POST"]) for path in paths])
    app.add_middleware(getattr(__import__(module), name))
    client = TestClient(app)
    assert client.get("/health").text == "done"
    for path in paths[1:]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}, {"x-api-key": "right"}):
            assert client.post(path, headers=headers).status_code == 401, (path, headers)
        assert client.post(path, headers={"authorization": "Bearer right"}).text == "done"
        assert client.post(path, headers={"host": "x/health?"}).status_code == 401


def test_each_server_is_started_with_a_key_of_its_own() -> None:
    settings = VllmSettings("m")
    servers = [VllmServer(settings, index) for index in range(2)]
    assert len({server.key for server in servers}) == 2
    assert server_environment(settings, 0, servers[0].key)[KEY_VARIABLE] == servers[0].key
    command = vllm_command(settings, 1)
    assert command[command.index("--middleware") + 1] == SERVER_KEY
    assert servers[0].key not in command, "other users see command lines"
