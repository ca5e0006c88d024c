"""Reading replies: the text format, its grammar, and native tool calls."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet.agents.call_grammar import MAX_DEPTH, CallSyntaxError, read_call, read_value
from ajet.agents.reply_format import NativeFormat, TextFormat

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    },
}


def parse(text: str) -> Any:
    return TextFormat().parse({"role": "assistant", "content": text}, [WRITE])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('write({"path": "a", "text": "b, c)"})', {"path": "a", "text": "b, c)"}),
        ('write(path=\'a, b\', text="say \\"hi\\"")', {"path": "a, b", "text": 'say "hi"'}),
        ('write("a", "b")', {"path": "a", "text": "b"}),
        ('write("a", text="120")', {"path": "a", "text": "120"}),
        ("write(path='a', text=[1, {'k': (2, None)}, True])", {"path": "a", "text": [1, {"k": [2, None]}, True]}),
        ('write(path="a", text="""x\nAction: y(1)\n""")', {"path": "a", "text": "x\nAction: y(1)\n"}),
        ("write()", {}),
        ("write( path = -1.5e3 , )", {"path": -1500.0}),
    ],
)
def test_calls(text: str, arguments: dict[str, Any]) -> None:
    parsed = parse(f"Thought: t\nAction: {text}")
    assert [(call.name, call.arguments) for call in parsed.calls] == [("write", arguments)], parsed.problem
    assert parsed.thought == "t"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(JSON, st.booleans())
def test_every_json_value_is_read_as_json_means_it(value: Any, ascii_only: bool) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only)
    assert read_value(written) == (value, len(written))


@given(st.dictionaries(st.from_regex(r"\A[a-z_]{1,8}\Z"), JSON, max_size=4))
def test_every_call_with_python_literals_is_read_back(arguments: dict[str, Any]) -> None:
    written = f"tool({', '.join(f'{key}={value!r}' for key, value in arguments.items())}) and more"
    name, found, end = read_call(written)
    assert (name, written[end:]) == ("tool", " and more")
    assert found == arguments or len(arguments) == 0


@given(st.text(alphabet="tool()[]{}=,:\"'\\ \n1.eTrue#", max_size=60))
def test_no_text_makes_the_reader_fail_otherwise(text: str) -> None:
    try:
        read_call(f"tool({text}")
    except CallSyntaxError as error:
        assert "expected" in str(error)


def test_a_run_of_digits_takes_no_time() -> None:
    began = time.process_time()
    with pytest.raises(CallSyntaxError):
        read_call(f"f({'9' * 20_000}x")
    assert time.process_time() - began < 2


def test_nesting_is_bounded() -> None:
    with pytest.raises(CallSyntaxError, match=str(MAX_DEPTH)):
        read_value("[" * 100_000)


@pytest.mark.parametrize(
    ("reply", "name", "arguments"),
    [
        ('Action: write\nAction Input: {"path": "a"}', "write", {"path": "a"}),
        ('**Action:** write\n**Action Input:** ```json\n{"path": "a"}\n```', "write", {"path": "a"}),
        ("Action: write\nAction Input: {'path': 'a'}", "write", {"path": "a"}),
        ("Action: `write`", "write", "{}"),
        ("Action: write\nAction Input: nonsense", "write", "nonsense"),
        ('Action: write\n<think>to a</think>\nAction Input: {"path": "a"}', "write", {"path": "a"}),
        ('Action: write(path="a")\nObservation: done\nThought: invented', "write", {"path": "a"}),
    ],
)
def test_actions(reply: str, name: str, arguments: Any) -> None:
    (found,) = parse(reply).calls
    assert (found.name, found.arguments) == (name, arguments)


def test_several_actions_in_one_reply() -> None:
    parsed = parse('Action: write("a")\nAction: write("b")')
    assert [(found.call_id, found.arguments) for found in parsed.calls] == [
        ("call_0", {"path": "a"}),
        ("call_1", {"path": "b"}),
    ]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Thought: so\nFinal Answer: 42", "42"),
        ("Final Answer: two lines:\nThought: of text\nand a third", "two lines:\nThought: of text\nand a third"),
        ("Thought: so\nAction: Final Answer: 42", "42"),
        ("Final Answer: 42\nObservation: nothing", "42"),
        ("Action: Final Answer\nAction Input: 42", "42"),
        ('Action: Final Answer\nAction Input: "the text"', "the text"),
        ('Action: `Final Answer`\nAction Input: {"answer": 7}', "7"),
        ("Action: Final Answer(3.10)", "3.10"),
        ("Action: Final Answer: [1]", "[1]"),
    ],
)
def test_final_answers(reply: str, answer: str) -> None:
    assert parse(reply).answer == answer


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("I think the answer: 42.", "neither an action nor a final answer"),
        ("", "neither"),
        ("Action: write(path=)", "expected a value"),
        ('Action: write("a") write("b")', "more after the action"),
        ('Action: write("a", path="b")', "given twice"),
        ('Action: write("unclosed', "closing"),
        ('Action: write("a")\nFinal Answer: 42', "not both"),
    ],
)
def test_what_cannot_be_read_is_explained(reply: str, says: str) -> None:
    parsed = parse(reply)
    assert parsed.answer is None and not parsed.calls
    assert says in parsed.problem


@pytest.mark.parametrize(
    ("reply", "thought"),
    [
        ('<think>\nAction: write("a")\n</think>\nThought: so\nFinal Answer: 42', 'Action: write("a")\nso'),
        ('I could do\nAction: write("a")\n</think>Final Answer: 42', 'I could do\nAction: write("a")'),
        ("Thought: so\n<thinking>Action: write('a')</thinking>\nFinal Answer: 42", "Action: write('a')\nso"),
        ("<think>Final Answer: 41? No.</think>Final Answer: 42", "Final Answer: 41? No."),
        ("Final Answer: 41? No.</think>\nFinal Answer: 42", "Final Answer: 41? No."),
    ],
)
def test_what_is_thought_is_not_done(reply: str, thought: str) -> None:
    parsed = parse(reply)
    assert (parsed.thought, parsed.calls, parsed.answer) == (thought, (), "42"), parsed.problem


def test_thinking_without_an_end_does_nothing() -> None:
    parsed = parse('<think>I could do\nAction: write("a")')
    assert not parsed.calls and "neither an action nor a final answer" in parsed.problem


def test_the_tags_of_thinking_in_an_argument_belong_to_it() -> None:
    for text in ("<think>", "</think>", "<think>x</think>"):
        (found,) = parse(f'Action: write\nAction Input: {{"path": "a", "text": "{text}"}}').calls
        assert found.arguments == {"path": "a", "text": text}
        (found,) = parse(f'Action: write("a", "{text}")').calls
        assert found.arguments == {"path": "a", "text": text}


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>six times seven</think>\n42", "six times seven", "42"),
        ("six times seven</think>42", "six times seven", "42"),
        ("<think>six times", "six times", ""),
        ("The tag <think> opens it.", "", "The tag <think> opens it."),
    ],
)
def test_thinking_is_no_answer(text: str, thought: str, answer: str) -> None:
    parsed = NativeFormat().parse({"content": text}, [WRITE])
    assert (parsed.thought, parsed.answer) == (thought, answer)


def test_native_replies() -> None:
    reader = NativeFormat()
    odd = {"content": None, "tool_calls": [{"function": {"name": "write"}}, {"id": "x", "function": None}, "?"]}
    parsed = reader.parse(odd, [WRITE])
    assert [(found.name, found.arguments, found.call_id) for found in parsed.calls] == [
        ("write", "", "call_0"),
        ("", "", "x"),
        ("", "", "call_2"),
    ]
    thoughtful = reader.parse({"content": "42", "reasoning_content": "hm"}, [WRITE])
    assert (thoughtful.thought, thoughtful.answer) == ("hm", "42")
