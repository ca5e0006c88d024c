"""What counts as extending a recorded call: equal messages, agents, retries, choices, changes."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from ajet.context_tracker.messages import plain_message, plain_messages
from ajet.schema.chat import FixedTools, JsonMessages
from ajet.schema.errors import InvalidRequestError, SessionClosedError, UnsupportedContentError
from support.call_trees import isomorphic
from support.tracker_helpers import SEARCH, WIDE, Drive, assert_faithful, called, result, said, system, user


def start(drive: Drive, reply: dict[str, Any], text: str | None = None, tools: Any = None) -> list[dict[str, Any]]:
    messages = [system(), user("Go.")]
    drive.ask(messages, reply, text=text, tools=tools)
    return messages


@pytest.mark.parametrize(
    "sent_back",
    [
        said("It is 4."),
        said("  It is 4.\n"),
        {"role": "assistant", "content": [{"type": "text", "text": "It is 4."}]},
        {"role": "assistant", "content": "It is 4.", "tool_calls": None, "refusal": None, "name": "Friday"},
        {"role": "assistant", "content": "It is 4.", "tool_calls": [], "annotations": [], "audio": None},
    ],
)
def test_a_reply_sent_back_in_another_form_is_the_same_reply(sent_back: dict[str, Any]) -> None:
    drive = Drive()
    messages = [*start(drive, said("It is 4."))[:-1], sent_back, user("Sure?")]
    call = drive.begin(messages)
    assert call.extends == "call-0"
    recorded = drive.seen["call-0"][0] + drive.seen["call-0"][1]
    assert call.prompt_ids[: len(recorded)] == recorded


def test_tool_calls_are_compared_by_value_and_ids_only_by_what_they_connect() -> None:
    drive = Drive()
    reply = called("call_1", "x", limit=3)
    messages = start(drive, reply, text="call", tools=[SEARCH])
    again = copy.deepcopy(reply)
    again["content"] = None
    again["tool_calls"][0]["id"] = "another"
    again["tool_calls"][0]["function"]["arguments"] = ' {"limit" : 3,\n "query":"x"}'
    call = drive.begin([*messages[:-1], again, result("another", "found")], tools=[SEARCH])
    assert call.extends == "call-0"
    assert drive.tracker.calls[-1].new_messages == [result("call_1", "found")]
    drive.begin([*messages[:-1], again, result("nobody", "found")], tools=[SEARCH])
    assert drive.tracker.calls[-1].new_messages[-1]["tool_call_id"] == "nobody"


@pytest.mark.parametrize(("wrote", "sends"), [("2.0", "2"), ("2", "2.0"), ("1e3", "1000"), ("[{}, -0.0]", "[{}, 0]")])
def test_numbers_in_a_call_are_compared_by_value(wrote: str, sends: str) -> None:
    drive = Drive()
    messages = start(drive, called_with(f'{{"x": {wrote}}}'), text="call", tools=[SEARCH])
    call = drive.begin([*messages[:-1], called_with(f'{{"x": {sends}}}'), result("c", "found")], tools=[SEARCH])
    assert call.extends == "call-0"


@pytest.mark.parametrize(
    ("wrote", "sends"), [("1", "true"), ("2.5", "2"), ("2", '"2"'), ("9007199254740993", "9007199254740992.0")]
)
def test_arguments_of_another_value_make_a_branch(wrote: str, sends: str) -> None:
    drive = Drive()
    messages = start(drive, called_with(f'{{"x": {wrote}}}'), text="call", tools=[SEARCH])
    call = drive.begin([*messages[:-1], called_with(f'{{"x": {sends}}}'), result("c", "found")], tools=[SEARCH])
    assert call.extends is None


def called_with(arguments: str) -> dict[str, Any]:
    message = called("c", "red")
    message["tool_calls"][0]["function"]["arguments"] = arguments
    return message


def test_dict_arguments_and_json_text_are_the_same() -> None:
    drive = Drive()
    reply = called("c", "x", flag=True)
    messages = start(drive, reply, text="call", tools=[SEARCH])
    again = copy.deepcopy(reply)
    again["tool_calls"][0]["function"]["arguments"] = {"flag": True, "query": "x"}
    assert drive.begin([*messages[:-1], again, result("c", "y")], tools=[SEARCH]).extends == "call-0"
    again["tool_calls"][0]["function"]["arguments"] = {"flag": 1, "query": "x"}  # equal in Python, not in JSON
    assert drive.begin([*messages[:-1], again, result("c", "y")], tools=[SEARCH]).extends is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[2].update(content="It is 5."), "reply_changed"),
        (lambda m: m[1].update(content="Stop."), "message_changed"),
        (lambda m: m[0].update(content="Be rude."), "message_changed"),
        (lambda m: m[2].update(reasoning_content="I guess."), "reasoning_changed"),
    ],
)
def test_a_changed_message_makes_a_branch_that_says_what_changed(change: Any, reason: str) -> None:
    drive = Drive()
    messages = [*start(drive, said("It is 4.")), user("Sure?")]
    change(messages)
    call = drive.begin(messages)
    assert call.extends is None
    fork = drive.tracker.calls[1].fork
    assert fork is not None and fork.reason == reason and fork.nearest == 0 and fork.tokens > 0
    if reason != "reasoning_changed":
        assert "became" in fork.detail and fork.detail.startswith("messages[")


def test_reasoning_is_rendered_as_it_is_sent_whatever_was_sent_before() -> None:
    drive = Drive("qwen3")

    def prompt(reasoning: str) -> str:
        thought = {"reasoning_content": reasoning} if reasoning else {}
        messages = [user("Go."), {**called("c", "x"), **thought}, result("c", "y")]
        return drive.tokenizer.decode(drive.begin(messages, tools=[SEARCH]).prompt_ids)

    for reasoning in ("It is cold.", "It is warm.", "It is cold.", ""):
        text = prompt(reasoning)
        assert [word for word in ("cold", "warm") if word in text] == [word for word in reasoning[6:-1].split()]


def test_a_reply_is_gone_on_from_after_a_request_that_changed_its_reasoning() -> None:
    drive = Drive("qwen3")
    asked = [user("Go.")]
    reply = {**called("c", "x"), "reasoning_content": "It is cold."}
    drive.ask([*asked], reply, text="<think>\nIt is cold.\n</think>\n\ncall", tools=[SEARCH])
    changed = {**reply, "reasoning_content": "It is warm."}
    said_nothing = {key: value for key, value in reply.items() if key != "reasoning_content"}
    for sent, extends in ((changed, None), (reply, "call-0"), (changed, None), (said_nothing, "call-0")):
        assert drive.begin([*asked, sent, result("c", "y")], tools=[SEARCH]).extends == extends


def test_equal_replies_with_other_thoughts_are_each_gone_on_from() -> None:
    drive = Drive("qwen3")
    asked = [user("Go.")]
    for choice, thought in enumerate(("It is cold.", "It is warm.")):
        call = drive.begin(asked, tools=[SEARCH], choice=choice)
        reply = {**called("c", "x"), "reasoning_content": thought}
        drive.commit(call, reply, f"<think>\n{thought}\n</think>\n\ncall")
    for choice, thought in enumerate(("It is cold.", "It is warm.")):
        sent = {**called("c", "x"), "reasoning_content": thought}
        call = drive.begin([*asked, sent, result("c", "y")], tools=[SEARCH])
        assert call.extends == f"call-{choice}"


def test_conversations_of_equal_texts_are_told_apart_by_their_first_thought() -> None:
    drive = Drive("qwen3", reasoning_history="keep")
    talks = [[user("Go.")], [user("Go.")]]
    for thoughts in (("It is cold.", "It is warm."), ("Still so.", "Still so.")):
        for talk, thought in zip(talks, thoughts, strict=True):
            reply = said("Yes.", reasoning_content=thought)
            drive.ask(talk, reply, text=f"<think>\n{thought}\n</think>\n\nYes.")
            talk.append(user("Sure?"))
    assert [drive.begin(talk).extends for talk in talks] == ["call-2", "call-3"]


def test_other_tools_or_template_arguments_make_a_branch() -> None:
    drive = Drive()
    messages = [*start(drive, said("It is 4."), tools=[SEARCH]), user("Sure?")]
    other = copy.deepcopy(SEARCH)
    other["function"]["description"] = "Look up"
    assert drive.begin(messages, tools=[SEARCH]).extends == "call-0"
    for index, tools in enumerate(([other], []), 2):
        assert drive.begin(messages, tools=tools).extends is None
        assert drive.tracker.calls[index].fork.reason == "tools_changed"  # type: ignore[union-attr]
    assert drive.begin(messages, tools=[SEARCH], kwargs={"x": 1}).extends is None
    assert drive.tracker.calls[4].fork.reason == "template_arguments_changed"  # type: ignore[union-attr]


def test_a_reply_cut_by_length_is_never_gone_on_from_as_if_it_had_ended() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    drive.ask(messages, said("It is"), finish="length")
    messages.append(user("Go on."))
    call = drive.begin(messages)
    assert call.extends is None
    assert drive.tracker.calls[1].fork.reason == "reply_cut_by_length"  # type: ignore[union-attr]
    drive.commit(call, said("4."))
    assert_faithful(drive, drive.tracker.finish(1.0).tree, expected_samples=2)


def test_behind_a_cut_reply_the_call_before_it_is_still_gone_on_from() -> None:
    drive = Drive()
    messages = start(drive, said("One."))
    messages.append(user("More."))
    drive.ask(messages, said("Two, th"), finish="length")
    messages.append(user("Go on."))
    call = drive.begin(messages)
    assert call.extends == "call-0"
    assert drive.tokenizer.decode(call.prompt_ids) == drive.renderer.text([{**m} for m in messages], [], {})


def test_several_agents_may_share_a_conversation_or_not() -> None:
    drive = Drive()
    a, b = [system("A"), user("Go.")], [system("B"), user("Go.")]
    for turn in range(4):
        for name, talk in (("a", a), ("b", b)):
            drive.ask(talk, said(f"{name}{turn}"), agent=name)
            talk.append(user("More."))
    handed_over = drive.begin(a, agent="c")
    assert handed_over.extends == "call-6"
    drive.commit(handed_over, said("Mine now."))
    episode = drive.tracker.finish(1.0)
    assert [call.agent for call in episode.tree.calls][-1] == "c"
    assert_faithful(drive, episode.tree, expected_samples=2)


def test_interleaved_and_concurrent_calls() -> None:
    drive = Drive()
    talks = [[system(), user(f"Question {n}.")] for n in range(3)]
    begun = [drive.begin(talk, agent="worker") for talk in talks]
    for n in (2, 0, 1):
        talks[n].append(drive.commit(begun[n], said(f"Answer {n}.")))
    for n in (1, 2, 0):
        talks[n].append(user("Sure?"))
        assert drive.ask(talks[n], said("Yes."), agent="worker").extends == f"call-{n}"
    assert_faithful(drive, drive.tracker.finish(1.0).tree, expected_samples=3)


def test_choices_of_one_request_share_its_prompt_and_each_can_be_gone_on_from() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    calls = [drive.begin(messages, choice=n) for n in range(3)]
    assert calls[0].prompt_ids == calls[1].prompt_ids == calls[2].prompt_ids
    for call, text in zip(calls, ("a", "b", "c"), strict=True):
        drive.commit(call, said(text))
    follow = drive.begin([*messages, said("b"), user("More.")])
    assert follow.extends == "call-1"
    drive.commit(follow, said("Done."))
    tree = drive.tracker.finish(1.0).tree
    assert len(tree.children()[tree.calls[0].prompt_run]) == 3
    assert [call.drop for call in tree.calls] == ["abandoned", None, "abandoned", None]


def test_messages_changed_in_place_do_not_fool_the_tracker() -> None:
    drive = Drive()
    question = user("Go.")
    messages = [system(), question]
    call = drive.tracker.begin("a", "t", messages, [], drive.begin([user("x")]).sampling)
    drive.commit(call, said("It is 4."))
    question["content"] = "Stop."
    follow = drive.tracker.begin("a", "t", [*messages, said("It is 4."), user("Sure?")], [], call.sampling)
    assert follow.extends is None
    assert "Stop." in drive.tokenizer.decode(follow.prompt_ids)


def test_a_request_that_ends_with_a_recorded_reply_asks_for_another() -> None:
    drive = Drive()
    messages = start(drive, said("It is 4."))
    call = drive.begin(messages)
    assert call.extends == "call-0"
    assert drive.tokenizer.decode(call.prompt_ids).endswith("It is 4.<|im_end|>\n<|im_start|>assistant\n")


def test_a_conversation_whose_rule_is_wrong_is_caught_by_the_audit() -> None:
    drive = Drive("chatml")
    template = drive.tokenizer.chat_template
    long_memory = "{%- if messages | length > 20 %}{{ '<|im_start|>system\nLong.<|im_end|>\n' }}{% endif -%}" + template
    own = copy.deepcopy(drive.tokenizer)
    own.chat_template = long_memory
    from ajet.context_tracker import ContextTracker, Renderer
    from ajet.schema.chat import Completion, Sampling

    tracker = ContextTracker(Renderer(own), WIDE)
    messages = [user("Go.")]
    extends = []
    for turn in range(24):
        call = tracker.begin("a", "t", messages, [], Sampling())
        extends.append(call.extends)
        ids = own.encode(f"{turn}")
        tracker.commit(call.call_id, Completion(ids, [-1.0] * len(ids), "stop"), said(f"{turn}"))
        messages = [*messages, said(f"{turn}"), user("More.")]
    assert None in extends[1:]
    assert any(call.fork and "how it begins" in call.fork.detail for call in tracker.calls)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "empty"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role is 'robot'"),
        (["x"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], r"tool_calls\[0\]"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(messages: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        Drive().begin(messages)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        ([{"text": None}], ""),
        ([{"type": "text", "text": None}], ""),
        ([{"text": "a"}, {"text": None}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_text_in_dashscopes_form(content: Any, text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = plain_message({"role": "assistant", "content": content, "tool_calls": [call]}, "m")
    assert message["content"] == text and message["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("part", "says"),
    [({"image": "x.png"}, "'image': 'x.png'"), ({}, "{}"), (3, "3"), ({"text": 3}, "'text': 3")],
)
def test_parts_without_text_are_named(part: Any, says: str) -> None:
    with pytest.raises(UnsupportedContentError, match=rf"m.content\[0\] is .*{says}"):
        plain_message({"role": "user", "content": [part]}, "m")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_pictures_sound_and_files_are_refused(kind: str) -> None:
    parts = [{"type": "text", "text": "Look"}, {"type": kind, kind: {"url": "data:,"}}]
    with pytest.raises(UnsupportedContentError, match=rf"messages\[0\].content\[1\] is .*'type': '{kind}'"):
        Drive().begin([{"role": "user", "content": parts}])


def test_template_arguments_may_not_replace_the_template() -> None:
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs may not set chat_template, tokenize"):
        Drive().begin([user("Go.")], kwargs={"tokenize": True, "chat_template": "x"})


def test_tools_that_are_no_json_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tools must be JSON"):
        Drive().begin([user("Go.")], tools=[{"function": object()}])


def test_a_refused_request_leaves_no_trace_in_the_next() -> None:
    drive = Drive()
    messages = start(drive, said("It is 4."))
    with pytest.raises(InvalidRequestError):
        drive.begin([*messages, user("Sure?"), {"role": "user", "content": 3}])
    call = drive.begin([*messages, user("Sure?")])
    assert call.extends == "call-0"
    assert len(drive.tracker.calls) == 2


def test_a_call_is_committed_or_aborted_once() -> None:
    drive = Drive()
    call = drive.begin([user("Go.")])
    drive.tracker.abort(call.call_id, "cancelled")
    for attempt in (lambda: drive.commit(call, said("x")), lambda: drive.tracker.abort(call.call_id, "again")):
        with pytest.raises(SessionClosedError, match="not in flight"):
            attempt()
    drive.tracker.finish(1.0)
    with pytest.raises(SessionClosedError):
        drive.begin([user("Go.")])
    with pytest.raises(SessionClosedError):
        drive.tracker.finish(1.0)


def test_a_retry_after_an_abort_shares_the_prompt() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    first = drive.begin(messages)
    drive.tracker.abort(first.call_id, "engine died")
    second = drive.begin(messages)
    assert second.prompt_ids == first.prompt_ids
    drive.commit(second, said("Yes."))
    episode = drive.tracker.finish(1.0)
    assert episode.tree.calls[0].run == -1 and episode.tree.calls[0].drop == "aborted"
    assert len(episode.tree.runs) == 2


def test_requests_as_json_and_as_objects_give_the_same_tree() -> None:
    trees = []
    for fresh in (True, False):
        drive = Drive(settings=replace(WIDE))
        messages = [system(), user("Go.")]
        for turn in range(4):
            sent = json.loads(json.dumps(messages)) if fresh else messages
            call = drive.tracker.begin("agent", "target", sent, [], drive.begin([user("?")]).sampling)
            messages.append(drive.commit(call, said(f"{turn}"), logprobs=[-1.0] * 2))
            messages.append(user("More."))
        trees.append(drive.tracker.finish(1.0).tree)
    assert isomorphic(trees[0], trees[1])


def as_json(messages: list[dict[str, Any]], decoded: list[int], **form: Any) -> JsonMessages:
    """Messages as a client sends them. `decoded` gets the number of messages of each decoding."""

    def decode(source: bytes) -> list[Any]:
        values: list[Any] = json.loads(source)
        decoded.append(len(values))
        return values

    return JsonMessages(json.dumps(messages, **form).encode(), decode)


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_of_messages_as_json_only_those_that_are_new_are_decoded(form: dict[str, Any]) -> None:
    drive, decoded = Drive(), list[int]()
    messages = [system(), user("Go.")]
    for turn in range(4):
        sent = as_json(messages, decoded, **form)
        assert drive.tracker.new_bytes("agent", sent, []) > 0
        call = drive.tracker.begin("agent", "target", sent, [], drive.begin([user("?")]).sampling)
        assert len(drive.tracker.calls[-1].new_messages) == (2 if turn == 0 else 1)
        messages += [drive.commit(call, said(f"{turn}")), user("More.")]  # another conversation takes its turn above
    assert decoded == [2, 2, 2, 2]
    again = as_json(messages[:-2], decoded, **form)
    assert drive.tracker.new_bytes("agent", again, []) == 0 and decoded[4:] == []


def test_any_conversation_has_the_same_calls_as_json_and_as_objects() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        drives = Drive(), Drive()
        messages = [system(), user("Go.")]
        for turn in range(8):
            agent = draw.choice(["one", "one", "other"])
            sampling = drives[0].begin([user("?")]).sampling
            drives[1].begin([user("?")])
            reply = called(f"c{turn}", "x") if draw.random() < 0.5 else said(f"Reply {turn}.")
            for drive, sent in zip(drives, (as_json(messages, []), copy.deepcopy(messages)), strict=True):
                call = drive.tracker.begin(agent, "target", sent, FixedTools([SEARCH]), sampling)
                drive.commit(call, reply, "said", logprobs=[-1.0] * (len(drive.sample("said")) + 1))
            again = copy.deepcopy(reply)
            if "tool_calls" in reply:
                again["tool_calls"][0]["id"] = draw.choice(["mine", f"c{turn}"])
                messages += [again, result(again["tool_calls"][0]["id"], "found")]
            else:
                messages += [again, user(draw.choice(["More.", "1"]))]
            if draw.random() < 0.3:  # the client rewrites what came before
                at = draw.randrange(1, len(messages))
                messages[at:] = [user(f"In short: {turn}")] if draw.random() < 0.5 else messages[at : at + 1]
        told = [
            [
                (c.extends, c.turn, c.new_messages, c.fork and c.fork.reason, c.prompt_tokens)
                for c in drive.tracker.calls
            ]
            for drive in drives
        ]
        assert told[0] == told[1]


def test_a_result_is_linked_by_the_ids_of_its_own_agent_even_if_another_sent_the_same_call_with_others() -> None:
    drive = Drive()
    reply = called("call_1", "x")
    messages = start(drive, reply, text="call", tools=[SEARCH])[:-1]
    mine, others = copy.deepcopy(reply), copy.deepcopy(reply)
    mine["tool_calls"][0]["id"], others["tool_calls"][0]["id"] = "mine", "others"
    sampling = drive.begin([user("?")]).sampling
    for agent, sent in (("agent", [*messages, mine]), ("other", [*messages, others])):
        drive.tracker.begin(agent, "target", as_json(sent, []), [SEARCH], sampling)
    call = drive.tracker.begin("agent", "target", as_json([*messages, mine, result("mine", "found")], []), [], sampling)
    assert call.extends is None or call.extends == "call-0"
    assert drive.tracker.calls[-1].new_messages[-1] == result("call_1", "found")


def test_a_prompt_that_is_still_held_does_not_change_when_its_call_is_extended() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    held, was = [], []
    for turn in range(4):
        call = drive.ask(messages, said(f"Reply {turn}."))
        held.append(call.prompt_ids)
        was.append(list(call.prompt_ids))
        messages.append(user("More."))
    del call
    assert held == was
    grows = id(held.pop())  # nobody else holds the last one any more
    held.clear()
    assert id(drive.ask(messages, said("Done.")).prompt_ids) == grows


def test_a_function_call_of_before_there_were_tools_is_read_as_one() -> None:
    raw = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "done"},
    ]
    _, called, result = plain_messages(raw)
    assert called["tool_calls"] == [{"id": "", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert result["role"] == "tool"
