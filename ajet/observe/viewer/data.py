"""`Data`: the JSON that the viewer's scripts fetch, the queries that ask for it, and the files that readers download.

Handlers are plain functions that run on worker threads, so a slow query doesn't hold up other pages.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ajet.observe.episode_codec import episode_json
from ajet.observe.episode_store import (
    SORT_KEYS,
    EpisodeFilter,
    EpisodeNotFoundError,
    EpisodeStore,
    RecordedEpisode,
)
from ajet.observe.statistics import (
    TASK_SORT_KEYS,
    RewardCount,
    TaskFilter,
    TaskRow,
    reward_counts,
    reward_histograms,
    task_history,
    task_page,
)
from ajet.observe.viewer.episode_view import (
    answer_names,
    episode_view,
    exact,
    gold_answer,
    task_view,
    tokens_view,
)
from ajet.observe.viewer.library import Experiment, Library, Reading, named_runs
from ajet.observe.viewer.overview import overview
from ajet.observe.viewer.series import Shown

_PAGE_SIZE = 100
_LARGEST_PAGE = 1000
_WHOLE = {"offset": 0, "limit": 1_000_000}
"""The page that a CSV file holds."""
_GROUP_LIMIT = 64
_YES_OR_NO = {"yes": True, "no": False}


# ---------------------------------------------------------------- queries in URLs


def episode_filter(values: Mapping[str, str], experiment: Experiment) -> EpisodeFilter:
    """Read a URL like `?step_min=3&status=timeout&q=apples`. A 400 names a malformed value. What success means is in
    the run's config."""
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
        success=_choice(values, "success"),
        validation=_choice(values, "validation"),
        mixed=_choice(values, "groups", {"all": None, "mixed": True, "equal": False}),
        ids=_noted(values, experiment),
        text=values.get("q", ""),
    )
    return where if where.success is None else replace(where, threshold=experiment.success_threshold())


def _noted(values: Mapping[str, str], experiment: Experiment) -> tuple[str, ...] | None:
    """The episodes that `?note=any` or `?note=tag:…` asks for."""
    kind, _, tag = values.get("note", "").partition(":")
    if kind not in ("", "any", "tag"):
        raise HTTPException(400, f"note={kind!r}: must be any or tag:…")
    return experiment.notes.read().tagged(tag) if kind else None


def task_filter(values: Mapping[str, str]) -> TaskFilter:
    """Read a URL like `?q=apples&solved_max=0.5`."""
    return TaskFilter(
        text=values.get("q", "").strip(),
        tag=values.get("tag", ""),
        validation=_choice(values, "validation"),
        solved_min=_real(values, "solved_min"),
        solved_max=_real(values, "solved_max"),
    )


def paging(values: Mapping[str, str], keys: Sequence[str], *, order: str) -> dict[str, Any]:
    """Which page a URL like `?sort=reward&order=asc&offset=100` asks for, as the lists take it. `keys`: what can be
    sorted by, the usual one first; `order`: the usual one."""
    sort = values.get("sort", keys[0])
    if sort not in keys:
        raise HTTPException(400, f"sort={sort!r}: must be one of {', '.join(keys)}")
    limit = min(_LARGEST_PAGE, max(1, _integer(values, "limit") or _PAGE_SIZE))
    place = {"offset": max(0, _integer(values, "offset") or 0), "limit": limit}
    return {"sort": sort, "descending": values.get("order", order) == "desc", **place}


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


def _choice(values: Mapping[str, str], name: str, meaning: Mapping[str, bool | None] = _YES_OR_NO) -> bool | None:
    text = values.get(name, "")
    if text and text not in meaning:
        raise HTTPException(400, f"{name}={text!r}: must be {' or '.join(meaning)}")
    return meaning[text] if text else None


# ---------------------------------------------------------------- CSV files

