"""Real model families: every prompt is what the family's own template makes of the whole conversation."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from template_sources import SOURCES, Source
from tracker_helpers import WIDE, said, system, user

from ajet.context_tracker import ContextTracker, Renderer
from ajet.context_tracker.messages import plain_messages
from ajet.context_tracker.settings import ReasoningHistory
from ajet.schema.generation import Completion, Sampling

Message = dict[str, Any]


def tool(name: str) -> dict[str, Any]:
    properties = {"query": {"type": "string", "description": "what to look for"}}
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}", "parameters": parameters}}


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


class Talk:
    """A conversation whose replies are sampled as its template writes them, and whose prompts are compared."""

    def __init__(self, source: Source, tools: list[dict[str, Any]], history: ReasoningHistory = "template") -> None:
        self.tokenizer = source.tokenizer()
        self.renderer = Renderer(self.tokenizer, reasoning_history=history)
        self.tracker = ContextTracker(self.renderer, WIDE)
        self.kwargs = dict(source.kwargs)
        self.tools = tools
        self.messages: list[Message] = []
        self.told: list[Message] = []
        """The same messages with the reasoning that clients leave out."""
        self.extended: list[bool] = []

    def written(self, messages: list[Message], *, generate: bool = True) -> str | None:
        """What the template writes for these messages, in the form that it understands."""
        fitted = self.renderer.template.fit(plain_messages(messages), first=True)
        try:
            text: str = self.tokenizer.apply_chat_template(
                fitted, tools=self.tools or None, add_generation_prompt=generate, tokenize=False, **self.kwargs
            )
        except Exception:  # noqa: BLE001 - what a template raises
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
        self.extended.append(call.extends is not None)
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
    found = [at for end in ends if (at := rest.find(end)) >= 0]
    return rest[: min(found)] if found else None


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


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_prompt_is_what_the_template_writes(source: Source, scenario: Any) -> None:
    if source.template() is None:
        pytest.skip(f"{source.package} is not there: make test-templates fetches it")
    scenario(Talk(source, [] if scenario is plain_chat else TOOLS))
