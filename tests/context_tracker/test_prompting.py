"""Why conversations fork: one line per fork, and the most expensive reasons of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ajet.context_tracker import describe_reasons
from ajet.schema.episode import ROOT, Episode, EpisodeStatus, Fork
from ajet.trainer.credit import summarise
from support.tracker_helpers import WIDE, Drive, called, result, said, system, user


def last_fork(drive: Drive) -> Fork:
    fork = drive.tracker.calls[-1].fork
    assert fork is not None
    return fork


def test_an_ordinary_conversation_has_no_forks() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    for turn in range(3):
        drive.ask(messages, said(f"{turn}"))
        messages.append(user("More."))
    drive.ask([*messages], said("a"))
    drive.ask([*messages], said("b"))  # a retry costs nothing
    drive.ask([system("Another agent."), user("Hello")], said("c"), agent="other")
    assert all(call.fork is None for call in drive.tracker.calls)


def test_it_says_which_characters_of_a_reply_were_changed() -> None:
    drive = Drive()
    drive.ask([system(), user("Go.")], said("The answer is forty-two."))
    drive.begin([system(), user("Go."), said("The answer is forty-three."), user("Sure?")])
    fork = last_fork(drive)
    assert fork.reason == "reply_changed"
    assert (
        fork.detail == "messages[2].content: 'nswer is forty-two.' became 'nswer is forty-three.' (from character 21)"
    )


def test_it_says_that_a_tool_call_was_changed() -> None:
    drive = Drive()
    drive.ask([user("Go.")], called("c", "red"), text="x")
    drive.begin([user("Go."), called("c", "blue"), result("c", "found")])
    assert last_fork(drive).detail.startswith("messages[1].tool_calls: ") and "blue" in last_fork(drive).detail


def test_a_rewritten_memory_costs_what_is_rendered_again() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    for turn in range(4):
        drive.ask(messages, said(f"Answer {turn}."))
        messages.append(user("More."))
    call = drive.begin([system(), user("So far: four answers.")])
    fork = last_fork(drive)
    assert fork.reason == "history_rewritten" and fork.detail.startswith("messages[1].content")
    shared = len(drive.renderer.render([system()], add_generation_prompt=False))
    assert len(call.prompt_ids) - shared - 3 <= fork.tokens <= len(call.prompt_ids) - shared


def test_a_role_may_change_too() -> None:
    drive = Drive()
    drive.ask([system("x"), user("Go.")], said("Yes."))
    drive.begin([user("x"), user("Go."), said("Yes."), user("More.")])
    assert "role: 'system' became 'user'" in last_fork(drive).detail


def test_forks_are_not_looked_for_when_nobody_asks() -> None:
    drive = Drive(settings=replace(WIDE, detect_forks=False))
    drive.ask([user("Go.")], said("Yes."))
    call = drive.begin([user("Go."), said("No."), user("More.")])
    assert call.extends is None and drive.tracker.calls[-1].fork is None


@pytest.mark.parametrize("explained", [True, False])
def test_credit_is_the_same_whether_forks_are_explained_or_not(explained: bool) -> None:
    """The winner was cut, so the next call is rendered whole: only its fork says which reply it went on from."""
    drive = Drive(settings=replace(WIDE, detect_forks=explained))
    winner, loser = drive.begin([user("Go.")]), drive.begin([user("Go.")])
    drive.commit(winner, said("Left"), finish="length")
    drive.commit(loser, said("Right"), finish="length")
    drive.ask([user("Go."), said("Left"), user("More.")], said("Done."))
    finished = drive.tracker.finish(1.0)
    episode = Episode("e", "t", EpisodeStatus.COMPLETED, finished.tree, finished.ledger, reward=1.0)
    assert [call.next for call in summarise(episode).calls] == [2, ROOT, ROOT]


def test_the_most_expensive_reasons_come_first() -> None:
    trees = []
    for length in (1, 30):
        drive = Drive()
        drive.ask([system(), user("Go.")], said("Yes."))
        drive.ask([system("Be rude. " * length), user("Go."), said("Yes."), user("More.")], said("a"))
        drive.ask([system(), user("Go."), said("No."), user("More.")], said("b"))
        trees.append(drive.tracker.finish(1.0).tree)
    changed, reply = describe_reasons(trees)
    assert changed.startswith("2 × message_changed (") and "messages[0].content" in changed
    assert reply.startswith("2 × reply_changed (") and int(changed.split()[3][1:]) > int(reply.split()[3][1:]) > 0
    assert describe_reasons([]) == []


def test_a_reason_that_says_all_has_no_example() -> None:
    drive = Drive()
    drive.ask([user("Go.")], said("Yes."), finish="length")
    drive.ask([user("Go."), said("Yes."), user("More.")], said("b"))
    (line,) = describe_reasons([drive.tracker.finish(1.0).tree])
    assert line.startswith("1 × reply_cut_by_length (") and line.endswith(" tokens rendered again)")


def test_a_later_reply_that_was_edited_is_named_although_an_earlier_one_matches() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    for turn in range(3):
        drive.ask(messages, said(f"Answer {turn}."))
        messages.append(user("More."))
    messages[4] = said("Answer one.")
    call = drive.begin(messages)
    assert call.extends == "call-0"
    fork = last_fork(drive)
    assert (fork.reason, fork.nearest) == ("reply_changed", 2)
    assert fork.detail.startswith("messages[4].content: 'Answer 1.' became 'Answer one.'")
    assert fork.tokens > 10


def test_an_edited_tool_result_is_named_although_the_call_before_it_matches() -> None:
    drive = Drive()
    messages = [user("Go.")]
    drive.ask(messages, called("c", "red"), text="x")
    messages.append(result("c", "found, after a long search, on the third shelf"))
    drive.ask(messages, said("There."))
    messages[2] = result("c", "found")
    call = drive.begin([*messages, user("Sure?")])
    assert call.extends == "call-0"
    fork = last_fork(drive)
    assert (fork.reason, fork.nearest) == ("message_changed", 1)
    assert fork.detail.startswith("messages[2].content: ")


def test_a_conversation_that_another_agent_goes_on_with_has_no_fork() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    drive.ask(messages, said("One."), agent="a")
    messages.append(user("More."))
    drive.ask(messages, said("Two."), agent="b")
    messages.append(user("More."))
    assert drive.begin(messages, agent="a").extends == "call-1"
    assert all(call.fork is None for call in drive.tracker.calls)
