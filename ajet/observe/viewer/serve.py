"""`Viewer`: listens on an address, gives the link to open, and serves the pages until interrupted.

`TrajectoryFolder` makes episodes of a folder of trajectories: it keeps an `episodes.sqlite` up to date, writes nothing
to the folder itself. Agents that ran without training know no tokens: these call trees hold none.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.viewer.data import Data
from ajet.observe.viewer.library import ExperimentNotFoundError, Library, NoExperimentsError
from ajet.observe.viewer.pages import Access, Gate, NotesApi, Pages
from ajet.schema.chat import DEFAULT_TARGET
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus, Failure, Ledger
from ajet.schema.errors import UserError
from ajet.schema.task import Task
from ajet.schema.trajectory import (
    NO_CALL,
    Trajectory,
    TrajectoryFormatError,
    TrajectoryStatus,
    read_trajectory,
    trajectory_files,
)
from ajet.system.http_messages import LOOPBACK, Answer, AsgiApp, HttpLimits, HttpRequest, is_loopback
from ajet.system.http_server import AddressError, HttpServer, listen

log = logging.getLogger(__name__)

_COMPRESS_FROM_BYTES = 50_000


def create_app(library: Library, access: Access) -> Starlette:
    """Make the application that shows these experiments."""
    pages = Pages(library, access)

    def refuse(request: Request, status: int, detail: str) -> Response:
        if request.scope["path"].startswith("/api/"):
            return Response(msgspec.json.encode({"error": detail}), status, media_type="application/json")
        return pages.error(request.scope["path"], status, detail)

    def failed(request: Request, error: Exception) -> Response:
        match error:
            case HTTPException():
                return refuse(request, error.status_code, error.detail)
            case ExperimentNotFoundError():
                return refuse(request, HTTPStatus.NOT_FOUND, str(error))
            case UnicodeError():
                detail = f"the URL contains text that can't be read: {error}"
                return refuse(request, HTTPStatus.BAD_REQUEST, detail)
        return refuse(request, HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    known = (HTTPException, UserError, UnicodeError, OSError)
    return Starlette(
        routes=[*pages.routes(), *Data(library).routes(), *NotesApi(library).routes()],
        middleware=[
            Middleware(Gate, access=access),
            Middleware(GZipMiddleware, minimum_size=_COMPRESS_FROM_BYTES, compresslevel=1),
        ],
        exception_handlers={kind: failed for kind in known},
    )


DEFAULT_PORT = 8642
_SHORTEST_PASSWORD = 8
_SETTINGS = "--host or --port"
_LIMITS = HttpLimits(max_body_bytes=64 * 1024)
"""Pages send the sign-in form and notes."""


class Viewer:
    """A viewer that is listening; `serve` runs it on the calling thread."""

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        password: str | None = None,
        trajectories: Path | None = None,
    ) -> None:
        """`port` None: 8642, or any free one if that one is taken. `trajectories`: the folder that `root` was made of,
        if it was."""
        outward = not is_loopback(host)
        if outward and (password is None or len(password) < _SHORTEST_PASSWORD):
            raise AddressError(
                f"--host {host}: other machines can reach that address, so the page needs a password of at "
                f"least {_SHORTEST_PASSWORD} characters: --password, or AJET_VIEW_PASSWORD. Without one, view from "
                f"this machine (or through `ssh -L`)."
            )
        self.library = Library(root, trajectories)
        if not root.exists():
            raise NoExperimentsError(
                f"{root}: no such folder. Runs write to saved_experiments/<name>; give that folder, or one "
                f"experiment in it."
            )
        self.access = Access(password=password, hosts=() if outward else (*LOOPBACK, host))
        self.socket = _listen(host, port)
        self.host, self.port = host, int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The link to open."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        names = self.library.names()
        path = f"/x/{quote(names[0])}" if self.library.single else "/"
        if self.library.trajectories is not None:
            path += "/episodes"
        token = "" if self.access.password is not None else f"?token={self.access.token}"
        return f"http://{host}:{self.port}{path}{token}"

    def serve(self) -> None:
        """Serve until interrupted."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = HttpServer(_Pages(create_app(self.library, self.access), self.access), _LIMITS)
        await server.start_on(self.socket)
        try:
            await asyncio.Event().wait()  # until the task is cancelled: by Ctrl-C
        finally:
            await server.aclose()


