"""Where a run on Trinity goes on, and whose weights it keeps. Needs no Trinity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ajet.backbone import LaunchOptions
from ajet.backbone.ray.facts import Machine
from ajet.backbone.ray.trinity import TrinityAdapter, padding_notes
from ajet.config import make_config
from ajet.engine.tiny_models import tiny_folder
from ajet.schema.errors import ConfigError

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
    assert ADAPTER.newest_step(BOTH, tmp_path) == 2, "that one is gone"
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    (folder / "global_step_4").mkdir()
    assert ADAPTER.newest_step(BOTH, tmp_path) == 4
    assert ADAPTER.newest_weights(BOTH, tmp_path) == folder / "global_step_4" / "actor" / "huggingface"


@pytest.mark.parametrize(("step", "done"), [(None, 0), (2, 2)])
def test_the_explorer_goes_on_where_the_trainer_is(tmp_path: Path, step: int | None, done: int) -> None:
    """It saves its place more often: after a kill it is ahead, of a run without a checkpoint, too."""
    pytest.importorskip("ray")
    from ajet.backbone.ray.trinity.driver import _rewind_explorer

    config = SimpleNamespace(
        mode="both",
        checkpoint_job_dir=tmp_path,
        explorer=SimpleNamespace(name="explorer"),
        buffer=SimpleNamespace(batch_size=4),
    )
    _rewind_explorer(config, None)
    assert not list(tmp_path.iterdir()), "a new run"
    meta = tmp_path / "explorer_meta.json"
    meta.write_text(json.dumps({"latest_iteration": 3, "taskset_states": [{"current_index": 12}]}))
    _rewind_explorer(config, step)
    assert json.loads(meta.read_text()) == {"latest_iteration": done, "taskset_states": [{"current_index": 4 * done}]}


def test_processes_that_run_episodes_share_the_most_at_a_time() -> None:
    """Each would let all of them run."""
    pytest.importorskip("ray")
    from ajet.backbone.ray.trinity.driver import _share_episodes

    taskset = SimpleNamespace(workflow_args={"payload": "…"})
    _share_episodes(
        SimpleNamespace(
            explorer=SimpleNamespace(runner_per_model=4, rollout_model=SimpleNamespace(engine_num=2)),
            buffer=SimpleNamespace(explorer_input=SimpleNamespace(tasksets=[taskset], eval_tasksets=[])),
        )
    )
    assert taskset.workflow_args == {"payload": "…", "processes": 8}


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


@pytest.mark.parametrize(("absent", "refused"), [(("pad_token",), False), (("pad_token", "eos_token"), True)])
def test_a_tokenizer_with_nothing_to_fill_rows_up_with(tmp_path: Path, absent: tuple[str, ...], refused: bool) -> None:
    """On GPUs, where the rows are Trinity's; on the CPU they are ours, which need no filling."""
    model = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen2-0.3m"), model)
    file = model / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(file.read_text()).items() if key not in absent}
    file.write_text(json.dumps(settings))
    config, gpu = make_config({"model.path": str(model)}), Machine("cuda")
    assert [note.refused for note in padding_notes(config, gpu)] == [True] * refused
    assert not list(padding_notes(config, Machine("cpu")))
    if refused:
        with pytest.raises(ConfigError, match=r"has neither a pad token nor an end token.* set pad_token in its"):
            ADAPTER.check(config, gpu, LaunchOptions())
