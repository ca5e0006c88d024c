"""Whether a run is learning, by plain rules; what is wrong with it; and the page that shows both."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from ajet.config import Config
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.viewer.library import Library
from ajet.observe.viewer.overview import Figures, overview, verdict
from support.pages_of_viewer import settled, start
from support.synthetic_run import Vocabulary, credit_of, math_episode, task_of

Open = Callable[..., Page]
Shoot = Callable[[Page, str], None]


def figures(steps: int = 40, **series: Callable[[int], float | None]) -> Figures:
    """The metrics of a run; `__` stands for a slash."""
    series.setdefault("episode__count", lambda _: 64.0)
    columns = {name.replace("__", "/"): [value(step) for step in range(steps)] for name, value in series.items()}
    return Figures({"steps": list(range(steps)), "series": columns})


def every(count: int, value: Callable[[int], float]) -> Callable[[int], float | None]:
    return lambda step: value(step) if step % count == 0 else None


def noisy(value: Callable[[int], float], seed: int = 0) -> Callable[[int], float]:
    drawn = random.Random(seed)
    return lambda step: value(step) + drawn.gauss(0, 0.05)


RISING = noisy(lambda step: 0.3 + step / 80)
FLAT = noisy(lambda _: 0.5)


@pytest.mark.parametrize(
    ("level", "title", "series"),
    [
        ("quiet", "Too early to tell", {"steps": 5, "return__mean": RISING}),
        ("good", "The training reward rises", {"return__mean": RISING}),
        ("warn", "No clear change so far", {"return__mean": FLAT}),
        ("bad", "The training reward falls", {"return__mean": noisy(lambda step: 0.8 - step / 80)}),
        ("good", "It is learning", {"val__return__mean": every(10, lambda step: 0.3 + step / 80)}),
        ("bad", "It is getting worse", {"val__return__mean": every(10, lambda step: 0.8 - step / 80)}),
        ("warn", "It learned, but has got worse since step 20",
         {"val__return__mean": every(10, lambda step: [0.3, 0.6, 0.9, 0.5][step // 10])}),
        ("warn", "What it had learned by step 20 is lost",
         {"val__return__mean": every(10, lambda step: [0.3, 0.6, 0.9, 0.3][step // 10])}),
        ("warn", "The training reward rises, validation doesn't",
         {"return__mean": RISING, "val__return__mean": every(10, lambda _: 0.4)}),
        ("quiet", "No clear change so far",
         {"val__return__mean": every(10, lambda step: 0.50 + step / 1000), "val__return__std": every(10, lambda _: 0.5),
          "val__episode__usable": every(10, lambda _: 64)}),
        ("bad", "Most episodes fail", {"return__mean": RISING, "episode__failed_share": lambda _: 0.75}),
    ],
)  # fmt: skip
def test_the_verdict(level: str, title: str, series: dict[str, Any]) -> None:
    found = verdict(figures(**series))
    assert (found.level, found.title) == (level, title)


def test_the_best_of_many_validations_is_no_peak() -> None:
    """Of a thousand noisy values, the best is far above the last, and means nothing."""
    assert verdict(figures(1000, val__return__mean=noisy(lambda step: 0.3 + step / 2000))).title == "It is learning"


def test_a_run_without_steps() -> None:
    assert verdict(Figures({"steps": [], "series": {}})).title == "No step has finished yet"


def test_what_says_so() -> None:
    found = verdict(figures(
        40, val__return__mean=every(10, lambda step: [0.3, 0.6, 0.9, 0.8][step // 10]),
        return__mean=lambda step: step / 40, credit__groups=lambda _: 8.0, credit__zero_variance_groups=lambda _: 7.0,
    ))  # fmt: skip
    assert [one.text for one in found.because] == [
        "Validation 0.3 at step 0, 0.8 at step 30 (best 0.9 at step 20).",
        "Training reward 0.0875 in steps 0–7, 0.887 in steps 32–39.",
        "12.5 % of the groups in steps 32–39 have different rewards. Only these teach.",
    ]


def write_run(root: Path) -> Path:
    """Three steps of one task that gets solved, and one that never is."""
    config, vocabulary = Config.model_validate({"ajet": {"experiment_name": "improving"}}), Vocabulary()
    with ExperimentFolder.open(config, exp_dir=root) as folder:
        recorder = EpisodeRecorder(folder.episodes, tokenizer=vocabulary)
        for step in (1, 2, 3):
            for task, rewards in ((1, [0.0, float(step > 1)] if step < 3 else [1.0, 1.0]), (2, [0.0, 0.0])):
                group = []
                for repeat, reward in enumerate(rewards):
                    episode = math_episode(
                        vocabulary, random.Random(100 * step + 10 * task + repeat), task=task, step=step, repeat=repeat
                    )
                    episode.reward, episode.is_success = reward, reward == 1.0
                    episode.status, episode.failure, episode.outcomes = "completed", None, ()  # type: ignore[assignment]
                    group.append(episode)
                for episode, credit in zip(group, credit_of(group), strict=True):
                    recorder.record(episode, step, credit, task=task_of(episode))
            folder.metrics.log(step, {
                "return/mean": step / 4, "episode/count": 4.0, "episode/sampled_tokens_total": 100.0,
                "ledger/captured": 100.0, "ledger/dropped": 20.0, "ledger/trained": 80.0, "time/step": 2.0,
                "time/rollout": 1.5, "time/train": 0.5, "outcome/length": 1.0, "user/cost": 0.25,
                "val/return/mean": step / 5,
            })  # fmt: skip
        recorder.close()
    (folder.path / "run.log").write_text(
        "".join(
            json.dumps({"level": level, "message": f"<b>{level}</b> of a run"}) + "\n" for level in ("INFO", "WARNING")
        )
    )
    return folder.path


def test_what_is_told_of_a_run(tmp_path: Path) -> None:
    found = overview(Library(write_run(tmp_path)).get("improving"))
    assert [(one.level, one.text) for one in found["health"]] == [
        ("warn", "3 of 12 episodes ended with a reply cut at its maximum length."),
        ("warn", "20 % of the sampled tokens were dropped, and trained nothing. It may follow from cut_replies."),
        ("quiet", "<b>WARNING</b> of a run"),
    ]
    assert [one.fault for one in found["health"]] == ["cut_replies", "dropped_tokens", "logged"]
    assert found["health"][0].change and not found["health"][2].change
    assert [row["task_id"] for row in found["improved"]] == ["apples-0001"] and found["improved"][0]["change"] == 1.0
    assert [row["task_id"] for row in found["unsolved"]] == ["apples-0002"] and found["unsolved_count"] == 1
    assert [(one["step"], one["reward"]) for one in found["pair"]["episodes"]] == [(1, 0.0), (3, 1.0)]
    assert found["totals"] == {
        "training_episodes": 12.0, "sampled_tokens": 300.0, "trained_tokens": 240.0, "seconds": 6.0,
        "seconds_per_step": 2.0, "cost": 3.0,
    }  # fmt: skip
    assert found["phases"] == {"rollout": 4.5, "train": 1.5}


def test_tokens_of_groups_with_equal_rewards_are_not_said_to_be_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        for step in (1, 2, 3):  # of 80 that could be trained, and none at all in the second step
            file.write(json.dumps({"step": step, "tokens/trained": 40.0 * (step != 2)}) + "\n")
    assert overview(Library(run).get("improving"))["totals"]["trained_tokens"] == 80.0


def test_what_cannot_be_read_is_among_what_is_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "episodes.sqlite").write_text("not a database " * 80)
    found = overview(Library(folder).get("improving"))
    assert "episodes.sqlite" in found["health"][0].text and found["health"][0].level == "bad"
    assert found["verdict"].title == "It is learning"


def test_a_run_opens_on_its_overview(tmp_path: Path, open_page: Open, shoot: Shoot) -> None:
    write_run(tmp_path)
    viewer = start(tmp_path)
    page = open_page(viewer, "/x/improving", width=1280, height=1200)
    settled(page)
    expect(page.locator("#verdict")).to_have_text("It is learning")
    expect(page.locator("#health")).to_contain_text("<b>WARNING</b> of a run")
    cut = page.locator("#health li").first
    expect(cut).to_contain_text("Change: rollout.max_response_length_in_one_turn")
    expect(cut.get_by_role("link", name="Show")).to_have_attribute("href", re.compile(r"/episodes\?status=truncated$"))
    expect(page.locator(".chart canvas")).to_have_count(2)
    expect(page.locator("#improved")).to_contain_text("+100 %")
    expect(page.locator("#unsolved")).to_contain_text("apples-0002")
    expect(page.locator(".tile", has_text="Cost")).to_contain_text("3")
    shoot(page, "overview")
    page.set_viewport_size({"width": 390, "height": 844})
    cards = "[...document.querySelectorAll('.card')].filter((card) => card.scrollWidth > card.clientWidth + 1).length"
    page.wait_for_function(f"() => {cards} === 0")  # charts follow the width a moment later
    page.set_viewport_size({"width": 1280, "height": 1200})
    page.locator("#pair").get_by_role("link", name="Differences").click()
    expect(page.locator("#differences-page[data-ready]")).to_be_visible()
    expect(page.get_by_label("Attempt on the right").locator("option:checked")).to_contain_text("reward 1")
    page.goto(f"http://127.0.0.1:{viewer.port}/x/improving")
    page.get_by_role("link", name="All charts").click()
    expect(page.get_by_role("heading", name="Return", exact=True)).to_be_visible()


def test_a_groups_best_and_worst_are_compared(tmp_path: Path, open_page: Open) -> None:
    write_run(tmp_path)
    page = open_page(start(tmp_path), "/x/improving/differences?group=s2-t1")
    expect(page.locator("#differences-page[data-ready]")).to_be_visible()
    expect(page.get_by_label("Attempt on the left").locator("option:checked")).to_contain_text("reward 1")
    expect(page.get_by_label("Attempt on the right").locator("option:checked")).to_contain_text("reward 0")
    expect(page).to_have_url(re.compile(r"\?a=\w+&b=\w+$"))


@pytest.mark.slow
def test_a_zoom_into_a_long_run_shows_its_steps(tmp_path: Path, open_page: Open) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "return/mean": float(step == 7777)}) + "\n" for step in range(1, 10_001))
    )
    page = open_page(start(tmp_path), "/x/long/charts")
    settled(page)
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Return", exact=True))
    chart.locator(".u-over").hover(position={"x": 100, "y": 60})
    expect(chart.locator(".step")).to_have_text(re.compile(r"steps \d+–\d+"))
    page.goto(f"{page.url}?from=7770&to=7780")
    settled(page)
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60)
    expect(chart.locator(".now")).to_have_text("step 77771")
