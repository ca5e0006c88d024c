"""Real model families: every prompt is what the family's own template makes of the whole conversation."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from ajet.context_tracker import ContextTracker, Renderer
from ajet.context_tracker.messages import plain_messages
from ajet.gateway.chat import pick_parser
from ajet.schema.chat import Completion, Sampling
from ajet.schema.errors import InvalidRequestError
from support.template_sources import SOURCES, Source
from support.tracker_helpers import WIDE, said, system, trained_leaves, user

Message = dict[str, Any]


def tool(name: str) -> dict[str, Any]:
    properties = {"query": {"type": "string", "description": "what to look for"}}
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}", "parameters": parameters}}


NO_SYSTEM = "a system message stands in the first user message"
LATE_SYSTEM = "a late system message is a user message"
CALLS_AS_TEXT = "calls are text"
RESULTS_AS_USER = "results are user messages"
SHORT_IDS = "ids have nine characters"
TEXT_IN_REASONING = "text beside a call and reasoning is part of the reasoning"
THINKING_PART = "reasoning is a part of the content"
REASONING_AS_TEXT = "reasoning is text in `<think>`"
TOOLS = [tool("search"), tool("fetch"), tool("weigh")]


def calls(*named: tuple[str, str], content: str = "") -> Message:
    """A reply with these calls: (id, tool)."""
    made = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"query": f"by {call_id}"})},
        }
        for call_id, name in named
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def answer(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def forms(messages: list[Message]) -> list[list[Message]]:
    """The messages as clients send them, and with their arguments by value."""
    by_value = copy.deepcopy(messages)
    for call in (call for message in by_value for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return [by_value, messages]


def differences(messages: list[Message], fitted: list[Message]) -> set[str]:
    """In which respects the form that a template is given differs from what clients send."""
    has = {role: any(m["role"] == role for m in fitted) for role in ("system", "tool")}
    calls = [[c["id"] for m in talk for c in m.get("tool_calls") or []] for talk in (messages, fitted)]
    late = [i for i, m in enumerate(messages) if m["role"] == "system" and i]
    texts = [str(m["content"]) for m in fitted if "tool_calls" in m]
    parts = any(isinstance(m["content"], list) for m in fitted)
    thoughts = [m["reasoning_content"] for m in messages if "reasoning_content" in m]
    beside = [m["content"] for m in messages if "tool_calls" in m and m["content"]]
    found = {
        NO_SYSTEM: messages[0]["role"] == "system" and not has["system"],
        LATE_SYSTEM: bool(late) and not any(m["role"] == "system" for m in fitted[1:]),
        CALLS_AS_TEXT: bool(calls[0]) and not calls[1],
        RESULTS_AS_USER: any(m["role"] == "tool" for m in messages) and not has["tool"],
        SHORT_IDS: bool(calls[1]) and calls[0] != calls[1],
        TEXT_IN_REASONING: bool(beside and thoughts and texts and not any(texts)),
        THINKING_PART: parts,
        REASONING_AS_TEXT: bool(thoughts)
        and any(f"<think>\n{t}" in str(m["content"]) for t in thoughts for m in fitted),
    }
    return {name for name, differs in found.items() if differs}


@cache
def _renderer(source: Source) -> Renderer:
    return Renderer(source.tokenizer())


class Talk:
    """A conversation whose replies are sampled as its template writes them, and whose prompts are compared."""

    def __init__(self, source: Source, tools: list[dict[str, Any]]) -> None:
        self.tokenizer = source.tokenizer()
        self.renderer = _renderer(source)
        self.tracker = ContextTracker(self.renderer, WIDE)
        self.kwargs = dict(source.kwargs)
        self.tools = tools
        self.messages: list[Message] = []
        self.told: list[Message] = []
        """The same messages with the reasoning that clients leave out."""
        self.otherwise: set[str] = set()
        """What the template can't be given as it is."""

    def written(self, messages: list[Message], *, generate: bool = True) -> str | None:
        """What the template writes for these messages: as they are, or else in the form that ajet gives them."""
        fitted = self.renderer.template.fit(plain_messages(messages), first=True)
        text = self.applied(fitted, generate)
        if text not in [self.applied(form, generate) for form in forms(messages)]:
            self.otherwise |= differences(messages, fitted)
        return text

    def applied(self, messages: list[Message], generate: bool) -> str | None:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=self.tools or None, add_generation_prompt=generate, tokenize=False, **self.kwargs
            )
        except (TemplateError, TypeError, ValueError):
            return None
        return text

    def hear(self, *messages: Message) -> None:
        self.messages += copy.deepcopy(messages)
        self.told += copy.deepcopy(messages)

    def begin(self) -> Any:
        sent = json.loads(json.dumps(self.messages))
        call = self.tracker.begin("a", "t", sent, self.tools, Sampling(), template_kwargs=self.kwargs or None)
        text = self.written(self.told)
        assert text is not None
        expected = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert self.tokenizer.decode(call.prompt_ids) == self.tokenizer.decode(expected)
        assert call.prompt_ids == expected
        return call

    def say(self, reply: Message, reasoning: str = "", keep: bool = True) -> None:
        """Have the model answer with this."""
        call = self.begin()
        full = {**reply, "reasoning_content": reasoning} if reasoning else reply
        ids = self.sampled(full)
        self.tracker.commit(call.call_id, Completion(ids, [-1.0] * len(ids), "stop", ids[-1]), full)
        if keep:
            self.messages.append(copy.deepcopy(reply))
            self.told.append(copy.deepcopy(full))

    def sampled(self, reply: Message) -> list[int]:
        """What a model that learned this template says to give this reply, and the token that it ends with."""
        before = self.written(self.told)
        assert before is not None
        next_ones = [answer(c["id"], "R") for c in reply.get("tool_calls", ())] or [user("N")]
        after = self.written([*self.told, reply, *next_ones]) or ""
        ended = self.written([*self.told, reply], generate=False) or ""
        ends = [*self.renderer.probe.end_tokens, self.tokenizer.eos_token]
        body = _up_to(ended, before, ends)
        if body is None or not after.startswith(before + body):
            body = _up_to(after, before, ends) or body
        if body is None:
            body = f"{reply.get('reasoning_content', '')}\n</think>\n\n{reply['content']}"
        rests = [text[len(before + body) :] for text in (after, ended) if text.startswith(before + body)]
        end = next((end for rest in rests for end in ends if rest.startswith(end)), self.tokenizer.eos_token)
        return [*self.tokenizer.encode(body, add_special_tokens=False), self.tokenizer.convert_tokens_to_ids(end)]


