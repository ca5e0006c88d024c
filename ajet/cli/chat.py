"""`ajet chat TARGET`: talk to a model or checkpoint in the terminal."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet.runtime.served_model import ServedModel
    from ajet.schema.chat import Message
    from ajet.session import EpisodeSession

HELP = "/new starts again, /tokens shows the last reply's tokens, /quit (or Ctrl-D) leaves"


def run(argv: Sequence[str]) -> int:
    """Read lines, print replies as they are drawn."""
    parser = ArgumentParser("ajet chat", description=__doc__)
    parser.add_argument(
        "target", metavar="TARGET", help="YAML, experiment, checkpoint, model folder, hub id, tiny:NAME"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--temperature", type=float, help="default: the config's, else 1")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one reply")
    return asyncio.run(_chat(parser.parse_intermixed_args(argv)))


async def _chat(arguments: Namespace) -> int:
    from ajet.runtime.served_model import load_served_model

    model = load_served_model(arguments.target, arguments.overrides)
    try:
        await model.engine.ready()
        print(f"{model.name}. {HELP}")
        await _Conversation(model, arguments).talk()
    finally:
        await model.engine.aclose()
    return 0


class _Conversation:
    """What was said, and how to say more."""

    def __init__(self, model: ServedModel, arguments: Namespace) -> None:
        self._model = model
        self._arguments = arguments
        self._messages: list[Message] = []
        self._session: EpisodeSession
        self._last: Any = None
        self._begin()

    def _begin(self) -> None:
        system = self._arguments.system
        self._messages = [{"role": "system", "content": system}] if system else []
        self._session = self._model.new_session()

    async def talk(self) -> None:
        """Until the user leaves."""
        while (line := await asyncio.to_thread(_read_line)) is not None:
            match line.strip():
                case "":
                    continue
                case "/quit":
                    return
                case "/new":
                    self._begin()
                case "/tokens":
                    self._show_tokens()
                case text:
                    await self._say(text)

    async def _say(self, text: str) -> None:
        from ajet.schema.chat import ChatRequest
        from ajet.schema.errors import ModelCallError
        from ajet.schema.generation import Sampling

        temperature = self._arguments.temperature
        sampling = Sampling(
            temperature=self._model.temperature if temperature is None else temperature,
            max_tokens=self._arguments.max_tokens,
        )
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            replies = await self._session.complete(ChatRequest(messages, sampling=sampling), _print_delta)
        except ModelCallError as error:
            print(f"({error})")
            return
        self._last = replies[0]
        self._messages = [*messages, replies[0].message]
        print("" if replies[0].finish_reason != "length" else " …")

    def _show_tokens(self) -> None:
        if self._last is None:
            return
        completion = self._last.completion
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            print(f"{token:>8} {logprob:8.3f}  {self._session.decode_token(token)!r}")


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _print_delta(delta: Any) -> None:
    said = delta.delta
    print(said.reasoning + said.content, end="", flush=True)
    if said.tool_call is not None:
        function = said.tool_call["function"]
        print(f"[{function['name']}({function['arguments']})]", end="", flush=True)
