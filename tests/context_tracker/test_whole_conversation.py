"""Templates that look back: what is appended to a reply is what they write for the whole conversation."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ajet.context_tracker import ContextTracker, Renderer
from ajet.context_tracker.template import STUB
from ajet.schema.chat import Completion, Sampling
from support.tracker_families import tokenizer
from support.tracker_helpers import SEARCH, WIDE, Drive, called, result, said, system, user

CALL = """{{ '<|im_start|>assistant\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
  {{- '<call>' + call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}
{{- '<|im_end|>\n' }}"""
RESULT = "{{ '<|im_start|>result of ' + NAME + '\n' + message.content + '<|im_end|>\n' }}"
FRAME = """{%- set seen = namespace(name='nothing', count=0, query='nothing') %}
{%- for tool in tools or [] %}{{ tool.function.name + '\n' }}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- for call in message.tool_calls or [] %}
      {%- set seen.name = call.function.name %}{% set seen.count = seen.count + 1 %}
      {%- set seen.query = call.function.arguments.query %}
    {%- endfor %}
    {{- '' }}CALL
  {%- elif message.role == 'tool' %}
    {%- set found = namespace(name='unknown') %}
    {%- for other in messages %}{% for call in other.tool_calls or [] %}
      {%- if call.id == message.tool_call_id %}{% set found.name = call.function.name %}{% endif %}
    {%- endfor %}{% endfor %}
    {{- '' }}RESULT
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
NAMES = {
    "the name of the call with that id": "found.name",
    "the name of the last call": "seen.name",
    "the name, and which call it was": "seen.name ~ ':' ~ seen.count",
    "what was asked for": "(seen.query or 'nothing')",
    "how many messages there are": "(messages | length | string)",
}


def template(name: str) -> str:
    return FRAME.replace("CALL", CALL).replace("RESULT", RESULT.replace("NAME", NAMES[name]))


class Loop:
    """An agent that calls tools, over a template of its own."""

    def __init__(self, source: str) -> None:
        self.tokenizer = copy.deepcopy(tokenizer("chatml"))
        self.tokenizer.chat_template = source
        self.own = Renderer(copy.deepcopy(self.tokenizer))
        """The test's, so that nothing is kept from its renderings."""
        self.rendered: list[int] = []
        render = self.tokenizer.apply_chat_template

        def counted(messages: list[Any], **options: Any) -> Any:
            self.rendered.append(len(messages))
            return render(messages, **options)

        self.tokenizer.apply_chat_template = counted
        self.renderer = Renderer(self.tokenizer)
        self.tools = [{"type": "function", "function": {"name": name}} for name in ("search", "fetch")]
        self.start()

    def start(self) -> None:
        self.tracker = ContextTracker(self.renderer, WIDE)
        self.messages: list[dict[str, Any]] = [user("Find it.")]

    def ask(self) -> Any:
        """A call whose prompt is compared with the template's rendering."""
        call = self.tracker.begin("a", "t", json.loads(json.dumps(self.messages)), self.tools, Sampling())
        expected = self.own.render(self.messages, self.tools)
        assert self.tokenizer.decode(call.prompt_ids) == self.tokenizer.decode(expected)
        assert call.prompt_ids == expected
        assert STUB not in self.tokenizer.decode(call.prompt_ids)
        return call

    def say(self, reply: dict[str, Any], end: str = "<|im_end|>") -> Any:
        call = self.ask()
        body = reply["content"] or ""
        for one in reply.get("tool_calls", ()):
            arguments = json.dumps(json.loads(one["function"]["arguments"]))
            body += f"<call>{one['function']['name']}{arguments}"
        ids = [*self.tokenizer.encode(body), self.tokenizer.convert_tokens_to_ids(end)]
        self.tracker.commit(call.call_id, Completion(ids, [-1.0] * len(ids), "stop", ids[-1]), reply)
        self.messages.append(reply)
        return call

    def turn(self, index: int, call_id: str) -> Any:
        reply = called(call_id, f"thing {index}")
        reply["tool_calls"][0]["function"]["name"] = ("search", "fetch")[index % 2]
        call = self.say(reply)
        self.messages.append(result(call_id, f"found {index}"))
        return call


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["fresh", "repeated", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_named_as_in_the_whole_conversation(name: str, ids: str) -> None:
    loop = Loop(template(name))
    for _ in range(2):  # what is learned in one conversation holds in the next
        loop.start()
        extended = [loop.turn(n, {"fresh": f"c{n}", "repeated": "c", "none": ""}[ids]).extends for n in range(12)]
        loop.say(said("Done."))
        loop.messages.append(user("And that?"))
        extended.append(loop.turn(1, "d").extends)
        loop.ask()
        if name != "how many messages there are" and ids != "repeated":
            assert None not in extended[1:]  # the conversation stays one sample


def test_parallel_results_may_come_in_any_order_and_late() -> None:
    loop = Loop(template("the name of the call with that id"))
    for order in ((0, 1), (1, 0), (1,)):
        loop.start()
        reply = called("c0", "one")
        reply["tool_calls"] += called("c1", "two")["tool_calls"]
        reply["tool_calls"][1]["function"]["name"] = "fetch"
        loop.say(reply)
        loop.messages += [result(f"c{n}", "found") for n in order]
        loop.say(said("Yes."))
        loop.messages.append(result("c0", "late"))
        loop.messages.append(result("zz", "of no call"))
        assert loop.ask().extends == "call-1"


def test_each_shape_is_compared_once_and_then_costs_what_is_new() -> None:
    loop = Loop(template("the name of the last call"))
    for call_id in "cd":
        loop.start()
        for index in range(40):
            loop.rendered.clear()
            loop.turn(index, f"{call_id}{index}")
    assert loop.rendered == [3]


def test_equal_messages_are_rendered_once_unless_the_template_tells_the_time() -> None:
    for time, expected in (("", [1]), ("{#- strftime_now -#}", [1, 1])):
        loop = Loop(time + template("the name of the last call"))
        loop.rendered.clear()
        prompts = []
        for _ in range(2):
            loop.start()
            prompts.append(loop.ask().prompt_ids)
        assert prompts[0] == prompts[1]
        assert prompts[0] is not prompts[1]
        assert loop.rendered == expected


def test_what_differs_in_type_alone_is_rendered_again() -> None:
    """For Jinja, `1` and `true` are equal as keys and differ as text."""
    loop = Loop("{{ flag }}" + template("the name of the last call"))
    texts = [loop.renderer.text(loop.messages, (), {"flag": flag}) for flag in (1, True, 1.0, "1", None)]
    assert [text.split("<")[0] for text in texts] == ["1", "True", "1.0", "1", "None"]


END = """{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' + message.content + ('<|im_end|>' if not loop.last else '<|endoftext|>') }}
  {%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize(("end", "extends"), [("<|im_end|>", "call-0"), ("<|endoftext|>", None)])
def test_a_reply_that_ends_otherwise_than_in_history_makes_a_branch(end: str, extends: str | None) -> None:
    """gpt-oss ends its answer with a token that its template never writes in history."""
    loop = Loop(END)
    loop.messages = [system(), user("Why?")]
    loop.say(said("Because."), end)
    loop.messages.append(user("Sure?"))
    assert loop.ask().extends == extends
    fork = loop.tracker.calls[1].fork
    assert extends or (fork and "its reply with '<|endoftext|>', where the template writes '<|im_end|>'" in fork.detail)


def test_reasoning_long_ago_in_a_turn_is_dropped_as_the_template_does() -> None:
    for thought in ("", "I look."):  # both conversations end alike
        drive = Drive("qwen3")
        messages = [user("Find it.")]
        for index, beside in enumerate((1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0)):
            reply = called(f"c{index}", "it", "Wait." if beside else "")
            if thought and not index:
                reply["reasoning_content"] = thought
            drive.ask(messages, reply, text="x", tools=[SEARCH])
            messages.append(result(f"c{index}", "found"))
        drive.ask(messages, said("Here."), tools=[SEARCH])
        messages.append(user("Sure?"))
        call = drive.begin(messages, tools=[SEARCH])
        assert bool(call.extends) is not bool(thought)


THINKING = """{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\n' }}
  {%- if message.content is string %}{{ message.content }}{% else %}
    {%- for part in message.content %}
      {{- '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}
    {%- endfor %}
  {%- endif %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_reasoning_goes_into_the_part_that_a_template_reads() -> None:
    loop = Loop(THINKING)
    text = loop.tokenizer.decode(loop.renderer.render([user("Why?"), said("So.", reasoning_content="Hm."), user("?")]))
    assert "assistant\n[THINK]Hm.[/THINK]So.<|im_end|>" in text


def test_a_late_developer_message_is_never_lost() -> None:
    first_only = "{%- if messages[0].role == 'developer' %}{{ messages[0].content }}{% endif %}" + (
        "{%- for message in messages if message.role in ('user', 'assistant') %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    )
    loop = Loop(first_only)
    talk = [{"role": "developer", "content": role} for role in ("First.", "Late.")]
    text = loop.tokenizer.decode(loop.renderer.render([talk[0], user("Hello"), said("Hi."), talk[1], user("Go on")]))
    assert text.startswith("First.") and "<|im_start|>user\nLate.<|im_end|>" in text