def _up_to(text: str, before: str, ends: list[str]) -> str | None:
    if not text.startswith(before):
        return None
    rest = text[len(before) :]
    return rest[: min((at for end in ends if (at := rest.find(end)) >= 0), default=len(rest))]


# ---------------------------------------------------------------- what is talked about


def plain_chat(talk: Talk) -> None:
    talk.hear(system(), user("What is 6 * 7?"))
    for index in range(4):
        talk.say(said(f"It is {index}."))
        talk.hear(user(f"And {index}?"))
    talk.begin()


def tool_loop(talk: Talk) -> None:
    talk.hear(system(), user("Find it."))
    for turn in range(2):
        for index, name in enumerate(("search", "fetch", "search", "weigh", "fetch", "weigh")):
            talk.say(calls((f"call{turn}0{index}xyz", name)))
            talk.hear(answer(f"call{turn}0{index}xyz", f"found {index}"))
        talk.say(said("It is here."))
        talk.hear(user("And that?"))
    talk.begin()


def parallel_calls(talk: Talk) -> None:
    talk.hear(user("Find both."))
    for turn in range(3):
        named = [(f"call{turn}{n}9abc", name) for n, name in enumerate(("search", "fetch", "weigh"))]
        talk.say(calls(*named))
        results = [answer(call_id, f"by {name}") for call_id, name in named]
        talk.hear(*(results if turn != 1 else results[::-1]))
    talk.say(said("Both."))
    talk.hear(user("Sure?"))
    talk.begin()


def ids_that_repeat(talk: Talk) -> None:
    talk.hear(user("Find it."))
    for name in ("search", "fetch", "weigh"):
        talk.say(calls(("abcdefghi", name)))
        talk.hear(answer("abcdefghi", f"by {name}"))
    talk.say(said("Done."))
    talk.hear(user("Sure?"))
    talk.begin()


def text_beside_calls(talk: Talk) -> None:
    talk.hear(user("Find it."))
    for index, name in enumerate(("search", "fetch")):
        talk.say(calls((f"call0000{index}", name), content="Let me look."))
        talk.hear(answer(f"call0000{index}", "found"))
    talk.say(said("Done."))
    talk.hear(user("Sure?"))
    talk.begin()


def retries(talk: Talk) -> None:
    talk.hear(system(), user("Find it."))
    talk.say(calls(("call00000", "search")), keep=False)
    talk.say(calls(("call00001", "fetch")), keep=False)
    talk.say(calls(("call00002", "fetch")))
    talk.hear(answer("call00002", "found"))
    talk.say(said("Here."), keep=False)
    talk.say(said("There."))
    talk.hear(user("Sure?"))
    talk.begin()


def reasoning(talk: Talk) -> None:
    talk.hear(system(), user("Find it."))
    for turn in range(2):
        for index, name in enumerate(("search", "fetch", "weigh")):
            talk.say(calls((f"call{turn}00{index}0", name)), reasoning=f"I look {turn} {index}.")
            talk.hear(answer(f"call{turn}00{index}0", f"found {index}"))
        talk.say(said("It is here."), reasoning="Done.")
        talk.hear(user("And that?"))
    talk.say(said("No."))
    talk.hear(user("Why?"))
    talk.begin()


