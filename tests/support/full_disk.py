"""A disk that is full: files of this process grow no larger than so many bytes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_up_to(most: int) -> Iterator[None]:
    """Writing beyond that raises an OSError, `File too large`. Print nothing meanwhile: pytest keeps it in a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
