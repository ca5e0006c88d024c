"""`ajet chat TARGET`: talk to a model or checkpoint in the terminal."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.runtime.model import Model
    from ajet.schema.chat import Message
    from ajet.session import EpisodeSession

HELP = "/new starts over, /tokens shows the tokens of the last reply, /quit (or Ctrl-D) quits"


def run(argv: Sequence[str]) -> int:
    """Read lines, and print replies as they are generated."""
    parser = ArgumentParser("ajet chat", description=__doc__)
    parser.add_argument(
        "target", metavar="TARGET", help="YAML, experiment, checkpoint, model folder, hub id, tiny:NAME"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--temperature", type=float, help="default: the config's, else 1")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximum length of a reply")
    return asyncio.run(_chat(parser.parse_intermixed_args(argv)))


async def _chat(arguments: Namespace) -> int:
    from ajet.cli.targets import target_config
    from ajet.runtime.model import load_model

    config = target_config(arguments.target, arguments.overrides)
    model = load_model(config)
    try:
        await model.engine.ready()
        print(f"{arguments.target}. {HELP}")
        await _Conversation(config, model, arguments).talk()
    finally:
        await model.engine.aclose()
    return 0


class _Conversation:
    """The messages so far, and the session that answers them."""

    def __init__(self, config: Config, model: Model, arguments: Namespace) -> None:
        self._rollout = config.ajet.rollout
        self._model = model
        self._arguments = arguments
        self._messages: list[Message] = []
        self._session: EpisodeSession
        self._last: Any = None
        self._begin()

    def _begin(self) -> None:
        system = self._arguments.system
        self._messages = [{"role": "system", "content": system}] if system else []
        self._session = self._model.open_conversation(self._rollout.max_model_len)

    async def talk(self) -> None:
        """Answer lines until the user quits."""
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
            temperature=self._rollout.temperature if temperature is None else temperature,
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
