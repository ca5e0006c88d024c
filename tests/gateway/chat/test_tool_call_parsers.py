"""Replies of each family come back exactly, however they are cut into pieces; what can't be read stays text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.gateway.chat.reply_parser import Delta, ParsedReply, ReplyParser
from ajet.gateway.chat.tool_call_parsers import FAMILIES, pick_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}},
            },
        },
    }
    for name in ("search", "math.add")
]
Call = tuple[str, dict[str, Any]]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# How a model of each family writes its calls: as its own chat template writes recorded ones.


def write_hermes(calls: list[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {dumped(a)}}}\n</tool_call>' for n, a in calls)


def write_llama(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {dumped(arguments)}}}' for name, arguments in calls)


def write_llama_tagged(calls: list[Call]) -> str:
    return "<|python_tag|>" + write_llama(calls)


def write_mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + dumped([{"name": name, "arguments": arguments} for name, arguments in calls])


def write_mistral_v11(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls)


def write_deepseek_v3(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def write_deepseek_v31(calls: list[Call]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def write_qwen_xml(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def write_qwen_xml_bare(calls: list[Call]) -> str:
    return write_qwen_xml(calls).replace("<tool_call>\n", "")


def write_glm(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def write_kimi(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumped(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def write_minimax(calls: list[Call]) -> str:
    inner = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def write_granite(calls: list[Call]) -> str:
    return "<|tool_call|>" + dumped([{"name": name, "arguments": arguments} for name, arguments in calls])


def write_lfm(calls: list[Call]) -> str:
    inner = ", ".join(f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls)
    return f"<|tool_call_start|>[{inner}]<|tool_call_end|>"


def write_dsml(calls: list[Call], block: str = "tool_calls") -> str:
    def parameter(key: str, value: Any) -> str:
        is_string = dumped(isinstance(value, str))
        return f'<｜DSML｜parameter name="{key}" string="{is_string}">{plain(value)}</｜DSML｜parameter>\n'

    inner = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(parameter(key, value) for key, value in arguments.items())
        + "</｜DSML｜invoke>\n"
        for name, arguments in calls
    )
    return f"<｜DSML｜{block}>\n{inner}</｜DSML｜{block}>"


def write_dsml_v32(calls: list[Call]) -> str:
    return write_dsml(calls, "function_calls")


def write_harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"
        for name, arguments in calls
    )


def write_harmony_recipient_first(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{dumped(arguments)}<|call|>"
        for name, arguments in calls
    )


def write_command(calls: list[Call]) -> str:
    listed = [{"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)]
    return f"<|START_ACTION|>{json.dumps(listed, ensure_ascii=False, indent=4)}<|END_ACTION|>"


WRITERS: list[tuple[str, Callable[[list[Call]], str]]] = [
    ("hermes", write_hermes),
    ("llama3", write_llama),
    ("llama3", write_llama_tagged),
    ("mistral", write_mistral),
    ("mistral", write_mistral_v11),
    ("deepseek", write_deepseek_v3),
    ("deepseek", write_deepseek_v31),
    ("qwen_xml", write_qwen_xml),
    ("qwen_xml", write_qwen_xml_bare),
    ("glm", write_glm),
    ("kimi", write_kimi),
    ("minimax", write_minimax),
    ("granite", write_granite),
    ("lfm", write_lfm),
    ("dsml", write_dsml),
    ("dsml", write_dsml_v32),
    ("harmony", write_harmony),
    ("harmony", write_harmony_recipient_first),
    ("command", write_command),
]
writers = pytest.mark.parametrize(("family", "write"), WRITERS, ids=[write.__name__ for _, write in WRITERS])

words = st.text(st.characters(codec="utf-8", exclude_characters="<>[]{}｜`"), min_size=1, max_size=20)
solid = words.filter(lambda text: text.strip() == text and text)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": solid,
        "count": st.integers(-(10**12), 10**12),
        "deep": st.dictionaries(
            st.sampled_from("abc"), st.lists(st.one_of(st.booleans(), st.none(), words), max_size=3)
        ),
    },
)
calls_of = st.lists(st.tuples(st.sampled_from(["search", "math.add"]), arguments), min_size=1, max_size=3)


def in_pieces(parser: ReplyParser, text: str, cuts: list[int], **more: Any) -> ParsedReply:
    """Parse piece by piece; what was streamed must add up to what is returned."""
    stream = parser.stream(TOOLS, pieces=True, **more)
    deltas = []
    at = 0
    for cut in [*sorted(cuts), len(text)]:
        deltas += stream.feed(text[at:cut])
        at = max(at, cut)
    deltas += stream.finish()
    reply = stream.reply()
    assert "".join(delta.content for delta in deltas) == reply.message["content"]
    assert "".join(delta.reasoning for delta in deltas) == reply.message.get("reasoning_content", "")
    assert streamed_calls(deltas) == reply.message.get("tool_calls", [])
    return reply


def streamed_calls(deltas: list[Delta]) -> list[dict[str, Any]]:
    """The calls that the pieces add up to. Each has an end; those that could not be read aren't among them."""
    calls: dict[int, dict[str, Any]] = {}
    ended: list[int] = []
    failed: list[int] = []
    for piece in [delta.call for delta in deltas if delta.call is not None]:
        if piece.begins:
            assert piece.name and piece.index not in calls
            calls[piece.index] = {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
        call = calls[piece.index]
        assert call["id"] == piece.id and piece.index not in ended + failed
        call["function"]["arguments"] += piece.arguments
        if piece.ends:
            (ended if piece.failed is None else failed).append(piece.index)
    assert sorted(ended + failed) == sorted(calls)
    return [calls[index] for index in ended]


def calls_in(reply: ParsedReply) -> list[Call]:
    functions = [call["function"] for call in reply.message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@writers
@settings(max_examples=30, deadline=None)
@given(calls=calls_of, cuts=st.lists(st.integers(0, 300), max_size=6))
def test_calls_come_back_exactly(
    family: str, write: Callable[[list[Call]], str], calls: list[Call], cuts: list[int]
) -> None:
    parser = FAMILIES[family]
    text = write(calls)
    reply = parser.parse(text, TOOLS)
    assert reply.malformed == () and reply.message["content"] == ""
    assert calls_in(reply) == calls
    ids = [call["id"] for call in reply.message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert in_pieces(parser, text, [min(cut, len(text)) for cut in cuts]) == reply


@writers
def test_calls_are_streamed_as_they_are_written(family: str, write: Callable[[list[Call]], str]) -> None:
    """The name first, then the arguments: at the latest when an argument is closed."""
    calls = [("search", {"text": "one, two", "count": 31}), ("math.add", {"deep": {"a": ["zero"]}})]
    text = write(calls)
    stream = FAMILIES[family].stream(TOOLS, pieces=True)
    deltas: list[Delta] = []
    late: dict[str, int] = {}
    for at, character in enumerate(text):
        deltas += stream.feed(character)
        said = "".join(delta.call.arguments for delta in deltas if delta.call is not None)
        for word in ("two", "31", "zero"):
            if word in said:
                late.setdefault(word, at + 1 - text.index(word) - len(word))
    deltas += stream.finish()
    assert streamed_calls(deltas) == FAMILIES[family].parse(text, TOOLS).message["tool_calls"]
    pieces = [delta.call for delta in deltas if delta.call is not None]
    assert len(pieces) > 6 and [piece.name for piece in pieces if piece.begins] == ["search", "math.add"]
    assert len(late) == 3 and max(late.values()) < 32, late


@pytest.mark.parametrize("family", ["hermes", "mistral", "deepseek", "qwen_xml", "glm", "kimi", "dsml", "command"])
@settings(max_examples=30, deadline=None)
@given(thought=solid, answer=solid, calls=calls_of, cuts=st.lists(st.integers(0, 300), max_size=6))
def test_reasoning_text_and_calls(family: str, thought: str, answer: str, calls: list[Call], cuts: list[int]) -> None:
    parser, write = FAMILIES[family], dict(WRITERS)[family]
    mark = parser.markup
    text = f"{mark.think_open}\n{thought}\n{mark.think_close}\n\n{answer}\n{write(calls)}"
    reply = parser.parse(text, TOOLS)
    assert reply.message["reasoning_content"] == thought and reply.message["content"] == answer
    assert calls_in(reply) == calls
    assert in_pieces(parser, text, [min(cut, len(text)) for cut in cuts]) == reply
    opened = text.removeprefix(mark.think_open)
    assert parser.parse(opened, TOOLS, in_reasoning=True) == reply


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_is_read_without_exception_and_the_same_in_pieces(family: str, data: st.DataObject) -> None:
    marks = ["<think>", "</think>", "[THINK]", "[/THINK]", "{", "}", '{"name": "f", "arguments": {}}', '"', " ", "\n"]
    for block in FAMILIES[family].markup.blocks:
        marks += [block.open, *block.close, block.open[: len(block.open) // 2]]
    marks += ["[ARGS]", "<arg_key>", "</arg_value>", "<parameter=x>", "</function>", "```json", "<｜tool▁sep｜>"]
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(marks), st.text(max_size=8)), max_size=14)))
    whole = FAMILIES[family].parse(text, TOOLS)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert in_pieces(FAMILIES[family], text, cuts) == whole
    for call in whole.message.get("tool_calls", []):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=80).filter(lambda text: "HINK]" not in text and "think>" not in text))
