"""`ajet serve` and `ajet vllm serve`: a model over HTTP, by our gateway or by a server of vLLM's."""

from __future__ import annotations

import asyncio
import gc
import hmac
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ajet.cli.main import interruption
from ajet.schema.errors import ConfigError
from ajet.system.command_line import CommandParser
from ajet.system.http_messages import is_loopback

if TYPE_CHECKING:
    from ajet.gateway.gateway import Gateway, GatewaySettings
    from ajet.task_runner.model import Model


def run(argv: Sequence[str]) -> int:
    """`ajet serve TARGET`: serve until Ctrl-C."""
    parser = CommandParser(
        "ajet serve", description="Offer a model or checkpoint as an OpenAI- and Anthropic-compatible endpoint."
    )
    parser.add_argument(
        "target", metavar="TARGET", help="YAML, experiment, checkpoint, model folder, hub id, tiny:NAME"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0: reachable from other machines (set --api-key then)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--api-key", default="", help="key that clients must send; default: any key is accepted")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM), for HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.api_key and not is_loopback(arguments.host):
        raise ConfigError(
            f"--host {arguments.host} lets other machines in, and without a key anyone could use the model\n"
            "    choose one: --api-key sk-…"
        )
    return asyncio.run(_serve(arguments))


async def _serve(arguments: Namespace) -> int:
    from ajet.cli.targets import target_config
    from ajet.gateway.gateway import GatewaySettings
    from ajet.system.http_server import tls_context
    from ajet.task_runner.model import load_model
    from ajet.task_runner.runtime import GARBAGE

    tls = tls_context(arguments.tls_cert, arguments.tls_key, "--tls-cert and --tls-key")
    settings = GatewaySettings(
        arguments.host, arguments.port, "--host or --port", without_key=not arguments.api_key, tls=tls
    )
    config = target_config(arguments.target, arguments.overrides)
    model = load_model(config)
    gateway = _open_gateway(model, config.ajet.rollout.max_model_len, settings, arguments.api_key)
    try:
        await gateway.start()
        await model.engine.ready()
        gc.collect()
        gc.freeze()  # what is loaded by now stays: going through it again and again would hold up all answers
        gc.set_threshold(*GARBAGE)
        stop = interruption()  # before it is said: whoever reads the line may send the signal
        print(f"{arguments.target} at {gateway.base_url} (Ctrl-C to stop)", flush=True)
        await stop.wait()
    finally:
        await gateway.aclose()
        await model.engine.aclose()
    return 0


def _open_gateway(model: Model, max_model_len: int, settings: GatewaySettings, api_key: str) -> Gateway:
    """A gateway that answers anyone with the right key and treats each request as a separate conversation."""
    from ajet.gateway.gateway import Gateway
    from ajet.gateway.protocol import Caller
    from ajet.schema.chat import DEFAULT_AGENT, DEFAULT_TARGET
    from ajet.system.http_messages import InvalidKeyError

    def authorize(key: str) -> Caller:
        if api_key and not hmac.compare_digest(key.encode(), api_key.encode()):
            raise InvalidKeyError("wrong API key")
        return Caller(model.open_conversation(max_model_len), DEFAULT_AGENT, DEFAULT_TARGET)

    return Gateway(settings, authorize)


VLLM_HELP = """\
Start a vLLM server as ajet needs it: token ids, logprobs at the temperature, new weights.

`rollout.engine: vllm` does this by itself. Use the command for a server that several runs or machines share
(`rollout.engine: remote`), or to find out what goes wrong.
"""


def vllm(argv: Sequence[str]) -> int:
    """`ajet vllm serve MODEL`: replace this process by vLLM's server."""
    parser = CommandParser("ajet vllm", description=VLLM_HELP)
    parser.add_argument("action", choices=["serve"])
    parser.add_argument("model", metavar="MODEL", help="model folder, hub id, experiment, checkpoint, tiny:NAME")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=18000)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--show", action="store_true", help="print the command instead of running it")
    arguments, extra = parser.parse_known_args(argv)

    from ajet.cli.targets import weights_of
    from ajet.engine.model_source import ModelSource
    from ajet.engine.vllm import SERVER_MODULE, VllmSettings, server_arguments, server_environment

    settings = VllmSettings(
        model=ModelSource.resolve(weights_of(arguments.model)).path,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        tensor_parallel=arguments.tensor_parallel_size,
        python=arguments.python,
        extra_args=tuple(extra),
    )
    command = [settings.python, "-m", SERVER_MODULE, *server_arguments(settings, arguments.port, arguments.host)]
    if arguments.show:
        variables = [f"{name}={value}" for name, value in server_environment(settings).items()]
        print(shlex.join([*variables, *command]))
        return 0
    _check_python(settings.python)
    os.execvpe(command[0], command, {**os.environ, **server_environment(settings)})


def _check_python(python: str) -> None:
    """Raise if this Python can't be started or has no vLLM. Doesn't import vLLM, which takes many seconds."""
    from ajet.schema.errors import MissingDependencyError
    from ajet.schema.install import install_command

    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        absent = subprocess.run([python, "-c", check], check=False).returncode
    except OSError as error:
        raise MissingDependencyError(f"{python} can't be started: {error} (--python)") from error
    if absent:
        raise MissingDependencyError(
            f"{python} has no vLLM: {install_command('vllm')}, or name a Python that has it with --python"
        )
