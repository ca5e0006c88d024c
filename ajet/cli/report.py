"""`ajet report EXPERIMENT`: one HTML file (and PNG plots) about a run, to send to a colleague."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ajet.system.command_line import CommandParser


def run(argv: Sequence[str]) -> int:
    """Write the report."""
    parser = CommandParser("ajet report", description="One self-contained HTML file about a run, and its plots.")
    parser.add_argument("experiment", type=Path, help="an experiment's folder, or its name in saved_experiments")
    parser.add_argument("-o", "--output", type=Path, help="the HTML file (default: report.html in the experiment)")
    arguments = parser.parse_args(argv)

    from ajet.cli.view import opened_experiment
    from ajet.observe.viewer import write_report

    experiment = opened_experiment(arguments.experiment)
    written = write_report(experiment, arguments.output or experiment.path / "report.html")
    print(f"{written[0]}\n{len(written) - 1} plots in {written[0].with_name(written[0].stem + '_plots')}")
    return 0
