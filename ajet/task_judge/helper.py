"""`HelperModel`: a model at an OpenAI-compatible endpoint that isn't trained; `Asker` asks until the answer can be
used.

For readers, judges and prompt proposers: `await HelperModel.from_config(config).complete(messages)`, within the budget
that `ajet.helper` sets. Agents whose target isn't trained get its endpoint alone; the budget doesn't count their calls.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ajet.config.root import HelperConfig
from ajet.schema.chat import Message, plain_text
from ajet.schema.errors import AjetError, ConfigError, UserError, concurrently
from ajet.schema.printable import encodable_values
from ajet.task_judge.helper_answers import SHOWN, AnswerCache, HelperReply, WrongAnswer

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion

log = logging.getLogger("ajet.helper")
T = TypeVar("T")
DASHSCOPE_URL = "https://dashscope.aliyuncs.com/compatible-mode/v1"
OPENAI_URL = "https://api.openai.com/v1"
TIMEOUT_S = 120.0
EMBEDDED_AT_ONCE = 10
"""Texts per request: common providers take no more."""
MAX_RETRIES = 5
"""Retries after a transient error (busy, unreachable, 5xx): with the client's backoff, about 15 seconds in total."""

REPORT_S = 10.0
"""The interval between lines of progress in the log."""
REFUSED = (400, 413, 422)
"""HTTP statuses of a request that the server doesn't take as it is: filtered content, too long a prompt."""


class HelperError(AjetError):
    """A call to the helper model failed, after retries."""


class HelperRefusalError(HelperError):
    """The helper's server refused a request for what it holds (HTTP 400, 413 or 422). Another request may succeed."""


class HelperBudgetError(UserError):
    """The budget in `ajet.helper` is used up: names the key."""


class BaseUrlAndKey(NamedTuple):
    """The settings of any OpenAI-compatible client. They also unpack: `base_url, api_key, model = …`."""

    base_url: str
    api_key: str
    model: str


class HelperBudget:
    """Counts calls, tokens and cost, and refuses further calls once a limit is reached. Any thread may use it.

    Calls that are in flight when `max_tokens` or `max_cost` is reached still finish.
    """

    def __init__(self, limits: HelperConfig | None = None) -> None:
        """`limits`: by default, there are none."""
        self.limits = limits or HelperConfig()
        self.calls = self.input_tokens = self.output_tokens = 0
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def cost(self) -> float:
        """What was spent, in the currency of the prices."""
        prices = self.limits.price_per_million
        return (self.input_tokens * prices.input + self.output_tokens * prices.output) / 1e6

    def take_call(self) -> None:
        """Count a call before it is made. Raises HelperBudgetError if the budget is used up."""
        with self._lock:
            for key, limit, spent in (
                ("max_calls", self.limits.max_calls, self.calls),
                ("max_tokens", self.limits.max_tokens, self.tokens),
                ("max_cost", self.limits.max_cost, self.cost),
            ):
                if limit is not None and spent >= limit:
                    raise HelperBudgetError(
                        f"ajet.helper.{key}: the helper model's budget is used up: {spent:g} of {limit:g}. Raise "
                        f"ajet.helper.{key}, or remove it for no limit"
                    )
            self.calls += 1

    def add_usage(self, input_tokens: int, output_tokens: int = 0) -> None:
        with self._lock:
            self.input_tokens += input_tokens
            self.output_tokens += output_tokens


class HelperMeter:
    """What the helper was asked in this process, part by part. Processes with a judge of their own aren't counted."""

    def __init__(self, config: Any) -> None:
        self._budget = HelperModel._of(config.ajet.helper).budget
        self._seen = (0, 0, 0.0)

    def since_last(self) -> dict[str, float]:
        """Calls, tokens and cost since the last time this was called, as metrics; nothing if nothing was asked."""
        now = (self._budget.calls, self._budget.tokens, self._budget.cost)
        names = ("helper/calls", "helper/tokens", "helper/cost")
        spent = {name: float(new - old) for name, new, old in zip(names, now, self._seen, strict=True)}
        self._seen = now
        return {name: value for name, value in spent.items() if value}


