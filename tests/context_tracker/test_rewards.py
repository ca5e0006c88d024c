"""The end of an episode: limits, masks, abandoned replies, rewards, the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ajet.context_tracker.tracker import FinishedCalls
from ajet.schema.chat import Sampling
from ajet.schema.episode import Outcome
from ajet.schema.errors import (
    AbnormalOutputError,
    ContextOverflowError,
    RewardError,
    TooManyStepsError,
)
from ajet.trainer.credit import summarise
from ajet.trainer.credit.summary import returns_of
from support.tracker_helpers import SEARCH, WIDE, Drive, assert_faithful, called, episode_of, said, system, user


def linear(drive: Drive, turns: int = 3, **options: Any) -> list[dict[str, Any]]:
    messages = [system(), user("Go.")]
    for turn in range(turns):
        drive.ask(messages, said(f"Answer {turn}."), **options)
        messages.append(user("More."))
    return messages


# ---------------------------------------------------------------- limits


def test_a_prompt_without_room_is_refused_in_openai_s_words() -> None:
    drive = Drive(settings=replace(WIDE, max_model_len=60))
    messages = [user("Go.")]
    with pytest.raises(
        ContextOverflowError, match=r"maximum context length is 60 tokens.*resulted in \d+ tokens"
    ) as caught:
        for _ in range(9):
            drive.ask(messages, said("Yes, quite so."))
            messages.append(user("More of this, please."))
    assert caught.value.code == "context_length_exceeded" and caught.value.http_status == 400
    assert drive.tracker.outcomes == {Outcome.OVERFLOW}
    episode = drive.tracker.finish(0.5)
    assert episode.outcomes == (Outcome.OVERFLOW,) and episode.ledger.trained > 0


def test_max_tokens_is_the_smallest_of_all_limits() -> None:
    settings = replace(WIDE, max_model_len=100, max_response_length_in_one_turn=50)
    drive = Drive(settings=settings)
    prompt = len(drive.begin([user("Go.")]).prompt_ids)
    assert drive.begin([user("Go.")]).sampling.max_tokens == min(50, 100 - prompt)
    assert drive.begin([user("Go.")], sampling=Sampling(max_tokens=7)).sampling.max_tokens == 7
    roomy = Drive(settings=replace(settings, max_model_len=prompt + 5))
    assert roomy.begin([user("Go.")]).sampling.max_tokens == 5


def test_the_end_tokens_stop_the_engine_unless_it_is_told_to_ignore_them() -> None:
    drive = Drive("chatml")
    assert set(drive.begin([user("Go.")]).sampling.stop_token_ids) == drive.renderer.end_ids
    assert drive.begin([user("Go.")], sampling=Sampling(ignore_eos=True)).sampling.stop_token_ids == ()


def test_each_agent_has_its_steps() -> None:
    drive = Drive(settings=replace(WIDE, max_steps=2))
    linear(drive, 2)
    with pytest.raises(TooManyStepsError, match="max_steps"):
        drive.begin([user("Go.")])
    assert drive.tracker.outcomes == {Outcome.MAX_STEPS}
    drive.begin([user("Go.")], agent="other")
    drive.begin([user("Go.")], agent="other", choice=1)
    aborted = drive.begin([user("Go.")], agent="other")
    drive.tracker.abort(aborted.call_id, "engine failure")
    drive.begin([user("Go.")], agent="other")


def test_the_last_reply_cut_by_length_is_an_outcome() -> None:
    drive = Drive()
    messages = [user("Go.")]
    drive.ask(messages, said("It is"), finish="length")
    assert drive.tracker.outcomes == {Outcome.LENGTH}
    drive.ask([user("Again.")], said("It is 4."))
    assert drive.tracker.outcomes == set()


def test_an_abnormal_reply_is_recorded_and_ends_the_episode() -> None:
    drive = Drive()
    with pytest.raises(AbnormalOutputError, match="nonsense: the words 'so'"):
        drive.ask([user("Go.")], said("so " * 80))
    with pytest.raises(AbnormalOutputError, match="ended after an abnormal reply"):
        drive.begin([user("Go.")])
    episode = drive.tracker.finish(-1.0)
    assert episode.outcomes == (Outcome.ABNORMAL,) and episode.ledger.trained == len(drive.seen["call-0"][1])


def test_checks_may_only_mark_or_be_off() -> None:
    drive = Drive(settings=replace(WIDE, terminate_on_abnormal=False))
    drive.ask([user("Go.")], said("so " * 80))
    assert drive.tracker.outcomes == {Outcome.ABNORMAL}
    off = Drive(settings=replace(WIDE, checks=()))
    off.ask([user("Go.")], said("so " * 80))
    assert off.tracker.outcomes == set()


# ---------------------------------------------------------------- masks


def test_calls_that_are_context_only() -> None:
    drive = Drive()
    messages = linear(drive, 2)
    drive.ask(messages, said("Helper's word."), trainable=False)
    messages.append(user("More."))
    drive.ask(messages, said("Mine."))
    episode = drive.tracker.finish(1.0)
    assert episode.ledger.masked == {"not_trainable": len(drive.seen["call-2"][1])}
    assert_faithful(drive, episode.tree, expected_samples=1)


def test_the_reply_of_a_failed_episode_is_dropped_not_lost() -> None:
    drive = Drive()
    linear(drive)
    drive.begin([user("in flight")])
    episode = drive.tracker.finish(None, failed=True)
    assert episode.reward is None
    assert episode.ledger.dropped == {"failed_episode": episode.ledger.captured}
    assert episode.tree.trained_tokens == 0
    assert episode.tree.calls[-1].drop == "aborted"


def test_a_failure_with_a_configured_reward_is_trained() -> None:
    drive = Drive()
    linear(drive)
    episode = drive.tracker.finish(-1.0)
    assert episode.reward == -1.0 and episode.ledger.trained == episode.ledger.captured


# ---------------------------------------------------------------- abandoned replies


def retry(drive: Drive, *, agent: str = "agent") -> list[dict[str, Any]]:
    messages = [system(), user("Go.")]
    drive.ask([*messages], said("Bad."), agent=agent)
    drive.ask(messages, said("Good."), agent=agent)
    return messages


def drops(drive: Drive, **fields: Any) -> list[str | None]:
    return [call.drop for call in drive.tracker.finish(1.0, **fields).tree.calls]


def test_a_retried_reply_is_abandoned_for_the_later_one() -> None:
    drive = Drive()
    retry(drive)
    episode = drive.tracker.finish(1.0)
    assert [call.drop for call in episode.tree.calls] == ["abandoned", None]
    assert episode.ledger.masked == {"abandoned": len(drive.seen["call-0"][1])}


def test_the_reply_that_was_built_upon_stays_even_if_it_came_first() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    first = drive.begin(messages)
    drive.commit(first, said("Good."))
    drive.ask([*messages], said("Bad."))
    drive.ask([*messages, said("Good."), user("More.")], said("Done."))
    assert drops(drive) == [None, "abandoned", None]


def test_a_reply_counts_as_built_upon_in_a_branch_too() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    drive.ask([*messages], said("Good."))
    drive.ask([*messages], said("Bad."))
    drive.ask([*messages, said("Good."), user("More.")], said("Done."), kwargs={"other": 1})
    assert drops(drive) == [None, "abandoned", None]


def test_replies_drawn_side_by_side_with_nothing_built_on_any_are_all_kept() -> None:
    drive = Drive()
    calls = [drive.begin([user("Vote.")]) for _ in range(4)]
    for index, call in enumerate(calls):
        drive.commit(call, said(f"{index}"))
    assert drops(drive) == [None] * 4


def test_the_workflow_s_output_tells_which_reply_was_used() -> None:
    drive = Drive()
    calls = [drive.begin([user("Vote.")]) for _ in range(3)]
    for call, text in zip(calls, ("red", "green", "blue"), strict=True):
        drive.commit(call, said(text))
    assert drops(drive, output="The answer is green.") == ["abandoned", None, "abandoned"]


def test_losers_stay_abandoned_if_the_winner_is_only_known_later() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    for text in ("Bad.", "Good.", "Worse."):
        drive.ask([*messages], said(text))
    drive.ask([*messages, said("Good."), user("More.")], said("Done."))
    assert drops(drive) == ["abandoned", None, "abandoned", None]


@pytest.mark.parametrize("extended", [True, False])
def test_a_retry_that_says_the_same_again_counts_once(extended: bool) -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    for _ in range(3):
        drive.ask([*messages], said("Good."))
    follow = drive.ask([*messages, said("Good."), user("More.")], said("Done."), kwargs={} if extended else {"a": 1})
    kept = int(follow.extends.removeprefix("call-")) if follow.extends else 2
    assert drops(drive) == [None if index == kept else "abandoned" for index in range(3)] + [None]


def test_equal_replies_drawn_side_by_side_all_count() -> None:
    drive = Drive()
    for call in [drive.begin([user("Vote.")]) for _ in range(3)]:
        drive.commit(call, said("red"))
    assert drops(drive, output="The answer is red.") == [None] * 3


def test_equal_answers_that_are_returned_all_count() -> None:
    """As of a vote that is taken in turn; what lost it isn't in the output."""
    drive = Drive()
    for text in ("red", "blue", "red"):
        drive.ask([user("Vote.")], said(text))
    assert drops(drive, output="The answer is red.") == [None, "abandoned", None]


