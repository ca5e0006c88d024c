"""The arguments of `ajet --conf …`: flags, `--with-<service>` flags, and overrides, in any order."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from ajet.backbone import LaunchOptions, RayStart
from ajet.schema.errors import UserError

if TYPE_CHECKING:
    from ajet.config import BackboneName


class ArgumentError(UserError):
    """A command line that makes no sense."""


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


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}\n    see: ajet --help")


def build_parser() -> ArgumentParser:
    """The flags. `RUN_HELP` in `main.py` describes them."""
    parser = _Parser(prog="ajet", add_help=False, allow_abbrev=False)
    parser.add_argument("--conf")
    parser.add_argument("--backbone")
    parser.add_argument("--exp-dir")
    parser.add_argument("--debug", metavar="TAGS", nargs="?", const="all")
    parser.add_argument("--fresh", action="store_true")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true")
    shown.add_argument("--json", action="store_true")
    ray = parser.add_mutually_exclusive_group()
    ray.add_argument("--with-ray", action="store_true")
    ray.add_argument("--with-ray-cluster", action="store_true")
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
    if flags.debug is not None and "=" in flags.debug:  # `--debug key=value`: no tags were given
        overrides.append(flags.debug)
        flags.debug = "all"
    unknown = [argument for argument in rest if argument not in overrides and not argument.startswith("--with-")]
    if unknown:
        raise ArgumentError(_unknown(unknown[0], parser))
    if flags.conf is None and not flags.kill:
        raise ArgumentError("--conf FILE.yaml is required\n    see: ajet --help")
    ray = RayStart.NONE
    if flags.with_ray:
        ray = RayStart.PRIVATE
    elif flags.with_ray_cluster:
        ray = RayStart.CLUSTER
    elif flags.ray_address:
        ray = RayStart.ADDRESS
    return LaunchArguments(
        conf=flags.conf,
        backbone=flags.backbone,
        exp_dir=flags.exp_dir,
        debug_tags=flags.debug,
        fresh=flags.fresh,
        with_logview=flags.with_logview,
        services=tuple(dict.fromkeys(services)),
        prefix=flags.prefix,
        kill=flags.kill,
        autokill=flags.autokill,
        overrides=tuple(overrides),
        options=LaunchOptions(
            ray=ray,
            ray_address=flags.ray_address,
            skip_check_avail_gpu=flags.skip_check_avail_gpu,
            quiet=flags.quiet,
            json=flags.json,
        ),
    )


def _service(argument: str) -> str:
    name = argument.removeprefix("--with-")
    if "=" in name or not name.replace("-", "_").isidentifier():
        raise ArgumentError(f"{argument}: `--with-NAME` takes no value\n    see: ajet --help")
    return name


def _unknown(argument: str, parser: ArgumentParser) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = get_close_matches(argument.partition("=")[0], flags, n=1)
    if argument.startswith("-"):
        return f"unknown flag {argument!r}\n    " + (f"did you mean {near[0]}?" if near else "see: ajet --help")
    if argument.endswith((".yaml", ".yml")):
        return f"unexpected argument {argument!r}\n    write --conf {argument}"
    return f"unexpected argument {argument!r}\n    overrides have the form key=value, e.g. rollout.num_repeat=8"
