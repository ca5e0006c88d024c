"""`HelperModel`: a model at an OpenAI-compatible endpoint that isn't trained; `Asker` asks until the answer can be
used.

For readers, judges and prompt proposers: `await HelperModel.from_config(config).complete(messages)`, within the budget
that `ajet.helper` sets. Agents whose target isn't trained get its endpoint alone; the budget doesn't count their calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ajet.schema.chat import Message
from ajet.schema.errors import AjetError, ConfigError, UserError
from ajet.schema.printable import encodable_values
from ajet.task_judge.helper.answers import AnswerCache

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion

DASHSCOPE_URL = "https://dashscope.aliyuncs.com/compatible-mode/v1"
OPENAI_URL = "https://api.openai.com/v1"
MAX_RETRIES = 5
"""Retries after a transient error (busy, unreachable, 5xx): with the client's backoff, about 15 seconds in total."""

REFUSED = (400, 413, 422)
"""HTTP statuses of a request that the server doesn't take as it is: filtered content, too long a prompt."""


class HelperError(AjetError):
    """A call to the helper model failed, after retries."""


class HelperRefusalError(HelperError):
    """The helper's server refused a request for what it holds (HTTP 400, 413 or 422). Another request may succeed."""


class HelperBudgetError(UserError):
    """The budget in `ajet.helper` is used up: names the key."""


class HelperEndpoint(NamedTuple):
    """Everything a client needs to reach the helper."""

    base_url: str
    api_key: str
    model: str


class HelperBudget:
    """Counts calls, tokens and cost, and refuses further calls once a limit is reached. Any thread may use it.

    Calls that are in flight when `max_tokens` or `max_cost` is reached still finish.
    """

    def __init__(
        self,
        *,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        input_price: float = 0.0,
        output_price: float = 0.0,
    ) -> None:
        """Prices are per million tokens."""
        self.max_calls, self.max_tokens, self.max_cost = max_calls, max_tokens, max_cost
        self.input_price, self.output_price = input_price, output_price
        self.calls = self.input_tokens = self.output_tokens = 0
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def cost(self) -> float:
        """In the currency of the prices."""
        return (self.input_tokens * self.input_price + self.output_tokens * self.output_price) / 1e6

    def take_call(self) -> None:
        """Count a call before it is made. Raises HelperBudgetError if the budget is used up."""
        with self._lock:
            for key, limit, spent in (
                ("max_calls", self.max_calls, self.calls),
                ("max_tokens", self.max_tokens, self.tokens),
                ("max_cost", self.max_cost, self.cost),
            ):
                if limit is not None and spent >= limit:
                    raise HelperBudgetError(
                        f"ajet.helper.{key}: the helper model's budget is used up: {spent:g} of {limit:g}. Raise "
                        f"ajet.helper.{key}, or remove it for no limit"
                    )
            self.calls += 1

    def add_usage(self, input_tokens: int, output_tokens: int) -> None:
        """Count the tokens of a finished call."""
        with self._lock:
            self.input_tokens += input_tokens
            self.output_tokens += output_tokens

    @property
    def counts_tokens(self) -> bool:
        return self.max_tokens is not None or self.max_cost is not None


