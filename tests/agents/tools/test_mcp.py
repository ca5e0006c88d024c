"""MCP servers as tools: a published one over standard streams, and one over HTTP."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.agents.tools import ToolResult, Toolset, ToolSetupError, make_tools
from ajet.agents.tools.mcp import McpServer
from ajet.schema.errors import EnvironmentUnavailableError

pytest.importorskip("mcp")
PYTHON = sys.executable

SERVER = """
import sys
from mcp.server.fastmcp import FastMCP, Image

import time
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
server = FastMCP("test", port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000)

@server.tool()
def double(x: int) -> int:
    "Double it."
    return 2 * x

@server.tool(name="bad.name")
def fail() -> str:
    "Fail."
    raise ValueError("on purpose")

@server.tool()
def picture() -> Image:
    "A picture."
    return Image(data=b"1234", format="png")

@server.tool()
def leave() -> str:
    "Exit."
    import os
    os._exit(3)

server.run(sys.argv[1])
"""


async def calls(spec: dict[str, Any], *wanted: tuple[str, Any]) -> list[ToolResult]:
    async with Toolset(make_tools([{"mcp": spec}]), call_seconds=30) as toolset:
        return [await toolset.call(name, arguments) for name, arguments in wanted]


def test_a_published_server() -> None:
    pytest.importorskip("mcp_server_calculator")
    command = [PYTHON, "-m", "mcp_server_calculator"]
    right, wrong = asyncio.run(
        calls({"command": command, "prefix": "s_"}, ("s_calculate", {"expression": "6*7"}), ("s_calculate", {}))
    )
    assert right.output == "42" and right.success
    assert not wrong.success and "lacks 'expression'" in wrong.output


@pytest.fixture
def server(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return file


def test_what_a_server_answers(server: Path) -> None:
    async def main() -> list[ToolResult]:
        return await calls(
            {"command": [PYTHON, str(server), "stdio"]},
            ("double", {"x": 4}),
            ("bad_name", {}),
            ("picture", {}),
        )

    double, failed, picture = asyncio.run(main())
    assert double.output == "8"
    assert not failed.success and "on purpose" in failed.output
    assert picture.output == "[image, 8 characters of base64]"


def test_a_server_that_is_gone_is_no_fault_of_the_models(server: Path) -> None:
    async def main() -> None:
        async with Toolset(make_tools([{"mcp": {"command": [PYTHON, str(server), "stdio"]}}])) as toolset:
            for name, arguments in (("leave", {}), ("double", {"x": 4})):
                with pytest.raises(EnvironmentUnavailableError, match=r"server\.py stdio ended before the episode did"):
                    await toolset.call(name, arguments)

    asyncio.run(main())


@pytest.fixture
def url(server: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([PYTHON, str(server), "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_time_of_a_call_is_not_that_of_the_start(server: Path) -> None:
    command = [PYTHON, str(server), "stdio", "8000", "2.5"]
    (result,) = asyncio.run(calls({"command": command, "timeout": 2.0}, ("double", {"x": 21})))
    assert result.output == "42"


def test_over_http(url: str) -> None:
    (double,) = asyncio.run(calls({"url": url, "tools": ["double"]}, ("double", {"x": 4})))
    assert double.output == "8"
    with pytest.raises(ToolSetupError, match="has no tool 'triple'; it has double"):
        asyncio.run(calls({"url": url, "tools": ["triple"]}))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 307 Away\r\nlocation: http://localhost:%d/mcp\r\ncontent-length: 0\r\n\r\n", "Redirect to"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n\r\n", "compressed"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n",
            "did not answer within",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["another host", "compressed", "endless"],
)
def test_a_server_that_means_no_good(
    answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ajet.agents.tools.mcp.CONNECT_S", 2.0)
    monkeypatch.setattr("ajet.agents.tools.mcp.MAX_ANSWER_BYTES", 1 << 16)
    asked: list[bytes] = []
    sent = 0

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            nonlocal sent
            asked.append(self.request.recv(65536))
            with suppress(OSError):  # the client has enough
                self.wfile.write(answer % self.server.server_address[1] if b"%d" in answer else answer)
                while b"307" not in answer and sent < 1 << 24:
                    self.wfile.write(b" " * 4096)
                    sent += 4096

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        spec = {"url": f"http://127.0.0.1:{server.server_address[1]}/mcp", "headers": {"x-secret": "s3cret"}}
        with pytest.raises(ToolSetupError, match=said):
            asyncio.run(calls(spec))
        server.shutdown()
    assert b"host: localhost" not in b"".join(asked).lower() and sent < 1 << 24
    assert ("127.0.0.1 sent more than" in caplog.text) == (said == "did not answer within")


def test_an_end_that_is_cancelled_while_a_server_closes_stays_cancelled() -> None:
    class Slow(McpServer):
        @asynccontextmanager
        async def session(self) -> AsyncIterator[Any]:
            yield SimpleNamespace(list_tools=self.list_tools)
            closing.set()
            await asyncio.sleep(60)

        async def list_tools(self, cursor: Any) -> Any:
            return SimpleNamespace(tools=[], nextCursor=None)

    async def use() -> None:
        async with Toolset([Slow(command="x")]):
            pass

    async def main() -> None:
        using = asyncio.create_task(use())
        await closing.wait()
        using.cancel()
        await asyncio.wait([using])
        assert using.cancelled()

    closing = asyncio.Event()
    asyncio.run(main())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "give either `command`"),
        ({"command": "x", "url": "y"}, "give either `command`"),
        ({"command": ""}, "is empty"),
        ({"comand": "x"}, "no option 'comand'; did you mean 'command'"),
        ({"command": "no-such-program-here"}, "no-such-program-here: FileNotFoundError"),
        ({"command": [PYTHON, "-c", "raise SystemExit('broken')"]}, "broken"),
        ({"url": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_reached_is_named(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolSetupError, match=said):
        asyncio.run(calls(spec))
