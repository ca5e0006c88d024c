"""A helper model's answers: `read_json` takes the value out of one, `AnswerCache` keeps them on disk, and
`NearDuplicates` finds repetitions among texts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ajet.schema.chat import Message
from ajet.schema.errors import UserError

FloatArray = npt.NDArray[np.float32]

BUSY_S = 30.0
"""How long to wait for another process that is writing."""


class AnswerCache:
    """One SQLite file, created together with its folder when the first answer is stored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    @staticmethod
    def key(model: str, messages: Sequence[Message], sampling: dict[str, Any], draw: int = 0) -> str:
        """The key of a question: a digest of everything that may change the answer. `draw` distinguishes repeats of a
        question."""
        said = json.dumps([model, list(messages), sampling, draw], sort_keys=True, ensure_ascii=False, default=repr)
        return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()

    def get(self, key: str) -> str | None:
        if self._connection is None and not self.path.exists():
            return None
        with self._opened() as connection:
            row = connection.execute("SELECT text FROM answer WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        text = text.encode("utf-8", "replace").decode("utf-8")
        with self._opened() as connection, connection:
            connection.execute("INSERT OR REPLACE INTO answer VALUES (?, ?, ?)", (key, text, time.time()))

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time. Raises a UserError if the file is damaged."""
        with self._lock:
            try:
                yield self._open()
            except sqlite3.OperationalError:  # a full disk, a lock held too long
                raise
            except sqlite3.DatabaseError as error:
                raise UserError(f"{self.path}: {error}\n    delete it: its answers are then asked for again") from None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch()  # for whom the umask says: SQLite's own lets its owner write alone
            connection = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE IF NOT EXISTS answer (key TEXT PRIMARY KEY, text TEXT, kept REAL)")
            self._connection = connection
        return self._connection


WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W\d_]+|\d+(?:[.,]\d+)*")
"""A word, a number, or one character of a script without spaces."""


Embed = Callable[[Sequence[str]], Awaitable[Mapping[str, Sequence[float]]]]


class NearDuplicates:
    """Remembers texts, and finds those that nearly repeat an earlier one: by their words, or by an embedding model.
    Texts with different numbers are different."""

    def __init__(self, threshold: float, embed: Embed | None = None) -> None:
        """`threshold`: the overlap from which two texts count as one, from 0 (only their numbers must match) to 1 (all
        words must match); with `embed`, the cosine of their vectors."""
        self.threshold = threshold
        self._texts: list[tuple[frozenset[int], tuple[str, ...]]] = []
        self._index: dict[int, list[int]] = defaultdict(list)
        self._embed = embed
        self._vectors: dict[str, FloatArray] = {}
        self._known: list[FloatArray] = []

    async def learn(self, texts: Iterable[str]) -> None:
        """Must be awaited before `find` and `add` get these texts: asks for their vectors, if they are compared so."""
        if self._embed is not None and (new := [text for text in dict.fromkeys(texts) if text not in self._vectors]):
            for text, values in (await self._embed(new)).items():
                vector = np.asarray(values, np.float32)
                self._vectors[text] = vector / max(float(np.linalg.norm(vector)), 1e-12)

    def find(self, text: str) -> int | None:
        """The number of the first text that this one repeats; None if it is new."""
        features, numbers = _features(text)
        if self._embed is not None:
            near = np.stack(self._known) @ self._vectors[text] >= self.threshold if self._known else ()
            return next((n for n, close in enumerate(near) if close and self._texts[n][1] == numbers), None)
        candidates = {number for feature in self._prefix(features) for number in self._index.get(feature, ())}
        for number in sorted(candidates):
            other, other_numbers = self._texts[number]
            if numbers == other_numbers and len(features & other) / len(features | other) >= self.threshold:
                return number
        return None

    def add(self, text: str) -> int | None:
        """Like `find`, but a new text is also remembered, under the next number from 0."""
        found = self.find(text)
        if found is None:
            features, numbers = _features(text)
            if self._embed is not None:
                self._known.append(self._vectors[text])
            for feature in self._prefix(features):
                self._index[feature].append(len(self._texts))
            self._texts.append((features, numbers))
        return found

    def _prefix(self, features: frozenset[int]) -> list[int]:
        """The first few features in a global order. Two similar texts always share at least one of them."""
        length = len(features) - math.ceil(self.threshold * len(features) - 1e-9) + 1
        return sorted(features)[: max(1, min(length, len(features)))]


def _features(text: str) -> tuple[frozenset[int], tuple[str, ...]]:
    """Hashes of words and of neighbouring pairs, and the numbers in order."""
    words = WORD.findall(text.casefold())
    grams = {*words, *(f"{left} {right}" for left, right in pairwise(words))} or {text.strip()}
    numbers = tuple(word for word in words if word[0].isdigit())
    return frozenset(map(hash, grams)), numbers


SHOWN = 200
"""How much of an unusable answer an error shows."""
THINKING = re.compile(
    r"<think(?:ing)?>.*?</think(?:ing)?>|^(?!\s*[{`]).*</think(?:ing)?>|^\s*<think(?:ing)?>.*", re.DOTALL
)
STRAY = re.compile(r"\\(?:([\"\\/]|n(?!eq\b|abla)|r(?!ight|ho\b)|t(?!imes|ext|heta|frac)|u[0-9a-fA-F]{4})|)")
"""A backslash, and what it escapes: nothing, if it begins a LaTeX command that the model didn't escape."""


START = re.compile(r"[{\[]")


class HelperReply(NamedTuple):
    text: str
    is_cut_off: bool
    """By the limit of tokens."""


class WrongAnswer(ValueError):
    """An answer can't be used. The message is sent back to the model, so it says what to change."""


def read_json(text: str, schema: dict[str, Any]) -> Any:
    """The JSON value in a model's answer, checked against a JSON schema. Raises WrongAnswer.

    Reasoning in `<think>` tags, fences and words around the value are allowed, and so are line breaks and LaTeX's
    backslashes within a text, as models write them; of several values, the last that fits.
    """
    try:
        return _last_that_fits(json_values(THINKING.sub("", text)), schema)
    except RecursionError:
        raise WrongAnswer("its brackets nest too deeply") from None


def _last_that_fits(found: list[Any], schema: dict[str, Any]) -> Any:
    import jsonschema

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
    """The outermost JSON objects and lists in a text, in order. Those before a stray `}` are left out: they stand in a
    damaged object, such as a judge's that quotes `{"score": 10}` without escaping it."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
    text = STRAY.sub(lambda found: found[0] if found[1] else r"\\", text)
    values: list[Any] = []
    position = end = 0
    while start := START.search(text, position):
        try:
            value, position = decoder.raw_decode(text, start.start())
        except ValueError:
            position = start.end()
            continue
        values = [value] if _closes_more(text[end : start.start()]) else [*values, value]
        end = position
    return [] if _closes_more(text[end:]) else values


def _closes_more(text: str) -> bool:
    return text.count("}") > text.count("{")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't a JSON number")
