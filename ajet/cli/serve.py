"""Commands that serve something over HTTP until Ctrl-C: a model (`ajet serve`, by our gateway; `ajet vllm serve`, by a
server of vLLM's), environments (`ajet env serve`), an endpoint that keeps spans (`ajet agentops`)."""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.cli.main import interruption
from ajet.schema.errors import ConfigError, UserError
from ajet.system.command_line import CommandParser, real, whole
from ajet.system.http_messages import is_loopback

if TYPE_CHECKING:
    from ajet.environment.server import EnvironmentServer
    from ajet.gateway.endpoints import Sink, SpanCollector
    from ajet.gateway.gateway import Gateway, GatewaySettings
    from ajet.schema.span import Span
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


async def _until_interrupted(
    server: EnvironmentServer | SpanCollector, arguments: Namespace, said: Callable[[], str]
) -> None:
    """Listen, say so, and wait for Ctrl-C or SIGTERM."""
    stop = interruption()  # before it is said: whoever reads the line may send the signal
    try:
        await server.start(arguments.host, arguments.port)
        print(said(), flush=True)
        await stop.wait()
    finally:
        await server.aclose()


# ---------------------------------------------------------------- environments

ENV_HELP = "`ajet env serve TARGET`: serve environments over HTTP, each in a process of its own."
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def environments(argv: Sequence[str]) -> int:
    """`ajet env serve TARGET`: serve until Ctrl-C."""
    return asyncio.run(_serve_environments(_environments_parser().parse_args(argv)))


def _environments_parser() -> CommandParser:
    parser = CommandParser("ajet env", description=ENV_HELP)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", description=ENV_HELP, help="serve environments over HTTP")
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


async def _serve_environments(arguments: Namespace) -> int:
    from ajet.cli.targets import options_of
    from ajet.environment.environment import EnvironmentSettings
    from ajet.environment.instances import InstanceLimits
    from ajet.environment.server import EnvironmentServer

    limits = InstanceLimits(arguments.workers, arguments.idle, arguments.step_timeout, arguments.memory)
    settings = EnvironmentSettings(
        arguments.target, options=options_of(arguments.option, "--option"), key="ajet env serve"
    )
    server = EnvironmentServer(settings, limits, api_key=_key(arguments.api_key_env), base_dirs=[Path.cwd()])
    await _until_interrupted(
        server,
        arguments,
        lambda: f"{server.name} at {server.address.url}, at most {limits.instances} at a time (Ctrl-C to stop)",
    )
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


# ---------------------------------------------------------------- spans

AGENTOPS_HELP = """\
`ajet agentops`: receive the spans of programs that are instrumented with AgentOps, or with OpenTelemetry.

They go to a file, from which `task_reader.type: tracing` makes tasks. There is no need for it inside an episode, or
beside a rollout store: the gateway and `ajet store` take spans themselves.
"""
SPANS_KEY_VARIABLE = "AJET_AGENTOPS_KEY"
SPANS_PORT = 4318


def agentops(argv: Sequence[str]) -> int:
    """`ajet agentops`: serve until Ctrl-C."""
    parser = CommandParser("ajet agentops", description=AGENTOPS_HELP)
    parser.add_argument("--out", type=Path, default=Path("spans.jsonl"), metavar="FILE", help="(default: spans.jsonl)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    parser.add_argument("--port", type=int, default=SPANS_PORT, help=f"0: any free one (default: {SPANS_PORT})")
    return asyncio.run(_collect(parser.parse_args(argv)))


async def _collect(arguments: Namespace) -> int:
    from ajet.gateway.endpoints import SpanCollector

    key = os.environ.get(SPANS_KEY_VARIABLE) or str(uuid.uuid4())  # AgentOps expects the form of a UUID
    collector = SpanCollector(key, _to_file(arguments.out))
    await _until_interrupted(
        collector,
        arguments,
        lambda: (
            f"spans go to {arguments.out}; export for the program:\n"
            f"  AGENTOPS_API_KEY={key}\n"
            f"  AGENTOPS_API_ENDPOINT={collector.url}\n"
            f"  AGENTOPS_EXPORTER_ENDPOINT={collector.url}/v1/traces\n"
            "(Ctrl-C to stop)"
        ),
    )
    print(f"{collector.received} spans", flush=True)
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
