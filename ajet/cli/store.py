"""`ajet store`: serve a rollout store over HTTP. `ajet store keys …`: who may use it."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ajet.cli.main import interruption
from ajet.schema.errors import UserError
from ajet.system.command_line import CommandParser, real

if TYPE_CHECKING:
    from ajet.store.database_store import Database, Retention
    from ajet.store.server import AccessKey
    from ajet.store.tables import Tables

DEFAULT_PORT = 4747
DEFAULT_PATH = "store.sqlite"
"""In the working folder."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_S = 36500 * 86400
"""A century: the calendar can say when it ends."""


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C, or manage keys."""
    if argv and argv[0] == "keys":
        return _keys(argv[1:])
    parser = CommandParser("ajet store", description=__doc__)
    _add_place(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0: any free one (default: {DEFAULT_PORT})")
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM file with the certificate: serve HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file with its private key")
    parser.add_argument("--keep", type=seconds, metavar="TIME", help="delete rollouts that ended longer ago (12h, 30d)")
    gigabytes = real(1e-6, 1e9, "gigabytes")
    parser.add_argument("--keep-gb", type=gigabytes, metavar="GB", help="delete the oldest ended rollouts beyond this")
    arguments = parser.parse_args(argv)
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    return asyncio.run(_serve(arguments))


def _add_place(parser: CommandParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--path", metavar="FILE", default=DEFAULT_PATH, help=f"SQLite file; serving makes it (default: {DEFAULT_PATH})"
    )
    place.add_argument("--postgres", metavar="URL", help="postgresql://user@host/database")


def _database(arguments: Namespace) -> Database:
    if arguments.postgres is None:
        from ajet.store.sqlite import SqliteDatabase

        return SqliteDatabase(arguments.path)
    from ajet.store.postgres import PostgresDatabase

    return PostgresDatabase(arguments.postgres)


def _retention(arguments: Namespace) -> Retention:
    """The limits of retention. A limit of 0 is refused: it would delete everything that has ended, so it must be a
    mistake."""
    from ajet.store.database_store import Retention

    if arguments.keep == 0:
        raise UserError("--keep: more than nothing, such as 12h or 30d")
    gigabytes = arguments.keep_gb
    return Retention(arguments.keep, None if gigabytes is None else int(gigabytes * 1e9))


async def _serve(arguments: Namespace) -> int:
    from ajet.store.database_store import DatabaseStore
    from ajet.store.server import StoreServer
    from ajet.system.http_messages import is_loopback
    from ajet.system.http_server import tls_context

    tls = tls_context(arguments.tls_cert, arguments.tls_key, "--tls-cert and --tls-key")
    async with DatabaseStore(_database(arguments), _retention(arguments)) as store:
        server, stop = StoreServer(store, tls=tls), interruption()  # from here on a signal ends it in order
        await server.start(arguments.host, arguments.port)
        try:
            _tell_keys(await store.tables(_first_keys))
            await server.read_keys()
            if tls is None and not is_loopback(arguments.host):
                print("warning: keys cross the network in the clear: use --tls-cert and --tls-key", file=sys.stderr)
            print(
                f"{'PostgreSQL' if arguments.postgres else arguments.path} at {server.url} (Ctrl-C to stop)", flush=True
            )
            await stop.wait()
        finally:
            await server.aclose()
    return 0


def _first_keys(tables: Tables) -> dict[str, str]:
    """Create a key of each role, if there are no keys yet."""
    from ajet.store.requests import Role
    from ajet.store.server import issue, listed

    if listed(tables):
        return {}
    return {str(role): issue(tables, str(role), [role]) for role in Role}


def _tell_keys(keys: dict[str, str]) -> None:
    if keys:
        print("keys, shown this once (ajet store keys: list, make, rotate and revoke them):")
        for name, key in keys.items():
            print(f"  {name:<8}{key}")


# ---------------------------------------------------------------- keys


def _keys(argv: Sequence[str]) -> int:
    parser = CommandParser("ajet store keys", description="Who may use a store. Also while it is being served.")
    commands = parser.add_subparsers(dest="do", required=True, metavar="list|make|rotate|revoke")
    listing = commands.add_parser("list", help="names, roles and ends of all keys")
    making = commands.add_parser("make", help="a new key, which is printed")
    making.add_argument("name")
    making.add_argument("--role", action="append", required=True, choices=["writer", "reader", "runner"])
    rotating = commands.add_parser("rotate", help="a new key for an old one, which stays valid for a while")
    rotating.add_argument("name")
    grace = "for how long (default: 1h; 0s: not at all)"
    rotating.add_argument("--grace", type=seconds, default="1h", metavar="TIME", help=grace)
    revoking = commands.add_parser("revoke", help="end a key at once")
    revoking.add_argument("name")
    for command in (making, rotating):
        command.add_argument("--valid", type=seconds, metavar="TIME", help="when the key expires (30d; default: never)")
    for command in (listing, making, rotating, revoking):
        _add_place(command)
    return asyncio.run(_change_keys(parser.parse_args(argv)))


async def _change_keys(arguments: Namespace) -> int:
    from ajet.store.server import key_tables

    def work(tables: Tables) -> str:
        from ajet.store import server as access_keys
        from ajet.store.requests import Role

        if arguments.do == "list":
            return "\n".join(_line(key) for key in access_keys.listed(tables)) or "no keys"
        if arguments.do == "revoke":
            access_keys.revoke(tables, arguments.name)
            return f"{arguments.name} ends within seconds"
        if arguments.do == "rotate":
            return access_keys.rotate(tables, arguments.name, arguments.valid, arguments.grace)
        return access_keys.issue(tables, arguments.name, [Role(role) for role in arguments.role], arguments.valid)

    print(await key_tables(arguments.path, arguments.postgres, work))
    return 0


def _line(key: AccessKey) -> str:
    if key.expires is None:
        end = "no end"
    else:
        verb = "expired" if key.expires <= time.time() else "expires"
        end = f"{verb} {time.strftime('%Y-%m-%d %H:%M', time.localtime(key.expires))}"
    return f"{key.name:<20} {','.join(sorted(key.roles)):<24} {end}"


def seconds(text: str) -> float:
    """The type of an argument that is a length of time: `90s`, `15m`, `12h` or `30d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a length of time: write 90s, 15m, 12h or 30d")
    if (length := float(found[1]) * UNITS[found[2]]) > LONGEST_S:
        raise ArgumentTypeError(f"{text!r} is too long: write at most {LONGEST_S // UNITS['d']}d")
    return length
