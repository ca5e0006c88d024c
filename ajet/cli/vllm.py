"""`ajet vllm serve MODEL`: start a vLLM server as ajet needs it: token ids, logprobs at the temperature, new weights.

`rollout.engine: vllm` does this by itself. Use the command for a server that several runs or machines share
(`rollout.engine: remote`), or to find out what goes wrong.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from ajet.system.command_line import CommandParser


def run(argv: Sequence[str]) -> int:
    """Replace this process by vLLM's server."""
    parser = CommandParser("ajet vllm", description=__doc__)
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
    os.execve(command[0], command, {**os.environ, **server_environment(settings)})


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
