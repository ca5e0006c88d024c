"""What a demonstration trains: the tokens after the prompt from which a session reads that very message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.local.demonstrations import count_demonstrations, read_demonstrations, replay
from ajet.config import make_config
from ajet.context_tracker import Renderer
from ajet.engine.model_source import ModelSource
from ajet.gateway.chat import pick_parser
from ajet.schema.errors import TaskDataError
from support.template_sources import SOURCES, Source
from support.tracker_families import FAMILIES, TEMPLATES, tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
ADD = {"name": "add", "arguments": '{"a": 3, "note": "x y"}'}
ASK = {"role": "user", "content": "How much is it?"}
SAYS = {"role": "assistant", "content": "It is 5."}
THINKS = {**SAYS, "reasoning_content": "Two and three."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": ADD}]}
CONSIDERS = {**CALLS, "reasoning_content": "I need a tool."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}


class Written(Source):
    """A template that was written for the tests."""

    def template(self) -> str:
        return (TEMPLATES / f"{self.file}.jinja").read_text()


KIMI = Written("Kimi, by hand", "", "kimi_k2_thinking", "<|im_end|>")
"""As Kimi K2 Thinking's own; the one that llama.cpp ships is rewritten for it, and transformers can't run it."""
KNOWN = {source.name: source for source in (*SOURCES, KIMI)}


def real_tokenizer(name: str) -> Any:
    source = KNOWN[name]
    if source.template() is None:
        pytest.skip(f"{source.package} is not in .chat-templates: make test-templates")
    return source.tokenizer()


THOUGHTS = {
    "Kimi, by hand": (
        "<think></think>It is 5.<|im_end|>",
        "<think>Two and three.</think>It is 5.<|im_end|>",
    ),
    "GLM 4.5": (
        "\n<think></think>\nIt is 5.<|user|>",
        "\n<think>Two and three.</think>\nIt is 5.<|user|>",
    ),
    "GLM 4.6": (
        "\n<think></think>\nIt is 5.<|user|>",
        "\n<think>Two and three.</think>\nIt is 5.<|user|>",
    ),
    "DeepSeek R1 Distill": (
        "\n</think>\n\nIt is 5.<｜end▁of▁sentence｜>",
        "Two and three.\n</think>\n\nIt is 5.<｜end▁of▁sentence｜>",
    ),
    "DeepSeek V3": (
        "\n</think>\n\nIt is 5.<｜end▁of▁sentence｜>",
        "Two and three.\n</think>\n\nIt is 5.<｜end▁of▁sentence｜>",
    ),
    "Nemotron 3 Nano": ("\n</think>\nIt is 5.<|im_end|>", "Two and three.\n</think>\nIt is 5.<|im_end|>"),
    "Qwen 3": (
        "<think>\n\n</think>\n\nIt is 5.<|im_end|>",
        "<think>\nTwo and three.\n</think>\n\nIt is 5.<|im_end|>",
    ),
    "gpt-oss": (
        "<|channel|>final<|message|>It is 5.<|return|>",
        "<|channel|>analysis<|message|>Two and three.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 5.<|return|>",
    ),
    "Qwen 2.5": ("It is 5.<|im_end|>", "<think>\nTwo and three.\n</think>\n\nIt is 5.<|im_end|>"),
}
"""What is to be sampled without and with reasoning."""
WITH_TOOLS = [
    "Kimi, by hand",
    "GLM 4.5",
    "GLM 4.6",
    "DeepSeek V3",
    "DeepSeek V3.1",
    "Nemotron 3 Nano",
    "Nemotron 3 Super",
    "Qwen 3",
    "Qwen 3.5",
    "gpt-oss",
]


def targets(real: Any, messages: list[dict[str, Any]], tools: Any = (), **kwargs: Any) -> list[tuple[str, str]]:
    """(prompt, target) of each reply that these messages train."""
    tree = replay(Renderer(real), messages, tools, template_kwargs=kwargs).tree
    return [(real.decode(tree.prompt_ids(i)), real.decode(tree.runs[c.run].ids)) for i, c in enumerate(tree.calls)]


def read(real: Any, prompt: str, target: str, tools: Any = ()) -> tuple[str, str, list[Any]]:
    """What a session reads when a model samples this."""
    parser = pick_parser(real)
    renderer = Renderer(real)
    text = renderer.decode(renderer.encoder.continuation(target))
    opened = parser.markup.think_open
    message = parser.parse(text, list(tools), in_reasoning=bool(opened) and prompt.rstrip().endswith(opened)).message
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
    return message.get("reasoning_content", "").strip(), message["content"].strip(), calls


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_reply_is_trained_as_the_model_would_sample_it(name: str) -> None:
    real = real_tokenizer(name)
    assert [targets(real, [ASK, reply])[-1][1] for reply in (SAYS, THINKS)] == list(THOUGHTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_reasoning_content_and_calls_are_read_back_exactly_once(name: str) -> None:
    real = real_tokenizer(name)
    kwargs = {"thinking": True} if name == "DeepSeek V3.1" else {}
    for call in (CALLS, CONSIDERS):
        for said in (SAYS, THINKS):
            first, last = targets(real, [ASK, call, RESULT, said], [TOOL], **kwargs)
            assert read(real, *first, [TOOL]) == (
                call.get("reasoning_content", ""),
                "",
                [("add", {"a": 3, "note": "x y"})],
            )
            reasoning, content, calls = read(real, *last, [TOOL])
            assert (reasoning, content, calls) == (said.get("reasoning_content", ""), "It is 5.", [])
            for target, one in ((first[1], call), (last[1], said)):
                for words in (one.get("reasoning_content"), one["content"]):
                    assert not words or target.count(words) == 1


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    line = json.dumps({"messages": [ASK, {"role": "assistant", "content": "né"}]}, ensure_ascii=False)
    file.write_bytes(json.dumps({"messages": [ASK, SAYS]}).encode() + b"\n" + line.encode("latin-1"))
    config = make_config({"trainer_common.algorithm.sft.demonstrations": str(file)})
    assert count_demonstrations(config) == 2
    with pytest.raises(TaskDataError, match=r"talks.jsonl:2: 'utf-8' codec can't decode byte 0xe9"):
        read_demonstrations(file, Renderer(ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()))


def test_reasoning_after_a_closed_thought_is_refused_by_name_and_trained_if_it_is_asked_for(tmp_path: Path) -> None:
    real = real_tokenizer("DeepSeek V3.1")
    assert targets(real, [ASK, SAYS])[0][1] == "It is 5.<｜end▁of▁sentence｜>"
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": [ASK, THINKS]}))
    with pytest.raises(TaskDataError, match=r'talks.jsonl:1: .*"chat_template_kwargs": \{"\w*thinking": true\}'):
        read_demonstrations(file, Renderer(real))
    file.write_text(json.dumps({"messages": [ASK, THINKS], "chat_template_kwargs": {"thinking": True}}))
    tree = read_demonstrations(file, Renderer(real))[0].tree
    assert real.decode(tree.prompt_ids(0)).endswith("<think>")
    assert real.decode(tree.runs[tree.calls[0].run].ids) == "Two and three.</think>It is 5.<｜end▁of▁sentence｜>"


def test_the_calls_of_kimi_get_the_ids_that_it_writes() -> None:
    real = real_tokenizer("Kimi, by hand")
    (_, first), (prompt, _) = targets(real, [ASK, CONSIDERS, RESULT, SAYS], [TOOL])
    assert "<think>I need a tool.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<" in first
    assert "## Return of functions.add:0\n5" in prompt and "call_1" not in prompt


@pytest.mark.parametrize("name", KNOWN)
def test_a_real_familys_reply_is_read_back_or_refused_by_name(name: str) -> None:
    real, kwargs = real_tokenizer(name), dict(KNOWN[name].kwargs)
    assert read(real, *targets(real, [ASK, SAYS], **kwargs)[0]) == ("", "It is 5.", [])
    try:
        prompt, target = targets(real, [ASK, THINKS], **kwargs)[0]
    except ValueError as refusal:
        assert "after which the model does not reason" in str(refusal)
    else:
        reasoning, content, _ = read(real, prompt, target)
        assert (reasoning, content) == ("Two and three.", "It is 5.") or "<think>" in content  # no field, no markup
        assert target.count("Two and three.") == target.count("It is 5.") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_imitated(name: str) -> None:
    family = tokenizer(name)
    for reply in (SAYS, THINKS):
        ((_, target),) = targets(family, [ASK, reply])
        assert target.count("It is 5.") == 1 and target.count("Two and three.") == ("reasoning_content" in reply)


def test_a_call_that_the_parser_would_not_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": [ASK, CALLS, RESULT, SAYS], "tools": [TOOL]}))
    with pytest.raises(TaskDataError, match=r"talks.jsonl:1: .*this reply's tool calls: .* would be read as nothing"):
        read_demonstrations(file, Renderer(real_tokenizer("DeepSeek R1 Distill")))


def test_a_reply_that_is_not_trained_need_not_be_sayable() -> None:
    r1 = real_tokenizer("DeepSeek R1 Distill")
    ((_, target),) = targets(r1, [ASK, {**CALLS, "train": False}, RESULT, ASK, SAYS], [TOOL])
    assert target == "\n</think>\n\nIt is 5.<｜end▁of▁sentence｜>"
    episode = replay(Renderer(r1), [ASK, SAYS, ASK, {**SAYS, "train": False}, ASK, SAYS])
    assert len(episode.tree.calls) == 2 and episode.ledger.trained == episode.ledger.captured > 0


INLINE = {"role": "assistant", "content": "<think>\nTwo and three.\n</think>\n\nIt is 5."}
WINDOWS = {**INLINE, "content": INLINE["content"].replace("\n", "\r\n")}
SPLIT_LATE = {"role": "assistant", "content": "\n\nIt is 5.", "reasoning_content": "\nTwo and three.\n"}


@pytest.mark.parametrize("name", THOUGHTS)
def test_the_lines_around_a_recorded_thought_are_not_trained_twice(name: str) -> None:
    real = real_tokenizer(name)
    for reply in (INLINE, WINDOWS, SPLIT_LATE):
        assert targets(real, [ASK, reply])[0][1] == THOUGHTS[name][1]
        assert targets(real, [ASK, reply, ASK, SAYS])[1][1] == THOUGHTS[name][0]


def test_tiny_models_write_a_recorded_thought_once() -> None:
    tiny = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    for reply in (THINKS, INLINE, WINDOWS, SPLIT_LATE):
        assert targets(tiny, [ASK, reply])[0][1] == "<think>\nTwo and three.\n</think>\n\nIt is 5.<|im_end|>"


def test_what_is_not_to_be_trained_is_said_by_train_or_as_openai_says_it() -> None:
    tiny = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    for left_out in ({"train": False}, {"weight": 0}, {"weight": 0.0}):
        ((prompt, target),) = targets(tiny, [{**SAYS, **left_out}, ASK, {**SAYS, "weight": 1, "train": None}])
        assert "It is 5." in prompt and target == "It is 5.<|im_end|>"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"messages": [ASK, {**SAYS, "train": "false"}]}, r"messages\[1\].train is 'false': expected \"train\": false"),
        ({"messages": [ASK, {**SAYS, "weight": 0.5}]}, r"messages\[1\].weight is 0.5: expected \"train\": false"),
        ({"messages": [ASK, {"role": "assistant", "text": "5"}]}, r"messages\[1\] has no content and no tool calls"),
        ({"messages": [SAYS, ASK, SAYS]}, r"messages\[0\] answers nothing, .*: give it \"train\": false"),
        ({"messages": [ASK, SAYS], "tools": json.dumps([TOOL])}, r"expected \{\"tools\": \["),
        ({"messages": [ASK, SAYS], "tools": [TOOL["function"]]}, r"tools\[0\].function must be an object with a name"),
    ],
)
def test_a_line_that_would_train_something_else_is_refused(tmp_path: Path, line: Any, problem: str) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(TaskDataError, match=rf"talks.jsonl:1: {problem}"):
        read_demonstrations(file, Renderer(ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()))
