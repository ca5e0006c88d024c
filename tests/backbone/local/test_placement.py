"""Which GPUs the trainer and the engines get. The number of GPUs is given: nothing is computed on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ajet.backbone.local import placement
from ajet.backbone.local.placement import NoGpu, Placement, check_gpu, has_kernels, place
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


# ---------------------------------------------------------------- GPUs that can't be used

PRESENT = ["sm_75", "sm_80", "sm_86", "sm_90a", "compute_90"]


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((8, 0), PRESENT, True),
        ((8, 9), PRESENT, True),
        ((7, 0), PRESENT, False),
        ((9, 0), PRESENT, True),
        ((12, 0), PRESENT, True),  # by way of compute_90
        ((12, 0), ["sm_90", "sm_90a", "sm_100"], False),
        ((10, 3), ["sm_100a"], False),
        ((12, 0), ["sm_120"], True),
        ((9, 4), ["gfx942"], True),  # not judged
        ((8, 0), [], True),
    ],
)
def test_which_kernels_run_where(capability: tuple[int, int], kernels: list[str], runs: bool) -> None:
    assert has_kernels(capability, kernels) is runs


@pytest.fixture
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch says of a GPU of 2017, which no machine here has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])


def test_a_gpu_without_kernels_is_refused_with_the_fix(stand_in_gpu: None) -> None:
    with pytest.raises(ConfigError) as caught:
        check_gpu(Placement("cuda:1", ()))
    said = str(caught.value)
    assert said.startswith("GPU 1: Tesla V100 has compute capability 7.0, and torch ")
    assert "kernels for sm_75, sm_80: install a PyTorch that is built for it" in said and "\n" not in said


@pytest.mark.parametrize(("hidden", "warned"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_gpu_that_the_run_leaves_unused_is_told_unless_it_is_hidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hidden: str | None, warned: bool
) -> None:
    """The machine shows a GPU whose driver is too old: a stand-in for one that isn't here."""
    old = NoGpu(
        True, "its driver is too old: it serves CUDA 11.4, and torch 2.13 is built for 12.6", "update the driver"
    )
    monkeypatch.setattr(placement, "why_no_gpu", lambda: old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    check_gpu(Placement(None, ()))
    assert ("training on the CPU, though there is a GPU: its driver is too old" in caplog.text) is warned
