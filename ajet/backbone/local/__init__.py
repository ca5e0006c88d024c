"""`--backbone=local`: rollout, credit and update on one machine, with PyTorch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.backbone import LaunchOptions
from ajet.schema.install import imported_to_stay, lazily

if TYPE_CHECKING:
    from ajet.backbone.local.placement import place as place
    from ajet.backbone.local.placement import visible_gpus as visible_gpus
    from ajet.backbone.local.placement import why_no_gpu as why_no_gpu
    from ajet.backbone.local.placement import why_unfit as why_unfit
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    """0: trained; 1: there was nothing to train on."""
    from ajet.backbone.checks import check_teacher, read_tasks, say_how_trained

    check_teacher(config)
    tasks = read_tasks(config)  # what is wrong with them is said before PyTorch is imported, which takes seconds
    from ajet.backbone.memory import announce_plan

    with imported_to_stay():
        say_how_trained(config)
        announce_plan(config)
        from ajet.backbone.local.loop import LocalRun
        from ajet.backbone.report import show_report

    code = LocalRun(config, experiment, options, tasks).run()
    if code == 0 and not options.json:
        show_report(config, experiment.path, quiet=options.quiet)
    return code


__getattr__ = lazily(__name__, dict.fromkeys(("place", "visible_gpus", "why_no_gpu", "why_unfit"), "placement"))
