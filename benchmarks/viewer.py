"""The viewer at 100,000 episodes, the cost of recording, and what is lost when the recording process is killed.

`python benchmarks/viewer.py [FOLDER] [--only recording]`; FOLDER keeps the made-up experiment between calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import psutil
from common import ROOT, ajet_command, known_figures, write_result
from playwright.sync_api import Page, sync_playwright

from ajet.backbone.metrics import episode_metrics
from ajet.config import Config
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
from ajet.observe.episode_tables import open_for_writing
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.statistics import TaskFilter, task_page
from ajet.schema.episode import Episode, EpisodeStatus, Ledger
from ajet.schema.task import Task

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "observe")]

from support.synthetic_run import (
    CallCredit,
    EpisodeCredit,
    TreeMaker,
    Vocabulary,
    credit_of,
    math_episode,
    step_metrics,
)

EPISODES = 100_000
PATTERNS = 800
GROUP = 8
LONG_TOKENS = 50_000
KILLS = 100
REPEATS = 5
NAME = "hundred-thousand"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
QUICKSTART_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, help="keeps the made-up experiment between calls")
    parser.add_argument(
        "--only", choices=("viewer", "tasks", "recording", "kills"), help="one part; the others keep theirs"
    )
    arguments = parser.parse_args()
    root = arguments.folder or Path(tempfile.mkdtemp(prefix="ajet-viewer-"))
    root.mkdir(parents=True, exist_ok=True)
    parts = {"viewer": measure_viewer, "tasks": measure_tasks, "recording": measure_recording, "kills": measure_kills}
    try:
        figures = known_figures("viewer") if arguments.only else {}
        for name, measure in parts.items():
            if arguments.only in (None, name):
                figures |= measure(root)
        print(json.dumps(figures, indent=2))
        print(write_result("viewer", figures))
    finally:
        if arguments.folder is None:
            shutil.rmtree(root)


# ---------------------------------------------------------------- a large experiment


def make_experiment(root: Path) -> None:
    """100,000 episodes from 800 different ones, and one of 50,000 tokens."""
    rng, vocabulary = random.Random(0), Vocabulary()
    patterns = [math_episode(vocabulary, rng, task=index // 4, repeat=index % 4) for index in range(PATTERNS)]
    config = Config.model_validate({"ajet": {"experiment_name": NAME}})
    with ExperimentFolder.open(config, exp_dir=root) as folder:
        recorder = EpisodeRecorder(folder.episodes, tokenizer=vocabulary)
        done = recorder.record(long_episode(vocabulary, rng), 0)
        for start in range(0, EPISODES - 1, GROUP):
            step = start // 64
            pattern = [patterns[rng.randrange(PATTERNS)] for _ in range(GROUP)]
            group = [
                replace(episode, episode_id=f"e{start + index:06d}", group_id=f"g{start // GROUP}", repeat=index)
                for index, episode in enumerate(pattern)
            ]
            for episode, credit in zip(group, credit_of(group), strict=True):
                done = recorder.record(episode, step, credit)
            if start % 4096 == 0:
                done.result()  # the writer keeps up: nothing piles up in memory
            if start % 64 == 0:
                folder.metrics.log(step, step_metrics(step, group, rng))
        recorder.close()
    (root / NAME / "complete").touch()


def long_episode(vocabulary: Vocabulary, rng: random.Random) -> Episode:
    """One conversation of about 50,000 tokens, half of them sampled."""
    maker = TreeMaker(vocabulary, rng)
    sentence = "The agent reads the page, finds {} apples and {} pears, and writes down what it saw. "
    last = -1
    while maker.tree.tokens < LONG_TOKENS:
        text = "".join(sentence.format(rng.randrange(100), rng.randrange(100)) for _ in range(25)) + "\n"
        last = maker.call(
            "reader", [{"role": "user", "content": text}], {"role": "assistant", "content": text}, extends=last
        )
    sampled = maker.tree.sampled_tokens
    return Episode("long", "long-task", EpisodeStatus.COMPLETED, maker.tree, Ledger(sampled, sampled), reward=1.0)


# ---------------------------------------------------------------- the viewer in a browser


def measure_viewer(root: Path) -> dict[str, Any]:
    experiment = root / NAME
    if not (experiment / "complete").exists():
        make_experiment(root)
    database_mb = (experiment / "episodes.sqlite").stat().st_size // 10**6
    server = subprocess.Popen(
        [sys.executable, "-m", "ajet", "view", str(root), "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        base = url[: url.index("/", len("http://"))]
        executable = shutil.which("chromium")
        if executable is None:
            raise SystemExit("benchmarks/viewer.py drives Chromium: apt-get install chromium")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1920, "height": 1080}, bypass_csp=True)  # to wait by polling
            page.goto(url)
            figures = in_browser(page, f"{base}/x/{NAME}")
            browser.close()
        figures = {"episodes": EPISODES, "database_mb": database_mb} | figures
        figures["server_memory_mb"] = psutil.Process(server.pid).memory_info().rss // 2**20
        return figures
    finally:
        server.terminate()
        server.wait()


def in_browser(page: Page, base: str) -> dict[str, Any]:
    """Seconds until what was asked for is on the screen: the slowest of some, and the median."""

    def count_is(text: str) -> None:
        page.wait_for_function("text => document.getElementById('count')?.textContent.includes(text)", arg=text)

    total = f"{EPISODES + 1:,}"  # and the long one

    def open_list() -> None:
        page.goto(f"{base}/episodes", wait_until="commit")
        count_is(f"of {total}")

    def by_text() -> None:
        page.goto(f"{base}/episodes?q={quote('sum looks wrong')}&sort=reward", wait_until="commit")
        page.wait_for_selector("#episodes tbody tr")

    def by_agent() -> None:
        page.get_by_label("Agent", exact=True).select_option("checker")
        page.wait_for_function(f"!document.getElementById('count').textContent.includes('of {total}')")

    def by_status() -> None:
        page.get_by_label("Status", exact=True).select_option("timeout")
        page.wait_for_function(
            "[...document.querySelectorAll('#episodes tbody .pill')].every(pill => pill.textContent === 'timeout')"
        )

    def tokens() -> None:
        page.goto(f"{base}/episode/long?view=tokens", wait_until="commit")
        page.wait_for_selector("#view-tokens[data-ready] .tk")

    def charts() -> None:
        page.goto(base, wait_until="commit")
        page.wait_for_selector(".chart canvas")

    figures = seconds_of("list_opens", open_list)
    figures |= seconds_of("text_filter_opens", by_text)
    figures |= seconds_of("agent_filter", by_agent, before=open_list)
    figures |= seconds_of("status_filter", by_status, before=open_list)
    figures |= seconds_of("charts_open", charts)
    figures |= seconds_of("token_view_opens", tokens)
    figures["token_view_tokens"] = int(
        page.locator(".token-bar").inner_text().split(" tokens")[0].split()[-1].replace(",", "")
    )
    figures["token_view_elements"] = page.locator(".tk").count()
    for kind, frames in page.evaluate(SCROLL).items():
        figures[f"{kind}_frame_ms"] = {
            "median": round(statistics.median(frames), 1),
            "p95": round(sorted(frames)[len(frames) * 95 // 100], 1),
        }
    return figures


SCROLL = """async () => {
  const box = document.querySelector(".tokens");
  const frames = async (move) => {
    const times = [];
    await new Promise(requestAnimationFrame);
    let last = performance.now();
    for (let frame = 0; frame < 180; frame++) {
      move(frame);
      await new Promise(requestAnimationFrame);
      times.push(performance.now() - last);
      last = performance.now();
    }
    return times;
  };
  box.scrollTop = 0;
  const scroll = await frames(() => { box.scrollTop += 100; });
  const jump = await frames(() => { box.scrollTop = (box.scrollHeight - box.clientHeight) * Math.random(); });
  return { scroll, jump };
}"""
"""Milliseconds a frame: a notch of a mouse wheel each frame (6,000 pixels a second), and jumps to anywhere."""


def seconds_of(name: str, work: Callable[[], None], before: Callable[[], None] | None = None) -> dict[str, Any]:
    times = []
    for _ in range(REPEATS):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return {f"{name}_s": {"median": round(statistics.median(times), 3), "max": round(max(times), 3)}}


# ---------------------------------------------------------------- the table of tasks


SHAPES = {"few_tasks_by_group": (200, True), "few_tasks_mixed": (200, False), "many_tasks": (20_000, False)}
"""Number of tasks, and whether the eight episodes of a group are of one task. Mixed ones have the most rows by step."""
PAGES: dict[str, tuple[TaskFilter, dict[str, Any]]] = {
    "first_page": (TaskFilter(), {}),
    "training_by_solved": (TaskFilter(validation=False), {"sort": "solved", "descending": True}),
    "text": (TaskFilter(text="12"), {"sort": "change"}),
}


def measure_tasks(root: Path) -> dict[str, Any]:
    """CPU seconds of a page of the table. Only rows of the lists are made up: no page reads an episode's body."""
    figures = {}
    for name, (tasks, by_group) in SHAPES.items():
        path = root / f"tasks-{name}.sqlite"
        for file in root.glob(f"{path.name}*"):
            file.unlink()
        figures[name] = make_rows(path, tasks, by_group)
        store = EpisodeStore(path)
        figures[name]["task_steps"] = store.rows("SELECT count(*) FROM tried_step")[0][0]
        for page, (where, more) in PAGES.items():
            figures[name][f"{page}_cpu_s"] = min(page_seconds(store, where, more) for _ in range(REPEATS))
        store.close()
    return {"tasks": figures}