def run_of_agent(drive: Drive, first: str, seen: str, last: str, *, rewritten: bool, agent: str = "agent") -> None:
    """A conversation of two calls that begins with the same prompt as any other."""
    messages = [system(), user("Go.")]
    drive.ask([*messages], said(first), agent=agent)
    messages += [said(f"Calling tools: {seen}" if rewritten else first), user(f"Observation: {seen}")]
    drive.ask(messages, said(last), agent=agent)


@pytest.mark.parametrize("rewritten", [True, False])
def test_a_second_run_does_not_take_the_place_of_the_first(rewritten: bool) -> None:
    drive = Drive()
    run_of_agent(drive, "Look for cats.", "cats", "41", rewritten=rewritten)
    run_of_agent(drive, "Look for dogs.", "dogs", "42", rewritten=rewritten)
    assert drops(drive) == [None] * 4


@pytest.mark.parametrize("rewritten", [True, False])
def test_nor_does_one_that_went_the_same_way(rewritten: bool) -> None:
    """The last calls have the same prompt, too: the agent went back to its beginning between them."""
    drive = Drive()
    for last in ("41", "42"):
        run_of_agent(drive, "Look for cats.", "cats", last, rewritten=rewritten)
    assert drops(drive) == [None] * 4


def test_a_second_run_of_one_call_keeps_its_reply() -> None:
    drive = Drive()
    run_of_agent(drive, "Look for cats.", "cats", "41", rewritten=False)
    drive.ask([system(), user("Go.")], said("42"))
    assert drops(drive) == [None] * 3


