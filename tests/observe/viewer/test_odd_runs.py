"""Pages of runs out of the ordinary: exact numbers, a long episode on a phone, a group that failed, a single value."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from ajet.config import Config
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.viewer.library import Experiment
from ajet.observe.viewer.report import write_report
from ajet.observe.viewer.serve import Viewer
from ajet.schema.episode import Episode, EpisodeStatus, Failure
from support.pages_of_viewer import settled, start
from support.synthetic_run import TreeMaker, Vocabulary, math_episode
from support.waiting import wait_until

Open = Callable[..., Page]
ASKED = '{"id": 12345678901234567890, "price": 1.50}'


@contextmanager
def recording(root: Path) -> Iterator[tuple[ExperimentFolder, Vocabulary, Callable[[Episode], None]]]:
    """A run, and what records an episode of it."""
    vocabulary = Vocabulary()
    with ExperimentFolder.open(Config.model_validate({"ajet": {"experiment_name": "odd"}}), exp_dir=root) as folder:
        recorder = EpisodeRecorder(folder.episodes, tokenizer=vocabulary)
        yield folder, vocabulary, lambda episode: assert_kept(recorder, episode)
        recorder.close()


def assert_kept(recorder: EpisodeRecorder, episode: Episode) -> None:
    assert recorder.record(episode, 1).result()


def failed(vocabulary: Vocabulary, repeat: int) -> Episode:
    episode = math_episode(vocabulary, random.Random(repeat), repeat=repeat)
    episode.status, episode.reward, episode.is_success = EpisodeStatus.WORKFLOW_ERROR, None, None
    episode.failure, episode.group_id = Failure("ValueError", "q" * 400), "failed"
    return episode


def test_numbers_are_those_that_the_model_wrote(tmp_path: Path, open_page: Open) -> None:
    with recording(tmp_path) as (_, vocabulary, keep):
        episode = math_episode(vocabulary, random.Random(1))
        call = episode.tree.calls[0]
        call.reply = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "buy", "arguments": ASKED}}]}
        call.agent = "buyer \u202erevolver"
        episode.metadata, episode.log_metrics = {"order": 2**63}, {"seen": 2**60 + 1}
        keep(episode)
    page = open_page(start(tmp_path), f"/x/odd/episode/{episode.episode_id}?call=0")
    expect(page.locator(".toolcall .arguments")).to_have_text(ASKED)
    for place in (".message.assistant .who b", ".graph .call .who"):
        expect(page.locator(place).first).to_contain_text("buyer U+202Erevolver")
    page.get_by_role("button", name="JSON", exact=True).click()
    expect(page.locator("#toast")).to_contain_text("Episode as JSON copied")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied["metadata"]["order"] == 2**63 and copied["log_metrics"]["seen"] == 2**60 + 1
    page.get_by_role("tab", name="Details").click()
    expect(page.locator("#view-details")).to_contain_text(str(2**60 + 1))


def test_raw_shows_arguments_as_they_were_written(tmp_path: Path, open_page: Open) -> None:
    with recording(tmp_path) as (_, vocabulary, keep):
        episode = math_episode(vocabulary, random.Random(1))
        keep(episode)
    page = open_page(start(tmp_path), f"/x/odd/episode/{episode.episode_id}?call=0")
    expect(page.locator(".toolcall .arguments").first).to_have_text(re.compile("^expression: "))
    page.get_by_role("button", name="Raw").click()
    expect(page.locator(".toolcall .arguments").first).to_have_text(re.compile(r'^\{"expression": "'))


def test_a_group_that_failed_has_no_reward(tmp_path: Path, open_page: Open) -> None:
    with recording(tmp_path) as (_, vocabulary, keep):
        for repeat in range(2):
            keep(failed(vocabulary, repeat))
    page = open_page(start(tmp_path), "/x/odd/group/failed")
    expect(page.locator("#about-group")).to_contain_text("2 episodes · all failed")
    expect(page.locator("#about-group")).not_to_contain_text("reward")
    inside = "box => box.scrollWidth <= box.clientWidth"
    assert page.locator(".failure").first.evaluate(inside), "a long message is wrapped"


def test_of_tasks_without_a_reward_nothing_is_said(tmp_path: Path, open_page: Open) -> None:
    with recording(tmp_path) as (_, vocabulary, keep):
        keep(failed(vocabulary, 0))
    page = open_page(start(tmp_path), "/x/odd")
    settled(page)
    expect(page.locator("#tasks-of-note")).to_be_hidden()


def test_long_names_widen_no_overview_on_a_phone(tmp_path: Path, open_page: Open) -> None:
    with recording(tmp_path) as (_, vocabulary, keep):
        episode = math_episode(vocabulary, random.Random(1))
        episode.task_id, episode.reward, episode.is_success = "w" * 90, 0.0, False
        keep(episode)
    name = "a_run_with_" * 8
    (tmp_path / "odd").rename(tmp_path / name)
    page = open_page(start(tmp_path), f"/x/{name}", width=390)
    settled(page)
    expect(page.locator("#unsolved")).to_contain_text("w" * 90)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_metric_of_one_step_is_a_point(tmp_path: Path, open_page: Open) -> None:
    with recording(tmp_path) as (folder, _, _):
        folder.metrics.log(1, {"val/return/mean": 0.5, "return/mean": 0.1, f"user/{'w' * 200}": 1.0})
        folder.metrics.log(2, {"return/mean": 2e9})
    page = open_page(start(tmp_path), "/x/odd/charts")
    settled(page)
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Validation return", exact=True))
    assert chart.locator("canvas").evaluate(HAS_ACCENT), "the value is drawn"
    # a long name doesn't widen the page, once charts are drawn at their width
    wait_until(lambda: bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth")))


HAS_ACCENT = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const is = (at, colour) => colour.every((part, index) => data[at + index] === part);
  for (let at = 0; at < data.length; at += 4) if (is(at, [0x44, 0x53, 0xd6])) return true;
  return false;
}"""


