"""The tutorials example_spider and example_calc_x: their parts, a scripted run, and two steps of training."""

from __future__ import annotations

import json
import runpy
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ajet.cli.main import main
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SHORT = (
    "data.train_batch_size=2",
    "rollout.num_repeat=2",
    "rollout.max_response_length_in_one_turn=16",
    "rollout.compute_madness_checklist=[]",
    "trainer_common.total_training_steps=2",
    "trainer_common.test_freq=-1",
    "trainer_common.use_kl_loss=false",
)
TINY = "model.path=tiny:qwen2-0.3m"
VOWELS = "sum(letter in 'aeiou' for letter in text) / max(1, len(text))"
GRADED = {
    "example_spider": f"import sql_agent as example\nexample.same_result = lambda database, text, gold: {VOWELS}\n"
    "Graded = example.SqlAgent\n",
    "example_calc_x": f"import calc_agent as example\nexample.is_right = lambda text, result: {VOWELS}\n"
    "Graded = example.calc_agent\n",
}
"""The examples' agents with a reward that random weights earn now and then."""


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    folder = tmp_path / "spider"
    shutil.copytree(ROOT / "tutorial" / "example_spider", folder)
    runpy.run_path(str(folder / "make_databases.py"), run_name="__main__")
    return folder


def test_the_calculator_s_last_number_counts_to_four_decimals() -> None:
    is_right = runpy.run_path(str(ROOT / "tutorial" / "example_calc_x" / "calc_agent.py"))["is_right"]
    assert all(is_right(f"So: {said}", "1234.6042") for said in ("1234.6042", "1,234.60424", "1234.60420"))
    assert not any(is_right(said, "1234.6042") for said in ("1234.6043", "1234.605", "1234.6", "none"))


def test_the_databases_answer_and_are_only_read(spider: Path) -> None:
    module: dict[str, Any] = runpy.run_path(str(spider / "sql_agent.py"))
    tasks = [json.loads(line) for file in spider.glob("data/*.jsonl") for line in file.open()]
    for task in tasks:
        database = module["Database"](task["database"])
        assert module["same_result"](database, task["gold"], task["gold"])
        assert not module["same_result"](database, "SELECT 'else'", task["gold"])
        database.close()
    database = module["Database"]("shop")
    forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    for query in (
        "DELETE FROM customer",
        "ATTACH 'other' AS o",
        "PRAGMA user_version",
        "SELECT load_extension('x')",
        forever,
        "SELECT hex(zeroblob(10000000))",
    ):
        with pytest.raises(sqlite3.Error):
            database.rows(query)
    with pytest.raises(FileNotFoundError, match=r"make_databases\.py"):
        module["Database"]("none")
    assert module["query_in"]("First:\n```sql\nSELECT 1;\n```") == "SELECT 1"


@pytest.mark.slow
def test_sql_is_written_checked_and_rewritten(spider: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(spider)
    assert main(["--conf", "spider.yaml", "--backbone=debug", "rollout.engine=scripted", TINY]) == 0
    store = EpisodeStore(spider / "saved_experiments" / "spider-debug" / "episodes.sqlite")
    episodes = [record.episode for record in store.all()]
    store.close()
    assert [episode.metadata["query"] for episode in episodes] == ["SELECT 1"] * 2
    assert {call.agent for call in episodes[0].tree.calls} == {"write", "check", "rewrite"}
    (spider / "graded.py").write_text(GRADED["example_spider"])
    assert main(["--conf", "spider.yaml", "--quiet", "rollout.user_workflow=graded.py->Graded", TINY, *SHORT]) == 0
    assert len(read_metrics(spider / "saved_experiments" / "spider" / "metrics.jsonl")) == 2


@pytest.mark.slow
def test_the_calculator_is_an_mcp_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp_server_calculator")
    folder = tmp_path / "calc"
    shutil.copytree(ROOT / "tutorial" / "example_calc_x", folder)
    monkeypatch.chdir(folder)
    before = (folder / "data" / "train.jsonl").read_text()
    runpy.run_path("make_data.py", run_name="__main__")
    assert (folder / "data" / "train.jsonl").read_text() == before
    assert main(["--conf", "calc_x.yaml", "--backbone=debug", "rollout.engine=scripted", TINY]) == 0
    store = EpisodeStore(folder / "saved_experiments" / "calc_x-debug" / "episodes.sqlite")
    assert sorted(record.episode.reward or 0.0 for record in store.all()) == [0.0, 1.0], "one problem is the script's"
    store.close()
    (folder / "graded.py").write_text(GRADED["example_calc_x"])
    assert main(["--conf", "calc_x.yaml", "--quiet", "rollout.user_workflow=graded.py->Graded", TINY, *SHORT]) == 0
    assert len(read_metrics(folder / "saved_experiments" / "calc_x" / "metrics.jsonl")) == 2