def test_a_retry_within_a_run_is_still_abandoned() -> None:
    drive = Drive()
    run_of_agent(drive, "Look for cats.", "cats", "41", rewritten=True)
    drive.ask([system(), user("Go.")], said("Look for"))
    run_of_agent(drive, "Look for dogs.", "dogs", "42", rewritten=True)
    drive.ask([system(), user("Go."), said("Calling tools: dogs"), user("Observation: dogs")], said("43"))
    assert drops(drive) == [None, None, "abandoned", None, "abandoned", None]


def test_other_agents_do_not_part_a_retry_from_its_like() -> None:
    drive = Drive()
    messages = [system(), user("Go."), said("Given."), user("More.")]
    drive.ask([*messages], said("Bad."))
    drive.ask(messages[:2], said("Mine."), agent="other")
    drive.ask([*messages], said("Good."))
    assert drops(drive) == ["abandoned", None, None]


def test_replies_that_a_later_request_quotes_were_used() -> None:
    drive = Drive()
    retry(drive)
    drive.ask([user("Which is better?\n1. Bad.\n2. Good.")], said("The second."))
    assert drops(drive) == [None, None, None]
    chosen = Drive()
    messages = retry(chosen)
    chosen.ask([user("Which is better?\n1. Bad.\n2. Good.")], said("The second."))
    chosen.ask([*messages, said("Good."), user("More.")], said("Done."))
    assert drops(chosen) == ["abandoned", None, None, None]