def test_without_tools_nothing_is_taken_for_a_call(family: str, text: str) -> None:
    write = dict(WRITERS)[family]
    text += write([("search", {"text": "x"})])
    assert FAMILIES[family].parse(text).message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "f"}</tool_call>', 'no "arguments"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not a JSON object but a list"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "after the call"),
        ("<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", "not JSON"),
        ("<tool_call>" + '{"a":' * 100_000, "deep"),
        ("<tool_call></tool_call>", "empty"),
        ("<tool_call>", "not a JSON object"),
    ],
)
def test_what_cannot_be_read_stays_text_and_is_named(text: str, why: str) -> None:
    reply = FAMILIES["hermes"].parse(f"Well: {text} so", TOOLS)
    assert reply.message == {"role": "assistant", "content": f"Well: {text} so"}
    assert len(reply.malformed) == 1 and why in reply.malformed[0]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a\udc00": 1}}</tool_call>'),
        ("mistral", r'[TOOL_CALLS]f[ARGS]{"a": "\ud83d"}'),
        ("lfm", r"<|tool_call_start|>[f(a='\ud83d')]<|tool_call_end|>"),
    ],
)
def test_half_of_a_surrogate_pair_makes_no_call(family: str, text: str) -> None:
    """No protocol could send it, whole or in pieces."""
    reply = in_pieces(FAMILIES[family], text, list(range(len(text))))
    assert reply.message["content"].endswith(text) and len(reply.malformed) == 1
    whole = text.replace(r"\ud83d", r"\ud83d\ude00").replace(r"\udc00", r"\u00e9")
    if family != "lfm":  # in Python, these are two halves
        assert len(calls_in(in_pieces(FAMILIES[family], whole, list(range(len(whole)))))) == 1


