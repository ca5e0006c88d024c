"""`ajet view`: the experiments of a folder as web pages. `Library` reads them, `Viewer` serves them."""

from typing import TYPE_CHECKING

from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.observe.viewer.episode_view import answer_names, gold_answer
    from ajet.observe.viewer.library import (
        Experiment,
        ExperimentNotFoundError,
        Library,
        NoExperimentsError,
        Reading,
        RunGain,
        differences,
        differently_judged,
        is_experiment,
        run_gains,
    )
    from ajet.observe.viewer.report import write_report, write_tables
    from ajet.observe.viewer.serve import TrajectoryFolder, Viewer

__all__ = [
    "Experiment",
    "ExperimentNotFoundError",
    "Library",
    "NoExperimentsError",
    "Reading",
    "RunGain",
    "TrajectoryFolder",
    "Viewer",
    "answer_names",
    "differences",
    "differently_judged",
    "gold_answer",
    "is_experiment",
    "run_gains",
    "write_report",
    "write_tables",
]

# commands that only read experiments load no web framework
_ELSEWHERE = {"TrajectoryFolder": "serve", "Viewer": "serve", "write_report": "report", "write_tables": "report"}
_OF_EPISODES = dict.fromkeys(("answer_names", "gold_answer"), "episode_view")
__getattr__ = lazily(__name__, dict.fromkeys(__all__, "library") | _ELSEWHERE | _OF_EPISODES)
