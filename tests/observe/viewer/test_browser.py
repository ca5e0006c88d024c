"""Every page in a real Chromium: opened, filtered, clicked, live, and unmoved by hostile text."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from ajet.config import Config
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.run_files import Notes
from ajet.observe.statistics import TaskFilter, task_page
from ajet.observe.viewer.serve import Viewer
from ajet.schema.episode import EnvironmentEvent, EnvironmentRecord, Episode
from ajet.schema.span import Span
from ajet.schema.task import Task
from support.pages_of_viewer import settled, start
from support.synthetic_run import Vocabulary, math_episode

Open = Callable[..., Page]
Shoot = Callable[[Page, str], None]
EXPERIMENT = "math-agent"


RUNS = ("math-agent-rloo", "math-agent")


def store_of(viewer: Viewer, name: str = EXPERIMENT) -> EpisodeStore:
    store = viewer.library.get(name).store()
    assert store is not None
    return store


def forked(viewer: Viewer) -> dict[str, Any]:
    return store_of(viewer).page(EpisodeFilter(agent="checker"), sort="forks")[0][0]


@pytest.mark.slow
def test_experiments_are_listed_found_and_compared(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    page = open_page(viewer)
    expect(page.locator("#experiments tbody tr")).to_have_count(2)
    page.get_by_label("Find by name, model or tag").fill("rloo")
    expect(page.locator("#experiments tbody tr")).to_have_count(1)
    page.get_by_label("Find by name, model or tag").fill("")
    page.get_by_label("Compare math-agent-rloo").check()
    page.get_by_label("Compare math-agent", exact=True).check()
    shoot(page, "experiments")
    page.get_by_role("link", name="Compare 2").click()
    expect(page).to_have_url(re.compile(r"/compare\?runs=math-agent-rloo,math-agent"))
    expect(page.locator(".run-legend a")).to_have_count(2)
    expect(page.locator("#results tbody tr")).to_have_count(2)
    columns = viewer.library.get("math-agent-rloo").metrics()["series"]["return/mean"]
    best = page.locator("#results tbody tr", has_text="math-agent-rloo").locator("td").nth(3)
    expect(best).to_have_text(f"{max(columns):.3g}")
    expect(page.locator(".differences tbody tr", has_text="adv_estimator")).to_contain_text("rloo")
    expect(page.locator(".chart", has=page.get_by_role("heading", name="Reward", exact=True))).to_contain_text(
        "math-agent-rloo"
    )
    shoot(page, "compare")
    spread = [
        page.locator(".chart", has=page.get_by_role("heading", name=f"Rewards of {name}", exact=True)) for name in RUNS
    ]
    for name, chart in zip(RUNS, spread, strict=True):
        with page.expect_download() as saved:
            page.get_by_label(f"Save Rewards of {name} as SVG").click()
        drawing = ElementTree.fromstring(Path(saved.value.path()).read_text())
        fills = {
            cell.get("fill") for cell in drawing.iter("{http://www.w3.org/2000/svg}rect") if cell.get("fill-opacity")
        }
        dot = page.locator(".run-legend a", has_text=re.compile(f"^{name}$")).locator(".dot")
        assert len(fills) == 1 and chart.locator(".keys.bars i").count() > 1
        seen = chart.locator(".keys.bars i").first.evaluate("node => getComputedStyle(node).backgroundColor")
        assert seen == dot.evaluate("node => getComputedStyle(node).backgroundColor"), "in the colour of its lines"
    chosen = spread[0].locator(".u-over")
    chosen.click()
    expect(page).to_have_url(re.compile(rf"/x/{RUNS[0]}/episodes\?step_min="))


@pytest.mark.slow
def test_charts_show_what_was_logged_and_the_link_keeps_the_view(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/charts", width=1920, height=1080)
    for title in ("Reward", "Success", "pass@k", "KL", "Entropy", "Clip fraction", "Staleness", "Tokens per second"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    for title in ("Time per step", "Packing ratio", "Masked", "Failures", "How episodes ended", "Turns"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    columns = viewer.library.get(EXPERIMENT).metrics()
    ends = page.locator(".chart", has=page.get_by_role("heading", name="How episodes ended", exact=True))
    truncated = columns["series"]["status/truncated"]
    assert truncated[-1] is None, "none was truncated in the last step"
    expect(ends.locator(".keys span", has_text="truncated")).to_have_text("truncated0")
    reward = page.locator(".chart", has=page.get_by_role("heading", name="Reward", exact=True))
    expect(reward.locator(".now")).to_have_text(f"{columns['series']['return/mean'][-1]:.3g}")
    expect(reward.locator("canvas")).to_be_visible()
    shoot(page, "charts")
    box = reward.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    page.get_by_label("Find a metric").fill("entropy")
    expect(page.locator(".chart:visible")).to_have_count(1)
    link = page.url
    again = open_page(viewer, link[link.index("/x/") :])
    expect(again.locator(".chart:visible")).to_have_count(1)
    expect(again.get_by_role("button", name="Reset zoom")).to_be_visible()
    expect(again.get_by_label("Find a metric")).to_have_value("entropy")


def test_a_click_on_a_chart_leads_to_that_steps_episodes(viewer: Viewer, open_page: Open) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}")
    chart = page.locator(".chart .u-over").first
    chart.click()
    expect(page).to_have_url(re.compile(r"/episodes\?step_min=(\d+)&step_max=\1"))
    expect(page.locator("#count")).to_contain_text("of 12 episodes")


def test_a_chart_that_can_be_clicked_moves_no_more(viewer: Viewer, open_page: Open) -> None:
    page = open_page(viewer)
    page.route("**/overview", lambda route: (page.wait_for_timeout(300), route.continue_()))  # after the charts
    page.goto(f"{page.url}x/{EXPERIMENT}")
    chart = page.locator(".chart .u-over").first
    expect(chart).to_be_visible()
    place = chart.bounding_box()
    expect(page.locator("#because li")).not_to_have_count(0)
    assert chart.bounding_box() == place


@pytest.mark.slow
def test_episodes_filter_sort_and_page(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    store = store_of(viewer)
    page = open_page(viewer, f"/x/{EXPERIMENT}/episodes")
    total = store.facets().total
    newest = store.page(EpisodeFilter(step_min=20, step_max=20, validation=False, mixed=True))[1]
    expect(page.locator("#count")).to_have_text(f"1–{newest} of {newest} episodes")
    expect(page).to_have_url(re.compile("step_min=20&step_max=20&validation=no&groups=mixed"))
    shoot(page, "episodes-newest")
    page.get_by_role("button", name=f"Show all {total} episodes").click()
    expect(page.locator("#count")).to_have_text(f"1–100 of {total} episodes")
    shoot(page, "episodes")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#count")).to_contain_text("101–200")
    page.get_by_label("Agent", exact=True).select_option("checker")
    count = store.page(EpisodeFilter(agent="checker"))[1]
    expect(page.locator("#count")).to_contain_text(f"of {count} episodes")
    page.get_by_label("Words in messages").fill('"sum looks wrong"')
    count = store.page(EpisodeFilter(agent="checker", text='"sum looks wrong"'))[1]
    expect(page.locator("#count")).to_contain_text(f"of {count} episodes")
    page.get_by_role("columnheader", name="Advantage").click()
    expect(page).to_have_url(re.compile("sort=advantage"))
    again = open_page(viewer, page.url[page.url.index("/x/") :])
    expect(again.locator("#count")).to_contain_text(f"of {count} episodes")
    expect(again.get_by_role("columnheader", name="Advantage")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#count")).to_contain_text(f"of {total} episodes")
    page.get_by_label("Step from").fill("abc")
    expect(page.locator("#none")).to_contain_text("is not a number")


def test_the_link_of_a_finding_shows_what_it_is_about(viewer: Viewer, open_page: Open) -> None:
    store = store_of(viewer)
    page = open_page(viewer, f"/x/{EXPERIMENT}/episodes?success=no&sort=reward&order=desc")
    missed, total = (store.page(EpisodeFilter(success=success))[1] for success in (False, None))
    assert 0 < missed < total
    expect(page.locator("#count")).to_contain_text(f"of {missed} episodes")
    expect(page.get_by_label("Success", exact=True)).to_have_value("no")


def test_rejected_filter_is_an_error_message_not_a_broken_page(viewer: Viewer, open_page: Open) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/episodes?status=nonsense")
    expect(page.locator("#none")).to_have_text("No episodes match.")


def test_a_group_side_by_side(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    group = forked(viewer)["group_id"]
    page = open_page(viewer, f"/x/{EXPERIMENT}/group/{group}", width=1440)
    expect(page.locator(".column")).to_have_count(4)
    expect(page.locator(".column .scores").first).to_contain_text("advantage")
    expect(page.locator("#about-group")).to_contain_text("4 episodes")
    shoot(page, "group")
    page.get_by_role("link", name="Episode 0").click()
    expect(page.locator("#episode[data-ready]")).to_be_visible()


def test_one_episode_conversation_tree_and_details(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    row = forked(viewer)
    episode = store_of(viewer).get(row["episode_id"]).episode
    page = open_page(viewer, f"/x/{EXPERIMENT}/episode/{row['episode_id']}")
    expect(page.locator(".graph .call")).to_have_count(len(episode.tree.calls))
    expect(page.locator(".graph circle")).to_have_count(len(episode.tree.calls))
    checker = next(index for index, call in enumerate(episode.tree.calls) if call.agent == "checker")
    page.locator(f'.graph .call[data-call="{checker}"]').click()
    expect(page.locator("#view-chat")).to_contain_text("You check solutions")
    expect(page.locator(f'.message.current[data-call="{checker}"]')).to_be_visible()
    expect(page).to_have_url(re.compile(f"call={checker}"))
    page.locator('.graph .call[data-call="0"]').click()
    expect(page.locator(".toolcall").first).to_contain_text("expression: ")
    shoot(page, "episode")
    fork = next((call.fork for call in episode.tree.calls if call.fork), None)
    if fork:
        expect(page.locator(".graph .why").first).to_be_visible()
    page.get_by_role("tab", name="Details").click()
    expect(page.locator("#view-details")).to_contain_text(f"Ledger: {episode.tree.sampled_tokens} tokens sampled")
    shoot(page, "details")


def test_copies(viewer: Viewer, open_page: Open) -> None:
    row = forked(viewer)
    page = open_page(viewer, f"/x/{EXPERIMENT}/episode/{row['episode_id']}?call=0")
    expect(page.locator("#episode[data-ready]")).to_be_visible()

    def copied(name: str) -> str:
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator("#toast")).to_contain_text("copied")
        text: str = page.evaluate("navigator.clipboard.readText()")
        return text

    assert "## user\nA shop sells" in copied("Copy text")
    curl = copied("curl")
    body = json.loads(curl[curl.index("-d '") + 4 : -1])
    assert body["messages"][0]["role"] == "system" and body["tools"][0]["function"]["name"] == "calculator"
    page.get_by_role("button", name="JSON", exact=True).click()
    expect(page.locator("#toast")).to_contain_text("Episode as JSON copied")
    whole = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert whole["episode_id"] == row["episode_id"] and whole["tree"]["runs"]


@pytest.mark.slow
def test_tokens_tell_what_is_known_of_each(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    row = forked(viewer)
    recorded = store_of(viewer).get(row["episode_id"])
    tree = recorded.episode.tree
    page = open_page(viewer, f"/x/{EXPERIMENT}/episode/{row['episode_id']}?view=tokens&call=0", width=1920, height=1080)
    expect(page.locator("#view-tokens[data-ready]")).to_be_visible()
    start = tree.calls[0].prompt_tokens
    token = page.locator(f'[data-t="{start + 1}"]').first
    token.hover()
    facts = page.locator(".inspector")
    expect(facts).to_contain_text(str(int(tree.runs[tree.calls[0].run].ids[1])))
    expect(facts).to_contain_text("solver, call 0")
    logprob = float(tree.calls[0].logprobs[1])
    expect(facts).to_contain_text(re.compile(re.escape(f"{abs(round(logprob, 4)):.2g}"[:4])))
    for label in ("logprob, trainer", "ratio", "advantage", "policy version"):
        expect(facts).to_contain_text(label)
    page.get_by_role("button", name="Logprob", exact=True).click()
    expect(page).to_have_url(re.compile("colour=logprob"))
    shoot(page, "tokens")
    token.click()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile(f"at={start + 2}"))
    again = open_page(viewer, page.url[page.url.index("/x/") :])
    expect(again.locator(".tk.on")).to_have_attribute("data-t", str(start + 2))
    text = "".join(page.locator(".line:not(.head)").all_text_contents()).replace("↵", "\n")
    reply = tree.calls[0].reply["content"]
    assert reply in text


def test_dark_and_light(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/charts", scheme="dark", width=1920, height=1080)
    expect(page.locator(".chart canvas").first).to_be_visible()
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    shoot(page, "charts-dark")
    page.get_by_label("Switch between dark and light").click()
    assert page.evaluate(background) != dark
    page.reload()
    assert page.evaluate(background) != dark, "the choice is kept"


@pytest.mark.slow
def test_keyboard_and_names_for_everything(viewer: Viewer, open_page: Open) -> None:
    row = forked(viewer)
    run = f"/x/{EXPERIMENT}"
    names = ("", "/charts", "/tasks", "/episodes", f"/episode/{row['episode_id']}")
    for path in ("/", *(run + name for name in names)):
        page = open_page(viewer, path)
        settled(page)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input:not([type=hidden]), select, a[href]")]
            .filter((node) => !(node.textContent.trim() || node.labels?.length || node.getAttribute("aria-label")))
            .map((node) => node.outerHTML)"""
        )
        assert nameless == []
        assert page.get_by_role("heading", level=1).count() == 1, path
    page.get_by_role("tab", name="Conversation").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Tokens")).to_have_attribute("aria-selected", "true")


