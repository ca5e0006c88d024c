"""`CliAgent`: runs a coding agent's command-line program (Codex, Claude Code, …) unmodified in the episode's sandbox.

The program finds the task's files in its working folder and the model at the run's gateway, which records its calls. A
run ends when the program exits, exceeds its time limit, or prints too much; the files it leaves are then judged. An
agent object holds settings only, and serves many runs at a time.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ajet.agents.model_function import text_of
from ajet.agents.reply_format import prompt_messages
from ajet.agents.run import AgentSettingsError, check_above_zero
from ajet.agents.task_tests import NO_BYTECODE, Verdict, bring_files, judge_by_tests, said
from ajet.config.kinds import CLI_PROGRAMS, load, nearest_name
from ajet.environment.sandboxes import ExecResult, Sandbox, SandboxError
from ajet.schema.chat import SIDE_MODEL
from ajet.schema.errors import WorkflowFault


@dataclass(frozen=True, slots=True)
class CliProgram:
    """How to run a program. Without `{prompt}` in the command, the prompt is its standard input."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text; `~/` is the program's home."""
    install: str = ""
    """The command that installs it."""


_CODEX = """\
model_provider = "ajet"
check_for_update_on_startup = false

[model_providers.ajet]
name = "ajet"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
apps = false
plugins = false
"""

_OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "model": "ajet/{model}",
    "small_model": "ajet/{side_model}",
    "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
    "provider": {
        "ajet": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "ajet",
            "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
            "models": {"{model}": {}, "{side_model}": {}},
        }
    },
}

