"""`ajet view [EXPERIMENT]`: runs and episodes in the browser, while they run and after."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ajet.schema.errors import UserError
from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.observe.viewer import Experiment


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    parser = CommandParser("ajet view", description="Show runs and episodes in the browser.")
    parser.add_argument(
        "experiment",
        nargs="?",
        type=Path,
        help="a folder of experiments (default: saved_experiments), one of them, its name, or a folder of trajectories",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    parser.add_argument("--port", type=int, help="port (default: 8642, or a free one)")
    parser.add_argument(
        "--password",
        default=os.environ.get("AJET_VIEW_PASSWORD"),
        help="required if --host is reachable by others",
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    arguments = parser.parse_args(argv)

    from ajet.observe.viewer import Viewer, ViewerSettings

    given = find_experiment(arguments.experiment)
    if given.is_file():
        raise UserError(f"{given} is a file: give the folder of a run, of several, or of trajectories")
    with shown_folder(given) as root:
        trajectories = None if root == given else given
        settings = ViewerSettings(root, arguments.host, arguments.port, arguments.password, trajectories)
        viewer = Viewer(settings)
        print(f"{viewer.url}\n(Ctrl-C to stop)", flush=True)
        if not arguments.no_browser and os.environ.get("DISPLAY"):
            import webbrowser

            threading.Timer(0.5, webbrowser.open, [viewer.url]).start()
        viewer.serve()
    return 0


@contextmanager
def shown_folder(folder: Path) -> Iterator[Path]:
    """The folder itself; or, if it holds trajectories of agents that ran alone, a folder with their episodes, which is
    kept up to date."""
    from ajet.schema.trajectory import trajectory_files

    if next(trajectory_files(folder), None) is None:
        yield folder
        return
    from ajet.observe.trajectory_folder import TrajectoryFolder

    with TemporaryDirectory(prefix="ajet-view-") as place:
        experiment = Path(place) / folder.resolve().name
        experiment.mkdir()
        trajectories = TrajectoryFolder(folder, experiment)
        try:
            trajectories.sync()
            trajectories.watch()
            yield experiment
        finally:
            trajectories.close()


def find_experiment(given: Path | None) -> Path:
    """The folder given as a path, or as a name within `saved_experiments`."""
    root = Path("saved_experiments")
    if given is None:
        return root
    named = root / given
    return named if not given.exists() and named.exists() else given


def opened_experiment(given: Path) -> Experiment:
    """The experiment at a path or of a name. Raises an error that names those that there are."""
    from ajet.observe.viewer import Experiment, ExperimentNotFoundError, Library, is_experiment

    path = find_experiment(given)
    if is_experiment(path):
        return Experiment(path)
    there = Library(Path("saved_experiments")).names()
    near = get_close_matches(str(given), there, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if str(given) in there:
        hint = f"./{given} is something else: write {Path('saved_experiments') / given}\n    "
    raise ExperimentNotFoundError(
        f"{given}: no such run\n    {hint}"
        + (
            f"runs in saved_experiments: {', '.join(there)}"
            if there
            else "saved_experiments has none; give the folder of a run"
        )
    )