HOSTILE = [
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>",
    '"><svg onload=window.hacked=1>',
    "</textarea></title><iframe srcdoc='<script>parent.hacked=1</script>'>",
    "{{ 7 * 7 }} ${7 * 7} <%= 7 * 7 %>",
    "right-to-left \u202egnp.exe\u202c \u2066isolated\u2069, zero\u200bwidth, null \x00, bell \x07, escape \x1b[31m",
    "long " + "x" * 1_000_000,
    "javascript:window.hacked=1",
]


def hostile_episode(vocabulary: Vocabulary) -> Episode:
    episode = math_episode(vocabulary, random.Random(3), task=1)
    first = episode.tree.calls[0]
    first.new_messages = [{"role": "user", "content": text} for text in HOSTILE]
    first.agent = HOSTILE[1]
    first.reply = {
        "role": "assistant", "content": HOSTILE[0], "reasoning_content": HOSTILE[4],
        "tool_calls": [{"id": "1", "function": {"name": HOSTILE[0], "arguments": HOSTILE[2]}}],
    }  # fmt: skip
    episode.task_id, episode.tag, episode.group_id = HOSTILE[0], HOSTILE[1], HOSTILE[0]
    episode.metadata = {HOSTILE[0]: HOSTILE[2]}
    event = EnvironmentEvent("step", 0.1, 0.2, None, False, HOSTILE[0], HOSTILE[2] + HOSTILE[4], HOSTILE[1])
    episode.environment = EnvironmentRecord(HOSTILE[0], [event])
    attributes = {HOSTILE[0]: HOSTILE[1], "text": HOSTILE[4] + HOSTILE[5]}
    episode.spans = [Span(rollout_id="r", attempt_id="a", span_id="s", name=HOSTILE[0], attributes=attributes)]
    ids = vocabulary.encode(HOSTILE[0] + HOSTILE[4] + HOSTILE[5])
    episode.tree.runs[first.run].ids = ids
    first.logprobs, first.mask = np.full(len(ids), -0.5, np.float32), np.ones(len(ids), np.bool_)
    return episode