CLAUDE_CODE = CliProgram(
    command=("claude", "-p", "--dangerously-skip-permissions"),
    env={
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{side_model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{side_model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    },
    install="npm install -g @anthropic-ai/claude-code",
)
CODEX = CliProgram(
    # the sandbox is ours: its own needs namespaces, which are refused in there
    command=(
        "codex",
        "exec",
        "--model",
        "{model}",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "-",
    ),
    files={"~/.codex/config.toml": _CODEX},
    install="npm install -g @openai/codex",
)
OPENCODE = CliProgram(
    command=("opencode", "run", "--title", "task"),  # without a title, it makes a side call that invents one
    env={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    },
    files={"~/.config/opencode/opencode.json": json.dumps(_OPENCODE, indent=1)},
    install="npm install -g opencode-ai",
)
MINI_SWE_AGENT = CliProgram(
    command=("mini", "--yolo", "--exit-immediately", "--model", "openai/{model}", "--task", "{prompt}"),
    env={
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
    },
    install="pip install mini-swe-agent mcp",
)  # fmt: skip


def cli_program(name: str) -> CliProgram:
    """The program of this name. Raises AgentSettingsError."""
    if name in CLI_PROGRAMS:
        program: CliProgram = load(CLI_PROGRAMS, name)
        return program
    raise AgentSettingsError(
        f"program: ajet knows no {name!r}{nearest_name(name, CLI_PROGRAMS)}; it knows {', '.join(CLI_PROGRAMS)}; "
        "run any other with `command`"
    )


def fill(text: str, values: Mapping[str, str], quote: Callable[[str], str] = str) -> str:
    """Fill in the values, each formatted by `quote`."""
    names = "|".join(map(re.escape, values))
    return re.sub(r"\{(" + names + r")\}", lambda found: quote(values[found[1]]), text)


TAIL_BYTES = 4000
"""How much of the program's output is recorded."""
ENTER = 'PATH="$1${1:+:}$PATH"; export PATH; shift; exec "$@"'
"""Runs a command with further folders in PATH."""
PROMPT = "prompt"
NO_TIME_LIMIT = 1e9
"""The sandbox's own limit, and the episode's, hold."""


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """The model's address as seen from inside the sandbox."""

    base_url: str
    """The base URL of OpenAI's protocol, up to and including `/v1`."""
    api_key: str
    model: str

    @property
    def anthropic_url(self) -> str:
        """The base URL of Anthropic's protocol."""
        return self.base_url.removesuffix("/v1")


class ProgramEnd(StrEnum):
    """Why a program ended."""

    EXIT = "exit"
    """It ended by itself."""
    MAX_SECONDS = "max_seconds"
    MAX_OUTPUT = "max_output"


@dataclass(frozen=True, slots=True)
class CliRun:
    """The result of a run."""

    exit_code: int
    stop_reason: ProgramEnd
    answer: str
    """The end of what it printed on its standard output."""
    output: str
    """The end of all that it printed."""
    seconds: float
    verdict: Verdict | None = None
    """The outcome of the task's tests, if it has any."""


class CliAgent:
    """Runs a program on a task's files."""

    def __init__(
        self,
        *,
        name: str = "cli",
        program: str | None = None,
        command: str | Sequence[str] | None = None,
        setup: str | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        installed_in: str | None = None,
        model_name: str | None = None,
        system_prompt: str | None = None,
        max_seconds: float | None = None,
        test_command: str = "",
        test_seconds: float = 60.0,
        result_as: str = "modules",
        max_output_mb: float = 16.0,
        base_dirs: Sequence[str | Path] = (),
    ) -> None:
        """`program`: the name of a known program; the other arguments override or extend its definition. `command`: an
        argument vector, or a shell line. `env`, `files`: variables and files (`~/` is the program's home). In all of
        them, the values of `placeholders` are filled in; without `{prompt}` in the command, the prompt is its standard
        input."""
        known = CliProgram() if program is None else cli_program(program)
        self.name = name
        self.program = program
        self.command: str | Sequence[str] = known.command if command is None else command
        if not self.command:
            raise AgentSettingsError("type cli needs a `program` that ajet knows, or a `command`")
        self.setup = setup
        self.env = {**known.env, **(env or {})}
        self.files = {**known.files, **(files or {})}
        self.installed_in = installed_in
        self.model_name = model_name
        self.install_hint = known.install
        self.system_prompt = system_prompt
        self.max_seconds = max_seconds
        self.test_command = test_command
        self.result_as = result_as
        check_above_zero("test_seconds", test_seconds, whole=False)
        check_above_zero("max_output_mb", max_output_mb, whole=False)
        self.test_seconds = test_seconds
        self.max_output_bytes = int(max_output_mb * 1e6)
        self.base_dirs = base_dirs

    @property
    def executable(self) -> str:
        """The program's name, as the command has it."""
        words = shlex.split(self.command) if isinstance(self.command, str) else self.command
        return words[0]

    async def check(self, sandbox: Sandbox) -> None:
        """Raises AgentSettingsError if the sandbox has no such program."""
        if isinstance(self.command, str):  # only the shell knows what a shell line runs
            return
        asked = ["/bin/sh", "-c", 'command -v -- "$1" >/dev/null', "sh", self.executable]
        if (await sandbox.exec(self._entered(asked))).exit_code == 0:
            return
        hint = f"Install it ({self.install_hint})" if self.install_hint else "Install it"
        raise AgentSettingsError(
            f"the program {self.executable!r} isn't in the sandbox. {hint} below /usr or, for docker and podman, in "
            "the image; or set agent.installed_in to the folder (npm's or a virtual environment) into which it was "
            "installed" + (f"; it isn't in {self.installed_in!r}" if self.installed_in else "")
        )

    async def run(
        self, task: Any, metadata: Mapping[str, Any], sandbox: Sandbox, model: ModelAddress, *, task_id: str = ""
    ) -> CliRun:
        """Run the program on a task. Raises WorkflowFault if it can't be started."""
        await bring_files(sandbox, metadata, self.base_dirs)
        home = await _home(sandbox)
        values = self._values(task, sandbox, model, home, task_id)
        for path, text in self.files.items():
            place = f"{home}/{path[2:]}" if path.startswith("~/") else path
            await sandbox.write(fill(place, values), fill(text, values).encode())
        variables = self._variables(model, values)
        if self.setup:
            result = await sandbox.exec(self._entered(["/bin/sh", "-c", self.setup]), env=variables)
            if result.exit_code:
                raise WorkflowFault(f"the agent's `setup` failed: {said(result)}")
        run = await self._program(sandbox, values, variables)
        command = str(metadata.get("test_command") or self.test_command)
        if not command:
            return run
        verdict = await judge_by_tests(
            sandbox, metadata, command, self.test_seconds, result_as=self.result_as, base_dirs=self.base_dirs
        )
        return replace(run, verdict=verdict)

    async def _program(self, sandbox: Sandbox, values: Mapping[str, str], variables: Mapping[str, str]) -> CliRun:
        """Run it to its end."""
        if isinstance(self.command, str):
            line = ["/bin/sh", "-c", fill(self.command, values, shlex.quote)]
            named = self.command
        else:
            line = [fill(word, values) for word in self.command]
            named = " ".join(self.command)
        printed = _Printed(self.max_output_bytes)
        started = time.monotonic()
        stdin = b"" if f"{{{PROMPT}}}" in named else values[PROMPT].encode()
        limit = NO_TIME_LIMIT if self.max_seconds is None else self.max_seconds
        try:
            result = await sandbox.exec(
                self._entered(line), timeout=limit, env=variables, stdin=stdin, on_output=printed.take
            )
        except _TooMuchOutputError:
            result = ExecResult(137, b"", b"", time.monotonic() - started)
            reason = ProgramEnd.MAX_OUTPUT
        else:
            reason = ProgramEnd.MAX_SECONDS if result.timed_out else ProgramEnd.EXIT
        answer = result.stdout[-TAIL_BYTES:].decode(errors="replace").strip()
        return CliRun(result.exit_code, reason, answer, printed.tail, time.monotonic() - started)

    def _values(self, task: Any, sandbox: Sandbox, model: ModelAddress, home: str, task_id: str) -> dict[str, str]:
        """The values of all placeholders."""
        texts = [self.system_prompt or "", *map(text_of, prompt_messages(task))]
        return {
            PROMPT: "\n\n".join(filter(None, texts)),
            "base_url": model.base_url,
            "anthropic_url": model.anthropic_url,
            "api_key": model.api_key,
            "model": self.model_name or model.model,
            "side_model": SIDE_MODEL,
            "home": home,
            "workspace": sandbox.workspace,
            "task_id": task_id,
        }

    def _variables(self, model: ModelAddress, values: Mapping[str, str]) -> dict[str, str]:
        return {
            "HOME": values["home"],
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": model.api_key,
            "ANTHROPIC_BASE_URL": model.anthropic_url,
            "ANTHROPIC_API_KEY": model.api_key,
            "AJET_MODEL": values["model"],
            **NO_BYTECODE,
            **{name: fill(value, values) for name, value in self.env.items()},
        }

    def _entered(self, line: Sequence[str]) -> list[str]:
        """The command, with the program's folder among the places where programs are looked for."""
        where = self.installed_in
        places = "" if where is None else f"{where}/node_modules/.bin:{where}/bin:{where}"
        return ["/bin/sh", "-c", ENTER, "sh", places, *line]


class _TooMuchOutputError(Exception):
    """The program printed too much."""


class _Printed:
    """The end of what a program has printed so far."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._end = bytearray()

    def take(self, chunk: bytes) -> None:
        self._total += len(chunk)
        self._end += chunk
        del self._end[:-TAIL_BYTES]
        if self._total > self._most:
            raise _TooMuchOutputError

    @property
    def tail(self) -> str:
        return self._end.decode(errors="replace").strip()


async def _home(sandbox: Sandbox) -> str:
    """The program's home, outside of the task's files. It is the same in each episode, because prompts may name it."""
    made = await sandbox.exec(["/bin/sh", "-c", 'mkdir -p "$HOME/.agent" && cd "$HOME/.agent" && pwd'])
    if made.exit_code:
        raise SandboxError(f"the sandbox has no place for the program's home: {said(made)}")
    return made.stdout.decode().strip()
