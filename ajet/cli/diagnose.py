"""`ajet diagnose RUN`: what is wrong with a run, the gravest first, with evidence and the key to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.cli.runs import wrapped
from ajet.schema.errors import EXIT_FAILED, UserError
from ajet.schema.printable import counted, printable
from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.observe.run_evidence import RunFinding
    from ajet.observe.viewer import Experiment


def run(argv: Sequence[str]) -> int:
    """Print the findings. Exit code 0 if the run is healthy, 1 if something is wrong with it."""
    parser = CommandParser("ajet diagnose", description="Say what is wrong with a run, and which key to change.")
    parser.add_argument("run", type=Path, metavar="RUN", help="an experiment's folder, or its name")
    parser.add_argument("--json", action="store_true", help="one JSON object per finding and line")
    arguments = parser.parse_args(argv)

    from ajet.cli.targets import opened_experiment

    experiment = opened_experiment(arguments.run)
    seen, found = findings(experiment)
    wrong = [finding for finding in found if finding.level in ("bad", "warn")]
    if arguments.json:
        for finding in found:
            print(json.dumps({**asdict(finding), "run": experiment.name}))
    else:
        _show(experiment, arguments.run, seen, found, wrong)
    return EXIT_FAILED if wrong else 0


def findings(experiment: Experiment) -> tuple[str, list[RunFinding]]:
    """What the run has recorded, and what the rules say of it."""
    from ajet.observe.diagnosis import diagnose
    from ajet.observe.run_evidence import Figures
    from ajet.observe.viewer import Reading

    reading = Reading()
    columns = experiment.metrics_in(reading)
    evidence = experiment.evidence(Figures(columns), reading)
    if reading.problems:
        problems = "\n    ".join(reading.problems)
        raise UserError(f"{problems}\n    repair or move away what can't be read, and diagnose again")
    steps = sum(step > 0 for step in columns["steps"])  # 0 is the validation before the first
    recorded = evidence.store.facets().total if evidence.store is not None else 0
    if not steps and not recorded:
        raise UserError(
            f"{experiment.path}: no step has ended and no episode is recorded, so there is nothing to diagnose\n"
            "    run.log in that folder says how far the run came"
        )
    seen = counted(steps, "step") if steps else f"{counted(recorded, 'episode')}; no training step is recorded"
    return seen, diagnose(evidence)


def _show(experiment: Experiment, given: Path, seen: str, found: list[RunFinding], wrong: list[RunFinding]) -> None:
    verdict = counted(len(wrong), "fault") if wrong else "nothing wrong"
    print(printable(f"{experiment.name}: {verdict} in {seen}"))
    for finding in found:
        print(f"\n{finding.level:<5}  {finding.fault}")
        _lines(finding.said)
        if finding.level not in ("bad", "warn"):
            continue
        if finding.evidence:
            _lines("evidence: " + ", ".join(f"{name} {_value(value)}" for name, value in finding.evidence.items()))
        if finding.change:
            _lines(f"change: {finding.change}")
        if finding.episodes:
            _lines(f"episodes: {' '.join(finding.episodes)}")
        if finding.link:
            _lines(f"look: ajet view {given}, then /x/{experiment.name}/{finding.link}")


def _lines(text: str) -> None:
    print("\n".join(wrapped(printable(text), 7)))


def _value(value: Any) -> str:
    from ajet.observe.run_evidence import as_number

    if isinstance(value, list):
        return (" " if isinstance(value[0], str) else " → ").join(map(_value, value))
    return as_number(value) if isinstance(value, int | float) else str(value)
