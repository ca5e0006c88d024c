"""Tables to download."""

from __future__ import annotations

import csv
import io

from ajet.observe.viewer.data import episodes_csv, metrics_csv


def test_metrics_are_columns() -> None:
    text = metrics_csv({"steps": [1, 2], "series": {"reward/mean": [0.5, None], "=cmd()": [1.0, 2.0]}})
    assert text.splitlines() == ["step,reward/mean,'=cmd()", "1,0.5,1.0", "2,,2.0"]


def test_an_episodes_text_is_no_formula() -> None:
    text = episodes_csv([{"episode_id": "=HYPERLINK(1)", "step": 3, "reward": -1.0, "task_id": 'say "hi", twice'}])
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["episode_id"], row["reward"], row["task_id"]) == ("'=HYPERLINK(1)", "-1.0", 'say "hi", twice')
