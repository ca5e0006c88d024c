"""The viewer's web application: pages from templates, data as JSON under `/api/`.

Handlers are plain functions that run on worker threads, so a slow query doesn't hold up other pages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

import msgspec
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import ajet
from ajet.http.access import Access, Gate, sign_in
from ajet.observe.episode_codec import episode_json
from ajet.observe.episode_store import SORT_KEYS, EpisodeFilter, EpisodeNotFoundError, EpisodeStore, SortKey
from ajet.viewer.episode_view import episode_view, tokens_view
from ajet.viewer.library import Experiment, ExperimentNotFoundError, Library, differences
from ajet.viewer.tables import episodes_csv, metrics_csv

_HERE = Path(__file__).parent
_STATIC = _HERE / "static"
_GROUP_LIMIT = 64
_COMPRESS_FROM_BYTES = 50_000
_PAGE_SIZE = 100
_LARGEST_PAGE = 1000
_LARGEST_FILE = 1_000_000


def create_app(library: Library, access: Access) -> Starlette:
    """The application that shows these experiments."""
    return Starlette(
        routes=[*Pages(library, access).routes(), *Data(library).routes()],
        middleware=[
            Middleware(Gate, access=access),
            Middleware(GZipMiddleware, minimum_size=_COMPRESS_FROM_BYTES, compresslevel=1),
        ],
        exception_handlers={HTTPException: _error_page, UnicodeError: _bad_text},
    )


class Pages:
    """The HTML pages. The templates escape all text; the pages' scripts fetch the data."""

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
        differing = differences([_experiment(self._library, name) for name in names])
        return self._page("run.html", title="Compare", runs=names, experiment=None, tab="charts", differences=differing)

    def run(self, request: Request) -> Response:
        experiment = self._named(request)
        return self._page(
            "run.html", title=experiment.name, runs=[experiment.name], experiment=experiment, tab="charts"
        )

    def episodes(self, request: Request) -> Response:
        experiment = self._named(request)
        return self._page("episodes.html", title=f"Episodes · {experiment.name}", experiment=experiment, tab="episodes")

    def group(self, request: Request) -> Response:
        experiment, group = self._named(request), request.path_params["group"]
        return self._page("group.html", title=f"Group {group}", experiment=experiment, group=group, tab="episodes")

    def episode(self, request: Request) -> Response:
        experiment, episode = self._named(request), request.path_params["episode"]
        title = f"Episode {episode} · {experiment.name}"
        return self._page("episode.html", title=title, experiment=experiment, episode=episode, tab="episodes")

    def about(self, request: Request) -> Response:
        experiment = self._named(request)
        asked = experiment.path / "config.yaml"
        resolved = experiment.path / "config.resolved.yaml"
        rubrics = experiment.path / "cache" / "rubrics.yaml"
        return self._page(
            "about.html",
            title=f"About · {experiment.name}",
            experiment=experiment,
            tab="about",
            events=list(reversed(experiment.events())),
            log=list(reversed(experiment.log_tail()))[:200],
            rubrics=rubrics.read_text(encoding="utf-8", errors="replace") if rubrics.exists() else "",
            environment=experiment.environment(),
            asked=asked.read_text(encoding="utf-8") if asked.exists() else "",
            resolved=resolved.read_text(encoding="utf-8") if resolved.exists() else "",
        )

    async def login(self, request: Request) -> Response:
        wrong = "wrong" in request.query_params
        if request.method == "POST":
            form = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
            if self._access.admits(form.get("secret", "")):
                return sign_in(self._access, form.get("next", "/"))
            wrong = True
        wanted = request.query_params.get("next", "/")
        needs_password = self._access.password is not None
        status = 401 if wrong else 200
        return self._page(
            "login.html", status, title="Sign in", next=wanted, wrong=wrong, needs_password=needs_password
        )

    def _named(self, request: Request) -> Experiment:
        return _experiment(self._library, request.path_params["name"])


