"""`ajet chat TARGET`: talk to a model or checkpoint in the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.cli.targets import RunSetting
    from ajet.config import Config
    from ajet.gateway.chat import EpisodeSession
    from ajet.schema.chat import Message
    from ajet.task_runner.model import Model

HELP = """\
/new      start over
/tokens   show the tokens of the last reply
/prompt   show the system message and the tools
/help     show this
/exit     leave (also /quit, or Ctrl-D)"""


def run(argv: Sequence[str]) -> int:
    """Read lines, and print replies as they are generated."""
    parser = CommandParser("ajet chat", description=__doc__)
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="YAML, a run's name or folder, checkpoint, model folder, hub id, tiny:NAME",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--system", help="a system message; default: the one of the run's last episode")
    parser.add_argument("--no-tools", action="store_true", help="don't offer the tools of the run's last episode")
    parser.add_argument("--temperature", type=float, help="default: the config's, else 1")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximum length of a reply")
    return asyncio.run(_chat(parser.parse_intermixed_args(argv)))


async def _chat(arguments: Namespace) -> int:
    from ajet.cli.targets import run_setting, target_config
    from ajet.task_runner.model import load_model

    config = target_config(arguments.target, arguments.overrides)
    setting = run_setting(arguments.target)
    if arguments.system is not None:
        setting = setting._replace(system=arguments.system)
    if arguments.no_tools:
        setting = setting._replace(tools=())
    print(f"loading {config.ajet.model.path} …", flush=True)
    model = load_model(config)
    try:
        await model.engine.ready()
        print(printable(f"{arguments.target}{_given(setting)}. /help lists the commands."))
        await _Conversation(config, model, arguments, setting).talk()
    finally:
        await model.engine.aclose()
    return 0


def _given(setting: RunSetting) -> str:
    """The settings that the conversation takes from the run."""
    tools = ", ".join(str(tool.get("function", {}).get("name")) for tool in setting.tools)
    parts = [*(["its system message"] if setting.system else []), *([f"the tools {tools}"] if tools else [])]
    return f", with {' and '.join(parts)}" if parts else ""


class _Conversation:
    """The messages so far, and the session that answers them. The user plays the tools."""

    def __init__(self, config: Config, model: Model, arguments: Namespace, setting: RunSetting) -> None:
        self._setting = setting
        self._rollout = config.ajet.rollout
        self._model = model
        self._arguments = arguments
        self._messages: list[Message] = []
        self._session: EpisodeSession
        self._last: Any = None
        self._begin()

    def _begin(self) -> None:
        system = self._setting.system
        self._messages = [{"role": "system", "content": system}] if system else []
        self._session = self._model.open_conversation(self._rollout.max_model_len)

    async def talk(self) -> None:
        """Answer lines until the user quits."""
        while (line := await asyncio.to_thread(_read_line)) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/help":
                    print(HELP)
                case "/new":
                    self._begin()
                case "/tokens":
                    self._show_tokens()
                case "/prompt":
                    self._show_prompt()
                case text if text.startswith("/") and " " not in text:
                    print(f"unknown command {text}\n{HELP}")
                case text:
                    await self._say({"role": "user", "content": text})

    async def _say(self, *said: Message) -> None:
        """Send messages, and show the reply. If it calls tools, ask the user for their results and go on."""
        while said:
            replied = await self._reply([*self._messages, *said])
            said = tuple(await asyncio.to_thread(_play_tools, self._messages[-1])) if replied else ()

    async def _reply(self, messages: list[Message]) -> bool:
        from ajet.schema.chat import ChatRequest, Sampling
        from ajet.schema.errors import ModelCallError

        temperature = self._arguments.temperature
        sampling = Sampling(
            temperature=self._rollout.temperature if temperature is None else temperature,
            max_tokens=self._arguments.max_tokens,
        )
        request = ChatRequest(messages, tools=[*self._setting.tools], sampling=sampling)
        try:
            replies = await self._session.complete(request, _print_delta)
        except ModelCallError as error:
            print(f"({error})")
            return False
        self._last = replies[0]
        self._messages = [*messages, replies[0].message]
        print("" if replies[0].finish_reason != "length" else f" … (cut at --max-tokens {self._arguments.max_tokens})")
        return True

    def _show_prompt(self) -> None:
        print(printable(self._setting.system) or "(no system message)")
        for tool in self._setting.tools:
            print(printable(json.dumps(tool.get("function", tool), ensure_ascii=False)))

    def _show_tokens(self) -> None:
        if self._last is None:
            return
        completion = self._last.completion
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            print(f"{token:>8} {logprob:8.3f}  {self._session.decode_token(token)!r}")


def _play_tools(reply: Message) -> list[Message]:
    """The tools' results, as the user types them. None at the end of the input."""
    results: list[Message] = []
    for call in reply.get("tool_calls") or ():
        line = _read_line(f"result of {call['function']['name']}: ")
        if line is None:
            return []
        results.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": line})
    return results


def _read_line(prompt: str = "> ") -> str | None:
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _print_delta(delta: Any) -> None:
    said = delta.delta
    print(printable(said.reasoning + said.content), end="", flush=True)
    if (piece := said.call) is not None:
        opening = f"[{piece.name}(" if piece.begins else ""
        print(printable(opening + piece.arguments + (")]" if piece.ends else "")), end="", flush=True)