def page_seconds(store: EpisodeStore, where: TaskFilter, more: dict[str, Any]) -> float:
    began = time.process_time()
    rows, _ = task_page(store, where, **more)
    msgspec.json.encode(rows)  # as the viewer answers
    return round(time.process_time() - began, 3)


def make_rows(path: Path, tasks: int, by_group: bool) -> dict[str, Any]:
    """100,000 episodes' rows, and what counting all tasks anew takes, as at a resume with another threshold."""
    rng = random.Random(0)
    EpisodeRecorder(path).close()
    connection = open_for_writing(path)
    names = [row[1] for row in connection.execute("PRAGMA table_info(episode)")]
    like = dict.fromkeys(names, 0) | {"tag": "", "status": "completed", "outcomes": "", "failure": "", "agents": "[]"}
    connection.execute("BEGIN")
    for start in range(0, EPISODES, GROUP):
        group = rng.randrange(tasks)
        for index in range(start, start + GROUP):
            task = group if by_group else rng.randrange(tasks)
            own = {"id": index + 1, "episode_id": f"e{index}", "step": index // 64, "reward": rng.random()}
            own |= {"success": rng.randrange(2), "validation": int(rng.random() < 0.1), "group_id": f"g{start}"}
            own |= {"task_id": f"task-{task:05}", "preview": f"How many apples are {task} apples and {task} pears?"}
            marks = ", ".join("?" * len(names))
            connection.execute(f"INSERT INTO episode VALUES ({marks})", [(like | own)[name] for name in names])
    connection.execute("DELETE FROM tried_threshold")
    connection.execute("COMMIT")
    connection.close()
    began = time.process_time()
    open_for_writing(path).close()
    return {"episodes": EPISODES, "tasks": tasks, "counted_anew_cpu_s": round(time.process_time() - began, 2)}


# ---------------------------------------------------------------- recording


def measure_recording(root: Path) -> dict[str, Any]:
    """What recording takes of a quickstart's step, in CPU seconds: the recorder alone on the episodes of a run (all its
    threads), against what that run spent a step. The difference of a long run and a short one is free of start-up.

    Wall clock would tell less: two runs differ by more than recording costs, and a busy machine slows steps down.
    """
    off = ["recorder.keep=every_n", "recorder.every_n=100000"]
    short = quickstart(root / "quickstart-short", 1)
    long = quickstart(root / "quickstart-long", 1 + QUICKSTART_STEPS)
    without = quickstart(root / "quickstart-without", 1 + QUICKSTART_STEPS, *off)
    [run] = [path for path in (root / "quickstart-long").iterdir() if (path / "episodes.sqlite").exists()]
    recorded = list(EpisodeStore(run / "episodes.sqlite").all(EpisodeFilter(validation=False)))
    best = min(record_again(root / f"again-{index}.sqlite", recorded) for index in range(3))
    recording, step = best / (1 + QUICKSTART_STEPS), (long - short) / QUICKSTART_STEPS
    return {
        "recording": {
            "episodes": len(recorded),
            "cpu_us_an_episode": round(1e6 * best / len(recorded)),
            "cpu_seconds_a_step": round(recording, 4),
            "quickstart_cpu_seconds_a_step": round(step, 3),
            "share_of_step": round(recording / step, 4),
            "whole_runs_cpu_seconds": {"recorded": round(long, 1), "not_recorded": round(without, 1)},
        }
    }


def quickstart(experiments: Path, steps: int, *overrides: str) -> float:
    """One run of the quickstart: the CPU seconds of the whole process."""
    command = ajet_command(
        QUICKSTART, experiments, "--fresh", f"trainer_common.total_training_steps={steps}",
        "trainer_common.test_freq=-1", "trainer_common.val_before_train=false", *overrides,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def record_again(path: Path, recorded: list[Any]) -> float:
    """CPU seconds (all threads) to record these, their metrics counted too."""
    recorder = EpisodeRecorder(path)
    began = time.process_time()
    for one in recorded:
        calls = [CallCredit(0.5, 1e-4, [(0.5, 1e-4)]) for _ in one.episode.tree.calls]
        recorder.record(
            one.episode, one.step, EpisodeCredit(calls), task=Task(main_query=one.query, task_id=one.episode.task_id)
        )
    recorder.flush()
    episode_metrics([one.episode for one in recorded])
    spent = time.process_time() - began
    recorder.close()
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    return spent


def measure_kills(root: Path) -> dict[str, Any]:
    """SIGKILL while recording, at random moments, into one file."""
    from test_recorder import kill_and_check

    rng = random.Random()
    path = root / "kills.sqlite"
    kills = [kill_and_check(path, seed, rng.random() * 0.3) for seed in range(KILLS)]
    for file in root.glob("kills.sqlite*"):
        file.unlink()
    return {
        "kills": len(kills),
        "acknowledged_before_kills": sum(acknowledged for acknowledged, _ in kills),
        "acknowledged_and_lost": sum(lost for _, lost in kills),
    }


if __name__ == "__main__":
    main()
