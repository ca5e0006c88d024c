"""The driver's process, watched: its log and its metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ajet.backbone.metrics import from_verl
from ajet.backbone.ray.watcher import LEFT_OUT, ChildLog, MetricsTail


def test_a_metrics_line_counts_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path, from_verl)
    assert list(tail) == []
    line = json.dumps({"step": 1, "data": {"reward/mean": 1.0}})
    path.write_text(line[:10])
    assert list(tail) == []
    path.write_text(line + "\n" + line[:5])
    assert list(tail) == [(1, {"reward/mean": 1.0})]
    assert list(tail) == []


def test_the_childs_log_holds_neither_secrets_nor_the_payload(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print('key sk-secret'); print({'ajet_run': 'PAYLOAD'})"], stdout=subprocess.PIPE
    )
    log = ChildLog(child, tmp_path / "log", payload="PAYLOAD", mask=lambda text: text.replace("sk-secret", "***"))
    child.wait()
    log.finish()
    assert (tmp_path / "log").read_text() == f"key ***\n{{'ajet_run': '{LEFT_OUT}'}}\n"
