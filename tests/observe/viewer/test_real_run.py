"""The viewer over a real training run, in a real Chromium: in the middle of the run, and when it is done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, expect

from ajet.observe.viewer.serve import Viewer
from support import ROOT, SUPPORT
from support.pages_of_viewer import start

Open = Callable[..., Page]
Shoot = Callable[[Page, str], None]
STARTING_MS = 240_000
"""A busy machine may take long to load torch."""
EACH_STEP = 2 * 4


class Run:
    """`ajet` training in a process of its own; after its first step it waits for `go`."""

    def __init__(self, folder: Path) -> None:
        self.experiments = folder / "experiments"
        self.experiments.mkdir()
        self.go = folder / "go"
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"main_query": f"Say {word}."}) + "\n" for word in ("apples", "pears")))
        conf = folder / "real.yaml"
        conf.write_text(yaml.safe_dump(self._config(tasks)))
        self.log = (folder / "output").open("w+")
        command = [sys.executable, "-m", "ajet", "--conf", str(conf), "--backbone=local", "--exp-dir"]
        self.process = subprocess.Popen(
            [*command, str(self.experiments)], cwd=folder, stdout=self.log, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.viewer: Viewer = start(self.experiments)

    def _config(self, tasks: Path) -> dict[str, Any]:
        ajet = {
            "experiment_name": "real",
            "model": {"path": "tiny:qwen2-0.3m"},
            "task_reader": {
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(tasks)}},
            },
            "data": {"max_prompt_length": 256, "max_response_length": 256, "train_batch_size": 2},
            "rollout": {
                "user_workflow": f"{SUPPORT / 'gated_agent.py'}->GatedAgent",
                "num_repeat": 4,
                "max_model_len": 512,
                "max_response_length_in_one_turn": 8,
                "compute_madness_checklist": [],
            },
            "trainer_common": {"total_training_steps": 3, "save_freq": -1, "test_freq": -1},
        }
        return {"ajet": ajet, "gate": {"metrics": str(self.experiments / "real" / "metrics.jsonl"), "go": str(self.go)}}

    def finish(self) -> None:
        self.go.touch()
        code = self.process.wait(timeout=STARTING_MS / 1000)
        self.log.seek(0)
        assert code == 0, self.log.read()[-3000:]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.process.kill()
    run.process.wait()
    run.log.close()


@pytest.mark.slow
def test_a_real_run_is_seen_while_it_goes_and_after(run: Run, open_page: Open, shoot: Shoot) -> None:
    home = open_page(run.viewer)
    expect(home.locator("#experiments tbody tr")).to_contain_text("running", timeout=STARTING_MS)
    overview = open_page(run.viewer, "/x/real")
    step = overview.locator("#about-run")
    expect(step).to_contain_text("step 1", timeout=STARTING_MS)
    charts = open_page(run.viewer, "/x/real/charts")
    expect(charts.locator("#live")).to_have_text("live")
    episodes = open_page(run.viewer, "/x/real/episodes?groups=all")
    expect(episodes.locator("#count")).to_have_text(f"1–{EACH_STEP} of {EACH_STEP} episodes")

    look_at_one_episode(open_page(run.viewer, "/x/real/episodes?groups=all"), shoot)
    filter_and_open_a_group(open_page(run.viewer, "/x/real/episodes?groups=all"), shoot)
    assert run.process.poll() is None, "all this was in the middle of the run"

    run.finish()
    expect(step).to_contain_text("step 3")
    expect(overview.locator("#status")).to_have_text("completed")
    expect(episodes.locator("#count")).to_have_text(f"1–{3 * EACH_STEP} of {3 * EACH_STEP} episodes")
    expect(home.locator("#experiments tbody tr")).to_contain_text("completed")
    expect(charts.locator("#live")).to_be_hidden()
    for title in ("Reward", "Loss", "Entropy", "Tokens per second", "Time per step"):
        expect(charts.get_by_role("heading", name=title, exact=True)).to_be_visible()
    shoot(charts, "real-charts")
    about = open_page(run.viewer, "/x/real/about")
    expect(about.locator("main")).to_contain_text("tiny:qwen2-0.3m")


def look_at_one_episode(page: Page, shoot: Shoot) -> None:
    """From the list to a call that forked, to a token."""
    forks = page.get_by_role("columnheader", name="Forks")
    forks.click()
    expect(forks).to_have_attribute("aria-sort", "descending")  # set with the rows; the URL changes before they come
    expect(page).to_have_url(re.compile("sort=forks"))
    page.locator("#episodes tbody tr .name").first.click()
    expect(page.locator("#episode[data-ready]")).to_be_visible()
    expect(page.locator(".graph .call")).to_have_count(4)
    page.locator(".graph .call", has_text="critic").click()
    expect(page.locator("#view-chat")).to_contain_text("<script>window.hacked = 1</script>")
    expect(page.locator("#view-chat .ctl", has_text="U+202E").first).to_be_visible()
    page.get_by_role("tab", name="Details").click()
    expect(page.locator("#view-details")).to_contain_text("Ledger")
    page.get_by_role("tab", name="Tokens").click()
    page.locator(".tk.m-trained").first.click()
    for label in ("logprob, sampler", "logprob, trainer", "ratio", "advantage", "policy version"):
        expect(page.locator(".inspector")).to_contain_text(label)
    shoot(page, "real-tokens")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe").count() == 0


def filter_and_open_a_group(page: Page, shoot: Shoot) -> None:
    page.get_by_label("Agent", exact=True).select_option("critic")
    expect(page.locator("#count")).to_contain_text(f"of {EACH_STEP} episodes")
    page.get_by_label("Words in messages").fill("pears")
    expect(page.locator("#count")).to_contain_text(f"of {EACH_STEP // 2} episodes")
    shoot(page, "real-episodes")
    page.get_by_role("link", name="Group").first.click()
    expect(page.locator(".column")).to_have_count(4)
    expect(page.locator(".column .scores").first).to_contain_text("advantage")
    shoot(page, "real-group")
