"""`ajet serve TARGET`: offer a model or checkpoint as an OpenAI- and Anthropic-compatible endpoint."""

from __future__ import annotations

import asyncio
import hmac
import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet.gateway.gateway import Gateway
    from ajet.runtime.served_model import ServedModel


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    parser = ArgumentParser("ajet serve", description=__doc__)
    parser.add_argument(
        "target", metavar="TARGET", help="YAML, experiment, checkpoint, model folder, hub id, tiny:NAME"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: for every machine (give an --api-key then)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--api-key", default="", help="clients must send this; default: any key will do")
    return asyncio.run(_serve(parser.parse_intermixed_args(argv)))


async def _serve(arguments: Namespace) -> int:
    from ajet.runtime.served_model import load_served_model

    model = load_served_model(arguments.target, arguments.overrides)
    gateway = _open_gateway(model, arguments)
    try:
        await gateway.start()
        await model.engine.ready()
        print(f"{model.name} at {gateway.base_url} (Ctrl-C to stop)", flush=True)
        await _interrupted()
    finally:
        await gateway.aclose()
        await model.engine.aclose()
    return 0


async def _interrupted() -> None:
    """Return when the user, or whoever started us, has had enough."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, done.set)
    await done.wait()


def _open_gateway(model: ServedModel, arguments: Namespace) -> Gateway:
    """A gateway that answers anyone with the right key and treats each request as a separate conversation."""
    from ajet.gateway.caller import Caller
    from ajet.gateway.gateway import Gateway, GatewaySettings
    from ajet.http.keys import InvalidKeyError
    from ajet.schema.chat import DEFAULT_AGENT, DEFAULT_TARGET

    def authorize(key: str) -> Caller:
        if arguments.api_key and not hmac.compare_digest(key.encode(), arguments.api_key.encode()):
            raise InvalidKeyError("wrong API key")
        return Caller(model.new_session(), DEFAULT_AGENT, DEFAULT_TARGET)

    settings = GatewaySettings(arguments.host, arguments.port, "--host or --port")
    return Gateway(settings, authorize)
