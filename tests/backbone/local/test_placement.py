"""Which GPUs the trainer and the engines get. The number of GPUs is given: nothing is computed on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.local.placement import Placement, place
from ajet.config.loader import load_config
from ajet.schema.errors import ConfigError


def config_of(folder: Path, *overrides: str) -> Any:
    (folder / "job.yaml").write_text("ajet: {project_name: p}")
    return load_config(folder / "job.yaml", overrides, backbone="local", complete=False)


VLLM = "rollout.engine=vllm"


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ([], 0, Placement(None, ())),
        ([], 4, Placement(None, ())),
        (["trainer_common.gpu=2"], 4, Placement("cuda:2", ())),
        ([VLLM], 0, Placement(None, ())),
        ([VLLM], 1, Placement("cuda:0", (0,))),
        ([VLLM, "rollout.n_vllm_engine=3"], 4, Placement("cuda:0", (1, 2, 3))),
        ([VLLM, "rollout.n_vllm_engine=2", "trainer_common.gpu=1"], 4, Placement("cuda:1", (0, 2))),
        ([VLLM, "rollout.n_vllm_engine=4"], 4, Placement("cuda:0", (0, 1, 2, 3))),
        ([VLLM, "rollout.vllm.devices=[0,1]"], 4, Placement("cuda:2", (0, 1))),
        ([VLLM, "rollout.vllm.devices=[0]", "trainer_common.gpu=0"], 4, Placement("cuda:0", (0,))),
        ([VLLM, "rollout.vllm.mode=in_process"], 2, Placement(None, ())),
    ],
)
def test_who_works_where(tmp_path: Path, overrides: list[str], gpus: int, expected: Placement) -> None:
    assert place(config_of(tmp_path, *overrides), lambda: gpus) == expected


@pytest.mark.parametrize(
    ("overrides", "gpus", "says"),
    [
        ([VLLM, "rollout.vllm.devices=[0]"], 0, r"vllm\.devices names GPU 0, and PyTorch finds no CUDA device here"),
        (
            [VLLM, "rollout.vllm.devices=[4]"],
            4,
            r"vllm\.devices names GPU 4, and this machine shows 4, numbered from 0",
        ),
        (["trainer_common.gpu=1"], 0, r"trainer_common\.gpu names GPU 1, .*no CUDA device"),
        ([VLLM, "rollout.tensor_model_parallel_size=8"], 4, r"need 8, and this machine shows 4"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, overrides: list[str], gpus: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place(config_of(tmp_path, *overrides), lambda: gpus)
