"""`ajet --conf …`: read the arguments, load the config, choose the backbone, open the experiment folder, run, clean
up, and advise.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone import LaunchOptions
from ajet.schema.errors import EXIT_FAILED, EXIT_INTERRUPTED, AjetError, ConfigError, UserError
from ajet.schema.install import require_training
from ajet.schema.printable import printable
from ajet.system.command_line import ArgumentError, CommandParser, fail, place_advice

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config
    from ajet.observe.experiment import ExperimentFolder


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """What `ajet --conf …` was asked to do."""

    conf: str | None = None
    backbone: str | None = None
    also: tuple[BackboneName, ...] = ()
    """Backbones that the same command runs besides this one, each in its turn."""
    exp_dir: str | None = None
    debug_tags: str | None = None
    fresh: bool = False
    with_logview: bool = False
    services: tuple[str, ...] = ()
    prefix: str = ""
    kill: bool = False
    autokill: bool = False
    overrides: tuple[str, ...] = ()
    options: LaunchOptions = field(default_factory=LaunchOptions)


OPTIONS = ("ray_cluster", "ray_address", "skip_check_avail_gpu", "quiet", "json")


def build_parser() -> CommandParser:
    """The flags, by the names of `LaunchArguments` and `LaunchOptions`. `RUN_HELP` in `main.py` describes them."""
    parser = CommandParser(prog="ajet", add_help=False, allow_abbrev=False)
    parser.add_argument("--conf")
    parser.add_argument("--backbone")
    parser.add_argument("--exp-dir")
    parser.add_argument("--debug", metavar="TAGS", dest="debug_tags", nargs="?", const="all")
    parser.add_argument("--fresh", action="store_true")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true")
    shown.add_argument("--json", action="store_true")
    ray = parser.add_mutually_exclusive_group()
    ray.add_argument("--with-ray", action="store_true")
    ray.add_argument("--with-ray-cluster", dest="ray_cluster", action="store_true")
    ray.add_argument("--ray-address")
    parser.add_argument("--with-logview", action="store_true")
    parser.add_argument("--skip-check-avail-gpu", action="store_true")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--autokill", action="store_true")
    return parser


def parse_arguments(argv: Sequence[str]) -> LaunchArguments:
    """Parse the command line. An argument that is neither flag nor override raises an error with the nearest flag."""
    parser = build_parser()
    flags, rest = parser.parse_known_args(argv)
    services = [_service(argument) for argument in rest if argument.startswith("--with-")]
    overrides = [argument for argument in rest if "=" in argument and not argument.startswith("-")]
    if flags.debug_tags is not None and "=" in flags.debug_tags:  # `--debug key=value`: no tags were given
        overrides.append(flags.debug_tags)
        flags.debug_tags = "all"
    unknown = [argument for argument in rest if argument not in overrides and not argument.startswith("--with-")]
    if unknown:
        raise ArgumentError(_unknown(unknown[0], parser))
    if flags.conf is None and not flags.kill:
        raise ArgumentError("--conf FILE.yaml is required\n    see: ajet --help")
    values = vars(flags)
    del values["with_ray"]  # it names the default
    options = LaunchOptions(**{name: values.pop(name) for name in OPTIONS})
    return LaunchArguments(
        **values, services=tuple(dict.fromkeys(services)), overrides=tuple(overrides), options=options
    )


def _service(argument: str) -> str:
    name = argument.removeprefix("--with-")
    if "=" in name or not name.replace("-", "_").isidentifier():
        raise ArgumentError(f"{argument}: `--with-NAME` takes no value\n    see: ajet --help")
    return name


def _unknown(argument: str, parser: CommandParser) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = get_close_matches(argument.partition("=")[0], flags, n=1)
    if argument.startswith("-"):
        override = argument.lstrip("-") if re.match(r"--?\w+\.[\w.]+=", argument) else ""
        instead = f"write {override}" if override else f"did you mean {near[0]}?" if near else "see: ajet --help"
        return f"unknown flag {argument!r}\n    {instead}"
    if argument.endswith((".yaml", ".yml")):
        return f"unexpected argument {argument!r}\n    write --conf {argument}"
    return f"unexpected argument {argument!r}\n    overrides have the form key=value, e.g. rollout.num_repeat=8"


log = logging.getLogger(__name__)

LESS_MEMORY = (
    "less memory is needed with a smaller ajet.trainer_common.max_tokens_per_step, ajet.rollout.max_num_seqs or "
    "ajet.rollout.max_model_len; `ajet validate CONFIG --plan` shows what takes how much, and what else to change"
)


def memory_advice(error: BaseException) -> str | None:
    """What ran out, and the keys that help. None for any other error."""
    torch = sys.modules.get("torch")
    of_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if not (of_gpu or of_cpu or isinstance(error, MemoryError)):
        return None
    said = str(error).strip().partition("\n")[0]
    return f"out of memory: {said[:200]}\n    {LESS_MEMORY}"


DEFAULT_BACKBONE: BackboneName = "local"
RunBackbone = Callable[["Config", "ExperimentFolder", LaunchOptions], int]
VIEWER_START_S = 10.0
"""How long a run waits for the viewer's address before it goes on without it."""


