"""Where a run on Trinity goes on, and whose weights it keeps. Needs no Trinity."""

from __future__ import annotations

import json
from pathlib import Path

from ajet.backbone.ray.trinity.adapter import TrinityAdapter
from ajet.config import make_config

ADAPTER = TrinityAdapter()
BOTH = make_config({"project_name": "p"})


def test_the_newest_complete_checkpoint_counts_whoever_wrote_it(tmp_path: Path) -> None:
    folder = tmp_path / "p" / "run"
    assert ADAPTER.newest_step(BOTH, tmp_path) is None
    assert ADAPTER.newest_weights(BOTH, tmp_path) is None
    (folder / "step_2" / "hf").mkdir(parents=True)
    (folder / "step_9").mkdir()  # still being written
    assert ADAPTER.newest_step(BOTH, tmp_path) == 2
    assert ADAPTER.newest_weights(BOTH, tmp_path) == folder / "step_2" / "hf"
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    assert ADAPTER.newest_step(BOTH, tmp_path) == 4
    assert ADAPTER.newest_weights(BOTH, tmp_path) == folder / "global_step_4" / "actor" / "huggingface"


def test_exploring_alone_goes_on_where_the_explorer_was(tmp_path: Path) -> None:
    exploring = make_config({"project_name": "p"}, trinity={"mode": "explore"})
    assert not ADAPTER.trains(exploring)
    assert [source.ends_step for source in ADAPTER.sources(exploring, tmp_path)] == [True, False]
    folder = tmp_path / "p" / "run"
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    assert ADAPTER.newest_step(exploring, tmp_path) is None
    (folder / "explorer_meta.json").write_text(json.dumps({"latest_iteration": 7}))
    assert ADAPTER.newest_step(exploring, tmp_path) == 7