EPISODE_COLUMNS = (
    "episode_id", "step", "validation", "task_id", "group_id", "repeat", "tag", "status", "failure", "reward",
    "advantage", "turns", "calls", "tokens", "sampled", "trained", "forks", "seconds",
)  # fmt: skip
TASK_COLUMNS = (
    "task_id", "tag", "attempts", "failed", "solved", "latest", "change", "reward", "last_step", "answer", "preview",
    "by_step",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would run a text that begins with one of these."""


def metrics_csv(columns: dict[str, Any]) -> str:
    """One row per step, one column per metric."""
    series = columns["series"]
    rows = [[step, *(values[index] for values in series.values())] for index, step in enumerate(columns["steps"])]
    return _csv(["step", *series], rows)


def episodes_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One row per episode."""
    return _csv(EPISODE_COLUMNS, [[row.get(name) for name in EPISODE_COLUMNS] for row in rows])


def tasks_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One row per task; `by_step` lists the share solved as `step:share`."""
    shown = [{**row, "by_step": " ".join(f"{step}:{share:.4g}" for step, share in row["by_step"])} for row in rows]
    return _csv(TASK_COLUMNS, [[row.get(name) for name in TASK_COLUMNS] for row in shown])


def _csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_safe(name) for name in head])
    writer.writerows([_safe(value) for value in row] for row in rows)
    return text.getvalue()


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


# ---------------------------------------------------------------- the routes


class Data:
    """The routes of all that pages read."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def routes(self) -> list[Route]:
        return [
            Route("/api/experiments", self.experiments),
            Route("/api/rewards", self.rewards),
            Route("/api/x/{name}", self.summary),
            Route("/api/x/{name}/overview", self.overview),
            Route("/api/x/{name}/metrics", self.metrics),
            Route("/api/x/{name}/metrics.csv", self.metrics_file),
            Route("/api/x/{name}/episodes", self.episodes),
            Route("/api/x/{name}/episodes.csv", self.episodes_file),
            Route("/api/x/{name}/facets", self.facets),
            Route("/api/x/{name}/candidates", self.candidates),
            Route("/api/x/{name}/tasks", self.tasks),
            Route("/api/x/{name}/tasks.csv", self.tasks_file),
            Route("/api/x/{name}/task/{task:path}", self.task),
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
        """What charts show. `?name=…&stacked=…`: the metrics; `?known=`: the stamp of what the page already has."""
        experiment, query = self._named(request), request.query_params
        smooth = _real(query, "smooth") or 0.0
        if not 0 <= smooth < 1:
            raise HTTPException(400, "smooth: must be from 0 to below 1")
        shown = Shown(
            tuple(query.getlist("name")), tuple(query.getlist("stacked")), _integer(query, "from"),
            _integer(query, "to"), smooth,
        )  # fmt: skip
        return _json({**experiment.chart(shown, query.get("known", "")), "running": experiment.running})

    def overview(self, request: Request) -> Response:
        experiment = self._named(request)
        return _json({**overview(experiment), "running": experiment.running})

    def episodes(self, request: Request) -> Response:
        rows, total = self._episodes(request)
        return _json({"rows": rows, "total": total})

    def _episodes(self, request: Request, **page: int) -> tuple[list[dict[str, Any]], int]:
        experiment = self._named(request)
        where = episode_filter(request.query_params, experiment)
        asked = paging(request.query_params, SORT_KEYS, order="desc")
        store = experiment.store()
        return store.page(where, **(asked | page)) if store is not None else ([], 0)

    def metrics_file(self, request: Request) -> Response:
        """All metrics, to download."""
        experiment = self._named(request)
        return _file(metrics_csv(experiment.metrics()), f"{experiment.name} metrics.csv")

    def episodes_file(self, request: Request) -> Response:
        """The episodes that the filters choose, all pages of them."""
        rows, _ = self._episodes(request, **_WHOLE)
        return _file(episodes_csv(rows), f"{self._named(request).name} episodes.csv")

    def rewards(self, request: Request) -> Response:
        """How the rewards of each step are spread, in one run or several with the same bins. One that can't be read is
        named, and the others are given."""
        experiments = [self._library.get(name) for name in named_runs(request.query_params.get("runs", ""))]
        reading = Reading()
        counts = [reading.part(partial(_reward_counts, one), list[RewardCount]()) for one in experiments]
        found = zip(experiments, reward_histograms(counts), strict=True)
        return _json({"runs": {one.name: asdict(spread) for one, spread in found}, "problems": reading.problems})

    def candidates(self, request: Request) -> Response:
        """What a search for prompt templates has found so far. `?known=`: the stamp of what the page already has."""
        experiment = self._named(request)
        return _json(experiment.prompts.view(experiment.running, request.query_params.get("known", "")))

    def tasks(self, request: Request) -> Response:
        rows, total = self._tasks(request)
        return _json({"rows": rows, "total": total})

    def tasks_file(self, request: Request) -> Response:
        """The tasks that the filters choose, all pages of them."""
        rows, _ = self._tasks(request, **_WHOLE)
        return _file(tasks_csv(rows), f"{self._named(request).name} tasks.csv")

    def _tasks(self, request: Request, **page: int) -> tuple[list[dict[str, Any]], int]:
        experiment = self._named(request)
        where = task_filter(request.query_params)
        asked = paging(request.query_params, TASK_SORT_KEYS, order="asc")
        store = experiment.store()
        if store is None:
            return [], 0
        rows, total = task_page(store, where, **(asked | page))
        records = store.tasks([row.task_id for row in rows])
        names = answer_names(experiment.config())
        answers = {name: exact(gold_answer(task.metadata, names)) for name, task in records.items()}
        # no asdict: it would copy each of the steps, of which a page may have 40,000
        return [
            {**{key: getattr(row, key) for key in _TASK_FIELDS}, "answer": answers.get(row.task_id)} for row in rows
        ], total

    def task(self, request: Request) -> Response:
        """One task: what the reader gave, and its attempts."""
        experiment, store, name = self._named(request), self._store(request), request.path_params["task"]
        attempts = task_history(store, name, experiment.success_threshold())
        if not attempts:
            raise HTTPException(404, f"no episode of task {name!r} is recorded")
        return _json({"task": task_view(experiment, store, name), "attempts": attempts})

    def facets(self, request: Request) -> Response:
        store = self._named(request).store()
        if store is None:
            return _json({"total": 0})
        return _json({**asdict(store.facets()), "newest": _newest(store)})

    def group(self, request: Request) -> Response:
        store = self._store(request)
        where = EpisodeFilter(group=request.path_params["group"])
        rows, total = store.page(where, sort="id", descending=False, limit=_GROUP_LIMIT)
        experiment = self._named(request)
        episodes = [_episode(experiment, store.get(row["episode_id"]), store) for row in rows]
        return _json({"rows": rows, "total": total, "episodes": episodes})

    def episode(self, request: Request) -> Response:
        experiment = self._named(request)
        return self._one(request, lambda one, store: _episode(experiment, one, store))

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
        return self._library.get(request.path_params["name"])


_TASK_FIELDS = tuple(field.name for field in fields(TaskRow))


def _episode(experiment: Experiment, recorded: RecordedEpisode, store: EpisodeStore) -> dict[str, Any]:
    """An episode's view with that of its task. Success is as the metrics count it."""
    view = episode_view(recorded, store)
    if (about := view["episode"])["success"] is None and about["reward"] is not None:
        about["success"] = about["reward"] >= experiment.success_threshold()
    return {**view, "task": task_view(experiment, store, recorded.episode.task_id)}


def _newest(store: EpisodeStore) -> dict[str, Any] | None:
    """The last training step, and whether groups in it have different rewards; None before the first."""
    found = store.rows("SELECT step FROM episode WHERE validation = 0 ORDER BY step DESC LIMIT 1")
    if not found:
        return None
    step = found[0]["step"]
    _, mixed = store.page(EpisodeFilter(step_min=step, step_max=step, validation=False, mixed=True), limit=0)
    return {"step": step, "mixed": mixed > 0}


def _reward_counts(experiment: Experiment) -> list[RewardCount]:
    store = experiment.store()
    return reward_counts(store) if store is not None else []


def _file(text: str, name: str) -> Response:
    """A CSV file, which browsers save."""
    plain = re.sub(r"[^\w.-]+", "_", name)
    named = f'filename="{plain}"' if plain.isascii() else f"filename*=UTF-8''{quote(plain)}"
    return Response(text, media_type="text/csv", headers={"content-disposition": f"attachment; {named}"})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value, enc_hook=str), media_type="application/json")