def run(argv: Sequence[str]) -> int:
    """Run a job, or end the ones still running (`--kill`)."""
    arguments = parse_arguments(argv)
    from ajet.observe.logs import log_to_terminal

    log_to_terminal(quiet=arguments.options.quiet or arguments.options.json)
    if arguments.kill or arguments.autokill:
        from ajet.system.processes import end_recorded

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
        if name != "debug" and (about := what_it_is_about(Path(arguments.conf))):
            print(about)
        print(f"backbone: {name} ({why})", flush=True)
    config.ajet.backbone = name
    return launch(arguments, config)


def what_it_is_about(file: Path) -> str | None:
    """The YAML's first line, if it is a comment that is a sentence."""
    with file.expanduser().open(encoding="utf-8") as lines:
        sentence = re.match(r"#\s*(?!Copyright)(\w.*\.)$", lines.readline().rstrip())
    return printable(sentence[1]) if sentence else None


def launch(arguments: LaunchArguments, config: Config) -> int:
    """Run a loaded config, whose backbone is set. Returns the exit code; raises a `UserError`."""
    from ajet.config.kinds import BACKBONES, load

    name = config.ajet.backbone or DEFAULT_BACKBONE
    if name in ("local", "debug"):  # the others say themselves what they need
        require_training(f"--backbone={name}")
    if name == "local":
        from ajet.backbone.local.placement import check_kernels, place, visible_gpus

        place(config, visible_gpus)  # a GPU that is missing is said before a plan is made for the CPU
        check_kernels(config, visible_gpus)
    run_backbone: RunBackbone = load(BACKBONES, name)
    if arguments.debug_tags is not None or name == "debug":
        _select_breakpoints(arguments.debug_tags, config)
    with last_error() as logged:
        code = _run_in_folder(arguments, config, run_backbone, logged)
    return logged.exit_code(code)


def _select_breakpoints(tags: str | None, config: Config) -> None:
    """Stop at `--debug TAGS`, which must exist, and expect `breakpoint()` where the user's sources call it."""
    from ajet.task_runner.breakpoints import ALL, expect_breakpoints, find_breakpoints, selected_tags, set_tags

    folders = [file.parent for file in user_files(config)]
    found = find_breakpoints([*folders, Path.cwd()] if tags is not None or not folders else folders)
    if found.stops and tags is None and sys.breakpointhook is sys.__breakpointhook__:
        log.info("breakpoint() in %s: one episode at a time, without deadlines", ", ".join(found.stops))
        expect_breakpoints()
    if tags is None:
        return
    set_tags(tags)
    unknown = sorted(selected_tags() - found.tags - {ALL})
    if unknown and found.complete:
        near = get_close_matches(unknown[0], found.tags, n=1)
        there = f"there are: {', '.join(sorted(found.tags))}" if found.tags else "there is no bp(…) at all"
        raise ArgumentError(
            f'--debug {tags}: no bp("{unknown[0]}") in your sources\n    '
            + (f"did you mean {near[0]}? " if near else "")
            + f"{there}; --debug all stops at every one"
        )


def known_backbone(flag: str | None) -> BackboneName | None:
    """The flag's value, checked to name a backbone. None if the flag wasn't given."""
    from ajet.config.kinds import BACKBONES

    if flag is None or flag in BACKBONES:
        return flag
    near = get_close_matches(flag, BACKBONES, n=1)
    raise ConfigError(
        f"--backbone={flag}: unknown backbone\n    " + (f"did you mean {near[0]}? " if near else "") + "allowed: "
        f"{', '.join(BACKBONES)}"
    )


def choose_backbone(flag: BackboneName | None, config: Config) -> tuple[BackboneName, str]:
    """The backbone, from the flag, the YAML or by default (`local`), and where it came from."""
    if flag is not None:
        return flag, "from --backbone"
    if config.ajet.backbone is not None:
        return config.ajet.backbone, "from ajet.backbone in the config"
    from ajet.config.kinds import BACKBONES

    return DEFAULT_BACKBONE, f"the default; --backbone takes {', '.join(BACKBONES)}"