class _Pages:
    """An `HttpHandler` that leaves every request to the application."""

    def __init__(self, app: AsgiApp, access: Access) -> None:
        self._app, self._access = app, access

    def admit(self, request: HttpRequest) -> None:
        request.unauthenticated = not self._access.authenticated(request)  # then the application asks to sign in

    async def handle(self, request: HttpRequest) -> AsgiApp:
        return self._app

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        headers = {"content-type": "text/plain; charset=utf-8", "x-content-type-options": "nosniff"}
        return Answer(status, f"{message}\n".encode(), headers)


def _listen(host: str, port: int | None) -> socket.socket:
    if port is not None:
        return listen(host, port, _SETTINGS)
    try:
        return listen(host, DEFAULT_PORT, _SETTINGS)
    except AddressError:  # most likely another viewer has it
        return listen(host, 0, _SETTINGS)


# ---------------------------------------------------------------- trajectories


_STATUS = {
    TrajectoryStatus.COMPLETED: EpisodeStatus.COMPLETED,
    TrajectoryStatus.TRUNCATED: EpisodeStatus.TRUNCATED,
    TrajectoryStatus.FAILED: EpisodeStatus.WORKFLOW_ERROR,
}
LOOK_AGAIN_S = 2.0


class TrajectoryFolder:
    """The trajectory files of a folder, as an experiment that the viewer can show."""

    def __init__(self, folder: Path, experiment: Path) -> None:
        """`experiment`: an empty folder of our own, for the database."""
        self._folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}
        self._recorder = EpisodeRecorder(experiment / "episodes.sqlite")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trajectories", daemon=True)

    def sync(self) -> int:
        """Read what is new. Returns how many trajectories were read."""
        changed = 0
        for path in trajectory_files(self._folder):
            try:
                state = path.stat()
                mark = (state.st_mtime_ns, state.st_size)
                if self._seen.get(path) == mark:
                    continue
                self._seen[path] = mark
                trajectory = read_trajectory(path)
            except (TrajectoryFormatError, OSError) as error:  # it was deleted meanwhile, for example
                log.warning("%s", error)
                continue
            episode = episode_of(trajectory)
            question = next((step.content for step in trajectory.steps if step.step_type == "observation"), "")
            task = Task(main_query=question, task_id=episode.task_id)
            self._recorder.record(episode, 0, task=task)
            changed += 1
        self._recorder.flush()
        return changed

    def watch(self) -> None:
        """Go on reading in a thread until closed."""
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._recorder.close()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_AGAIN_S):
            self.sync()


def episode_of(trajectory: Trajectory) -> Episode:
    """The trajectory as an episode without tokens."""
    failure = trajectory.failure
    if trajectory.status is TrajectoryStatus.RUNNING:
        failure = Failure("Unfinished", "it is still running, or its process was killed")
    usage = trajectory.usage
    return Episode(
        episode_id=trajectory.request_id,
        task_id=trajectory.task_id or trajectory.request_id,
        status=_STATUS.get(trajectory.status, EpisodeStatus.CANCELLED),
        tree=_tree(trajectory),
        ledger=Ledger(),
        group_id=trajectory.task_id,
        repeat=trajectory.repeat,
        reward=trajectory.reward,
        is_success=trajectory.is_success,
        failure=failure,
        metadata={
            **trajectory.metadata,
            "final_response": trajectory.final_response,
            "stop_reason": str(trajectory.stop_reason or trajectory.status),
            "model": trajectory.model,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            **({} if trajectory.cost is None else {"cost": trajectory.cost}),
        },
        timings={"total": trajectory.seconds, "model": sum(call.seconds for call in trajectory.calls)},
    )


def _tree(trajectory: Trajectory) -> CallTree:
    rewards: dict[int, float] = {}
    for step in trajectory.steps:
        if step.reward_score is not None:
            rewards[step.call] = rewards.get(step.call, 0.0) + step.reward_score
    calls: list[Call] = []
    for index, made in enumerate(trajectory.calls):
        extends = ROOT if made.extends == NO_CALL else made.extends
        calls.append(
            Call(
                name=made.reply_id or f"call-{index}",
                agent=trajectory.agent,
                target=DEFAULT_TARGET,
                turn=0 if extends == ROOT else calls[extends].turn + 1,
                prompt_run=ROOT,
                prompt_tokens=made.usage.input_tokens,
                finish_reason="length" if made.finish_reason == "length" else "stop",
                trainable=False,
                reward=rewards.get(index),
                extends=extends,
                new_messages=made.new_messages,
                reply=made.reply,
                tools=0 if trajectory.tools else ROOT,
                started_s=made.started_s,
                seconds=made.seconds,
            )
        )
    return CallTree(calls=calls, toolsets=[trajectory.tools] if trajectory.tools else [])
