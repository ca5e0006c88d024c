"""What a collapsed policy writes is found; unusual but ordinary text is not."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from ajet.context_tracker.abnormal import find_abnormal
from support.honest_texts import garbage, honest_texts
from support.tracker_helpers import SEARCH, called

HONEST, GARBAGE = honest_texts(), garbage()
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<s>")


def check(text: str, *names: str, **message: Any) -> str | None:
    reply = {"role": "assistant", "content": text, **message}
    return find_abnormal(text, reply, [SEARCH], names or ("nonsense",), CONTROLS)


ORDINARY = {
    "maths": "∑_{i=1}^{n} i² = n(n+1)(2n+1)/6 ≤ ∞, where x ∈ ℝ, ∂f/∂x → 0 and √2 ≈ 1.41421356 ± 10⁻⁸; ∀ε>0 ∃δ>0",
    "accents": "Übermäßig façade naïve Žluťoučký kůň, ąćęłńóśźż — ¿qué? ¡sí! «d'accord»",
    "arrows and currency": "A → B ⇒ C ↔ D; 20 € = £17.50 ≈ ¥3,200 ₹1,900 ₿0.0003",
    "emoji": "Done! 🎉🎉🎉 👩‍💻 ✅ 🇨🇭 " * 5,
    "chinese": "首先,我们需要理解问题。然后逐步推导,最后得到答案:四十二。谢谢大家的耐心等待和帮助。" * 3,
    "japanese": "こんにちは、世界。これはテストです。カタカナと漢字も使います。" * 3,
    "russian and english": "Слово «agent» переводится как agent, а tool — это инструмент (tool).",
    "languages": "English, 中文, Русский, العربية, हिन्दी, 日本語, ภาษาไทย, 한국어, Ελληνικά, עברית — welcome to you",
    "long number": "2**200 = 1606938044258990275541962092341162602522202993782792835301376, 10^100 = 1" + "0" * 100,
    "pi": "3." + "14159265358979323846264338327950288419716939937510" * 8,
    "table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 40 + "-" * 120,
    "rules": "=" * 200 + "\n" + "*" * 80 + "\n" + "_" * 100,
    "matrix": "\n".join("0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0" for _ in range(24)),
    "code": "def f(x):\n    if x:\n        return [\n"
    + "            None,\n" * 12
    + "        ]\n    }\n    }\n    }\n",
    "json": json.dumps({"rows": [{"id": i, "ok": True} for i in range(60)]}),
    "base64": "aGVsbG8gd29ybGQsIHRoaXMgaXMgYSBsb25nIHN0cmluZyBvZiBiYXNlNjQgdGV4dCB3aXRob3V0IGFueSBzcGFjZXM=" * 2,
    "html": "<s>old price</s> <b>new</b> &amp; <em>more</em> and <s>again</s>",
    "laughter": "hahahahahaha! noooooooo... sooooo good!!!!!!!!!!!!",
    "song": "la la la la la la la la la, hey Jude",
    "dna": "ACGT" * 12,
    "windows": "C:\\Users\\me\r\n\tnext\r\n\x1b[31mred\x1b[0m",
    "cut emoji": "Great 🎉 \ufffd\ufffd",
    "empty": "",
}

NONSENSE = {
    "control token": "Sure. <|im_start|>user\nWhat?",
    "one letter": "The answer is a" + "a" * 150,
    "one symbol": "The answer is " + "!" * 900,
    "one word": "I think " + "the " * 80,
    "one phrase": "go to the next page and " * 25,
    "chinese phrase": "答案是" + "好的好的" * 20,
    "one line": "Let me check the file again.\n" * 20,
    "two lines": "Let me check.\nNow I look again.\n" * 20,
    "undecodable": "abc \ufffd\ufffd \ufffd\ufffd\ufffd def",
    "control characters": "abc\x00\x01\x02\x03\x04",
    "salad": "aб你ก bв好ข cг世ค dд界ง eе天จ fж地ฉ gз玄ช hи黄ซ iй宇ฌ jк宙ญ kл洪ฎ lм荒ฏ",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_text_is_not_nonsense(name: str) -> None:
    assert check(ORDINARY[name]) is None


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_found_in_content_and_in_thinking(name: str) -> None:
    found = check(NONSENSE[name])
    assert found is not None and found.startswith("nonsense: ")
    assert check("Fine.", reasoning_content=NONSENSE[name]) == found


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_found_in_the_midst_of_a_long_reply(name: str) -> None:
    sentences = [f"Step {index} reads file {index} and notes what it says." for index in range(60)]
    middle = "\n".join(sentences[:30]) + "\n" + NONSENSE[name] + "\n" + "\n".join(sentences[30:])
    if name not in ("salad",):  # a little of it isn't noticed among ordinary text
        assert check(middle) is not None


@pytest.mark.parametrize("name", HONEST)
def test_honest_text_raises_no_alarm(name: str) -> None:
    assert check(HONEST[name]) is None


def test_there_are_enough_honest_texts() -> None:
    assert len(set(HONEST.values())) >= 200


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_found(name: str) -> None:
    assert check(GARBAGE[name]) is not None


def test_a_long_text_of_any_kind_takes_no_time() -> None:
    texts = [HONEST["language: thai"] * 400, HONEST["language: russian"] * 400, "null, " * 20_000, "ab" * 60_000]
    before = time.process_time()
    for text in texts:
        check(text)
    assert time.process_time() - before < 4


def test_words_at_random_are_not_nonsense() -> None:
    rng = random.Random(0)
    words = ["read", "the", "file", "then", "compare", "both", "numbers", "and", "write", "a", "note"]
    for _ in range(200):
        assert check(" ".join(rng.choice(words) for _ in range(400))) is None


def test_non_ascii() -> None:
    assert check("plain text, 3 < 4", "non_ascii") is None
    assert check("naïve", "non_ascii") == "non_ascii: 'ï' is not an ASCII character"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<think>\nhm\n</think>\n\n```python\nprint(1)\n```", None),
        ("hm\n</think>\n```python\nprint(1)\n```\n", None),
        ("```python\nprint(1)\n```", "0 <think>"),
        ("<think>a</think><think>b</think>```python\n1\n```", "2 <think>"),
        ("So: <think>a</think>```python\n1\n```", "text before"),
        ("<think>a</think>no code", "0 python blocks"),
        ("<think>a</think>```python\n1\n```\n```python\n2\n```", "2 python blocks"),
        ("<think>a</think>```python\n1\n", "expected exactly one, closed"),
        ("<think>```python\n1\n```</think> none", "0 python blocks"),
    ],
)
def test_format_type_1(text: str, problem: str | None) -> None:
    found = check(text, "format_type_1")
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (called("a", "x"), None),
        ({"tool_calls": [{"function": {"name": "search", "arguments": {"query": "x"}}}]}, None),
        ({"tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}, "no tool 'find'; the tools are search"),
        ({"tool_calls": [{"function": {"name": "search", "arguments": "{"}}]}, "not JSON"),
        ({"tool_calls": [{"function": {"name": "search", "arguments": "[1]"}}]}, "not an object"),
        ({"tool_calls": [{"function": {"name": "search", "arguments": "{}"}}]}, "lacks the argument 'query'"),
    ],
)
def test_wrong_toolcall(call: dict[str, Any], problem: str | None) -> None:
    found = check("", "wrong_toolcall", tool_calls=call["tool_calls"])
    assert found is None if problem is None else found is not None and problem in found


def test_a_schema_that_requires_no_list_requires_nothing() -> None:
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "required": True}}}
    assert find_abnormal("", called("a", "x"), [tool], ("wrong_toolcall",), CONTROLS) is None


def test_tool_calls_that_could_not_be_read() -> None:
    assert "could be read" in (check('<tool_call>{"name": search}', "wrong_toolcall") or "")
    reply = {"role": "assistant", "content": ""}
    found = find_abnormal("", reply, [], ("wrong_toolcall",), CONTROLS, malformed=['{"name": search}'])
    assert found is not None and "can't be read" in found


def test_checks_run_in_the_order_of_the_list() -> None:
    assert (check("naïve " * 80, "non_ascii", "nonsense") or "").startswith("non_ascii")
    assert (check("naïve " * 80, "nonsense", "non_ascii") or "").startswith("nonsense")
    assert check("naïve " * 80, "wrong_toolcall") is None
