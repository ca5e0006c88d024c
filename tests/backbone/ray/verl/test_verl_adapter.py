"""What is checked before a run on verl, and where it goes on. Needs no verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.backbone import LaunchOptions
from ajet.backbone.ray.facts import Machine
from ajet.backbone.ray.verl import VerlAdapter
from ajet.config import make_config
from ajet.schema.errors import UserError

ADAPTER = VerlAdapter()


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("trainer_common.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size: 3 does not divide the 8"),
        ("rollout.tensor_model_parallel_size", "tensor_model_parallel_size: 3 does not divide the 8"),
    ],
)
def test_sizes_that_do_not_divide_the_gpus_are_named(key: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        ADAPTER.check(make_config({key: 3}), Machine("cuda"), LaunchOptions())


def test_the_cpu_counts_as_one_gpu() -> None:
    ADAPTER.check(make_config({"rollout.tensor_model_parallel_size": 3}), Machine("cpu"), LaunchOptions())
    with pytest.raises(UserError, match="does not divide the 1 GPUs"):
        ADAPTER.check(
            make_config({"trainer_common.ulysses_sequence_parallel_size": 2}), Machine("cpu"), LaunchOptions()
        )


def test_verls_own_key_may_switch_validations_off() -> None:
    assert ADAPTER.validates(make_config({}))
    assert not ADAPTER.validates(make_config({}, trainer={"test_freq": -1}))


def test_the_newest_checkpoint_is_the_one_that_verl_names(tmp_path: Path) -> None:
    config = make_config({})
    assert ADAPTER.newest_step(config, tmp_path) is None
    assert ADAPTER.newest_weights(config, tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "global_step_3").mkdir()
    assert ADAPTER.newest_step(config, tmp_path) == 3
    assert ADAPTER.newest_weights(config, tmp_path) == tmp_path / "global_step_3" / "actor" / "huggingface"
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert ADAPTER.newest_step(config, tmp_path) == 3, "somebody wrote the file by hand"


def test_a_run_goes_on_where_verl_could_not_write_which_checkpoint_is_the_newest(tmp_path: Path) -> None:
    """It opens the file anew after each checkpoint, so a full disk or a kill leaves it empty."""
    named = tmp_path / "latest_checkpointed_iteration.txt"
    named.touch()
    for step in (2, 10, 9):
        (tmp_path / f"global_step_{step}").mkdir()
    assert ADAPTER.newest_step(make_config({}), tmp_path) == 10
    assert named.read_text() == "10", "verl reads it, too"


def test_a_checkpoint_that_is_gone_is_not_the_newest(tmp_path: Path) -> None:
    """verl would begin again without a word, and its steps would follow those that are recorded."""
    named, config = tmp_path / "latest_checkpointed_iteration.txt", make_config({})
    named.write_text("9")
    for step in (2, 6, 12):  # verl hadn't finished the last one
        (tmp_path / f"global_step_{step}").mkdir()
    assert ADAPTER.newest_step(config, tmp_path) == 6
    assert named.read_text() == "6", "verl reads it, too"
    for step in (2, 6):
        (tmp_path / f"global_step_{step}").rmdir()
    assert ADAPTER.newest_step(config, tmp_path) is None
    (tmp_path / "global_step_6").mkdir()
    assert ADAPTER.newest_step(config, tmp_path) == 6, "it was brought back"


def test_a_run_goes_on_from_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    config = make_config({"trainer_common.resume": "elsewhere/global_step_4"})
    assert ADAPTER.newest_step(config, tmp_path) == 4
    assert not [note for note in ADAPTER.notes(config, Machine("cuda")) if note.refused]
    (note,) = [
        note
        for note in ADAPTER.notes(make_config({"trainer_common.resume": "elsewhere/step_4"}), Machine("cuda"))
        if note.refused
    ]
    assert note.key == "ajet.trainer_common.resume"
