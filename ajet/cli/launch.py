"""`ajet --conf …`: load the config, choose the backbone, open the experiment folder, run, and clean up.

Contract with the backbones: `ajet.backbone.<name>` has `run(config, experiment) -> int` (or takes a third argument
`options: LaunchOptions`); the result is the exit code.
"""

from __future__ import annotations

import inspect
import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ajet.cli.arguments import LaunchArguments, parse_arguments
from ajet.cli.main import COMMANDS, EXIT_FAILED, EXIT_INTERRUPTED, fail
from ajet.schema.errors import AjetError, ConfigError, FeatureUnavailableError, UserError

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger(__name__)

BACKBONES = {
    "local": "ajet.backbone.local",
    "debug": "ajet.backbone.debug",
    "verl": "ajet.backbone.ray.verl",
    "trinity": "ajet.backbone.ray.trinity",
}
DEFAULT_BACKBONE: BackboneName = "local"
VIEWER_START_S = 10.0
"""How long a run waits for the viewer's address before it goes on without."""


def run(argv: Sequence[str]) -> int:
    """Run a job, or end those still running (`--kill`)."""
    arguments = parse_arguments(argv)
    from ajet.observe.logs import log_to_terminal

    log_to_terminal(quiet=arguments.options.quiet or arguments.options.json)
    if arguments.kill or arguments.autokill:
        from ajet.runtime.processes import end_recorded

        for line in end_recorded(arguments.prefix):
            print(line, file=sys.stderr)
        if arguments.kill:
            return 0
    assert arguments.conf is not None
    from ajet.config.loader import load_config

    flag = known_backbone(arguments.backbone)
    config = load_config(arguments.conf, arguments.overrides, backbone=flag)
    name, why = choose_backbone(flag, config)
    if not (arguments.options.quiet or arguments.options.json):
        print(f"backbone: {name} ({why})", flush=True)
    config.ajet.backbone = name
    start = backbone_entry(name)
    if arguments.debug_tags is not None:
        from ajet.task_runner.breakpoints import set_tags

        set_tags(arguments.debug_tags)
    return _conduct(arguments, config, start)


def known_backbone(flag: str | None) -> BackboneName | None:
    """The flag's value, if it names a backbone."""
    from ajet.config.root import BackboneName

    known: tuple[BackboneName, ...] = get_args(BackboneName)
    for name in known:
        if flag == name:
            return name
    if flag is None:
        return None
    near = get_close_matches(flag, known, n=1)
    raise ConfigError(
        f"--backbone={flag}: no such backbone\n    " + (f"did you mean {near[0]}? " if near else "") + "allowed: "
        f"{', '.join(BACKBONES)}"
    )


def choose_backbone(flag: BackboneName | None, config: Config) -> tuple[BackboneName, str]:
    """The backbone and why: the flag, else the YAML, else `local`."""
    if flag is not None:
        return flag, "from --backbone"
    if config.ajet.backbone is not None:
        return config.ajet.backbone, "from ajet.backbone in the config"
    return DEFAULT_BACKBONE, f"the default; --backbone takes {', '.join(BACKBONES)}"


def backbone_entry(name: str) -> Callable[..., int]:
    """A backbone's `run`."""
    module = BACKBONES[name]
    entry: Callable[..., int] | None = getattr(import_module(module), "run", None) if _has_code(module) else None
    if entry is None:
        raise FeatureUnavailableError(
            f"the {name} backbone is not part of this version\n    available: {', '.join(available_backbones())}"
        )
    return entry


def available_backbones() -> list[str]:
    """The backbones that this version has."""
    return [name for name, module in BACKBONES.items() if _has_code(module)]


def _has_code(module: str) -> bool:
    """Whether a module is more than an empty folder (Python calls that a namespace package)."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def _conduct(arguments: LaunchArguments, config: Config, start: Callable[..., int]) -> int:
    """From the experiment folder's opening to its close. Nothing that was started outlives it."""
    from ajet.observe.experiment import ExperimentFolder
    from ajet.runtime.companions import start_service
    from ajet.runtime.processes import recorded_run

    _terminate_like_interrupt()
    with ExitStack() as stack:
        experiment = ExperimentFolder.open(
            config,
            exp_dir=arguments.exp_dir,
            fresh=arguments.fresh,
            source_yaml=config.yaml_path,
            backbone=config.ajet.backbone or DEFAULT_BACKBONE,
        )
        status: list[Any] = ["failed", {}]
        stack.callback(lambda: experiment.close(status[0], **status[1]))
        try:
            stack.enter_context(recorded_run(experiment.path, arguments.prefix))
            experiment.save_code(_user_files(config))
            for service in arguments.services:
                stack.enter_context(start_service(service, arguments.prefix))
            if arguments.with_logview:
                stack.enter_context(_viewer(experiment))
            takes_options = "options" in inspect.signature(start).parameters
            code = start(config, experiment, arguments.options) if takes_options else start(config, experiment)
        except KeyboardInterrupt:
            status[0] = "interrupted"
            print(f"\ninterrupted; what was done is in {experiment.path}", file=sys.stderr)
            return EXIT_INTERRUPTED
        except AjetError as error:
            status[1] = {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, UserError):
                raise
            return fail(str(error), EXIT_FAILED)
        except Exception as error:
            # nobody foresaw this one: its traceback belongs into run.log and onto the terminal
            status[1] = {"error": f"{type(error).__name__}: {error}"}
            log.exception("the run failed with %s", type(error).__name__)
            return EXIT_FAILED
        status[0] = {0: "completed", EXIT_INTERRUPTED: "interrupted"}.get(code, "failed")
        return code


def _terminate_like_interrupt() -> None:
    """SIGTERM ends a run as cleanly as Ctrl-C does."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _user_files(config: Config) -> list[Path]:
    """The user's own source files that the config names."""
    named = (config.ajet.rollout.user_workflow, config.ajet.task_judge.judge_protocol, config.ajet.task_reader.type)
    places = [Path(text.partition("->")[0]) for text in named if text and "->" in text]
    return [place for place in places if place.suffix == ".py" and place.is_file()]


@contextmanager
def _viewer(experiment: ExperimentFolder) -> Iterator[None]:
    """The viewer in a process of its own; its address is printed as soon as it has one."""
    from ajet.runtime.companions import start_command

    if not COMMANDS["view"].exists:
        raise FeatureUnavailableError("--with-logview: the viewer is not part of this version")
    command = [sys.executable, "-m", "ajet", "view", str(experiment.path), "--no-browser"]
    with start_command("logview", command) as log:
        until = time.monotonic() + VIEWER_START_S
        while not (address := re.search(r"^http\S+", log.read_text(errors="replace"), re.MULTILINE)):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        print(f"viewer: {address.group() if address else f'not up yet, see {log}'}", flush=True)
        yield
