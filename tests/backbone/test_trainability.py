"""AuditFigures, holes and the verdict of `ajet audit`, without any episode that was really played."""

from __future__ import annotations

import numpy as np
import pytest

from ajet.backbone.trainability import (
    CONVERSATION,
    ECHO,
    EMPTY,
    FORMAT,
    GOLD,
    LONGEST,
    ONE_TURN,
    SHORTEST,
    TURNS,
    WHAT,
    AuditFigures,
    LengthLimits,
    Probe,
    Probed,
    figures,
    find_hole,
    quoted,
    verdict,
)
from ajet.schema.episode import Call, CallTree, Episode, EpisodeGroup, EpisodeStatus, Failure, Ledger, Outcome, Run

LIMITS = LengthLimits(reply=8, conversation=100, turns=5)


def episode(
    reward: float | None, *, tokens: int = 4, prompt: int = 10, cut: bool = False, logprob: float = -0.5, **more: object
) -> Episode:
    runs = [Run(np.zeros(prompt, np.int32), -1, 0), Run(np.zeros(tokens, np.int32), 0, prompt, call=0)]
    call = Call("c", "a", "t", 0, prompt_run=0, prompt_tokens=prompt, run=1, finish_reason="length" if cut else "stop")
    call.logprobs = np.full(tokens, logprob, np.float32)
    status = EpisodeStatus.WORKFLOW_ERROR if reward is None else EpisodeStatus.COMPLETED
    failure = Failure("ValueError", "no") if reward is None else None
    tree = CallTree(runs, [call])
    return Episode("e", "t", status, tree, Ledger(), reward=reward, failure=failure, **more)  # type: ignore[arg-type]


def measured(*groups: list[Episode]) -> AuditFigures:
    return figures([EpisodeGroup(str(n), str(n), group) for n, group in enumerate(groups)], LIMITS, 1.0)


def decided(*groups: list[Episode], hole: str | None = None, batch: int = 8) -> tuple[str, str, int | None]:
    found = verdict(measured(*groups), hole, LIMITS, batch)
    return found.what, found.key, found.value


def test_figures_are_those_of_the_usable_episodes() -> None:
    found = measured([episode(1.0), episode(0.0)], [episode(0.0), episode(0.0), episode(None)], [episode(None)])
    assert (found.tasks, found.episodes, found.usable) == (2, 6, 4)
    assert found.failures == {"workflow_error, ValueError: no": 2}
    assert found.pass_at[1].value == 0.25 and found.pass_at[2].value == 0.5
    assert found.mixed is not None and found.mixed.value == 0.5
    assert found.reward == (0, 0.25, 1)


def test_a_group_of_one_says_nothing_about_groups() -> None:
    assert measured([episode(1.0)], [episode(None)]).mixed is None
    assert measured([episode(None)]).pass_at == {}


@pytest.mark.parametrize(
    ("played", "key"),
    [
        (episode(0.0, tokens=8, cut=True), ONE_TURN),
        (episode(0.0, tokens=5, prompt=95, cut=True), CONVERSATION),
        (episode(0.0, outcomes=(Outcome.OVERFLOW,)), CONVERSATION),
        (episode(0.0, outcomes=(Outcome.MAX_STEPS,)), TURNS),
        (episode(0.0, tokens=3, cut=True), "max_tokens of your workflow's requests"),
    ],
)
def test_the_limit_that_cuts_is_named(played: Episode, key: str) -> None:
    what, named, value = decided([played, episode(1.0)])
    assert (what, named) == ("change limits", key)
    assert value == {ONE_TURN: 16, CONVERSATION: 200, TURNS: 10}.get(key)