def test_a_text_that_the_prompt_holds_is_no_quote() -> None:
    drive = Drive()
    for move in ("up", "up", "left"):
        drive.ask([user("Go up or left.")], said(move))
    assert drops(drive) == ["abandoned", "abandoned", None]


def test_a_final_answer_may_be_the_argument_of_a_tool_call() -> None:
    drive = Drive()
    for index, answer in enumerate(("41", "42", "43")):
        drive.ask([user("Go.")], called(f"c{index}", answer), tools=[SEARCH])
    assert drops(drive, output="41\n42") == [None, None, "abandoned"]


def test_other_agents_single_replies_and_own_rewards_are_never_abandoned() -> None:
    drive = Drive()
    drive.ask([user("Go.")], said("A."), agent="a")
    drive.ask([user("Go.")], said("B."), agent="b")
    retry(drive, agent="c")
    drive.tracker.reward(-1.0, call="call-2")
    assert drops(drive) == [None] * 4


def test_the_same_messages_with_other_tools_or_template_arguments_are_no_retry() -> None:
    drive = Drive("qwen3")
    for differing in ({"tools": [SEARCH]}, {"kwargs": {"enable_thinking": False}}, {}):
        drive.ask([user("Go.")], said("Good."), **differing)
    assert drops(drive) == [None, None, None]


def test_prompts_of_token_ids_are_retried_built_upon_and_run_again_like_those_of_messages() -> None:
    drive = Drive()

    def ask(prompt: list[int], text: str) -> list[int]:
        call = drive.tracker.begin_tokens("agent", "target", drive.renderer.read_tokens(prompt), Sampling())
        drive.commit(call, said(text))
        return [*prompt, *drive.seen[call.call_id][1]]

    ask([7, 8], "Bad.")
    ask([*ask([7, 8], "Good."), 9], "Done.")
    ask([7, 8], "A second run.")
    ask([*ask([7, 8], "First."), 9], "The winner is the first.")
    ask([7, 8], "Not used.")
    assert drops(drive) == ["abandoned", None, None, "abandoned", None, None, None]
    assert_faithful(drive, drive.tracker.tree)


def test_abandoned_calls_can_be_trained() -> None:
    drive = Drive(settings=replace(WIDE, abandoned_calls="train"))
    retry(drive)
    assert drops(drive) == [None, None]


# ---------------------------------------------------------------- rewards


def returns_to_go(calls: FinishedCalls) -> list[float]:
    return returns_of(summarise(episode_of(calls)), gamma=1.0).to_go


def test_a_list_of_rewards_goes_to_the_calls() -> None:
    drive = Drive()
    linear(drive)
    episode = drive.tracker.finish([0.0, 0.5, 1.0])
    assert [call.reward for call in episode.tree.calls] == [0.0, 0.5, 1.0]
    assert episode.reward == 1.5
    assert returns_to_go(episode) == [1.5, 1.5, 1.0]  # the sum, to go: no outcome comes on top


