"""The viewer's HTML pages. The templates escape all text; the pages' scripts fetch the data."""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import ajet
from ajet.http.access import Access, sign_in
from ajet.viewer.library import Experiment, Library, Reading, differences, differently_judged

_HERE = Path(__file__).parent
_STATIC = _HERE / "static"


class Pages:
    """The pages, by address."""

    def __init__(self, library: Library, access: Access) -> None:
        self._library = library
        self._access = access
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=select_autoescape(default=True, default_for_string=True),
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._static = static_path()
        self._templates.globals.update(version=ajet.__version__, library=library, static=self._static)

    def routes(self) -> list[Route | Mount]:
        return [
            Route("/", self.home),
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/compare", self.compare),
            Route("/x/{name}", self.run),
            Route("/x/{name}/episodes", self.episodes),
            Route("/x/{name}/tasks", self.tasks),
            Route("/x/{name}/task/{task:path}", self.task),
            Route("/x/{name}/candidates", self.candidates),
            Route("/x/{name}/differences", self.differences),
            Route("/x/{name}/group/{group:path}", self.group),
            Route("/x/{name}/episode/{episode:path}", self.episode),
            Route("/x/{name}/about", self.about),
            Mount(self._static, StaticFiles(directory=_STATIC)),
        ]

    def _page(self, template: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(**values), status)

    def home(self, request: Request) -> Response:
        return self._page("home.html", title="Experiments")

    def compare(self, request: Request) -> Response:
        names = [name for name in request.query_params.get("runs", "").split(",") if name]
        compared = [self._library.get(name) for name in names]
        return self._page(
            "run.html",
            title="Compare",
            runs=names,
            experiment=None,
            tab="charts",
            differences=differences(compared),
            warning=differently_judged(compared),
        )

    def run(self, request: Request) -> Response:
        experiment = self._named(request)
        return self._page(
            "run.html", title=experiment.name, runs=[experiment.name], experiment=experiment, tab="charts"
        )

    def episodes(self, request: Request) -> Response:
        experiment = self._named(request)
        return self._page("episodes.html", title=f"Episodes · {experiment.name}", experiment=experiment, tab="episodes")

    def tasks(self, request: Request) -> Response:
        experiment = self._named(request)
        return self._page("tasks.html", title=f"Tasks · {experiment.name}", experiment=experiment, tab="tasks")

    def task(self, request: Request) -> Response:
        experiment, task = self._named(request), request.path_params["task"]
        return self._page(
            "task.html", title=f"Task {task} · {experiment.name}", experiment=experiment, task=task, tab="tasks"
        )

    def candidates(self, request: Request) -> Response:
        experiment = self._named(request)
        title = f"Candidates · {experiment.name}"
        return self._page("candidates.html", title=title, experiment=experiment, tab="candidates")

    def differences(self, request: Request) -> Response:
        experiment = self._named(request)
        title = f"Differences · {experiment.name}"
        return self._page("differences.html", title=title, experiment=experiment, tab="episodes")

    def group(self, request: Request) -> Response:
        experiment, group = self._named(request), request.path_params["group"]
        return self._page("group.html", title=f"Group {group}", experiment=experiment, group=group, tab="episodes")

    def episode(self, request: Request) -> Response:
        experiment, episode = self._named(request), request.path_params["episode"]
        title = f"Episode {episode} · {experiment.name}"
        return self._page("episode.html", title=title, experiment=experiment, episode=episode, tab="episodes")

    def about(self, request: Request) -> Response:
        experiment = self._named(request)
        reading = Reading()
        events: list[dict[str, Any]] = reading.part(experiment.events, [])
        log: list[dict[str, Any]] = reading.part(experiment.log_tail, [])
        environment: dict[str, str] = reading.part(experiment.environment, {})
        asked = experiment.path / "config.yaml"
        resolved = experiment.path / "config.resolved.yaml"
        rubrics = experiment.path / "cache" / "rubrics.yaml"
        return self._page(
            "about.html",
            title=f"About · {experiment.name}",
            experiment=experiment,
            tab="about",
            events=list(reversed(events)),
            log=list(reversed(log))[:200],
            rubrics=rubrics.read_text(encoding="utf-8", errors="replace") if rubrics.exists() else "",
            environment=environment,
            problems=reading.problems,
            asked=asked.read_text(encoding="utf-8", errors="replace") if asked.exists() else "",
            resolved=resolved.read_text(encoding="utf-8", errors="replace") if resolved.exists() else "",
        )

    async def login(self, request: Request) -> Response:
        wrong = "wrong" in request.query_params
        if request.method == "POST":
            form = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
            if self._access.admits(form.get("secret", "")):
                return sign_in(self._access, form.get("next", "/"))
            await asyncio.sleep(self._access.pause_s)
            wrong = True
        wanted = request.query_params.get("next", "/")
        needs_password = self._access.password is not None
        status = 401 if wrong else 200
        return self._page(
            "login.html", status, title="Sign in", next=wanted, wrong=wrong, needs_password=needs_password
        )

    def _named(self, request: Request) -> Experiment:
        return self._library.get(request.path_params["name"])

    def error(self, status: int, detail: str) -> Response:
        """The page that says what went wrong."""
        return self._page("error.html", status, title=str(status), detail=detail)


@cache
def static_path() -> str:
    """The path of styles and scripts. It contains a hash of their content, so browsers can cache them forever."""
    content = hashlib.sha256()
    for file in sorted(_STATIC.iterdir()):
        content.update(file.name.encode() + file.read_bytes())
    return f"/static/{content.hexdigest()[:12]}"
