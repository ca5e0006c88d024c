"""A store of each kind, and a PostgreSQL that is started once if a test needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.store_kinds import KINDS, Opener, postgres_cluster


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    with ExitStack() as started:
        url: list[str] = []

        def get() -> str:
            if not url:
                pytest.importorskip("psycopg")
                url.append(started.enter_context(postgres_cluster(tmp_path_factory.mktemp("postgres"))))
            return url[0]

        yield get


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, postgres: Callable[[], str]) -> Opener:
    return Opener(request.param, tmp_path, postgres)
