"""`McpServer`: the tools of an MCP server, over a program's standard streams or streamable HTTP.

Each episode has a connection of its own (and, with `command`, a server process of its own), closed with its tools. The
program runs beside ajet, not in the sandbox, with only the variables in `env` and those that the SDK finds harmless.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx

from ajet.agents.tools.tool import (
    Arguments,
    StatelessTool,
    Tool,
    ToolContext,
    ToolResult,
    ToolSetupError,
    describe_error,
)
from ajet.schema.errors import EnvironmentUnavailableError, MissingDependencyError
from ajet.schema.install import install_command

log = logging.getLogger(__name__)

CONNECT_S = 60.0
CLOSE_S = 10.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""The size limit of an answer over HTTP, and of a stream of events."""
SAID = 500
"""How much of what a server wrote before it failed is shown."""


class McpServer:
    """A `ToolSource`: `{mcp: {command: "uvx mcp-server-calculator"}}` or `{mcp: {url: "http://…/mcp"}}`."""

    def __init__(
        self,
        *,
        command: str | list[str] | None = None,
        url: str | None = None,
        env: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        tools: list[str] | None = None,
        prefix: str = "",
        timeout: float = 60.0,
    ) -> None:
        """`tools`: only these of its tools; `prefix`: what their names begin with here; `timeout`: of one call."""
        if (command is None) == (url is None):
            raise ToolSetupError("mcp: give either `command`, which starts a server, or `url`")
        self._command = shlex.split(command) if isinstance(command, str) else list(command or [])
        if url is None and not self._command:
            raise ToolSetupError("mcp.command is empty")
        self._url = url
        self._env = env or {}
        self._headers = headers or {}
        self._tools = tools
        self._prefix = prefix
        self._timeout = timeout

    @property
    def place(self) -> str:
        """The server, in messages."""
        return self._url or shlex.join(self._command)

    async def connect(self, context: ToolContext) -> _Connection:
        """Start or reach the server, and ask for its tools."""
        connection = _Connection(self)
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.ready
        except BaseException as error:  # cancelled, too: the server's program must not stay
            await connection.close()
            if isinstance(error, TimeoutError):
                raise ToolSetupError(f"mcp: {self.place} did not answer within {CONNECT_S:g} s") from None
            raise
        return connection

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """The SDK's client session, initialised."""
        try:
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError:
            raise MissingDependencyError(f"MCP servers need the package mcp: {install_command('mcp')}") from None
        async with AsyncExitStack() as stack:
            said = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
            try:
                if self._url is None:
                    program, *rest = self._command
                    started = StdioServerParameters(command=program, args=rest, env=self._env)
                    streams: Any = await stack.enter_async_context(stdio_client(started, errlog=said))
                else:
                    patience = httpx.Timeout(CONNECT_S, read=max(CONNECT_S, self._timeout))
                    headers = {"accept-encoding": "identity", **self._headers}  # the SDK keeps to the url's host
                    client = httpx.AsyncClient(headers=headers, timeout=patience, transport=_BoundedTransport())
                    await stack.enter_async_context(client)
                    streams = await stack.enter_async_context(streamable_http_client(self._url, http_client=client))
                session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
                await session.initialize()
            except Exception as error:  # the SDK raises whatever its streams do
                said.seek(0)
                words = said.read()[-SAID:].strip()
                hint = f"; it said: {words}" if words else ""
                raise ToolSetupError(f"mcp: {self.place}: {describe_error(_first(error))}{hint}") from error
            yield session

    def tools_of(self, listed: Sequence[Any], session: Any) -> list[Tool]:
        """The server's tools that are wanted."""
        names = [tool.name for tool in listed]
        for name in self._tools or []:
            if name not in names:
                raise ToolSetupError(f"mcp: {self.place} has no tool {name!r}; it has {', '.join(names)}")
        return [
            McpTool(tool, session, self.place, self._prefix, self._timeout)
            for tool in listed
            if self._tools is None or tool.name in self._tools
        ]


class _BoundedTransport(httpx.AsyncHTTPTransport):
    """Cuts answers that are larger than any tool's: what a server sends is held in memory."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":  # a small one may be huge, unpacked
            await response.aclose()
            raise httpx.DecodingError("the answer is compressed, which was not asked for", request=request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, request)
        return response


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, request: httpx.Request) -> None:
        self._inner, self._request, self._left = inner, request, MAX_ANSWER_BYTES

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for some in self._inner:
            self._left -= len(some)
            if self._left < 0:
                log.warning("mcp: %s sent more than %d MB, and was cut", self._request.url.host, MAX_ANSWER_BYTES >> 20)
                raise httpx.ReadError("the answer is too large", request=self._request)
            yield some

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Connection:
    """A connection, in a task of its own: the SDK wants to be left in the task that entered it."""

    def __init__(self, server: McpServer) -> None:
        self.tools: Sequence[Tool] = ()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._serve(server))

    async def _serve(self, server: McpServer) -> None:
        try:
            async with server.session() as session:
                listed, cursor = [], None
                while True:
                    page = await session.list_tools(cursor)
                    listed += page.tools
                    cursor = page.nextCursor
                    if not cursor:
                        break
                self.tools = server.tools_of(listed, session)
                if not self.ready.done():
                    self.ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # it reaches the one who waits for `ready`
            if self.ready.done():
                raise
            first = _first(error)
            if not isinstance(first, ToolSetupError | MissingDependencyError):
                first = ToolSetupError(f"mcp: {server.place}: {describe_error(first)}")
            self.ready.set_exception(first)

    async def close(self) -> None:
        self._stop.set()
        await asyncio.wait([self._task], timeout=CLOSE_S)
        if not self._task.done():
            log.warning("an MCP server's connection did not close within %g s, and was cut", CLOSE_S)
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
        elif not self._task.cancelled() and (error := self._task.exception()):  # nothing is left to close
            log.debug("an MCP server ended before its connection", exc_info=error)


class McpTool(StatelessTool):
    """One tool of a server."""

    limits_itself = True

    def __init__(self, tool: Any, session: Any, place: str, prefix: str, timeout: float) -> None:
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", prefix + tool.name)[:64]
        self.description = tool.description or tool.name
        self.parameters = {"type": "object", "properties": {}, **tool.inputSchema}
        self._remote = tool.name
        self._session = session
        self._place = place
        self._limit = timedelta(seconds=timeout)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        try:
            answer = await self._session.call_tool(self._remote, arguments, read_timeout_seconds=self._limit)
        except Exception as error:  # of an optional package: its kinds aren't imported to be named here
            if type(error).__name__ == "ClosedResourceError" or str(error) == "Connection closed":
                raise EnvironmentUnavailableError(f"mcp: {self._place} ended before the episode did") from error
            raise
        texts = [_shown(part) for part in answer.content]
        return ToolResult("\n".join(texts) or "done", not answer.isError, answer.structuredContent)


def _shown(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    resource: Any = getattr(part, "resource", None)
    if getattr(resource, "text", None) is not None:
        return str(resource.text)
    data: str = getattr(part, "data", None) or getattr(resource, "blob", None) or ""
    return f"[{part.type}, {len(data)} characters of base64]"


def _first(error: BaseException) -> BaseException:
    """The error itself: task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