def test_a_list_of_rewards_follows_messages_not_tokens() -> None:
    drive = Drive()
    messages = [user("Go.")]
    for finish in ("length", "stop", "stop"):
        drive.ask(messages, said("It is"), finish=finish)
        messages.append(user("More."))
    episode = drive.tracker.finish([0.0, 0.5, 1.0])
    assert [call.extends for call in episode.tree.calls] == [-1, -1, 1]  # nothing goes on from a cut reply
    assert [call.reward for call in episode.tree.calls] == [0.0, 0.5, 1.0]
    assert returns_to_go(episode) == [1.5, 1.5, 1.0]
    shortened = Drive()
    messages = [user("Go.")]
    shortened.ask(messages, said("A long answer."))
    shortened.ask([user("Go."), said("An answer."), user("More.")], said("Done."))
    assert shortened.tracker.finish([0.25, 0.5]).reward == 0.75


def test_rewards_of_calls_and_agents() -> None:
    drive = Drive()
    linear(drive)
    drive.ask([user("Judge.")], said("Good."), agent="judge")
    drive.tracker.reward(0.25, call="call-1")
    drive.tracker.reward(2, agent="judge")
    episode = drive.tracker.finish(1.0)
    assert [call.reward for call in episode.tree.calls] == [None, 0.25, None, None]
    assert episode.agent_rewards == {"judge": 2.0} and episode.reward == 1.0


def test_a_call_s_reward_adds_to_the_outcome_unless_it_replaces_it() -> None:
    drive = Drive()
    linear(drive)
    drive.tracker.reward(0.25, call="call-2")
    assert returns_to_go(drive.tracker.finish(1.0)) == [1.25, 1.25, 1.25]
    replacing = Drive()
    linear(replacing)
    replacing.tracker.reward(0.25, call="call-2", replace=True)
    episode = replacing.tracker.finish(1.0)
    assert episode.reward == 1.0 and episode.tree.calls[2].replaces_outcome
    assert returns_to_go(episode) == [0.25, 0.25, 0.25]


def test_only_a_call_s_reward_can_replace_the_outcome() -> None:
    drive = Drive()
    linear(drive, 1)
    with pytest.raises(RewardError, match=r"replace=True.*needs call="):
        drive.tracker.reward(1.0, replace=True)


def test_the_episode_s_reward_may_be_given_by_the_workflow() -> None:
    drive = Drive()
    linear(drive)
    drive.tracker.reward(0.75)
    assert drive.tracker.finish(None).reward == 0.75
    crashed = Drive()
    linear(crashed)
    crashed.tracker.reward(0.75)
    assert crashed.tracker.finish(None, failed=True).reward is None


def test_a_list_needs_one_agent_without_branches() -> None:
    several = Drive()
    linear(several, 1)
    several.ask([user("x")], said("y"), agent="other")
    with pytest.raises(RewardError, match=r"single agent.*tuner\.reward"):
        several.tracker.finish([1.0, 1.0])
    branched = Drive()
    retry(branched)
    with pytest.raises(RewardError, match=r"does not continue.*tuner\.reward"):
        branched.tracker.finish([1.0, 1.0])
    short = Drive()
    linear(short)
    with pytest.raises(RewardError, match="1 rewards for 3 model calls"):
        short.tracker.finish([1.0])
    assert short.tracker.finish(1.0).reward == 1.0  # the error left the episode open


def test_rewards_for_nobody_are_refused() -> None:
    drive = Drive()
    linear(drive, 1)
    for call in ("call-9", "", "lc_run--1"):
        with pytest.raises(RewardError, match=r"no such call; it has call-0: .*response_metadata"):
            drive.tracker.reward(1.0, call=call)
    with pytest.raises(RewardError, match="no such agent"):
        drive.tracker.reward(1.0, agent="nobody")
    with pytest.raises(RewardError, match="not both"):
        drive.tracker.reward(1.0, call="call-0", agent="agent")


def test_times_and_sampling_are_recorded() -> None:
    drive = Drive()
    linear(drive, 2)
    calls = drive.tracker.finish(1.0).tree.calls
    assert calls[1].started_s >= calls[0].started_s >= 0 and calls[0].seconds >= 0
    assert calls[0].sampling.max_tokens == WIDE.max_response_length_in_one_turn
    assert [call.turn for call in calls] == [0, 1]