class Data:
    """The JSON that the pages' scripts fetch."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def routes(self) -> list[Route]:
        return [
            Route("/api/experiments", self.experiments),
            Route("/api/x/{name}", self.summary),
            Route("/api/x/{name}/metrics", self.metrics),
            Route("/api/x/{name}/metrics.csv", self.metrics_file),
            Route("/api/x/{name}/episodes", self.episodes),
            Route("/api/x/{name}/episodes.csv", self.episodes_file),
            Route("/api/x/{name}/facets", self.facets),
            Route("/api/x/{name}/group/{group:path}", self.group),
            Route("/api/x/{name}/episode/{episode:path}", self.episode),
            Route("/api/x/{name}/tokens/{episode:path}", self.tokens),
            Route("/api/x/{name}/raw/{episode:path}", self.raw),
        ]

    def experiments(self, request: Request) -> Response:
        return _json([self._library.get(name).summary() for name in self._library.names()])

    def summary(self, request: Request) -> Response:
        return _json(self._named(request).summary())

    def metrics(self, request: Request) -> Response:
        after = request.query_params.get("after", "")
        experiment = self._named(request)
        columns = experiment.metrics(int(after) if after.lstrip("-").isdigit() else None)
        return _json({**columns, "running": experiment.running})

    def episodes(self, request: Request) -> Response:
        query = episode_query(request.query_params)
        store = self._named(request).store()
        if store is None:
            return _json({"rows": [], "total": 0})
        rows, total = store.page(
            query.where, sort=query.sort, descending=query.descending, offset=query.offset, limit=query.limit
        )
        return _json({"rows": rows, "total": total})

    def metrics_file(self, request: Request) -> Response:
        """All metrics, to download."""
        experiment = self._named(request)
        return _file(metrics_csv(experiment.metrics()), f"{experiment.name} metrics.csv")

    def episodes_file(self, request: Request) -> Response:
        """The episodes that the filters choose, all pages of them."""
        experiment, query = self._named(request), episode_query(request.query_params)
        store = experiment.store()
        rows = (
            store.page(query.where, sort=query.sort, descending=query.descending, limit=_LARGEST_FILE)[0]
            if store
            else []
        )
        return _file(episodes_csv(rows), f"{experiment.name} episodes.csv")

    def facets(self, request: Request) -> Response:
        store = self._named(request).store()
        return _json(asdict(store.facets()) if store is not None else {"total": 0})

    def group(self, request: Request) -> Response:
        store = self._store(request)
        where = EpisodeFilter(group=request.path_params["group"])
        rows, total = store.page(where, sort="id", descending=False, limit=_GROUP_LIMIT)
        episodes = [episode_view(store.get(row["episode_id"]), store) for row in rows]
        return _json({"rows": rows, "total": total, "episodes": episodes})

    def episode(self, request: Request) -> Response:
        return self._one(request, episode_view)

    def tokens(self, request: Request) -> Response:
        return self._one(request, tokens_view)

    def raw(self, request: Request) -> Response:
        """Everything about one episode, to copy or download."""
        return self._one(request, lambda one, _store: episode_json(one.episode, one.step, one.annotation))

    def _one(self, request: Request, view: Callable[[Any, EpisodeStore], dict[str, Any]]) -> Response:
        store = self._store(request)
        try:
            recorded = store.get(request.path_params["episode"])
        except EpisodeNotFoundError as error:
            raise HTTPException(404, str(error)) from error
        return _json(view(recorded, store))

    def _store(self, request: Request) -> EpisodeStore:
        store = self._named(request).store()
        if store is None:
            raise HTTPException(404, "this experiment hasn't recorded any episodes yet")
        return store

    def _named(self, request: Request) -> Experiment:
        return _experiment(self._library, request.path_params["name"])


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """Which page of the episodes list a URL asks for."""

    where: EpisodeFilter
    sort: SortKey
    descending: bool
    offset: int
    limit: int


def episode_query(values: Mapping[str, str]) -> EpisodeQuery:
    """Read a URL like `?step_min=3&status=timeout&q=apples&sort=reward&order=asc`. A 400 names a malformed value."""
    sort = values.get("sort", "id")
    if sort not in SORT_KEYS:
        raise HTTPException(400, f"sort={sort!r}: must be one of {', '.join(SORT_KEYS)}")
    where = EpisodeFilter(
        step_min=_integer(values, "step_min"),
        step_max=_integer(values, "step_max"),
        reward_min=_real(values, "reward_min"),
        reward_max=_real(values, "reward_max"),
        task=values.get("task", ""),
        group=values.get("group", ""),
        status=values.get("status", ""),
        agent=values.get("agent", ""),
        tag=values.get("tag", ""),
        failure=values.get("failure", ""),
        success=_boolean(values, "success"),
        validation=_boolean(values, "validation"),
        text=values.get("q", ""),
    )
    return EpisodeQuery(
        where=where,
        sort=cast(SortKey, sort),
        descending=values.get("order", "desc") != "asc",
        offset=max(0, _integer(values, "offset") or 0),
        limit=min(_LARGEST_PAGE, max(1, _integer(values, "limit") or _PAGE_SIZE)),
    )


def _integer(values: Mapping[str, str], name: str) -> int | None:
    number = _real(values, name)
    return None if number is None else int(number)


def _real(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise HTTPException(400, f"{name}={text!r} is not a number") from None
    if number != number or abs(number) > 1e15:
        raise HTTPException(400, f"{name}={text!r} is out of range")
    return number


def _boolean(values: Mapping[str, str], name: str) -> bool | None:
    text = values.get(name, "")
    if text not in ("", "yes", "no"):
        raise HTTPException(400, f"{name}={text!r}: must be yes or no")
    return None if not text else text == "yes"


@cache
def static_path() -> str:
    """The path of styles and scripts. It contains a hash of their content, so browsers can cache them forever."""
    content = hashlib.sha256()
    for file in sorted(_STATIC.iterdir()):
        content.update(file.name.encode() + file.read_bytes())
    return f"/static/{content.hexdigest()[:12]}"


def _experiment(library: Library, name: str) -> Experiment:
    try:
        return library.get(name)
    except ExperimentNotFoundError as error:
        raise HTTPException(404, str(error)) from error


def _file(text: str, name: str) -> Response:
    """A CSV file, which browsers save."""
    plain = re.sub(r"[^\w.-]+", "_", name)
    return Response(text, media_type="text/csv", headers={"content-disposition": f'attachment; filename="{plain}"'})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value, enc_hook=str), media_type="application/json")


def _error_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return Response(msgspec.json.encode({"error": error.detail}), error.status_code, media_type="application/json")
    templates = Environment(loader=FileSystemLoader(_HERE / "templates"), autoescape=True)
    page = templates.get_template("error.html").render(
        title=f"{error.status_code}",
        detail=error.detail,
        version=ajet.__version__,
        library=None,
        static=static_path(),
    )
    return HTMLResponse(page, error.status_code)


def _bad_text(request: Request, error: Exception) -> Response:
    return _error_page(request, HTTPException(400, f"the URL contains text that can't be read: {error}"))
