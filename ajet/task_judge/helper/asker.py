"""`Asker`: questions to a helper model whose answers must have a form. Retried, cached, limited in number.

An answer that can't be used is never replaced by a default: the model is told what was wrong and asked again, and what
still fails raises `UnusableAnswerError` with the last answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ajet.schema.chat import Message
from ajet.task_judge.helper.answers import AnswerCache
from ajet.task_judge.helper.model import HelperError, HelperModel

T = TypeVar("T")

SHOWN = 200
"""How much of an unusable answer an error shows."""
THINKING = re.compile(r"<think>.*?</think>|^.*</think>", re.DOTALL)


class UnusableAnswerError(HelperError):
    """The helper model gave no usable answer, however often it was asked. Shows the last one and what is wrong."""


class WrongAnswer(ValueError):
    """What is wrong with an answer, in words that its author can act on."""


class Asker:
    """Asks one model. Any thread and any event loop may use it; all share `max_concurrent`."""

    def __init__(
        self,
        helper: HelperModel,
        *,
        cache: AnswerCache | None = None,
        max_concurrent: int = 32,
        retries: int = 3,
        timeout_s: float = 120.0,
    ) -> None:
        """`retries`: of an answer that can't be used. Failed calls are retried by the helper's client as well."""
        self.helper = helper
        self.cache = cache
        self.cached = 0
        """Answers that came from the cache."""
        self._max_concurrent = max_concurrent
        self._retries = retries
        self._timeout_s = timeout_s
        self._slots: asyncio.Semaphore | None = None
        self._lock = threading.Lock()

    async def ask(self, messages: Sequence[Message], read: Callable[[str], T], *, draw: int = 0, **sampling: Any) -> T:
        """The answer, as `read` returns it; `read` raises WrongAnswer for what can't be used.

        `draw`: equal questions with different numbers are asked separately. Raises HelperError, UnusableAnswerError,
        or HelperBudgetError.
        """
        return await asyncio.wrap_future(self._submit(self._ask(list(messages), read, draw, sampling)))

    def ask_blocking(
        self, messages: Sequence[Message], read: Callable[[str], T], *, draw: int = 0, **sampling: Any
    ) -> T:
        """`ask`, for code that doesn't await."""
        return self._submit(self._ask(list(messages), read, draw, sampling)).result()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.helper.loop())

    async def _ask(self, messages: list[Message], read: Callable[[str], T], draw: int, sampling: dict[str, Any]) -> T:
        key = AnswerCache.key(self.helper.model, messages, sampling, draw)
        if self.cache is not None and (kept := self.cache.get(key)) is not None:
            self.cached += 1
            return read(kept)
        asked = messages
        for last in [False] * self._retries + [True]:
            async with self._slot():
                text = await self._call(asked, sampling)
            try:
                answer = read(text)
            except WrongAnswer as error:
                if last:
                    raise UnusableAnswerError(
                        f"helper model {self.helper.model!r} gave no usable answer in {self._retries + 1} tries: "
                        f"{error}. The last one: {text[:SHOWN]!r}"
                    ) from None
                again = f"This answer can't be used: {error}. Answer again, in the form that was asked for."
                asked = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": again}]
            else:
                if self.cache is not None:
                    self.cache.put(key, text)
                return answer
        raise AssertionError("unreachable")

    async def _call(self, messages: list[Message], sampling: dict[str, Any]) -> str:
        try:
            async with asyncio.timeout(self._timeout_s * 2):
                return await self.helper.complete(messages, timeout=self._timeout_s, **sampling)
        except TimeoutError:
            raise HelperError(
                f"helper model {self.helper.model!r} at {self.helper.endpoint().base_url}: no answer within "
                f"{self._timeout_s:g} s, nor when asked again"
            ) from None

    def _slot(self) -> asyncio.Semaphore:
        """Made on the helper's loop, which all questions run on."""
        with self._lock:
            if self._slots is None:
                self._slots = asyncio.Semaphore(self._max_concurrent)
            return self._slots


def read_json(text: str, schema: dict[str, Any]) -> Any:
    """The JSON value in a model's answer, checked against a JSON schema. Raises WrongAnswer.

    Reasoning in `<think>` tags, fences and words around the value are allowed; of several values, the last that fits.
    """
    import jsonschema

    found = list(json_values(THINKING.sub("", text)))
    if not found:
        raise WrongAnswer("it holds no JSON value")
    validator = jsonschema.Draft202012Validator(schema)
    wrong = ""
    for value in reversed(found):
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        if error is None:
            return value
        wrong = wrong or f"{'.'.join(map(str, error.absolute_path)) or 'the JSON value'}: {error.message[:SHOWN]}"
    raise WrongAnswer(wrong)


def json_values(text: str) -> list[Any]:
    """The outermost JSON objects and lists in a text, in order."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    values: list[Any] = []
    position = 0
    while (start := _next_start(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start)
            values.append(value)
        except (ValueError, RecursionError):
            position = start + 1
    return values


def _next_start(text: str, position: int) -> int | None:
    places = [place for place in (text.find("{", position), text.find("[", position)) if place >= 0]
    return min(places, default=None)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't a JSON number")
