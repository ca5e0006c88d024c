"""`ajet env serve TARGET`: serve environments over HTTP, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from ajet.cli.main import interruption
from ajet.cli.targets import options_of
from ajet.schema.errors import UserError
from ajet.system.command_line import CommandParser, real, whole

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    return asyncio.run(_serve(_parser().parse_args(argv)))


def _parser() -> CommandParser:
    parser = CommandParser("ajet env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", description=__doc__, help="serve environments over HTTP")
    serve.add_argument("target", metavar="TARGET", help="path/file.py->Class, module->Class or gymnasium:ID")
    serve.add_argument("--workers", type=whole(1), default=8, help="most environments at a time (default: 8)")
    serve.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from other machines; needs a key")
    serve.add_argument("--port", type=int, default=8080, help="0: any free port (default: 8080)")
    serve.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key that clients must send")
    seconds = real(0.1, 1e7, "seconds")
    idle, hangs = "end one that isn't used (default: 1800)", "end one that hangs (default: 300)"
    serve.add_argument("--idle", type=seconds, default=1800.0, metavar="SECONDS", help=idle)
    serve.add_argument("--step-timeout", type=seconds, default=300.0, metavar="SECONDS", help=hangs)
    serve.add_argument(
        "--memory", default="4G", metavar="SIZE", type=_size, help="of each process; 0: no limit (default: 4G)"
    )
    serve.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument for the environment (repeatable)",
    )
    return parser


async def _serve(arguments: Namespace) -> int:
    from ajet.environment.environment import EnvironmentSettings
    from ajet.environment.instances import InstanceLimits
    from ajet.environment.server import EnvironmentServer

    limits = InstanceLimits(arguments.workers, arguments.idle, arguments.step_timeout, arguments.memory)
    settings = EnvironmentSettings(
        arguments.target, options=options_of(arguments.option, "--option"), key="ajet env serve"
    )
    server = EnvironmentServer(settings, limits, api_key=_key(arguments.api_key_env), base_dirs=[Path.cwd()])
    done = interruption()
    try:
        await server.start(arguments.host, arguments.port)
        print(
            f"{server.name} at {server.address.url}, at most {limits.instances} at a time (Ctrl-C to stop)", flush=True
        )
        await done.wait()
    finally:
        await server.aclose()
    return 0


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if len(key) < 8:
        what = "is not set" if not key else "is shorter than 8 characters"
        raise UserError(f"--api-key-env {name}: the environment variable {name} {what}")
    return key


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentTypeError(f"{text!r}: write a size such as 500M or 4G")
    return int(float(found[1]) * _UNITS[found[2].upper()])