def hostile_task() -> Task:
    metadata = {"answer": HOSTILE[0], HOSTILE[1]: [HOSTILE[2], {HOSTILE[6]: HOSTILE[4]}], "api_key": "a-key-of-a-task"}
    return Task(main_query=HOSTILE[0], metadata=metadata)


@pytest.mark.slow
def test_hostile_text_is_text(tmp_path: Path, open_page: Open, shoot: Shoot) -> None:
    vocabulary = Vocabulary()
    episode, other = hostile_episode(vocabulary), hostile_episode(vocabulary)
    other.episode_id, other.tree.calls[0].new_messages[0]["content"] = "other", HOSTILE[2] + HOSTILE[3]
    config = Config.model_validate({"ajet": {"experiment_name": "hostile"}})
    with ExperimentFolder.open(config, exp_dir=tmp_path) as folder:
        folder.metrics.log(1, {f"user/{HOSTILE[0]}": 1.0, "reward/mean": 1.0})
        recorder = EpisodeRecorder(folder.episodes, tokenizer=vocabulary)
        assert recorder.record(episode, 1, task=hostile_task()).result()
        assert recorder.record(other, 1, task=hostile_task()).result()
        recorder.close()
    Notes(folder.path).write(HOSTILE[0] + HOSTILE[4], [HOSTILE[1][:40]])
    Notes(folder.path).write(HOSTILE[0] + HOSTILE[4], [HOSTILE[1][:40]], episode.episode_id)
    viewer = start(tmp_path)
    first, second = episode.episode_id, other.episode_id
    group = (
        "%3Cscript%3Ewindow.hacked%20%3D%201%3C%2Fscript%3E%3Cimg%20src%3Dx%20onerror%3D'window.hacked%20%3D%201'%3E"
    )
    for path in (
        "/", "/x/hostile", "/x/hostile/charts", "/x/hostile/about", "/x/hostile/episodes", f"/x/hostile/group/{group}",
        "/x/hostile/tasks", f"/x/hostile/task/{group}", f"/x/hostile/differences?a={first}&b={second}",
        f"/x/hostile/episode/{episode.episode_id}", f"/x/hostile/episode/{episode.episode_id}?view=tokens&call=0",
        f"/x/hostile/episode/{episode.episode_id}?view=details",
        f"/x/hostile/episode/{episode.episode_id}?view=timeline",
    ):  # fmt: skip
        page = open_page(viewer, path)
        settled(page)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("window.hacked") is None, path
        assert page.locator("iframe, img").count() == 0, path
    page = open_page(viewer, f"/x/hostile/task/{group}")
    expect(page.locator(".gold")).to_contain_text("<script>window.hacked = 1</script>")
    expect(page.locator("#given")).not_to_contain_text("a-key-of-a-task")
    expect(page.locator("#given .ctl", has_text="U+202E").first).to_be_visible()
    page = open_page(viewer, f"/x/hostile/episode/{episode.episode_id}?call=0")
    expect(page.locator("#note")).to_contain_text("<script>window.hacked = 1</script>")
    chat = page.locator("#view-chat")
    expect(chat).to_contain_text("<script>window.hacked = 1</script>")
    expect(chat).to_contain_text("{{ 7 * 7 }}")
    expect(chat.locator(".ctl", has_text="U+202E").first).to_be_visible()
    expect(chat.locator(".ctl", has_text="U+0000").first).to_be_visible()
    expect(chat.get_by_role("button", name="more characters")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long line does not widen the page"
    shoot(page, "hostile")


def all_pages(viewer: Viewer) -> list[str]:
    row = forked(viewer)
    others, _ = store_of(viewer).page(EpisodeFilter(group=row["group_id"]), sort="reward", descending=False)
    run, episode = f"/x/{EXPERIMENT}", f"/x/{EXPERIMENT}/episode/{row['episode_id']}"
    return [
        "/", "/compare?runs=math-agent,math-agent-rloo", run, f"{run}/charts", f"{run}/episodes", f"{run}/about",
        f"{run}/tasks", f"{run}/task/{row['task_id']}",
        f"{run}/differences?a={row['episode_id']}&b={others[0]['episode_id']}",
        f"{run}/group/{row['group_id']}", episode, f"{episode}?view=tokens&call=0", f"{episode}?view=details",
        f"{episode}?view=timeline",
    ]  # fmt: skip


OVERLAPPING = """() => {
  const boxes = [...document.querySelectorAll(".top > *, .top .tabs a")]
    .filter((node) => node.checkVisibility() && !node.matches(".tabs, .spring"))
    .map((node) => [node.textContent.trim(), node.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
    .map(([other]) => `${one} / ${other}`));
}"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [(400, 800), (1280, 720), (1920, 1080)])
def test_nothing_sticks_out_or_overlaps(viewer: Viewer, open_page: Open, shoot: Shoot, size: tuple[int, int]) -> None:
    for path in all_pages(viewer):
        page = open_page(viewer, path, width=size[0], height=size[1])
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        assert page.evaluate(OVERLAPPING) == [], path
        if size[0] == 400 and path.endswith(f"/x/{EXPERIMENT}"):
            shoot(page, "narrow")


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = (colour) => {
    const linear = (part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = colour.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const weak = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    if (node.closest("[aria-disabled=true], :disabled, .visually-hidden, .skip, script, option, .nl")) continue;
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
    const ground = chain.reduce((below, colour) => over(rgba(colour), below), [255, 255, 255, 1]);
    const [text, below] = [luminance(over(rgba(getComputedStyle(node).color), ground)), luminance(ground)];
    const ratio = (Math.max(text, below) + 0.05) / (Math.min(text, below) + 0.05);
    if (ratio < 4.5) weak.add(`${ratio.toFixed(2)} ${node.outerHTML.slice(0, 80)}`);
  }
  return [...weak];
}"""
"""Texts whose contrast is below WCAG AA."""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(viewer: Viewer, open_page: Open, scheme: str) -> None:
    for path in all_pages(viewer):
        page = open_page(viewer, path, scheme=scheme)
        settled(page)
        assert page.evaluate(CONTRAST) == [], path


def test_a_validation_is_not_called_training(tmp_path: Path, open_page: Open) -> None:
    vocabulary = Vocabulary()
    episode = math_episode(vocabulary, random.Random(1), task=0)
    config = Config.model_validate({"ajet": {"experiment_name": "validated"}})
    with ExperimentFolder.open(config, exp_dir=tmp_path) as folder:
        recorder = EpisodeRecorder(folder.episodes, tokenizer=vocabulary)
        assert recorder.record(episode, 1, validation=True).result()
        recorder.close()
    viewer = start(tmp_path)
    rows = open_page(viewer, "/x/validated/episodes")
    expect(rows.locator("#episodes tbody tr td").nth(9)).to_have_text("–")
    page = open_page(viewer, f"/x/validated/episode/{episode.episode_id}?view=details&call=0")
    expect(page.locator("#view-details")).to_contain_text("None: a validation doesn't train.")
    page.get_by_role("tab", name="Tokens").click()
    expect(page.locator(".scale")).to_contain_text("would be trained")
    page.locator(".tk.m-trained").first.click()
    expect(page.locator(".inspector")).to_contain_text("no: validation")


def test_charts_fold_and_can_be_saved(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/charts")
    settled(page)
    both = page.locator(".chart", has=page.get_by_role("heading", name="Training and validation", exact=True))
    expect(both).to_contain_text("training")
    expect(both).to_contain_text("validation")
    outcome = page.locator("details.section", has=page.get_by_role("heading", name="Outcome", exact=True))
    more = page.locator("details.section", has=page.get_by_role("heading", name="More about episodes"))
    expect(outcome).to_have_attribute("open", "")
    expect(more).not_to_have_attribute("open", "")
    shoot(page, "charts-folded")
    more.locator("summary").click()
    outcome.locator("summary").click()
    page.reload()
    settled(page)
    expect(more).to_have_attribute("open", "")
    expect(outcome).not_to_have_attribute("open", "")
    page.get_by_label("Find a metric").fill("return")
    expect(outcome).to_have_attribute("open", "")
    with page.expect_download() as saved:
        page.get_by_label("Save Training and validation as PNG").click()
    assert saved.value.suggested_filename == f"{EXPERIMENT}_Training_and_validation.png"
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
    charts = (("return", "Training and validation", "path"), ("reward", "Rewards by step", "rect"))
    for metric, title, shape in charts:
        page.get_by_label("Find a metric").fill(metric)
        with page.expect_download() as saved:
            page.get_by_label(f"Save {title} as SVG").click()
        assert saved.value.suggested_filename.endswith(".svg")
        drawing = ElementTree.fromstring(Path(saved.value.path()).read_text())
        assert title in drawing.itertext() and len(drawing.findall(f"{{http://www.w3.org/2000/svg}}{shape}")) >= 2
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    rows = Path(saved.value.path()).read_text().splitlines()
    assert rows[0].startswith("step,") and len(rows) == 1 + len(viewer.library.get(EXPERIMENT).metrics()["steps"])


def test_a_chart_is_saved_before_it_has_come_into_view(viewer: Viewer, open_page: Open) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/charts")
    page.add_init_script("window.IntersectionObserver = class { observe() {} };")  # nothing ever comes into view
    page.reload()
    saved = save(page, "PNG")
    page.reload()  # or the chart would be drawn by now
    drawing = ElementTree.fromstring(save(page, "SVG"))
    assert saved.startswith(b"\x89PNG") and len(drawing.findall("{http://www.w3.org/2000/svg}path")) >= 2


def test_a_chart_that_has_no_data_is_not_saved_in_silence(viewer: Viewer, browser: Browser) -> None:
    context = browser.new_context()
    base = f"http://127.0.0.1:{viewer.port}"
    context.add_cookies([{"name": viewer.access.cookie, "value": viewer.access.cookie_value, "url": base}])
    page = context.new_page()
    page.add_init_script("window.IntersectionObserver = class { observe() {} };")  # nothing ever comes into view
    page.goto(f"{base}/x/{EXPERIMENT}/charts")
    button = page.get_by_label("Save Training and validation as PNG")
    expect(button).to_be_attached()
    page.route("**/metrics?*", lambda route: route.abort())  # as if the viewer had ended
    button.click()
    expect(page.locator("#toast")).to_contain_text("Nothing saved")
    context.close()


def save(page: Page, kind: str) -> bytes:
    with page.expect_download() as saved:
        page.get_by_label(f"Save Training and validation as {kind}").click()
    return Path(saved.value.path()).read_bytes()


def test_an_episode_that_is_gone_says_why_in_whole(viewer: Viewer, browser: Browser) -> None:
    with browser.new_context() as context:  # its 404 is an error of the page's
        base = f"http://127.0.0.1:{viewer.port}"
        context.add_cookies([{"name": viewer.access.cookie, "value": viewer.access.cookie_value, "url": base}])
        page = context.new_page()
        page.goto(f"{base}/x/{EXPERIMENT}/episode/gone")
        said = page.get_by_role("alert")
        expect(said).to_contain_text("no episode 'gone'")
        expect(said).to_contain_text("(ajet.recorder.max_gb)")
        assert said.evaluate("node => node.scrollHeight <= node.clientHeight")


def test_episodes_can_be_downloaded(viewer: Viewer, open_page: Open) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/episodes?status=completed&step_min=2&step_max=2")
    expect(page.locator("#count")).to_contain_text("episodes")
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    rows = Path(saved.value.path()).read_text().splitlines()
    wanted = store_of(viewer).page(EpisodeFilter(status="completed", step_min=2, step_max=2))[1]
    assert len(rows) == 1 + wanted
    page.locator("#episodes tbody tr a.name").first.click()
    page.locator("#episode[data-ready]").wait_for()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Download").click()
    record = json.loads(Path(saved.value.path()).read_text())
    assert saved.value.suggested_filename == f"{record['episode_id']}.json"
    assert record["status"] == "completed"


@pytest.mark.slow
def test_a_task_leads_to_its_attempts(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/tasks")
    total = task_page(store_of(viewer), TaskFilter())[1]
    expect(page.locator("#count")).to_have_text(f"1–{total} of {total} tasks")
    page.get_by_role("columnheader", name="Solved", exact=True).click()
    expect(page).to_have_url(re.compile("sort=solved"))
    page.get_by_label("Solved, per cent from").fill("50")
    few = task_page(store_of(viewer), TaskFilter(solved_min=0.5))[1]
    expect(page.locator("#count")).to_contain_text(f"of {few} task")
    shoot(page, "tasks")
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    assert len(Path(saved.value.path()).read_text().splitlines()) == few + 1
    page.locator("#tasks tbody .name").first.click()
    expect(page.locator("#task[data-ready]")).to_be_visible()
    expect(page.locator(".gold")).to_contain_text(re.compile(r"\d+"))
    expect(page.locator("#given")).to_contain_text('"book": "apples"')
    shoot(page, "task")
    page.locator("#attempts .chip").first.click()
    expect(page.locator("#episode[data-ready]")).to_be_visible()
    page.get_by_role("tab", name="Details").click()
    expect(page.locator("#view-details .gold")).to_be_visible()


def test_two_attempts_are_compared(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    row = next(
        row for row in store_of(viewer).page(EpisodeFilter(status="completed", reward_max=0.0))[0]
        if store_of(viewer).page(EpisodeFilter(group=row["group_id"], reward_min=1.0))[1]
    )  # fmt: skip
    page = open_page(viewer, f"/x/{EXPERIMENT}/group/{row['group_id']}")
    settled(page)
    page.get_by_role("link", name="Differences").click()
    expect(page).to_have_url(re.compile(f"a=.*&b={row['episode_id']}"))  # the best against the worst
    shortest = min(
        store_of(viewer).page(EpisodeFilter(group=row["group_id"], reward_min=1.0))[0], key=lambda best: best["tokens"]
    )
    page.get_by_label("Attempt on the left").select_option(shortest["episode_id"])
    expect(page.locator("#verdict")).to_contain_text(re.compile("the first difference is in message [45]"))
    for side, kind in (("left", "del"), ("right", "ins")):
        expect(page.get_by_label(f"Attempt on the {side}")).to_be_visible()
        expect(page.locator(f".pair {kind}").first).to_be_visible()
    expect(page.locator(".message.same .toolcall")).to_contain_text("calculator")
    shoot(page, "differences")
    left = page.get_by_label("Attempt on the left")
    right = page.get_by_label("Attempt on the right").input_value()
    slow = f"**/episode/{shortest['episode_id']}"
    page.route(slow, lambda route: (page.wait_for_timeout(500), route.continue_()))
    left.select_option(right)
    expect(page.locator("#verdict")).to_contain_text("The same, word for word")
    left.select_option(shortest["episode_id"])  # whose answer comes when another is chosen already
    left.select_option(right)
    page.wait_for_timeout(900)
    expect(page.locator("#verdict")).to_contain_text("The same, word for word")
    expect(page).to_have_url(re.compile(f"a={right}&b={right}"))
    assert page.evaluate(DIFFERENCES_OF_TEXTS, page.locator("script[src*=keys]").get_attribute("src")) == [
        [[["call ", True], ["add", False], ["(1)", True]], [["call ", True], ["sum", False], ["(1)", True]]],
        [[0, 0, True], [1, -1, False], [2, 1, True], [-1, 2, False]],
    ]


DIFFERENCES_OF_TEXTS = """async (script) => {
  const { wordDifferences, aligned } = await import(script.replace("keys.js", "diff.js"));
  return [wordDifferences("call add(1)", "call sum(1)"), aligned(["a", "b", "c"], ["a", "c", "d"], (x, y) => x === y)];
}"""


def test_a_duration_is_rounded_as_a_whole(viewer: Viewer, open_page: Open) -> None:
    page = open_page(viewer)
    said = page.evaluate(DURATIONS, page.locator("script[src*=keys]").get_attribute("src"))
    assert said == ["9.9 s", "10 s", "1 min 00 s", "2 min 00 s", "1 h 00 min", "2 h 13 min"]


DURATIONS = """async (script) => {
  const { seconds } = await import(script.replace("keys.js", "common.js"));
  return [9.94, 9.96, 59.7, 119.7, 3599.8, 8000].map(seconds);
}"""


@pytest.mark.slow
def test_notes_are_written_and_read(tmp_path: Path, experiments: Path, open_page: Open, shoot: Shoot) -> None:
    shutil.copytree(experiments / EXPERIMENT, tmp_path / EXPERIMENT)
    viewer = start(tmp_path)
    episode = store_of(viewer).page()[0][0]["episode_id"]
    page = open_page(viewer, f"/x/{EXPERIMENT}/episode/{episode}")
    page.get_by_role("button", name="Add a note or tags").click()
    page.get_by_label("Note about this episode").fill("The judge read the wrong line.")
    page.get_by_label("Tags, separated by commas").fill("judge, look again")
    page.keyboard.press("j")
    page.get_by_role("button", name="Keep").click()
    expect(page.locator("#note .text")).to_have_text("The judge read the wrong line.")
    shoot(page, "note")
    page.goto(f"{page.url.split('/episode')[0]}/episodes?groups=all")
    page.get_by_label("Notes").select_option("tag:judge")
    expect(page.locator("#count")).to_have_text("1–1 of 1 episode")
    expect(page.locator("#episodes tbody")).to_contain_text("look again")
    page.goto(f"{page.url.split('/episodes')[0]}/about")
    page.get_by_role("button", name="Add a note or tags").click()
    page.get_by_label("Tags, separated by commas").fill("x" * 41)
    page.get_by_role("button", name="Keep").click()
    expect(page.locator("#note .bad")).to_contain_text("each of at most 40 characters")
    page.get_by_label("Tags, separated by commas").fill("baseline")
    page.get_by_role("button", name="Keep").click()
    expect(page.locator("#note .note-tag")).to_have_text("baseline")
    home = open_page(viewer, "/")
    expect(home.locator("#experiments .note-tag")).to_have_text("baseline")


def test_keys_are_listed_and_the_environment_is_shown(viewer: Viewer, open_page: Open, shoot: Shoot) -> None:
    page = open_page(viewer, f"/x/{EXPERIMENT}/charts")
    settled(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("zoom all charts")
    shoot(page, "keys")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("/")
    expect(page.get_by_label("Find a metric")).to_be_focused()
    page.goto(f"{page.url.split('/charts')[0]}/about")
    environment = page.locator("section.card", has=page.get_by_role("heading", name="Environment"))
    for name in ("Python", "machine", "torch", "command"):
        expect(environment).to_contain_text(name)
    shoot(page, "about")