def test_what_there_is_to_do() -> None:
    right, wrong = episode(1.0), episode(0.0)
    assert decided([right, wrong])[0] == "train"
    assert decided([right, wrong], hole="it is paid for nothing")[0] == "change the reward"
    assert decided([wrong, wrong])[0] == "imitate first"
    assert decided([right, right])[0] == "change the reward"
    assert decided([right, wrong], *[[wrong, wrong]] * 9, batch=8)[0] == "imitate first"
    assert decided([right, wrong], *[[wrong, wrong]] * 7, batch=8)[0] == "train"


def test_noise_is_not_cured_by_longer_replies_and_a_cut_may_be_meant() -> None:
    noise = episode(0.0, tokens=8, cut=True, logprob=-6)
    assert decided([noise, noise])[0] == "imitate first"
    short = [episode(float(number % 2), tokens=8, cut=True) for number in range(4)]
    assert decided(short)[0] == "train"


def probes(**rewards: float | None) -> Probed:
    names = {kind.replace(" ", "_"): kind for kind in (GOLD, *WHAT)}
    return Probed(
        [
            Probe(
                names[name], f"t{task}", f"a {name}", reward, reward == 1, "" if reward is not None else "boom", False
            )
            for name, reward in rewards.items()
            for task in range(2)
        ]
    )


def test_a_sound_reward_has_no_hole() -> None:
    assert find_hole(probes(gold=1, empty=0, echo=0, format_only=0.2, longest=0, shortest=0), (0, 1), 1.0) is None
    assert find_hole(probes(empty=0, echo=0), (0, 0), 1.0) is None
    assert find_hole(probes(gold=1, empty=0.5, echo=0.75), (0, 1), 1.0, relative=True) is None
    assert find_hole(probes(gold=1, empty=None), (0, 1), 1.0) is None


@pytest.mark.parametrize("kind", [EMPTY, ECHO, FORMAT, LONGEST, SHORTEST])
def test_each_hole_is_named_with_its_reply(kind: str) -> None:
    given = {"gold": 1.0, **dict.fromkeys(("empty", "echo", "format_only", "longest", "shortest"), 0.0)}
    name = kind.replace(" ", "_")
    hole = find_hole(probes(**{**given, name: 0.8}), (0, 1), 1.0)
    assert hole == f"{WHAT[kind]} is rewarded in 2 of 2 tasks: 'a {name}' earns 0.8, the right answer 1"


def test_a_right_answer_must_earn_more_than_a_wrong_one() -> None:
    for rewards in ({"gold": 0, "empty": 0}, {"gold": 0.5, "empty": 0.5}, {"gold": -1, "empty": 0}):
        hole = find_hole(probes(**rewards), (rewards["empty"], rewards["empty"]), 1.0)
        assert hole is not None and hole.startswith("the right answer earns no more than a wrong one: 'a gold'")
    assert find_hole(probes(gold=0.25, empty=0.5), (0, 1), 1.0, relative=True) is not None


def test_a_reward_that_pays_every_reply_the_same_is_a_hole_even_below_a_success() -> None:
    assert find_hole(probes(empty=0.7, echo=0.7), (0.7, 0.7), 1.0) == "every reply earns 0.7, whatever it says"
    assert find_hole(probes(empty=0.7, echo=0.7), (0.7, 0.8), 1.0) is None
    assert find_hole(probes(gold=1, empty=0.5, echo=0.5), (0.5, 0.5), 1.0) is None
    assert find_hole(probes(empty=0.7, echo=0.7), (0.7, 0.7), 1.0, relative=True) is None


def test_a_judge_that_raises_on_a_probe_is_a_hole() -> None:
    probed = probes(gold=1)
    probed.probes.append(Probe(EMPTY, "t0", "", None, False, "judge_error, IndexError: 0", judge_failed=True))
    assert find_hole(probed, (0, 1), 1.0) == "the judge fails on an empty reply (''): judge_error, IndexError: 0"


def test_long_replies_are_shown_short() -> None:
    assert quoted("x" * 1000) == f"'{'x' * 49}…{'x' * 24}' (1,000 characters)"
