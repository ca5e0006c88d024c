"""Questions whose answers must have a form, against a server on a real socket: retries, cache, limits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.schema.errors import UserError
from ajet.task_judge.helper import Asker, HelperError, HelperModel, UnusableAnswerError
from ajet.task_judge.helper_answers import AnswerCache, WrongAnswer, read_json
from support.http_server import Answer, Server

ASK = [{"role": "user", "content": "How good is it?"}]
SCORE = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 10}},
    "required": ["score"],
}


def reply(text: str) -> Answer:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, {}, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(lambda *_: reply('{"score": 7}'))
    yield server
    server.http.shutdown()


def score(text: str) -> Any:
    return read_json(text, SCORE)["score"]


@pytest.mark.parametrize(
    "text",
    [
        '{"score": 7}',
        'Good. ```json\n{"score": 7}\n```',
        '<think>{"score": 1}</think> {"score": 7} done',
        'not opened {"score": 2}</think>{"score": 7}',
        '{"draft": 3} and then {"score": 7, "reason": "a {brace}"}',
        'broken {"score": then {"score": 7}',
        r'{"score": 7} for \frac{1}{2} is \boxed{wrong}',
        'in the form {"reason": "…", "score": a number}: {"score": 7}',
        '<thinking>{"score": 1}</thinking> {"score": 7}',
        '{"reason": "two\nlines", "score": 7}',
        '{"reason": "it ends with </think>", "score": 7}',
        r'{"reason": "\(x\) is \sqrt{2}, \underline{no}", "score": 7}',
    ],
)
def test_the_value_is_found_in_what_models_write(text: str) -> None:
    assert score(text) == 7


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no JSON value"),
        ("seven", "no JSON value"),
        ('{"score": 11}', "score: 11 is greater than the maximum"),
        ('{"score": "7"}', "score: '7' is not of type 'number'"),
        ('{"score": NaN}', "no JSON value"),
        ("{}", "'score' is a required property"),
        ("[" * 100_000, "nest too deeply"),
        ('{"reason": "it says "{"score": 10}", so", "score": 0}', "no JSON value"),
        ('{"reason": "it says "{"score": 10}"", "score": 0} [1]', "not of type 'object'"),
        ('<think>either {"score": 1} or {"score": 9}, hm', "no JSON value"),
    ],
)
def test_what_is_wrong_with_an_answer(text: str, wrong: str) -> None:
    with pytest.raises(WrongAnswer, match=wrong):
        score(text)


def test_latex_that_is_not_escaped_stays_as_it_is() -> None:
    texts = read_json(r'["\frac{1}{2} \times \beta \neq \rho", "a\nb\tc\\d\u00e9\"", "\text{x} \nabla f"]', {})
    assert texts == [r"\frac{1}{2} \times \beta \neq \rho", 'a\nb\tc\\dé"', r"\text{x} \nabla f"]


@pytest.mark.parametrize("text", ['Perhaps {"score": 1}, or', None])
def test_an_answer_that_is_cut_off_is_not_used(server: Server, text: str | None) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
    server.handle = lambda *_: (200, {}, {"choices": [choice]})
    with pytest.raises(UnusableAnswerError, match=r"\(retries: 1\): it is too long: it was cut off at max_tokens"):
        asyncio.run(Asker(HelperModel("m", server.url), retries=1).ask(ASK, score))
    assert asyncio.run(HelperModel("m", server.url).complete(ASK)) == (text or "")


def test_a_wrong_answer_is_told_and_asked_again(server: Server) -> None:
    answers = ["seven", '{"score": 70}', '{"score": 7}']
    server.handle = lambda *_: reply(answers.pop(0))
    asker = Asker(HelperModel("m", server.url), retries=2)
    assert asyncio.run(asker.ask(ASK, score)) == 7
    last = server.seen[-1][1]["messages"]
    assert (
        last[:1] == ASK and last[1]["content"] == '{"score": 70}' and "greater than the maximum" in last[2]["content"]
    )


def test_an_answer_that_stays_wrong_is_an_error_with_its_text(server: Server, tmp_path: Path) -> None:
    server.handle = lambda *_: reply("I'd say seven")
    cache = AnswerCache(tmp_path / "a.sqlite")
    asker = Asker(HelperModel("m", server.url), retries=1, cache=cache)
    with pytest.raises(UnusableAnswerError, match=r"\(retries: 1\): it holds no JSON value.*I'd say seven"):
        asyncio.run(asker.ask(ASK, score))
    assert not cache.path.exists(), "only usable answers are kept"


def test_answers_are_kept_by_content(server: Server, tmp_path: Path) -> None:
    for _ in range(2):  # the second time as in another process
        asker = Asker(HelperModel("m", server.url), cache=AnswerCache(tmp_path / "x" / "a.sqlite"))
        assert asyncio.run(asker.ask(ASK, score, temperature=0)) == 7
    assert len(server.seen) == 1 and asker.cached == 1
    asyncio.run(asker.ask(ASK, score, temperature=1))
    asyncio.run(asker.ask(ASK, score, temperature=0, draw=1))
    other = Asker(HelperModel("other", server.url), cache=asker.cache)
    asyncio.run(other.ask(ASK, score, temperature=0))
    assert len(server.seen) == 4, "sampling, draw and model are part of the question"


def test_a_damaged_cache_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"SQLite format 3\0" + b"rubbish" * 500)
    asker = Asker(HelperModel("m", server.url), cache=AnswerCache(tmp_path / "a.sqlite"))
    with pytest.raises(UserError, match=r"a\.sqlite: .*\n    delete it"):
        asyncio.run(asker.ask(ASK, score))


def test_a_kept_answer_that_no_longer_fits_is_asked_for_again(server: Server, tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "a.sqlite")
    cache.put(AnswerCache.key("m", ASK, {}), '{"score": "seven"}')
    asker = Asker(HelperModel("m", server.url), cache=cache)
    assert [asyncio.run(asker.ask(ASK, score)) for _ in range(2)] == [7, 7]
    assert len(server.seen) == 1 and asker.cached == 1


def test_no_more_than_so_many_at_a_time(server: Server) -> None:
    running, most = [0], [0]
    lock, three = threading.Lock(), threading.Event()

    def handle(*_: Any) -> Answer:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 3:
                three.set()
        assert three.wait(10)
        with lock:
            running[0] -= 1
        return reply('{"score": 7}')

    server.handle = handle
    asker = Asker(HelperModel("m", server.url), max_concurrent=3)

    async def many() -> list[Any]:
        return await asyncio.gather(*(asker.ask(ASK, score, draw=number) for number in range(9)))

    assert asyncio.run(many()) == [7] * 9 and most[0] == 3


def test_a_server_that_hangs_is_named(server: Server) -> None:
    released = threading.Event()

    def hang(*_: Any) -> Answer:
        released.wait(30)
        return reply(json.dumps({}))

    server.handle = hang
    model = HelperModel("m", server.url, timeout_s=0.1)
    for ask in (lambda: asyncio.run(Asker(model).ask(ASK, score)), lambda: model.complete_blocking(ASK)):
        with pytest.raises(HelperError, match=r"no answer within 0.1 s, nor when asked again \(ajet.helper.timeout\)"):
            ask()
    released.set()