def test_half_of_a_surrogate_pair_between_tags_is_text() -> None:
    text = '<tool_call><function=search><parameter=count>"\\ud83d"</parameter></function></tool_call>'
    assert calls_in(FAMILIES["qwen_xml"].parse(text, TOOLS)) == [("search", {"count": r'"\ud83d"'})]


def test_a_call_after_a_broken_one_is_still_read() -> None:
    text = '<tool_call>{"name": 3}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reply = FAMILIES["hermes"].parse(text, TOOLS)
    assert calls_in(reply) == [("f", {})] and reply.message["content"] == '<tool_call>{"name": 3}</tool_call>'


def test_line_breaks_in_strings_and_arguments_inside_a_string_are_accepted() -> None:
    parse = FAMILIES["hermes"].parse
    assert calls_in(parse('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', TOOLS)) == [
        ("f", {"a": "1\n2"})
    ]
    assert calls_in(parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', TOOLS)) == [
        ("f", {"a": 1})
    ]
    assert calls_in(parse('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', TOOLS)) == [
        ("f", {"a": "</tool_call>"})
    ]


def test_arguments_stay_as_the_model_wrote_them() -> None:
    source = '{"b":1.50,  "a": "\\u00e9"}'
    reply = FAMILIES["hermes"].parse(f'<tool_call>{{"name": "f", "arguments": {source}}}</tool_call>', TOOLS)
    assert reply.message["tool_calls"][0]["function"]["arguments"] == source