class HelperModel:
    """A model at an OpenAI-compatible endpoint. Any thread and any event loop may use it."""

    def __init__(
        self, model: str, base_url: str | None = None, api_key: str | None = None, *, budget: HelperBudget | None = None
    ) -> None:
        """`base_url`, `api_key`: default to OPENAI_BASE_URL (else OpenAI's address) and OPENAI_API_KEY."""
        self.model = model
        self.budget = budget or HelperBudget()
        """Its limits, and what has been spent so far."""
        self._base_url = base_url
        self._api_key = api_key
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_config(cls, config: Any) -> HelperModel:
        """The model of `ajet.helper`. All callers in this process share one object, and so one budget."""
        section = config.ajet.helper
        if section.model is None:
            raise ConfigError("ajet.helper.model: a helper model is needed and none is named. Set its name and address")
        with _lock:
            if id(section) not in _shared:
                prices = section.price_per_million
                budget = HelperBudget(
                    max_calls=section.max_calls,
                    max_tokens=section.max_tokens,
                    max_cost=section.max_cost,
                    input_price=prices.input,
                    output_price=prices.output,
                )
                _shared[id(section)] = cls(section.model, section.base_url, section.api_key, budget=budget)
                weakref.finalize(section, _shared.pop, id(section), None)
            return _shared[id(section)]

    @classmethod
    def chosen(cls, config: Any, model: str | None, key: str) -> HelperModel:
        """The model that the YAML's `key` names, at the endpoint of `ajet.helper` and within its budget; the model of
        `ajet.helper` if `key` names none. Without `ajet.helper`, `former` determines the endpoint."""
        section = config.ajet.helper
        if section.model is None and not model:
            raise ConfigError(
                f"{key}: a helper model is needed and none is named. Set ajet.helper.model and ajet.helper.base_url, "
                f"or {key}"
            )
        if not model or model == section.model:
            return HelperModel.from_config(config)
        if section.model is None:
            return cls.former(model)
        return HelperModel.from_config(config).named(model)

    def named(self, model: str) -> HelperModel:
        """Another model at the same endpoint, sharing this budget."""
        return HelperModel(model, self._base_url, self._api_key, budget=self.budget)

    @classmethod
    def former(cls, model: str, api_key: str | None = None) -> HelperModel:
        """A model that an old file names without an endpoint: at DashScope if there is a key for it, else at
        OPENAI_BASE_URL. DASHSCOPE_API_KEY may hold several keys, separated by `|`; the first is used."""
        key = api_key or os.environ.get("DASHSCOPE_API_KEY", "").partition("|")[0]
        if not key:
            return cls(model)
        return cls(model, os.environ.get("DASHSCOPE_BASE_URL", DASHSCOPE_URL), key)

    def endpoint(self) -> HelperEndpoint:
        """Address, key and name of the model. Raises ConfigError if none is configured."""
        base_url = self._base_url or os.environ.get("OPENAI_BASE_URL")
        api_key = self._api_key or os.environ.get("OPENAI_API_KEY")
        if base_url is None and api_key is None:
            raise ConfigError(
                f"helper model {self.model!r}: no endpoint is known. Set ajet.helper.base_url in the YAML, or "
                "OPENAI_BASE_URL and OPENAI_API_KEY, or pass base_url to ajet.task_judge.helper.HelperModel"
            )
        return HelperEndpoint(base_url or OPENAI_URL, api_key or "none", self.model)

    async def complete(self, messages: Sequence[Message], **sampling: Any) -> str:
        """The text of the model's reply. `sampling`: `temperature`, `max_tokens` and any other parameter that the
        endpoint accepts.

        Raises HelperBudgetError before a call that the budget doesn't allow, HelperError if the call fails.
        """
        return await asyncio.wrap_future(self._begin(messages, sampling))

    def complete_blocking(self, messages: Sequence[Message], **sampling: Any) -> str:
        """`complete`, for code that doesn't await."""
        return self._begin(messages, sampling).result()

    def _begin(self, messages: Sequence[Message], sampling: dict[str, Any]) -> Future[str]:
        self.endpoint()
        self.budget.take_call()
        return asyncio.run_coroutine_threadsafe(self._call(list(messages), sampling), self.loop())

    async def _call(self, messages: list[Message], sampling: dict[str, Any]) -> str:
        from openai import APIStatusError, OpenAIError

        try:
            reply: ChatCompletion = await self._client.chat.completions.create(
                model=self.model,
                messages=encodable_values(messages),  # an agent may have written a lone surrogate
                **sampling,
            )
        except OpenAIError as error:
            place = self.endpoint().base_url
            refused = isinstance(error, APIStatusError) and error.status_code in REFUSED
            kind = HelperRefusalError if refused else HelperError
            raise kind(f"helper model {self.model!r} at {place}: {type(error).__name__}: {error}") from error
        if reply.usage is not None:
            self.budget.add_usage(reply.usage.prompt_tokens, reply.usage.completion_tokens)
        elif self.budget.counts_tokens:
            raise HelperError(
                f"helper model {self.model!r}: the endpoint reports no token usage, so ajet.helper.max_tokens and "
                "max_cost can't be kept. Limit the calls instead: ajet.helper.max_calls"
            )
        if not reply.choices:
            raise HelperError(f"helper model {self.model!r} replied without any choice")
        return reply.choices[0].message.content or ""

    @cached_property
    def _client(self) -> openai.AsyncOpenAI:
        from openai import AsyncOpenAI

        base_url, api_key, _ = self.endpoint()
        return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=MAX_RETRIES)

    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all calls, in a separate thread: an HTTP client belongs to one loop, and each episode's
        code runs on another."""
        with _lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="ajet-helper", daemon=True).start()
            return self._loop


_shared: dict[int, HelperModel] = {}
"""By the id of the `ajet.helper` section that they were made from."""
_lock = threading.Lock()
T = TypeVar("T")

SHOWN = 200
"""How much of an unusable answer an error shows."""
THINKING = re.compile(r"<think>.*?</think>|^.*</think>", re.DOTALL)


class UnusableAnswerError(HelperError):
    """The helper model gave no usable answer within all retries. Shows the last one and what is wrong with it."""


class WrongAnswer(ValueError):
    """An answer can't be used. The message is sent back to the model, so it says what to change."""


class Asker:
    """Asks one model, and retries until it can use the answer. Any thread and event loop may use it; all share
    `max_concurrent`."""

    def __init__(
        self,
        helper: HelperModel,
        *,
        cache: AnswerCache | None = None,
        max_concurrent: int = 32,
        retries: int = 3,
        timeout_s: float = 120.0,
    ) -> None:
        """`retries`: how often to ask again for an answer that can be used. The helper's client retries failed calls as
        well."""
        self.helper = helper
        self.cache = cache
        self.cached = 0
        """How many answers came from the cache."""
        self._max_concurrent = max_concurrent
        self._retries = retries
        self._timeout_s = timeout_s
        self._slots: asyncio.Semaphore | None = None
        self._lock = threading.Lock()

    async def ask(self, messages: Sequence[Message], read: Callable[[str], T], *, draw: int = 0, **sampling: Any) -> T:
        """The answer as parsed by `read`, which raises WrongAnswer if it can't use the text.

        `draw`: the same question with another number is asked again instead of being read from the cache. Raises
        HelperError, UnusableAnswerError, or HelperBudgetError.
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
        """Created on the helper's loop, on which all questions run."""
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
