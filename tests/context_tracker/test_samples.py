"""Linear samples: the fewest rows, once or multiplicity, truncation, and where every token went."""

from __future__ import annotations

from typing import Any

import pytest

from ajet.context_tracker import linear_samples
from ajet.context_tracker.messages import SharedTokenLoss, TrackerSettings
from ajet.context_tracker.samples import episode_samples
from ajet.schema.episode import CallTree, Ledger, Sample
from support.tracker_helpers import Drive, episode_of, said, system, user


def rows(
    tree: CallTree, *, loss: SharedTokenLoss = "once", prompt: int = 10**6, response: int = 10**6, count: int = 10**6
) -> tuple[list[Sample], Ledger]:
    return linear_samples(
        tree, shared_token_loss=loss, max_prompt_length=prompt, max_response_length=response, max_samples=count
    )


def linear_tree(turns: int = 4) -> tuple[Drive, CallTree]:
    drive = Drive()
    messages = [system(), user("Go.")]
    for turn in range(turns):
        drive.ask(messages, said(f"Answer {turn}."))
        messages.append(user("More, please."))
    return drive, drive.tracker.finish(1.0).tree


def forked_tree(branches: int = 3) -> tuple[Drive, CallTree]:
    """One shared reply, then several different next questions."""
    drive = Drive()
    messages = [system(), user("Go.")]
    drive.ask(messages, said("The shared reply."))
    for branch in range(branches):
        drive.ask([*messages, user(f"Question {branch}")], said("Answer " + "and more " * branch + "."))
    return drive, drive.tracker.finish(1.0).tree


def trained_ids(sample: Sample, call: int) -> list[int]:
    return [int(i) for i in sample.response_ids[sample.response_mask & (sample.call_of_token == call)]]


def test_a_row_begins_with_the_first_prompt_and_holds_all_replies() -> None:
    drive, tree = linear_tree()
    (sample,), ledger = rows(tree)
    assert sample.prompt_ids.tolist() == drive.seen["call-0"][0]
    for index in range(4):
        assert trained_ids(sample, index) == drive.seen[f"call-{index}"][1]
    assert ledger.trained == ledger.captured == sample.response_mask.sum()
    assert sample.agent == "agent"
    context = ~sample.response_mask
    assert (sample.call_of_token[context] == -1).all() and (sample.logprobs[context] == 0).all()
    assert (sample.logprobs[sample.response_mask] < 0).all()


def test_once_trains_a_shared_reply_in_the_first_row_only() -> None:
    drive, tree = forked_tree()
    samples, ledger = rows(tree)
    assert [bool(trained_ids(sample, 0)) for sample in samples] == [True, False, False]
    assert ledger.trained == ledger.captured
    multiple, ledger = rows(tree, loss="multiplicity")
    assert all(trained_ids(sample, 0) == drive.seen["call-0"][1] for sample in multiple)
    assert ledger.trained == ledger.captured  # a token counts once, however many rows hold it
    assert [s.prompt_ids.tolist() for s in multiple] == [drive.seen["call-0"][0]] * 3


def test_an_added_end_token_is_context_and_a_sampled_one_is_trained() -> None:
    for end in (True, False):
        drive = Drive()
        messages = [user("Go.")]
        drive.ask(messages, said("Yes."), end=end)
        drive.ask([*messages, user("More.")], said("No."))
        (sample,), _ = rows(drive.tracker.finish(1.0).tree)
        ends = sample.response_ids == drive.tokenizer.eos_token_id
        first_end = int(ends.argmax())
        assert bool(sample.response_mask[first_end]) is end


def test_too_many_samples_keep_those_with_most_trained_tokens() -> None:
    drive, tree = forked_tree(4)
    samples, ledger = rows(tree, count=2)
    assert [sorted(set(s.call_of_token[s.response_mask].tolist())) for s in samples] == [[0, 3], [4]]
    gone = sum(len(drive.seen[f"call-{index}"][1]) for index in (1, 2))
    assert ledger.dropped == {"too_many_samples": gone}
    assert ledger.trained + gone == ledger.captured


def test_a_response_is_cut_and_the_rest_goes_to_the_ledger() -> None:
    _, tree = linear_tree()
    whole = len(rows(tree)[0][0].response_ids)
    for limit in range(1, whole + 3):
        samples, ledger = rows(tree, response=limit)
        assert len(samples[0].response_ids) <= limit
        assert ledger.trained == samples[0].response_mask.sum()
        assert ledger.dropped.get("response_too_long", 0) == ledger.captured - ledger.trained
        assert samples[0].response_mask[-1]  # no context after the last trained token


def test_a_long_prompt_moves_into_the_response() -> None:
    drive, tree = linear_tree()
    prompt = len(drive.seen["call-0"][0])
    (short,), ledger = rows(tree, prompt=prompt - 5)
    assert len(short.prompt_ids) == prompt - 5 and not short.response_mask[:5].any()
    assert ledger.trained == ledger.captured
    none, ledger = rows(tree, prompt=3, response=prompt - 3)
    assert none == [] and ledger.dropped == {"prompt_too_long": ledger.captured}


def test_masked_calls_need_no_row_and_stay_as_context() -> None:
    drive = Drive()
    messages = [system(), user("Go.")]
    drive.ask(messages, said("Helper."), trainable=False)
    drive.ask([*messages, user("One")], said("First."))
    drive.ask([*messages, user("Two")], said("Second."), trainable=False)
    samples, ledger = rows(drive.tracker.finish(1.0).tree)
    assert len(samples) == 1
    assert ledger.masked == {"not_trainable": len(drive.seen["call-0"][1]) + len(drive.seen["call-2"][1])}
    assert trained_ids(samples[0], 0) == [] and trained_ids(samples[0], 1) == drive.seen["call-1"][1]
    helper = drive.seen["call-0"][0] + drive.seen["call-0"][1]
    assert samples[0].prompt_ids.tolist()[: len(helper)] == helper


def test_versions_change_within_a_reply() -> None:
    from ajet.schema.chat import Completion

    drive = Drive()
    call = drive.begin([user("Go.")])
    completion = Completion([5, 6, 7, 8], [-1.0] * 4, "length", versions=[(0, 3), (2, 4)])
    drive.tracker.commit(call.call_id, completion, said("x"))
    (sample,), _ = rows(drive.tracker.finish(1.0).tree)
    assert sample.versions.tolist() == [3, 3, 4, 4]


def test_an_episode_under_a_run_s_settings() -> None:
    drive, _ = Drive(), None
    drive.ask([user("Go.")], said("Yes."))
    episode = episode_of(drive.tracker.finish(1.0))
    samples, _ = episode_samples(episode, TrackerSettings(max_response_length=2))
    assert samples[0].episode_id == "episode" and len(samples[0].response_ids) == 2


@pytest.mark.parametrize("status", ["empty", "failed"])
def test_nothing_to_train_gives_no_rows(status: str) -> None:
    drive = Drive()
    reward: Any = 1.0
    if status == "failed":
        drive.ask([user("Go.")], said("Yes."))
        reward = None
    samples, ledger = rows(drive.tracker.finish(reward).tree)
    assert samples == [] and ledger.trained == 0