def test_a_long_episode_on_a_phone(tmp_path: Path, open_page: Open) -> None:
    with recording(tmp_path) as (_, vocabulary, keep):
        episode, last = math_episode(vocabulary, random.Random(1)), -1
        maker = TreeMaker(vocabulary, random.Random(1))
        for turn in range(60):
            asked = [{"role": "user", "content": f"{turn} " + "so it is " * 60}]
            last = maker.call("solver", asked, {"role": "assistant", "content": "yes"}, extends=last)
        episode.tree = maker.tree
        keep(episode)
    viewer = start(tmp_path)
    page = open_page(viewer, f"/x/odd/episode/{episode.episode_id}", width=390)
    settled(page)
    assert page.evaluate("scrollY") == 0, "it opens on what the episode is"
    expect(page.locator(".graph .call").last).to_be_visible()
    page = open_page(viewer, f"/x/odd/episode/{episode.episode_id}?view=tokens", width=390)
    settled(page)
    assert 10 < page.locator("#view-tokens .line").count() < 100, "lines out of sight are not in the page"


def test_a_run_that_is_gone_is_not_a_viewer_that_stopped(tmp_path: Path, experiments: Path, browser: Browser) -> None:
    shutil.copytree(experiments / "math-agent", tmp_path / "math-agent")
    viewer: Viewer = start(tmp_path)
    base = f"http://127.0.0.1:{viewer.port}"
    page = browser.new_page()
    page.context.add_cookies([{"name": viewer.access.cookie, "value": viewer.access.cookie_value, "url": base}])
    page.goto(f"{base}/x/math-agent/charts")
    settled(page)
    shutil.rmtree(tmp_path / "math-agent")
    expect(page.locator("#live")).to_have_text("can't be read")
    expect(page.locator("#live")).to_have_attribute("title", re.compile("no experiment 'math-agent'"))
    page.context.close()


@pytest.mark.slow
def test_long_words_widen_no_report(tmp_path: Path, browser: Browser) -> None:
    with recording(tmp_path) as (_, vocabulary, keep):
        episode = failed(vocabulary, 0)
        episode.tag = episode.tree.calls[0].agent = episode.task_id = "w" * 300
        keep(episode)
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(write_report(Experiment(tmp_path / "odd"), tmp_path / "report.html")[0].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_a_name_may_contain_what_separates_names(tmp_path: Path, experiments: Path, open_page: Open) -> None:
    names = ("lr=1,kl=0", "50%2C #?")
    for name in names:
        shutil.copytree(experiments / "math-agent-rloo", tmp_path / name)
    viewer = start(tmp_path)
    page = open_page(viewer)
    for name in names:
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare 2").click()
    settled(page)
    page.get_by_label("Smoothing").fill("0.5")
    expect(page).to_have_url(re.compile("smooth=0.5"))
    page.reload()
    settled(page)
    expect(page.locator("#results tbody tr")).to_have_count(2)
    for name in names:
        expect(page.get_by_role("heading", name=f"Rewards of {name}", exact=True)).to_be_visible()
    page.locator("#results").get_by_role("link", name=names[0]).click()
    page.get_by_role("link", name="All charts").click()
    settled(page)
    expect(page.get_by_role("heading", name="Rewards by step")).to_be_visible()
