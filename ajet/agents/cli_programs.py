"""The coding agents that ajet knows by name: how each is run without a person, and without any network but the gateway.

A program's telemetry, its look for updates and what else it would ask the internet for are switched off: they would
wait in vain. In all texts, `{prompt}`, `{base_url}` and the like are filled in (`ajet.agents.cli_agent`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ajet.agents.limits import AgentSettingsError
from ajet.config.kinds import CLI_PROGRAMS, load, nearest_name


@dataclass(frozen=True, slots=True)
class CliProgram:
    """How a program is run. Without `{prompt}` in the command, the prompt is its standard input."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text; `~/` is the program's home."""
    install: str = ""
    """How it is installed."""


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
    command=("opencode", "run", "--title", "task"),  # without a title, a side call makes one up
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
    """The text with its values, each as `quote` writes it."""
    names = "|".join(map(re.escape, values))
    return re.sub(r"\{(" + names + r")\}", lambda found: quote(values[found[1]]), text)


def names(text: str, name: str) -> bool:
    """Whether the text has a place for this value."""
    return f"{{{name}}}" in text
