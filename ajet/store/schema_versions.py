"""The tables of a store's database, by version, and how one version becomes the next.

A version is never edited once it was released: a change is a new entry. `{blob}` and the like are the types for which
SQLite and PostgreSQL have different names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ajet.store.errors import StoreError

Run = Callable[[str], Any]

VERSION_1 = (
    "CREATE TABLE rollout (number {serial}, rollout_id TEXT NOT NULL UNIQUE, status TEXT NOT NULL, queue {integer}, "
    "mode TEXT, resources_id TEXT, start_time {real} NOT NULL, end_time {real}, attempts {integer} NOT NULL, "
    "spans {integer} NOT NULL, size {integer} NOT NULL, config {blob} NOT NULL, body {blob} NOT NULL)",
    "CREATE INDEX rollout_queue ON rollout (queue, number) WHERE queue IS NOT NULL",
    "CREATE INDEX rollout_status ON rollout (status, end_time)",
    "CREATE TABLE attempt (rollout {integer} NOT NULL, sequence {integer} NOT NULL, attempt_id TEXT NOT NULL, "
    "status TEXT NOT NULL, worker_id TEXT, owner TEXT, start_time {real} NOT NULL, end_time {real}, heard {real}, "
    "deadline {real}, body {blob} NOT NULL, PRIMARY KEY (rollout, sequence)) {clustered}",
    "CREATE INDEX attempt_deadline ON attempt (deadline) WHERE deadline IS NOT NULL",
    "CREATE TABLE span (rollout {integer} NOT NULL, attempt {integer} NOT NULL, span_id TEXT NOT NULL, "
    "sequence {integer} NOT NULL, body {blob} NOT NULL, PRIMARY KEY (rollout, attempt, span_id)) {clustered}",
    "CREATE TABLE resources (number {serial}, resources_id TEXT NOT NULL, version {integer} NOT NULL, "
    "create_time {real} NOT NULL, update_time {real} NOT NULL, body {blob} NOT NULL, UNIQUE (resources_id, version))",
    "CREATE TABLE worker (worker_id TEXT PRIMARY KEY, status TEXT NOT NULL, body {blob} NOT NULL) {clustered}",
    "CREATE TABLE request (request_id TEXT PRIMARY KEY, done {real} NOT NULL, answer {blob} NOT NULL) {clustered}",
    "CREATE INDEX request_done ON request (done)",
    "CREATE TABLE access_key (name TEXT NOT NULL, digest TEXT PRIMARY KEY, roles TEXT NOT NULL, "
    "created {real} NOT NULL, expires {real}) {clustered}",
)

VERSION_2 = (
    "CREATE TABLE span_batch (number {serial}, rollout {integer} NOT NULL, attempt {integer} NOT NULL, "
    "ids TEXT NOT NULL, body {blob} NOT NULL)",
    "CREATE INDEX span_batch_attempt ON span_batch (rollout, attempt)",
    "INSERT INTO span_batch (rollout, attempt, ids, body) SELECT rollout, attempt, span_id, body FROM span "
    "ORDER BY rollout, attempt, sequence",
    "DROP TABLE span",
)
"""A row for all spans of an attempt that came together, instead of a row for each."""

VERSIONS: Mapping[int, Sequence[str]] = {1: VERSION_1, 2: VERSION_2}
"""What makes each version out of the one before; the first out of nothing."""


def migrate(found: int, run: Run, where: str, versions: Mapping[int, Sequence[str]] = VERSIONS) -> int:
    """Bring a database from version `found` to the newest one. Inside the caller's transaction."""
    newest = max(versions)
    if found > newest:
        raise StoreError(
            f"{where}: written by a newer version of ajet (its tables have version {found}, this one knows {newest}). "
            "Update ajet here, or use another store"
        )
    for version in range(found + 1, newest + 1):
        for statement in versions[version]:
            run(statement)
    return newest