class HelperModel:
    """A model at an OpenAI-compatible endpoint. Any thread and any event loop may use it."""

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        budget: HelperBudget | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`base_url`, `api_key`: default to OPENAI_BASE_URL (else OpenAI's address) and OPENAI_API_KEY. `timeout_s`:
        for one answer; after twice this time, retries included, a call has failed."""
        self.model = model
        self.timeout_s = timeout_s
        self.budget = budget or HelperBudget()
        self._base_url = base_url
        self._api_key = api_key
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_config(cls, config: Any) -> HelperModel:
        """The model of `ajet.helper`. All callers in this process share one object, and so one budget."""
        section = config.ajet.helper
        if section.model is None:
            raise ConfigError("ajet.helper.model: a helper model is needed and none is named. Set its name and address")
        return cls._of(section)

    @classmethod
    def for_embeddings(cls, config: Any) -> HelperModel | None:
        """The model of `ajet.helper.embedding_model`, within the same budget; None if none is named."""
        section = config.ajet.helper
        return None if section.embedding_model is None else cls._of(section).named(section.embedding_model)

    @classmethod
    def _of(cls, section: Any) -> HelperModel:
        with _lock:
            if id(section) not in _shared:
                limits = section.model_copy()  # one that the section itself is dropped from
                name, budget = section.model or "", HelperBudget(limits)
                _shared[id(section)] = cls(
                    name, section.base_url, section.api_key, budget=budget, timeout_s=section.timeout
                )
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
        return HelperModel(model, self._base_url, self._api_key, budget=self.budget, timeout_s=self.timeout_s)

    @classmethod
    def former(cls, model: str, api_key: str | None = None) -> HelperModel:
        """A model that an old file names without an endpoint: at DashScope if there is a key for it, else at
        OPENAI_BASE_URL. DASHSCOPE_API_KEY may hold several keys, separated by `|`; the first is used."""
        key = api_key or os.environ.get("DASHSCOPE_API_KEY", "").partition("|")[0]
        if not key:
            return cls(model)
        return cls(model, os.environ.get("DASHSCOPE_BASE_URL", DASHSCOPE_URL), key)

    def endpoint(self) -> BaseUrlAndKey:
        """Address, key and name of the model. Raises ConfigError if none is configured."""
        base_url = self._base_url or os.environ.get("OPENAI_BASE_URL")
        api_key = self._api_key or os.environ.get("OPENAI_API_KEY")
        if base_url is None and api_key is None:
            raise ConfigError(
                f"helper model {self.model!r}: no endpoint is known. Set ajet.helper.base_url in the YAML, or "
                "OPENAI_BASE_URL and OPENAI_API_KEY, or pass base_url to ajet.task_judge.helper.HelperModel"
            )
        return BaseUrlAndKey(base_url or OPENAI_URL, api_key or "none", self.model)

    async def complete(self, messages: Sequence[Message], **sampling: Any) -> str:
        """The text of the model's reply. `sampling`: `temperature`, `max_tokens` and any other parameter that the
        endpoint accepts; `timeout` stands in for `timeout_s`.

        Raises HelperBudgetError before a call that the budget doesn't allow, HelperError if the call fails.
        """
        return (await self.reply(messages, **sampling)).text

    async def reply(self, messages: Sequence[Message], **sampling: Any) -> HelperReply:
        """`complete`, which also says whether the reply is whole."""
        return await asyncio.wrap_future(self._begin(self._chat(list(messages), sampling)))

    def complete_blocking(self, messages: Sequence[Message], **sampling: Any) -> str:
        """`complete`, for code that doesn't await."""
        return self._begin(self._chat(list(messages), sampling)).result().text

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text. Raises as `complete` does."""
        return await asyncio.wrap_future(self._begin(self._vectors(list(texts))))

    def _begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self.endpoint()
            self.budget.take_call()
        except AjetError:
            call.close()
            raise
        return asyncio.run_coroutine_threadsafe(call, self.loop())

    async def _chat(self, messages: list[Message], sampling: dict[str, Any]) -> HelperReply:
        timeout_s = sampling.pop("timeout", self.timeout_s)
        reply: ChatCompletion = await self._answer(
            self._client.chat.completions.create(
                model=self.model,
                messages=encodable_values(messages),  # an agent may have written a lone surrogate
                timeout=timeout_s,
                **sampling,
            ),
            timeout_s,
        )
        self._count(reply, "prompt_tokens", "completion_tokens")
        try:
            choice = reply.choices[0]
            said = plain_text(choice.message.content) or getattr(choice.message, "refusal", None) or ""
            return HelperReply(said, choice.finish_reason == "length")
        except (AttributeError, TypeError, IndexError):  # the client takes any JSON, and a text that is none
            raise self._no_answer(reply) from None

    async def _vectors(self, texts: list[str]) -> list[list[float]]:
        asked = self._client.embeddings.create(
            model=self.model, input=encodable_values(texts), encoding_format="float", timeout=self.timeout_s
        )
        reply = await self._answer(asked, self.timeout_s)
        self._count(reply, "prompt_tokens")
        try:
            vectors = [each.embedding for each in sorted(reply.data, key=lambda each: each.index)]
        except (AttributeError, TypeError):
            raise self._no_answer(reply) from None
        if len(vectors) != len(texts):
            raise HelperError(f"embedding model {self.model!r} gave {len(vectors)} vectors for {len(texts)} texts")
        return vectors

    async def _answer(self, call: Awaitable[T], timeout_s: float) -> T:
        """What the server answers, with its errors as ours."""
        from openai import APIStatusError, OpenAIError

        place = self.endpoint().base_url
        try:
            async with asyncio.timeout(timeout_s * 2):
                return await call
        except TimeoutError:
            raise HelperError(
                f"helper model {self.model!r} at {place}: no answer within {timeout_s:g} s, nor when asked again "
                "(ajet.helper.timeout)"
            ) from None
        except OpenAIError as error:
            refused = isinstance(error, APIStatusError) and error.status_code in REFUSED
            kind = HelperRefusalError if refused else HelperError
            raise kind(f"helper model {self.model!r} at {place}: {type(error).__name__}: {error}") from error
        except ValueError as error:  # JSON that is cut off, or in another encoding
            raise self._no_answer(error) from None

    def _no_answer(self, got: Any) -> HelperError:
        said = repr(got.to_dict() if hasattr(got, "to_dict") else got)
        return HelperError(
            f"helper model {self.model!r} at {self.endpoint().base_url}: the server's answer isn't one of OpenAI's "
            f"protocol. Is the address right (most end in /v1)? It was {said[:SHOWN]}"
        )

    def _count(self, reply: Any, *names: str) -> None:
        usage = getattr(reply, "usage", None)
        spent = [count for name in names if isinstance(count := getattr(usage, name, None), int)]
        if len(spent) == len(names):
            self.budget.add_usage(*spent)
        elif self.budget.limits.max_tokens is not None or self.budget.limits.max_cost is not None:
            raise HelperError(
                f"helper model {self.model!r}: the endpoint reports no token usage, so ajet.helper.max_tokens and "
                "max_cost can't be kept. Limit the calls instead: ajet.helper.max_calls"
            )

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


class UnusableAnswerError(HelperError):
    """The helper model gave no usable answer within all retries. Shows the last one and what is wrong with it."""


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
    ) -> None:
        """`retries`: how often to ask again for an answer that can be used. The helper's client retries failed calls as
        well."""
        self.helper = helper
        self.cache = cache
        self.cached = 0
        """How many answers came from the cache."""
        self._retries = retries
        self._slots = asyncio.Semaphore(max_concurrent)  # all questions run on the helper's loop

    @classmethod
    def of_run(
        cls, config: Any, helper: HelperModel, *, max_concurrent: int = 32, retries: int = 3, cache: bool = True
    ) -> Asker:
        """Make one that keeps answers in the experiment's folder. Raises ConfigError if the helper has no endpoint."""
        helper.endpoint()
        kept = AnswerCache(config.cache_path / "helper_answers.sqlite") if cache else None
        return cls(helper, cache=kept, max_concurrent=max_concurrent, retries=retries)

    async def ask(self, messages: Sequence[Message], read: Callable[[str], T], *, draw: int = 0, **sampling: Any) -> T:
        """The answer as parsed by `read`, which raises WrongAnswer if it can't use the text.

        `draw`: the same question with another number is asked again instead of being read from the cache. Raises
        HelperError, UnusableAnswerError, or HelperBudgetError.
        """
        work = self._ask(list(messages), read, draw, sampling)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.helper.loop()))

    @property
    def spent(self) -> str:
        """Calls, tokens and cost so far, in words."""
        budget = self.helper.budget
        kept = f", {self.cached} from the cache" if self.cached else ""
        cost = f", cost {budget.cost:.4g}" if budget.cost else ""
        return f"{budget.calls} calls{kept}, {budget.tokens:,} tokens{cost}"

    async def _ask(self, messages: list[Message], read: Callable[[str], T], draw: int, sampling: dict[str, Any]) -> T:
        key = AnswerCache.key(self.helper.model, messages, sampling, draw)
        if self.cache is not None and (kept := self.cache.get(key)) is not None:
            with suppress(WrongAnswer):  # another version took it, or somebody edited it: the model is asked again
                answer, self.cached = read(kept), self.cached + 1
                return answer
        asked, text, wrong = messages, "", ""
        for _ in range(self._retries + 1):
            async with self._slots:
                text, is_cut_off = await self.helper.reply(asked, **sampling)
            try:
                if is_cut_off:  # a value in it may be a draft
                    raise WrongAnswer("it is too long: it was cut off at max_tokens")
                answer = read(text)
            except WrongAnswer as error:
                wrong = str(error)
                again = f"This answer can't be used: {error}. Answer again, in the form that was asked for."
                asked = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": again}]
            else:
                if self.cache is not None:
                    self.cache.put(key, text)
                return answer
        raise UnusableAnswerError(
            f"helper model {self.helper.model!r} gave no usable answer (retries: {self._retries}): {wrong}. The last "
            f"one: {text[:SHOWN]!r}"
        )

    async def all(self, work: Sequence[Coroutine[Any, Any, T]], what: str) -> list[T]:
        """The results of work that asks, in order, with a line of progress in the log now and then. The first error
        cancels the rest, and is raised without a group."""
        said_at, done = time.monotonic(), 0

        async def one(coroutine: Coroutine[Any, Any, T]) -> T:
            nonlocal said_at, done
            result = await coroutine
            done += 1
            if time.monotonic() - said_at > REPORT_S:
                said_at = time.monotonic()
                log.info("%s: %d of %d done, %s", what, done, len(work), self.spent)
            return result

        return await concurrently(one(coroutine) for coroutine in work)

    async def vectors(self, texts: Sequence[str]) -> dict[str, list[float]]:
        """Each text's vector, if the helper is an embedding model. Raises HelperError, or HelperBudgetError."""
        keys = {text: AnswerCache.key(self.helper.model, [{"role": "text", "content": text}], {}, 0) for text in texts}
        kept = {text: self.cache and self.cache.get(key) for text, key in keys.items()}
        found: dict[str, list[float]] = {text: json.loads(answer) for text, answer in kept.items() if answer}
        missing = [text for text in keys if text not in found]
        for start in range(0, len(missing), EMBEDDED_AT_ONCE):
            some = missing[start : start + EMBEDDED_AT_ONCE]
            for text, vector in zip(some, await self.helper.embed(some), strict=True):
                found[text] = vector
                if self.cache is not None:
                    self.cache.put(keys[text], json.dumps(vector))
        return found
