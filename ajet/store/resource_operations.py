"""Requests about resources, carried out: publish, query."""

from __future__ import annotations

import os

from ajet.store import requests as ask
from ajet.store.errors import UnknownIdError
from ajet.store.records import Page, Resources
from ajet.store.request_context import Context, answered, remember


def publish_resources(context: Context, request: ask.PublishResources) -> Resources:
    if (answer := answered(context, request)) is not None:
        return _versions(context, answer[0], answer[1])[0]
    resources_id = request.resources_id or f"rs-{os.urandom(6).hex()}"
    before = _versions(context, resources_id)
    resources = Resources(
        resources_id=resources_id,
        version=before[0].version + 1 if before else 1,
        create_time=before[0].create_time if before else context.now,
        update_time=context.now,
        resources=request.resources,
    )
    context.tables.add_resources(resources)
    remember(context, request, (resources_id, resources.version))
    return resources


def query_resources(context: Context, request: ask.QueryResources) -> Page[Resources]:
    found, total = context.tables.query_resources(request)
    if request.resources_id is not None and not total:
        raise UnknownIdError(
            f"no resources {request.resources_id!r}"
            + ("" if request.version is None else f" of version {request.version}")
        )
    return Page(items=found, total=total)


def latest_resources_id(context: Context) -> str | None:
    """Of what was published last."""
    found = _versions(context)
    return found[0].resources_id if found else None


def refuse_unknown_resources(context: Context, resources_id: str) -> None:
    if not _versions(context, resources_id):
        raise UnknownIdError(f"no resources {resources_id!r} in this store: publish them first")


def _versions(context: Context, resources_id: str | None = None, version: int | None = None) -> list[Resources]:
    """The newest of these, if there are any."""
    return context.tables.query_resources(ask.QueryResources(resources_id=resources_id, version=version, limit=1))[0]
