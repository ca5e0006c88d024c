"""`ajet view`: the experiments of a folder as web pages. `Library` reads them, `Viewer` serves them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet.observe.viewer.library import (
        Experiment,
        ExperimentNotFoundError,
        Library,
        NoExperimentsError,
        differences,
        differently_judged,
        is_experiment,
    )
    from ajet.observe.viewer.report import write_report
    from ajet.observe.viewer.serve import Viewer, ViewerSettings

__all__ = [
    "Experiment",
    "ExperimentNotFoundError",
    "Library",
    "NoExperimentsError",
    "Viewer",
    "ViewerSettings",
    "differences",
    "differently_judged",
    "is_experiment",
    "write_report",
]

# commands that only read experiments load no web framework
_HOMES = {"Viewer": "serve", "ViewerSettings": "serve", "write_report": "report"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'library')}"), name)
