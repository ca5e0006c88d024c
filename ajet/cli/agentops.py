"""`ajet agentops`: receive the spans of programs that are instrumented with AgentOps, or with OpenTelemetry.

They go to a file, from which `task_reader.type: tracing` makes tasks. There is no need for it inside an episode, or
beside a rollout store: the gateway and `ajet store` take spans themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.cli.main import interruption
from ajet.schema.errors import UserError
from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.gateway.endpoints import Sink
    from ajet.schema.span import Span

KEY_VARIABLE = "AJET_AGENTOPS_KEY"
DEFAULT_PORT = 4318


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    parser = CommandParser("ajet agentops", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("spans.jsonl"), metavar="FILE", help="(default: spans.jsonl)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0: any free one (default: {DEFAULT_PORT})")
    return asyncio.run(_serve(parser.parse_args(argv)))


async def _serve(arguments: Namespace) -> int:
    from ajet.gateway.endpoints import SpanCollector

    key = os.environ.get(KEY_VARIABLE) or str(uuid.uuid4())  # AgentOps expects the form of a UUID
    stop = interruption()
    collector = SpanCollector(key, _to_file(arguments.out))
    await collector.start(arguments.host, arguments.port)
    try:
        print(
            f"spans go to {arguments.out}; export for the program:\n"
            f"  AGENTOPS_API_KEY={key}\n"
            f"  AGENTOPS_API_ENDPOINT={collector.url}\n"
            f"  AGENTOPS_EXPORTER_ENDPOINT={collector.url}/v1/traces\n"
            "(Ctrl-C to stop)",
            flush=True,
        )
        await stop.wait()
        print(f"{collector.received} spans", flush=True)
    finally:
        await collector.aclose()
    return 0


def _to_file(path: Path) -> Sink:
    """Write one OTLP document per line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None

    async def keep(spans: Sequence[Span]) -> None:
        from ajet.observe.otlp import to_json
        from ajet.observe.run_files import append_whole

        line = json.dumps(to_json(spans, {}, "agentops"), ensure_ascii=False) + "\n"
        try:
            append_whole(path, line.encode())
        except OSError as error:
            raise UserError(f"{path} can't be written ({error.strerror}): senders are told to try again") from None

    return keep
