"""`docs/metrics.md` explains every metric that the code names, and none that it doesn't."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ajet.backbone import metrics
from ajet.cli.main import main
from support.pages import ROOT

PREFIXES = "credit|curriculum|episode|ledger|loss|perf|prompt|return|reward|success|tag|time|tokens|train|val"
LITERAL = re.compile(rf'f?"((?:{PREFIXES})/[a-z_@/{{}}]+)"')
SOURCES = [file for room in ("backbone", "trainer", "task_reader") for file in (ROOT / "ajet" / room).rglob("*.py")]
CODE = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES)
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
EXPLAINED = re.findall(rf"`((?:{PREFIXES}|status|outcome|failure|masked|dropped|fork|user)/[^`]+)`", PAGE)


def named_in_the_code() -> set[str]:
    """Under our names: not those that are translated into ours, nor mere beginnings of names."""
    found = {name for file in SOURCES for name in LITERAL.findall(file.read_text(encoding="utf-8"))}
    tables = (metrics.STEP, metrics.VERL, metrics.TRINITY)
    found -= {name for table in tables[1:] for name in table}
    found |= {name for table in tables for name in table.values()}
    return {name for name in found if not name.endswith(("/", "@", "_"))}


def stands_for(written: str, name: str) -> bool:
    """Whether a name with `<k>` or `{k}` in it stands for another."""
    parts = re.split(r"<\w+>|\{\w+\}", written)
    return re.fullmatch(".+".join(map(re.escape, parts)), name) is not None


@pytest.mark.parametrize("name", sorted(named_in_the_code()))
def test_the_page_explains(name: str) -> None:
    assert any(stands_for(one, name) or stands_for(name, one) for one in EXPLAINED)


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_code_has(name: str) -> None:
    plain = name.partition("<")[0].removesuffix("_max")
    assert plain in CODE or plain.rstrip("/").rpartition("/")[2] in CODE


@pytest.mark.slow
def test_a_run_logs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-agent"]) == 0
    monkeypatch.chdir(tmp_path / "my-agent")
    steps = ["trainer_common.total_training_steps=2", "trainer_common.test_freq=1"]
    assert main(["--conf", "my-agent.yaml", "--quiet", *steps]) == 0
    lines = Path("saved_experiments/my-agent/metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)} - {"step", "time"}
    assert [name for name in sorted(names) if not any(stands_for(one, name) for one in EXPLAINED)] == []
