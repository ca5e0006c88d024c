"""`Search`: budget, checks, what ends it, and what it compares."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest

from ajet.prompt_tuning import BudgetExhausted, Candidate, Kind, Purpose, Reply, Request, Score, Trial
from ajet.prompt_tuning.best_of import BestOf
from ajet.prompt_tuning.proposal import (
    Ask,
    SearchFailedError,
    UnusedTemplateError,
    messages_for,
    read_templates,
    refusal,
)
from ajet.prompt_tuning.trial import Budget, Limits, common_means
from ajet.schema.resources import PromptSet, PromptTemplate
from support.search_worlds import Editor, World, make_search, prompts


def says(*texts: str) -> Any:
    """A proposer that gives these replies, one after the other, the last for ever."""

    class Says(Editor):
        def answer(self, request: Request) -> str:
            return texts[min(len(self.requests), len(texts)) - 1]

    return Says()


def test_what_a_candidate_is_survives_the_history() -> None:
    candidate = Candidate("c3", prompts(), ("c0", "c1"), "merge", "because", 2)
    assert Candidate.from_record(candidate.to_record()) == candidate


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("  \n", "empty"),
        ("x" * 20_000 + "{question}", "20,010 characters; at most 20,000"),
        ("Solve it", r"lacks the placeholder \{question\}"),
        ("{question} {hint}", r"nothing fills \{hint\}; the placeholders are: \{question\}"),
        ('{question} like {"a": 1}', r"\{\{ and \}\}"),
        ("{question", r"\{\{ and \}\}"),
        ("Solve: {question}", "the same as the template that it should improve"),
        ("Known {question}", "the same as an earlier proposal"),
    ],
)
def test_a_bad_proposal_is_refused_with_words_to_act_on(text: str, why: str) -> None:
    wrong = refusal(prompts(), {"solver": text}, prompts(), [prompts("Known {question}").version])
    assert re.search(why, wrong), wrong


def test_jinja_placeholders_are_checked_too() -> None:
    start = PromptSet({"solver": PromptTemplate("{{ question }}", "jinja")})
    assert "lacks the placeholder {{ question }}" in refusal(start, {"solver": "nothing"}, start, [])
    assert "nothing fills {{ hint }}" in refusal(start, {"solver": "{{ question }} {{ hint }}"}, start, [])
    assert refusal(start, {"solver": "Think. {{ question }} {# once more: #} {{ question }}"}, start, []) == ""
    loop = PromptSet({"solver": PromptTemplate("{% for w in question %}{{ w.text|trim }}{% endfor %}", "jinja")})
    kept = {"solver": "Read: {% for w in question %}- {{ w.text|trim }}{% endfor %}"}
    assert refusal(loop, kept, loop, []) == ""


@pytest.mark.parametrize(
    ("start", "engine", "text", "has"),
    [
        ("{question}", "f-string", "{question:>999999999}", "{question:>999999999}"),
        ("{question}", "f-string", "Solve {question!r}", "{question!r}"),
        ("{question}", "f-string", "Solve {question:zz}", "{question:zz}"),
        ("{{ q }}", "jinja", "{{ q }} {{ 9 ** 9 ** 9 }}", "pow"),
        ("{{ q }}", "jinja", "{{ q * 1000000000 }}", "mul"),
        ("{{ q }}", "jinja", "{{ q.missing }}", ".missing"),
        ("{{ q }}", "jinja", "{% for i in range(99999) %}{{ q }}{% endfor %}", "call"),
        ("{% for w in q %}{% endfor %}", "jinja", "{% for a in q %}{% for b in q %}{% endfor %}{% endfor %}", "for"),
    ],
)  # fmt: skip
def test_a_proposal_may_change_words_and_no_more(start: str, engine: Any, text: str, has: str) -> None:
    templates = PromptSet({"solver": PromptTemplate(start, engine)})
    wrong = refusal(templates, {"solver": text}, templates, [])
    assert f"it has {has!r}, which the start hasn't" in wrong


def test_no_episode_is_spent_on_a_refused_proposal_and_the_proposer_hears_why() -> None:
    world, proposer = World(), says("no placeholder", "still none", "check {question}")
    search, _ = make_search(world, proposer, rounds=1)
    asyncio.run(BestOf(proposals=1).run(search))
    assert "lacks the placeholder {question}" in proposer.requests[1].messages[-1]["content"]
    assert len(world.asked) == 2, "the start and the one that passed"
    assert search.best.texts["solver"] == "check {question}"


def test_a_proposer_that_talks_nonsense_ends_the_search_in_time() -> None:
    search, notes = make_search(proposer=says("lorem ipsum"), rounds=50)
    asyncio.run(BestOf(proposals=2).run(search))
    assert search.best is search.start and search.round == 3
    assert "every proposal was refused" in search.ended_because and "{question}" in search.ended_because
    assert len(notes.of("refused")) == 6


def test_equal_proposals_of_a_round_count_once() -> None:
    search, notes = make_search(proposer=says("check {question}"), rounds=1)
    asyncio.run(BestOf(proposals=3).run(search))
    assert len(search.candidates) == 2
    assert [one["reason"] for one in notes.of("refused")] == ["it is the same as another proposal of this round"] * 2


def test_the_budget_ends_the_search_and_keeps_what_was_found() -> None:
    world = World()
    search, notes = make_search(world, budget=Budget(Limits(episodes=45, reserved=10)), rounds=9)
    with pytest.raises(
        BudgetExhausted, match=r"budget.episodes: 32 of 45 were run \(10 are kept for the confirmation\)"
    ):
        asyncio.run(BestOf(proposals=4).run(search))
    search.end_unfinished_round("")
    assert world.episodes() == 32
    last = notes.of("round")[-1]
    assert last["partial"] and last["best"] == search.best.id != "c0"
    search.budget.confirm()
    search.budget.check(20)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(tokens=500), "budget.tokens: "),
        (Limits(money=0.001), "budget.money: 0.00"),
        (Limits(seconds=3), r"budget.seconds: \d of 3 is spent"),
    ],
)
def test_every_limit_counts_episodes_and_proposer(limits: Limits, why: str) -> None:
    ticks = iter(range(1000))
    clock = (lambda: float(next(ticks))) if limits.seconds else (lambda: 0.0)
    budget = Budget(limits, prices=(1.0, 10.0), proposer_prices=(5.0, 50.0), clock=clock)
    search, _ = make_search(budget=budget, rounds=99)
    with pytest.raises(BudgetExhausted, match=why):
        asyncio.run(BestOf(proposals=4).run(search))
    spent = budget.spent
    assert spent.prompt_tokens == spent.episodes * 10 and spent.proposer_prompt_tokens == spent.questions * 100
    ours = spent.prompt_tokens * 1.0 + spent.sampled_tokens * 10.0
    theirs = spent.proposer_prompt_tokens * 5.0 + spent.proposer_sampled_tokens * 50.0
    assert spent.money == pytest.approx((ours + theirs) / 1e6)


def test_a_template_that_nobody_asks_for_is_named_after_the_first_batch() -> None:
    class Deaf(World):
        def trial(self, candidate: Candidate, task: str) -> Trial:
            return Trial(task, 1.0, prompts_used=frozenset({"solver"}))

    world = Deaf()
    search, _ = make_search(world, start=prompts(planner="Plan {question}"))
    with pytest.raises(UnusedTemplateError, match=r"no episode used template 'planner'.*tuner.prompt\(\"planner\"\)"):
        asyncio.run(BestOf().run(search))
    assert len(world.asked) == 1


def test_a_start_that_always_fails_ends_the_search() -> None:
    class Broken(World):
        def trial(self, candidate: Candidate, task: str) -> Trial:
            return Trial(task, None, failure="KeyError: 'room', at agent.py:17 in execute")

    search, _ = make_search(Broken())
    with pytest.raises(SearchFailedError, match=r"all 8 tasks failed with the templates as they are.*agent.py:17"):
        asyncio.run(BestOf().run(search))


def test_a_candidate_that_breaks_the_workflow_counts_zero_and_the_search_goes_on() -> None:
    class Fragile(World):
        def trial(self, candidate: Candidate, task: str) -> Trial:
            if candidate.id == "c1":
                return Trial(task, None, failure="ValueError: no JSON")
            return super().trial(candidate, task)

    search, _ = make_search(Fragile(), rounds=1)
    asyncio.run(BestOf(proposals=3).run(search))
    assert search.score_of(search.candidates["c1"]) == 0.0
    assert search.best.id not in ("c0", "c1")


def test_faults_are_no_zeros() -> None:
    lost = Trial("v1", None, fault=True, failure="EngineError: gone")
    first = Score("c0", Purpose.BATCH, (Trial("v0", 0.5), Trial("v1", 1.0)))
    second = Score("c1", Purpose.BATCH, (Trial("v0", 0.6), lost))
    third = Score("c2", Purpose.BATCH, (lost, lost))
    assert second.mean == 0.6
    assert common_means([first, second, third]) == [0.5, 0.6, None], "compared on the tasks that count in both"

    class Dead(World):
        async def __call__(
            self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
        ) -> list[list[Trial]]:
            return [[lost for _ in tasks] for _ in candidates]

    search, _ = make_search(Dead())
    with pytest.raises(SearchFailedError, match=r"no episode of this batch could be scored.*EngineError: gone"):
        asyncio.run(BestOf().run(search))


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ('<template name="solver">\nA {q}\n</template>', "A {q}"),
        ("Here you are: <template>A</template>", "A"),
        ("<think><template>no</template></think>A", "A"),
        ("I keep {q}.\n</think>\nA", "A"),
        ('No tags.</think><template name="solver">A</template>', "A"),
        ("<template>Think in <think> and </think>. {q}</template>", "Think in <think> and </think>. {q}"),
        ("Sure!\n```\nA\n```", "A"),
        ("  A  ", "A"),
    ],
)
def test_templates_are_found_in_replies(reply: str, found: str) -> None:
    assert read_templates(reply, ["solver"]) == {"solver": found}


def test_reasoning_that_was_cut_off_is_no_template() -> None:
    with pytest.raises(ValueError, match="cut off within its reasoning"):
        read_templates("<think>It should be <template>A {q}</template>, or", ["solver"])


def test_several_templates_need_their_names() -> None:
    both = '<template name="a">1</template> and <template name="b">2</template>'
    assert read_templates(both, ["a", "b"]) == {"a": "1", "b": "2"}
    with pytest.raises(ValueError, match="put each new template between"):
        read_templates("1", ["a", "b"])
    with pytest.raises(ValueError, match="there is no template 'c' to change; there is: a, b"):
        read_templates('<template name="c">1</template>', ["a", "b"])


@pytest.mark.parametrize("kind", list(Kind))
def test_a_question_shows_templates_feedback_and_failures(kind: Kind) -> None:
    trial = Trial(
        "t1", 0.0, failure="ValueError: no JSON", feedback="the room has no projector", query="Book a room",
        conversations=([{"role": "assistant", "content": "x" * 9000}],),
    )  # fmt: skip
    ask = Ask(kind, Candidate("c0", prompts()), ("solver",), (trial,), feedback="say what fits")
    asked = messages_for(ask)[-1]["content"]
    assert "Solve: {question}" in asked and len(asked) < 12_000
    if kind in (Kind.CRITIQUE, Kind.REFLECT):
        assert "the room has no projector" in asked and "ValueError: no JSON" in asked and "Book a room" in asked
    if kind is Kind.EDIT:
        assert "say what fits" in asked
    assert ('<template name="solver">…</template>' in asked) == (kind is not Kind.CRITIQUE)


def test_a_proposer_that_returns_nothing_is_refused() -> None:
    class Silent(Editor):
        async def __call__(self, request: Request) -> Reply:
            return Reply("")

    search, notes = make_search(proposer=Silent(), rounds=1)
    asyncio.run(BestOf(proposals=1).run(search))
    assert "it is empty" in notes.of("refused")[0]["reason"]


def test_half_a_surrogate_pair_in_a_proposal_costs_no_episode() -> None:
    """A model's JSON may hold one, and no client can send it."""
    search, _ = make_search(proposer=says("check \ud83d {question}"), rounds=1)
    asyncio.run(BestOf(proposals=1).run(search))
    assert search.candidates["c1"].texts["solver"] == r"check \ud83d {question}"


def test_a_criticism_is_what_follows_the_reasoning() -> None:
    search, _ = make_search(proposer=says("Hm, <template>?</template>", "<think>Hm.</think>\nToo short."))
    asks = [Ask(Kind.CRITIQUE, search.start, ("solver",), draw=draw) for draw in range(2)]
    assert asyncio.run(search.critique(asks)) == ["Hm, <template>?</template>", "Too short."]
