"""The viewer's web application: pages from templates, data as JSON under `/api/`, and what readers write."""

from __future__ import annotations

import sqlite3
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ajet.observe.viewer.access import Access, Gate
from ajet.observe.viewer.data import Data
from ajet.observe.viewer.library import ExperimentNotFoundError, Library
from ajet.observe.viewer.notes_api import NotesApi
from ajet.observe.viewer.pages import Pages
from ajet.schema.errors import UserError

_COMPRESS_FROM_BYTES = 50_000


def create_app(library: Library, access: Access) -> Starlette:
    """The application that shows these experiments."""
    pages = Pages(library, access)

    def refuse(request: Request, status: int, detail: str) -> Response:
        if request.scope["path"].startswith("/api/"):
            return Response(msgspec.json.encode({"error": detail}), status, media_type="application/json")
        return pages.error(status, detail)

    def failed(request: Request, error: Exception) -> Response:
        match error:
            case HTTPException():
                return refuse(request, error.status_code, error.detail)
            case ExperimentNotFoundError():
                return refuse(request, HTTPStatus.NOT_FOUND, str(error))
            case sqlite3.Error():
                return refuse(request, HTTPStatus.INTERNAL_SERVER_ERROR, f"episodes.sqlite can't be read: {error}")
            case UnicodeError():
                detail = f"the URL contains text that can't be read: {error}"
                return refuse(request, HTTPStatus.BAD_REQUEST, detail)
        return refuse(request, HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    known = (HTTPException, UserError, UnicodeError, sqlite3.Error, OSError)
    return Starlette(
        routes=[*pages.routes(), *Data(library).routes(), *NotesApi(library).routes()],
        middleware=[
            Middleware(Gate, access=access),
            Middleware(GZipMiddleware, minimum_size=_COMPRESS_FROM_BYTES, compresslevel=1),
        ],
        exception_handlers={kind: failed for kind in known},
    )