def a_new_system_message(talk: Talk) -> None:
    talk.hear(system(), user("Find it."))
    talk.say(calls(("call00000", "search")))
    talk.hear(answer("call00000", "found"))
    talk.say(said("Here."))
    talk.hear(user("Sure?"))
    talk.messages[0] = system("Be rude.")
    talk.told[0] = system("Be rude.")
    talk.say(said("Of course."))
    talk.hear(user("Go on."))
    talk.say(said("Well."))
    talk.hear(system("Be nice again."), user("Go on."))
    talk.say(said("Well."))
    talk.hear(user("Go on."))
    talk.begin()


SCENARIOS = (
    plain_chat,
    tool_loop,
    parallel_calls,
    ids_that_repeat,
    text_beside_calls,
    retries,
    reasoning,
    a_new_system_message,
)


# ---------------------------------------------------------------- gpt-oss


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Source:
    """A family whose template is there."""
    found: Source = request.param
    if found.template() is None:
        pytest.skip(f"{found.package} is not there: make test-templates fetches it")
    return found


@pytest.mark.parametrize("source", [s for s in SOURCES if s.name == "gpt-oss"], ids=["gpt-oss"], indirect=True)
def test_what_gpt_oss_says_is_read_and_gone_on_from(source: Source) -> None:
    talk = Talk(source, TOOLS)
    talk.hear(system(), user("Find it."))

    def hear_and_read(text: str) -> tuple[Any, Message]:
        sent = json.loads(json.dumps(talk.messages))
        call = talk.tracker.begin("a", "t", sent, TOOLS, Sampling())
        ids = talk.tokenizer(text, add_special_tokens=False)["input_ids"]
        reply = pick_parser(talk.tokenizer).parse(talk.renderer.decode(ids), TOOLS, call_id=call.call_id).message
        talk.tracker.commit(call.call_id, Completion(ids, [-1.0] * len(ids), "stop", ids[-1]), reply)
        talk.messages.append({key: value for key, value in reply.items() if key != "reasoning_content"})
        return call, reply

    thought = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    said_ = thought + '<|channel|>commentary to=functions.fetch <|constrain|>json<|message|>{"query":  "x"}<|call|>'
    first, reply = hear_and_read(said_)
    (made,) = reply["tool_calls"]
    assert (reply["reasoning_content"], made["function"]["name"]) == ("I look.", "fetch")
    talk.messages.append(answer(made["id"], "found"))
    second, reply = hear_and_read("<|channel|>final<|message|>Here.<|return|>")
    assert reply["content"] == "Here." and second.extends == first.call_id
    result = '<|start|>functions.fetch to=assistant<|channel|>commentary<|message|>"found"<|end|><|start|>assistant'
    text = talk.tokenizer.decode(second.prompt_ids)
    assert text == talk.tokenizer.decode(first.prompt_ids) + said_ + result
    talk.hear(user("Sure?"))
    third, _ = hear_and_read("<|channel|>final<|message|>Yes.<|return|>")
    text = talk.tokenizer.decode(third.prompt_ids)
    assert third.extends is None and "<|return|>" not in text and "I look." not in text
    assert "final<|message|>Here.<|end|><|start|>user<|message|>Sure?<|end|><|start|>assistant" in text


# ---------------------------------------------------------------- how the families compare

SINGLE_CALLS = ("Llama 3.1", "Llama 3.2")
DOCS = Path(__file__).parents[2] / "docs" / "dev" / "context_tracker.md"


@cache
def held(source: Source, scenario: Any) -> Talk:
    talk = Talk(source, [] if scenario is plain_chat else TOOLS)
    scenario(talk)
    return talk


def row(source: Source) -> str:
    """A family's line in the table of docs/dev/context_tracker.md."""
    talks = {s: held(source, s) for s in SCENARIOS if s is not parallel_calls or source.name not in SINGLE_CALLS}
    notes = set().union(*(talk.otherwise for talk in talks.values()))
    if source.name in SINGLE_CALLS:
        notes.add("more than one call at a time is refused")
    if not _renderer(source).template.takes_tools:
        notes.add("tools are not described")
    samples = [str(trained_leaves(talks[scenario].tracker.tree)) for scenario in (plain_chat, tool_loop, reasoning)]
    return "| " + " | ".join([source.name, source.package, *samples, "; ".join(sorted(notes))]).rstrip() + " |"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name, indirect=True)
def test_every_prompt_is_what_the_template_writes(source: Source, scenario: Any) -> None:
    if scenario is parallel_calls and source.name in SINGLE_CALLS:
        with pytest.raises(InvalidRequestError, match="single tool-calls at once"):
            held(source, scenario)
    else:
        held(source, scenario)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name, indirect=True)
def test_the_documents_say_how_a_family_is_treated(source: Source) -> None:
    assert row(source) in DOCS.read_text(encoding="utf-8").splitlines()