class LastError(logging.Handler):
    """Keeps the last error that was logged: why a run failed that raised nothing."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.message = ""
        self.lost = False
        """Records could not be written to the end, as after a disk that stayed full."""

    def emit(self, record: logging.LogRecord) -> None:
        from ajet.observe.logs import LOST

        self.message = record.getMessage()
        self.lost |= hasattr(record, LOST)

    def exit_code(self, code: int) -> int:
        """A run that lost records has failed."""
        return EXIT_FAILED if self.lost and not code else code


@contextmanager
def last_error() -> Iterator[LastError]:
    handler, logger = LastError(), logging.getLogger("ajet")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def _run_in_folder(arguments: LaunchArguments, config: Config, run_backbone: RunBackbone, logged: LastError) -> int:
    """Open the experiment folder, run, and close it. Nothing that was started outlives this."""
    from ajet.backbone.checks import check_start, recipe, starts_over
    from ajet.config.effects import notes
    from ajet.observe.experiment import ExperimentFolder, folder_of, typed
    from ajet.observe.logs import ONLY_TO_FILE
    from ajet.system.command_line import interrupts_recognised, termination_like_interrupt
    from ajet.system.processes import recorded_run
    from ajet.system.services import start_service, wanted_services
    from ajet.task_judge.base_judge import scored_by

    options = arguments.options
    with ExitStack() as stack:
        stack.enter_context(termination_like_interrupt())
        experiment = ExperimentFolder.open(
            config,
            exp_dir=arguments.exp_dir,
            fresh=arguments.fresh or starts_over(config),
            source_yaml=config.yaml_path,
            backbone=config.ajet.backbone or DEFAULT_BACKBONE,
            judge=scored_by(config),
        )
        config.remember_folder(folder_of(config, arguments.exp_dir, config.yaml_path).resolve())
        status: list[Any] = ["failed", {}]
        stack.callback(lambda: experiment.close(status[0], **status[1]))
        try:
            options = replace(options, viewer=f"ajet view {typed(experiment.path)}")
            for note in notes(config, arguments.also):
                log.info("%s", note)
            if (sets := recipe(config)) is not None:
                log.info("recipe %s", sets)
            stack.enter_context(recorded_run(experiment.path, arguments.prefix))
            experiment.save_code(user_files(config))
            for service in wanted_services(config, arguments.services):
                stack.enter_context(start_service(service, arguments.prefix))
            if arguments.with_logview:
                options = replace(options, viewer=stack.enter_context(_viewer(experiment, options)))
            check_start(config)
            with interrupts_recognised():
                code = logged.exit_code(run_backbone(config, experiment, options))
        except KeyboardInterrupt:
            status[0] = "interrupted"
            print(f"\ninterrupted. {_what_is_saved(experiment.path)}", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # nobody reads our output any more (`ajet … | head`): that ends the run like Ctrl-C
            status[0] = "interrupted"
            raise
        except AjetError as error:
            status[1] = {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, UserError):
                experiment.withdraw()
                raise
            return fail(str(error), EXIT_FAILED)
        except Exception as error:
            status[1] = {"error": f"{type(error).__name__}: {error}"}
            if (advice := memory_advice(error) or place_advice(error, experiment.path)) is not None:
                log.debug("the run failed", exc_info=error)
                return fail(advice, EXIT_FAILED)
            log.error("the run failed", exc_info=error, extra={ONLY_TO_FILE: True})
            return fail(
                f"{type(error).__name__}: {error}\n    nothing in the configuration explains this; the traceback is in "
                f"{experiment.path / 'run.log'}",
                EXIT_FAILED,
            )
        status[0] = {0: "completed", EXIT_INTERRUPTED: "interrupted"}.get(code, "failed")
        if status[0] == "failed" and logged.message:
            status[1] = {"error": logged.message}
        return code


def _what_is_saved(folder: Path) -> str:
    if (folder / "prompts" / "best.yaml").exists():
        return f"The rounds so far are saved in {folder / 'prompts'}: the same command goes on from there"
    steps = list[int]()
    for place in ("checkpoints", "checkpoints/*/run"):  # Trinity's own folder is below
        steps += [int(path.name[5:]) for path in folder.glob(f"{place}/step_*") if path.name[5:].isdecimal()]
        named = (file.read_text() for file in folder.glob(f"{place}/latest_checkpointed_iteration.txt"))
        steps += [int(step) for step in named if step]  # verl writes it in place
    if not steps:
        return f"Nothing is saved to go on from; what was recorded is in {folder}"
    return f"Step {max(steps)} is saved in {folder / 'checkpoints'}: the same command goes on from there"


def user_files(config: Config) -> list[Path]:
    from ajet.backbone.checks import formulas

    ajet = config.ajet
    named = [ajet.rollout.user_workflow, ajet.task_judge.judge_protocol, ajet.task_reader.type, *formulas(config)]
    if ajet.rollout.environment is not None:
        named.append(ajet.rollout.environment.source)
    if ajet.rollout.agent is not None:
        named += [ajet.rollout.agent.type, *(tool for tool in ajet.rollout.agent.tools if isinstance(tool, str))]
    places = [Path(text.partition("->")[0]) for text in named if text and "->" in text]
    return [place for place in places if place.suffix == ".py" and place.is_file()]


@contextmanager
def _viewer(experiment: ExperimentFolder, options: LaunchOptions) -> Iterator[str]:
    """The viewer in its own process. Its address is printed as soon as it has one, and yielded. It is no part of what
    `--json` and `--quiet` leave on stdout, and its token none of the log."""
    from ajet.system.services import start_command

    command = [sys.executable, "-m", "ajet", "view", str(experiment.path), "--no-browser"]
    with start_command("logview", command) as started:
        until = time.monotonic() + VIEWER_START_S
        while not (address := re.search(r"^http\S+", started.log.read_text(errors="replace"), re.MULTILINE)):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        found = address.group() if address else f"not up yet, see {started.log}"
        print(f"viewer: {found}", file=sys.stderr if options.json or options.quiet else None, flush=True)
        yield found
