"""The page of candidates in a real Chromium: what it shows, live, damaged, hostile, narrow and wide."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from test_browser import CONTRAST, OVERLAPPING

from ajet.backbone.prompt.journal import PromptJournal
from ajet.observe.viewer.serve import Viewer
from support.pages_of_viewer import settled, start
from support.synthetic_search import write_search

Open = Callable[..., Page]
Shoot = Callable[[Page, str], None]
PAGE = "/x/searched-prompt/candidates"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Viewer:
    root = tmp_path_factory.mktemp("searched")
    write_search(root)
    return start(root)


@pytest.mark.slow
def test_who_came_from_whom_what_changed_and_why(searched: Viewer, open_page: Open, shoot: Shoot) -> None:
    page = open_page(searched, "/x/searched-prompt", height=1250)
    page.get_by_role("link", name="Candidates").click()
    expect(page.locator("#about-search")).to_have_text("apo · all rounds were run")
    expect(page.locator("#tiles")).to_contain_text("within noise")
    found = searched.library.get("searched-prompt").prompts.view(running=False)
    family = page.locator("#family .member")
    expect(family).to_have_count(len(found["candidates"]))
    best = found["best"]["candidate"]
    expect(page.locator("#candidate h2")).to_have_text(best)
    expect(page.locator("#candidate ins")).not_to_have_count(0)
    shoot(page, "candidates")
    one = next(one for one in found["candidates"] if one["parents"] == ["c0"])
    page.locator(f'#family [data-candidate="{one["id"]}"]').click()
    expect(page).to_have_url(re.compile(f"candidate={one['id']}$"))
    expect(page.locator("#candidate .template")).to_contain_text(one["templates"]["solver"]["text"].split("\n")[0])
    expect(page.locator("#candidate .led")).to_contain_text(one["feedback"].split("\n")[0])
    expect(page.locator("#candidate .read tbody tr")).to_have_count(3)
    page.get_by_label("Compared with").select_option(best)
    expect(page.locator("#candidate del").first).to_be_visible()
    page.get_by_role("button", name="Text", exact=True).click()
    expect(page.locator("#candidate del")).to_have_count(0)
    again = open_page(searched, page.url[page.url.index("/x/") :])
    expect(again.locator("#candidate h2")).to_have_text(one["id"])
    expect(again.get_by_label("Compared with")).to_have_value(best)
    expect(again.get_by_role("button", name="Text", exact=True)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name=re.compile("^c0$")).first.click()
    expect(page.locator("#candidate")).to_contain_text("as they were given")
    page.locator("#refused summary").click()
    expect(page.locator("#refused")).to_contain_text("lacks the placeholder {question}")


@pytest.mark.slow
def test_scores_by_task_lead_to_the_episodes_behind_them(searched: Viewer, open_page: Open) -> None:
    found = searched.library.get("searched-prompt").prompts.view(running=False)
    best = found["best"]["candidate"]
    page = open_page(searched, PAGE)
    rows = page.locator("#scores tbody tr")
    expect(rows).to_have_count(8)
    trials = {
        (score["candidate"], trial["task"]): trial
        for score in found["scores"] if score["purpose"] == "validation" for trial in score["trials"]
    }  # fmt: skip
    page.get_by_label("Which tasks of them").select_option("unsolved")
    unsolved = {task for one, task in trials} - {task for (one, task), trial in trials.items() if trial["success"]}
    expect(rows).to_have_count(len(unsolved))
    failing = page.locator("#scores tbody tr", has_text="apples-0011")
    expect(failing.locator("td.failed").first).to_have_text("failed")
    page.get_by_label("Which tasks of them").select_option("differ")
    expect(page).to_have_url(re.compile("tasks=differ"))
    solved = next(task for (one, task), trial in trials.items() if one == best and trial["success"])
    line = page.locator("#scores tbody tr", has_text=solved)
    expect(line.locator("td.chosen")).to_have_text("1")
    page.get_by_role("button", name="Unseen").click()
    expect(page.locator("#scores-summary")).to_contain_text("4 tasks, 2 candidates")
    page.get_by_role("button", name="Validation").click()
    line.locator("td.chosen a").click()
    expect(page.locator("#episode[data-ready]")).to_be_visible()
    assert page.url.endswith(trials[best, solved]["episodes"][0])
    page.get_by_role("tab", name="Details").click()
    page.get_by_role("link", name="The candidate with these templates").click()
    expect(page.locator("#candidate h2")).to_have_text(best)


@pytest.mark.slow
def test_a_search_that_goes_on_grows_on_the_page(tmp_path: Path, open_page: Open) -> None:
    folder = write_search(tmp_path, end=False)
    page = open_page(start(tmp_path), PAGE)
    expect(page.locator("#about-search")).to_contain_text("the last round isn't complete")
    members = page.locator("#family .member")
    count = (folder / "prompts/history.jsonl").read_text().count('"event": "candidate"')
    expect(members).to_have_count(count)
    expect(page.locator(f'[data-candidate="c{count - 1}"]')).to_contain_text("unfinished")
    journal = PromptJournal(folder)
    journal.note(
        "candidate", id=f"c{count}", version="12345678", parents=["c0"], made_by="rewrite", feedback="", round=4,
        templates={"solver": {"text": "Newly come.\n{question}", "engine": "f-string"}}, read=[],
    )  # fmt: skip
    journal.close()
    expect(members).to_have_count(count + 1)
    expect(page.locator("#candidate h2")).not_to_have_text(f"c{count}"), "what is being read stays"


def test_a_damaged_history_is_said_and_the_rest_shown(tmp_path: Path, open_page: Open) -> None:
    folder = write_search(tmp_path)
    file = folder / "prompts/history.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    gone = next(at for at, line in enumerate(lines) if '"parents": ["c0"]' in line and '"candidate"' in line)
    file.write_text("".join([*lines[:gone], "}{\n", *lines[gone + 1 :], '{"event": "ro']))
    (folder / "prompts/best.yaml").write_text("candidate: [")
    page = open_page(start(tmp_path), PAGE)
    expect(page.locator(".problem")).to_have_count(3)
    expect(page.locator("#problems")).to_contain_text(f"line {gone + 1}: left out")
    expect(page.locator("#problems")).to_contain_text("cut off while it was written")
    expect(page.locator("#problems")).to_contain_text("best.yaml is damaged")
    expect(page.locator("#family .member").first).to_be_visible()
    file.write_text("}{\n")
    expect(page.locator("#none")).to_have_text("No candidate can be read from the history.")


def test_hostile_texts_are_shown_as_text(tmp_path: Path, open_page: Open) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e {question}"
    folder = write_search(tmp_path, extra=attack.replace("{question}", "{{}}"))
    journal = PromptJournal(folder)
    template = {"text": attack + "w" * 3000, "engine": "f-string"}
    journal.note(
        "candidate", id="c99", version="<b>", parents=["c0", "c1", "<i>"], made_by="<u>", feedback=attack, round=4,
        templates={'"><script>alert(3)</script>': template},
        read=[{"task": "../..\"><img src=x onerror=alert(4)>", "reward": 1, "feedback": attack, "episodes": ["<a>"]}],
    )  # fmt: skip
    trial = {
        "task": "<img src=x onerror=alert(5)>",
        "reward": -1e9,
        "success": 1,
        "failure": attack,
        "episodes": ["javascript:alert(6)"],
    }
    journal.note("scores", round=4, purpose="validation", candidate="c99", mean=1, trials=[trial])
    journal.note("refused", round=4, kind="<b>", parents=["<b>"], texts={"x": attack}, reason=attack)
    journal.close()
    page = open_page(start(tmp_path), f"{PAGE}?candidate=c99&text=whole", width=390)
    expect(page.locator("#candidate .template")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator("#candidate .ctl").first).to_have_text("U+202E")
    expect(page.locator("#scores tbody")).to_contain_text("<img src=x onerror=alert(5)>")
    page.locator("#refused summary").click()
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("[...document.links].every((link) => new URL(link.href).origin === location.origin)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long word does not widen the page"


@pytest.mark.slow
@pytest.mark.parametrize("size", [(390, 844), (1280, 800), (1920, 1080)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(searched: Viewer, open_page: Open, size: tuple[int, int], scheme: str) -> None:
    page = open_page(searched, PAGE, width=size[0], height=size[1], scheme=scheme)
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OVERLAPPING) == []
    assert page.evaluate(CONTRAST) == []
