"""`ajet.rollout.agent`: a ready agent in place of a workflow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ajet.config.kinds import CliProgramName
from ajet.config.section import AboveZero, Block, Positive, Section


def _plain(value: Any) -> Any:
    """Nested mappings of a tool's options, as plain values."""
    return [dict(item) if isinstance(item, dict) else item for item in value] if isinstance(value, list) else value


class AgentConfig(Section):
    """`ajet.rollout.agent`: a ready agent in place of a workflow.

    Its reward comes from the judge; without one, from the agent itself (`coding`, `cli`: the tests), from comparing its
    answer with the task's `answer`, or from its tools."""

    type: str = "react"
    """`react` (thinks, calls tools, answers), `tool` (one tool call a step, ends by `finish`), `coding` (edits files
    and runs tests in `rollout.sandbox`), `cli` (a program such as Codex, in `rollout.sandbox`), or `module->Class`: an
    agent of your own."""
    system_prompt: str | None = None
    """The system message. null: the agent's own."""
    tools: Annotated[list[str | dict[str, Any]], BeforeValidator(_plain)] = []
    """What it may call: names (`ajet tools` lists them), `{name: {options}}`, `module->object`, or `{mcp: {…}}`."""
    format: Literal["auto", "native", "text"] = "auto"
    """How the model calls tools: `native`, or as `text` (Thought, Action, Action Input). `auto`: natively."""
    max_steps: Positive = 10
    """Most model calls in an episode. Summaries of a full context don't count."""
    max_tokens: Positive | None = None
    """Most tokens in all replies of an episode together. null: no limit."""
    max_seconds: AboveZero | None = None
    """Seconds after which the agent stops. null: only `rollout.episode_timeout` applies, which fails the episode."""
    max_output_chars: Positive = 20000
    """Most characters of a tool's output that the model is shown."""
    when_full: Literal["drop", "summarise", "stop"] = "drop"
    """When the conversation nears `rollout.max_model_len`: leave out old tool output, go on from a summary, or stop."""
    parallel_tool_calls: bool = True
    """Run the tool calls of one reply at the same time."""
    options: Block = Block()
    """Further arguments of the agent's class."""
    program: CliProgramName | None = None
    """cli: a program that ajet knows how to run: `claude-code`, `codex`, `opencode` or `mini-swe-agent`."""
    command: str | list[str] | None = None
    """cli: what is run instead, a program and its arguments, or a shell line. `{prompt}`, `{base_url}`,
    `{anthropic_url}`, `{api_key}`, `{model}`, `{side_model}`, `{home}`, `{workspace}` and `{task_id}` are filled in;
    without `{prompt}`, the prompt is its standard input."""
    setup: str | None = None
    """cli: a shell line that is run in the sandbox before the program."""
    env: dict[str, str] = {}
    """cli: further variables of the program, filled in like `command`."""
    files: dict[str, str] = {}
    """cli: files that are written before the program starts, path to text, filled in like `command`. `~/` is the
    program's home, which is not in the workspace."""
    installed_in: str | None = None
    """cli: the folder into which npm or pip installed the program, if the sandbox doesn't find it by itself. With
    bubblewrap, it is shown inside, read-only; with an image, it is one of the image's."""
    model_name: str | None = None
    """cli: the model's name as the program asks for it (`{model}`), for a program that treats names differently. Any
    name is answered by the trained model. null: `ajet-cli`."""