def test_json_answers_of_llama_are_not_calls() -> None:
    reply = FAMILIES["llama3"].parse('{"answer": 3}', TOOLS)
    assert reply == ParsedReply({"role": "assistant", "content": '{"answer": 3}'})


def test_mistrals_ids_are_nine_characters() -> None:
    call = FAMILIES["mistral"].parse('[TOOL_CALLS]search[ARGS]{"text": "x"}', TOOLS).message["tool_calls"][0]
    assert len(call["id"]) == 9 and call["id"].isalnum()


def test_ids_depend_on_the_call_alone() -> None:
    text = write_hermes([("search", {}), ("search", {})])
    ids = [
        [call["id"] for call in FAMILIES["hermes"].parse(text, TOOLS, call_id=call_id).message["tool_calls"]]
        for call_id in ("a", "a", "b")
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (None, "hermes"),
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\\n<function=' + name", "qwen_xml"),
        ("<tool_call> <arg_key>", "glm"),
        ("<|start_header_id|> <|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("<|tool_call_begin|>", "kimi"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<｜DSML｜invoke", "dsml"),
        ("<|START_THINKING|> <|START_ACTION|>", "command"),
    ],
)
def test_the_template_reveals_the_family(template: str | None, family: str) -> None:
    assert pick_parser(template).name == family
    tokenizer = type("Tokenizer", (), {"chat_template": {"default": "x", "tool_use": template or ""}})()
    assert pick_parser(tokenizer).name == family


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call_start|>[search('x')]<|tool_call_end|>",
        "<|tool_call_start|>[search(text=open)]<|tool_call_end|>",
        "<|tool_call_start|>[search(text=1e999)]<|tool_call_end|>",
        "<|tool_call_start|>[search(**{})]<|tool_call_end|>",
        "<|tool_call_start|>search()<|tool_call_end|>",
        "<|tool_call_start|>[search(text='x'",
        "<|tool_call_start|>[" + "(" * 5000,
        "<|tool_call_start|>[" + "a." * 5000 + "b()]<|tool_call_end|>",
    ],
    ids=range(8),
)
def test_python_that_is_no_plain_call_stays_text(text: str) -> None:
    reply = pick_parser("<|tool_list_start|>").parse(text, TOOLS)
    assert reply.message["content"] == text and "tool_calls" not in reply.message and reply.malformed
    assert "0x" not in reply.malformed[0], "an agent tells the model, whose prompt would differ in each run"


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_channels_of_harmony(pieces: int) -> None:
    call = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"text": "x"}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    search = [("search", {"text": "x"})]
    parser = FAMILIES["harmony"]
    for text, expected in [
        (f"{thought}<|channel|>final<|message|>It is 4.", ("It is 4.", "Hm.", [])),
        (f"{thought}{call}", ("", "Hm.", search)),
        (
            f"{thought}<|channel|>commentary<|message|>I will search.<|end|><|start|>assistant{call}<|call|>",
            ("I will search.", "Hm.", search),
        ),
        (
            f"{thought}<|channel|>analysis<|message|>So.<|end|><|start|>assistant{call}",
            ("", "Hm.So.", search),
        ),
        ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', ('{"a": 1}', "", [])),
    ]:
        reply = in_pieces(parser, text, list(range(0, len(text), pieces)))
        assert reply.malformed == ()
        message = reply.message
        assert (message["content"], message.get("reasoning_content", ""), calls_in(reply)) == expected
    assert parser.parse(f"{thought}<|channel|>final<|message|>It is 4.").message["content"] == "It is 4."


def test_the_frame_of_command() -> None:
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>It is 4.<|END_RESPONSE|>"
    for tools in (TOOLS, []):
        message = FAMILIES["command"].parse(text, tools).message
        assert (message["content"], message["reasoning_content"]) == ("It is 4.", "Hm.")


def test_a_run_of_spaces_keeps_no_parser_busy() -> None:
    began = time.process_time()
    reply = FAMILIES["harmony"].parse("<|channel|>commentary to=functions.search" + " " * 2000, TOOLS)
    assert reply.malformed and time.process_time() - began < 5
