"""`ajet doctor`: what this machine and its packages offer, what conflicts, and the command that fixes it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from ajet.backbone.local import why_no_gpu, why_unfit
from ajet.backbone.plan import installed, requirement, version_range
from ajet.config.kinds import TRACKERS, load
from ajet.schema.install import TRAIN, install_command, missing_for_training
from ajet.system.command_line import OPEN_FILES, CommandParser, open_more_files

GIB = 1024**3
MEMORY_GIB, DISK_GIB, SHARED_MEMORY_GIB = 4.0, 5.0, 1.0
"""Below these, the tiny models still run; a real model, its checkpoints, or Ray won't."""
USES_WIDTH = 40
"""Width of the column that says what an absent package is for."""


class Sign(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    ABSENT = "absent"
    """Optional, and not installed."""
    WARNING = "warning"
    PROBLEM = "problem"


SIGNS = {
    Sign.OK: ("✓", "32"),
    Sign.ABSENT: ("·", "2"),
    Sign.WARNING: ("!", "33"),
    Sign.PROBLEM: ("✗", "31"),
}


class Finding(NamedTuple):
    """One line of the report."""

    level: Sign
    what: str
    detail: str
    fix: str = ""


class Optional(NamedTuple):
    """A package that only some need."""

    package: str
    extra: str
    lets: str


OPTIONAL = (
    Optional("agentscope", "agentscope", "agents written with AgentScope"),
    Optional("langchain-openai", "langchain", "agents written with LangChain"),
    Optional("anthropic", "anthropic", "agents written with Anthropic's client"),
    Optional("vllm", "vllm", "rollout.engine: vllm"),
    Optional("flash-attn", "flash-attn", "model.attn: flash_attention_2"),
    Optional("verl", "verl", "--backbone=verl"),
    Optional("trinity-rft", "trinity", "--backbone=trinity"),
    Optional("gepa", "gepa", "prompt_tuning.algorithm: gepa"),
    *(Optional(load(TRACKERS, name).install, "trackers", f"trainer_common.logger: {name}") for name in TRACKERS),
)
CORE = ("openai", "pydantic", "omegaconf")
TRAINING = ("transformers", "datasets", "safetensors", "accelerate")
"""With torch: what the small installation leaves out."""
NEEDS_TRANSFORMERS = {"verl": ">=5.5,<5.11", "trinity-rft": ">=5.12.1,<5.24"}
"""Where the ranges of transformers that verl and Trinity work with differ from ours."""


def run(argv: Sequence[str]) -> int:
    """Print the report. Exit code 1 if something must be fixed."""
    CommandParser("ajet doctor", description=__doc__).parse_args(argv)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    findings: list[Finding] = []
    for title, checks in SECTIONS:
        print(f"\033[1m{title}\033[0m" if colour else title)
        for check in checks:
            for finding in check():
                findings.append(finding)
                print(render(finding, colour), flush=True)
    problems = [finding for finding in findings if finding.level is Sign.PROBLEM]
    warnings = [finding for finding in findings if finding.level is Sign.WARNING]
    if problems:
        print(f"\n{len(problems)} to fix, in the order above.")
    else:
        few = missing_for_training()
        ready = "Ready." if few is None else "Ready for runners, ready agents, the store and the viewer."
        print(f"\n{ready}" + (f" {len(warnings)} worth a look." if warnings else ""))
        if few is not None:
            print(f"Not for training, debug runs and models here, which need {few}: {install_command(TRAIN)}")
    return 1 if problems else 0


def render(finding: Finding, colour: bool) -> str:
    """A finding as one line, and its fix as another."""
    sign, code = SIGNS[finding.level]
    if colour:
        sign = f"\033[{code}m{sign}\033[0m"
    line = f"  {sign} {finding.what:<18}{finding.detail}"
    return f"{line}\n      fix: {finding.fix}" if finding.fix else line


def pip(what: str) -> str:
    """The command that installs into this environment."""
    return f"pip install '{what}'"


def perhaps_warning(what: str, detail: str, fix: str) -> Finding:
    """A warning if there is something to do about it."""
    return Finding(Sign.WARNING if fix else Sign.OK, what, detail, fix)


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    fix = "" if fits else "make a new environment with Python 3.11, 3.12 or 3.13"
    yield Finding(Sign.OK if fits else Sign.PROBLEM, "Python", f"{version}  {sys.prefix}", fix)


def check_machine() -> Iterator[Finding]:
    from ajet.system.processes import main_memory

    cores = len(os.sched_getaffinity(0))
    yield Finding(Sign.OK, "CPU", f"{cores} core{'' if cores == 1 else 's'}")
    memory = main_memory()
    free, disk = memory.available / GIB, shutil.disk_usage(Path.cwd()).free / GIB
    fix = "close other programs, or stay with the tiny: models" if free < MEMORY_GIB else ""
    yield perhaps_warning("memory", f"{free:.1f} GiB free of {memory.total / GIB:.1f}", fix)
    fix = "free some space, or use --exp-dir on another disk; old runs are in saved_experiments/"
    yield perhaps_warning("disk", f"{disk:.1f} GiB free here", fix if disk < DISK_GIB else "")


def check_limits() -> Iterator[Finding]:
    if (files := open_more_files()) < OPEN_FILES:
        fix = "raise the hard limit, or lower rollout.max_env_worker"
        yield perhaps_warning("open files", f"at most {files}", fix)
    shared = shutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").is_dir() else 0.0
    if shared < SHARED_MEMORY_GIB and (installed("verl") or installed("trinity-rft")):
        fix = "in a container: docker run --shm-size=8g"
        yield perhaps_warning("shared memory", f"{shared:.2f} GiB in /dev/shm", fix)


def check_torch() -> Iterator[Finding]:
    version = installed("torch")
    if version is None:
        yield Finding(Sign.ABSENT, "torch", f"{'training, and models here':<{USES_WIDTH}}{install_command(TRAIN)}")
        return
    yield from _in_range("torch", needed=True)
    yield from check_gpu()


def check_gpu() -> Iterator[Finding]:
    """The GPUs that torch sees, and those it should see."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if (why := why_unfit(index)) is not None:
                yield Finding(Sign.PROBLEM, f"GPU {index}", why, "install a PyTorch built for it: pytorch.org")
                continue
            free, total = torch.cuda.mem_get_info(index)
            fix = "nvidia-smi shows what uses it; `ajet --kill` ends what ajet left running"
            detail = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} GiB free of {total / GIB:.0f}"
            yield perhaps_warning(f"GPU {index}", detail, fix if free < total / 2 else "")
        return
    none = why_no_gpu()
    if none.there:
        yield Finding(Sign.PROBLEM, "GPU", f"there is one, but {none.cause}", none.fix)
    else:
        yield Finding(Sign.OK, "GPU", "none: the local and debug backbones run on the CPU")


def check_core() -> Iterator[Finding]:
    for package in CORE:
        yield from _in_range(package, needed=True)
    if installed("torch"):
        for package in TRAINING:
            yield from _in_range(package, needed=True, extra=TRAIN)


def _in_range(package: str, *, needed: bool, lets: str = "", extra: str = "") -> Iterator[Finding]:
    """Whether a package is installed, in a version that this program's own metadata allows."""
    wanted, version = requirement(package), installed(package)
    bounds = version_range(wanted)
    command = install_command(extra) if extra else pip(f"{package}{bounds}")
    if version is None:
        if needed:
            yield Finding(Sign.PROBLEM, package, "not installed", command)
        else:
            yield Finding(Sign.ABSENT, package, f"{lets:<{USES_WIDTH}}{command}")
    elif wanted.specifier.contains(version, prereleases=True):
        yield Finding(Sign.OK, package, version)
    else:
        level = Sign.PROBLEM if needed else Sign.WARNING
        yield Finding(level, package, f"{version}, but {bounds} is supported", pip(f"{package}{bounds}"))


def check_optional() -> Iterator[Finding]:
    for option in OPTIONAL:
        yield from _in_range(option.package, needed=False, lets=option.lets, extra=option.extra)


def check_conflicts() -> Iterator[Finding]:
    """Packages that can't share an environment."""
    present = {package: version for package in NEEDS_TRANSFORMERS if (version := installed(package))}
    transformers = installed("transformers")
    conflicts = [
        package
        for package in present
        if transformers and not SpecifierSet(NEEDS_TRANSFORMERS[package]).contains(transformers, prereleases=True)
    ]
    if len(present) > 1:
        needs = ", ".join(
            f"{package} {version} needs transformers {NEEDS_TRANSFORMERS[package]}"
            for package, version in present.items()
        )
        fix = "keep each in its own environment: pip uninstall verl, or pip uninstall trinity-rft"
        yield Finding(Sign.PROBLEM, ", ".join(present), needs, fix)
    elif conflicts:
        (package,) = conflicts
        needs = NEEDS_TRANSFORMERS[package]
        detail = f"{package} {present[package]} needs transformers {needs}, but {transformers} is installed"
        yield Finding(Sign.PROBLEM, package, detail, pip(f"transformers{needs}"))
    else:
        yield Finding(Sign.OK, "conflicts", "none among verl, trinity-rft and transformers")


def check_state() -> Iterator[Finding]:
    """What ajet started and is still running."""
    from ajet.system.processes import still_running

    running = still_running()
    if running:  # most likely on purpose, so there is nothing to fix
        yield Finding(Sign.OK, "running", f"{', '.join(running)} (ajet --kill ends that)")
    else:
        yield Finding(Sign.OK, "running", "nothing that ajet started")


Check = Callable[[], Iterator[Finding]]
SECTIONS: tuple[tuple[str, tuple[Check, ...]], ...] = (
    ("machine", (check_python, check_machine, check_limits, check_torch, check_state)),
    ("packages", (check_core, check_conflicts)),
    ("optional", (check_optional,)),
)
