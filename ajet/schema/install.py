"""What is imported only when it is asked for, and how to install it where it isn't there.

The commands name the clone or wheel in use, never our name on an index, where it may be somebody else's.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ajet.schema.errors import MissingDependencyError

DISTRIBUTION = "agentjet"
TRAIN = "train"
"""The extra that only training and local engines need; runners, ready agents, the store and most commands work without
it."""
TRAIN_PACKAGES = ("torch", "transformers", "datasets", "safetensors", "accelerate", "tokenizers", "huggingface_hub")
"""The packages of `TRAIN`, by import name."""


def missing_for_training() -> str | None:
    """The first package of `TRAIN` that isn't installed."""
    return next((package for package in TRAIN_PACKAGES if find_spec(package) is None), None)


def require_training(what: str) -> None:
    """Raise unless the packages of `TRAIN` are installed. `what` needs them."""
    if (missing := missing_for_training()) is not None:
        raise MissingDependencyError(_needs(what, missing))


@contextmanager
def missing_packages_named(what: str) -> Iterator[None]:
    """Turn an import error that is caused by the small installation into one that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in TRAIN_PACKAGES:
            raise
        raise MissingDependencyError(_needs(what, package)) from error


@contextmanager
def imported_to_stay() -> Iterator[None]:
    """Import for training: the million objects that they make are never looked through for garbage, which takes
    an eighth of the time to the first step. Where PyTorch is imported already, there is nothing to do."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _needs(what: str, package: str) -> str:
    return f"{what} needs {package}, which the small installation doesn't have\n    {install_command(TRAIN)}"


def install_command(extra: str) -> str:
    """`pip install …` for what an extra adds."""
    clone = clone_in_use()
    if clone is not None:
        here = clone == Path.cwd()
        tested = clone / "constraints" / f"{extra}.txt"
        constraints = f"-c {tested.relative_to(clone) if here else tested} " if tested.exists() else ""
        return f"pip install {constraints}-e '{'.' if here else clone}[{extra}]'"
    wheel = _wheel_in_use()
    if wheel is not None and wheel.exists():
        return f"pip install '{wheel}[{extra}]'"
    packages = " ".join(f"'{package}'" for package in _packages_of(extra))
    return f"pip install {packages or f'{extra!r}'}"


def clone_in_use() -> Path | None:
    """The clone that this program runs from, if any."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def _wheel_in_use() -> Path | None:
    """The file that this program was installed from, as pip recorded it."""
    try:
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(origin.get("url", ""))
    return Path(unquote(url.path)) if url.scheme == "file" else None


def _packages_of(extra: str) -> list[str]:
    """The requirements that an extra adds, as this program's own metadata declares them."""
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        declared = []
    marked = (text.partition(";") for text in declared)
    found = [package.strip() for package, _, mark in marked if re.search(rf"extra == ['\"]{extra}['\"]", mark)]
    return [package for package in found if not package.startswith(DISTRIBUTION)]


def written_for_another_agentscope(error: BaseException) -> str:
    """What to install where a file imports what only another major version of AgentScope has. Empty: it doesn't."""
    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] != "agentscope":
        return ""
    try:
        present = metadata.version("agentscope")
    except metadata.PackageNotFoundError:
        return ""
    needed, wanted = ("2", "agentscope>=2") if present.startswith("1.") else ("1.0", "agentscope<2")
    return f"it is written for AgentScope {needed}, and {present} is installed: pip install '{wanted}'"


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`. `homes`: name → module below the package."""

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return attribute
