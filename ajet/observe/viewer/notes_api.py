"""`NotesApi`: the notes and tags that readers write about runs and episodes. All else in the viewer only reads.

A page of another site can't write: the cookie stays at home, the body must be JSON, and the request must say that it
comes from a page of ours.
"""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ajet.observe.notes import Note, NotesError
from ajet.observe.viewer.library import Library


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to keep a note."""

    note: str
    tags: list[str]
    episode: str = ""


class NotesApi:
    """The routes under which notes are read and kept."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def routes(self) -> list[Route]:
        return [
            Route("/api/x/{name}/notes", self.read),
            Route("/api/x/{name}/notes", self.write, methods=["POST"]),
        ]

    def read(self, request: Request) -> Response:
        """All notes of an experiment, and why none can be kept, if that is so."""
        name = request.path_params["name"]
        notes = self._library.get(name).notes.read()
        return _json({**asdict(notes), "refused": self._library.why_no_notes})

    async def write(self, request: Request) -> Response:
        require_own_page(request)
        try:
            written = msgspec.json.decode(await request.body(), type=_Written)
        except msgspec.DecodeError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"not a note: {error}") from error
        return _json(asdict(await run_in_threadpool(self._keep, request.path_params["name"], written)))

    def _keep(self, name: str, written: _Written) -> Note:
        experiment = self._library.get(name)
        if self._library.why_no_notes:
            raise HTTPException(HTTPStatus.CONFLICT, self._library.why_no_notes)
        store = experiment.store() if written.episode else None
        if written.episode and (store is None or not store.has(written.episode)):
            raise HTTPException(HTTPStatus.NOT_FOUND, f"no episode {written.episode!r} in {name}")
        try:
            return experiment.notes.write(written.note, written.tags, written.episode)
        except NotesError as error:
            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from error


def require_own_page(request: Request) -> None:
    """Raise unless a page of this server sent the request, as browsers tell, with a body that no form can have."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    if site != "same-origin" or (origin is not None and urlsplit(origin).netloc != request.headers.get("host")):
        raise HTTPException(HTTPStatus.FORBIDDEN, "notes are written from the viewer's own pages only")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
