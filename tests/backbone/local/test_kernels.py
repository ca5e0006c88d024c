"""What optional kernels lack on this machine is said before a run starts, in one line with the fix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ajet.backbone.local import placement as kernels
from ajet.backbone.local.placement import check_kernels, why_no_compiler
from ajet.cli.main import main
from ajet.config import Config, load_config
from ajet.schema.errors import ConfigError, MissingDependencyError

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def config_of(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def no_gpu() -> int:
    return 0


@pytest.mark.parametrize(("on_gpu", "program"), [(False, "CXX"), (True, "CC")])
def test_a_missing_compiler_is_named(on_gpu: bool, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setenv(program, "no-such-compiler")
    said = "needs no-such-compiler, which isn't there: apt-get install build-essential"
    assert said in str(why_no_compiler(on_gpu=on_gpu))


def test_missing_headers_and_a_missing_triton_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # a program that is there
    monkeypatch.setattr(kernels.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert f"Python's headers, and {tmp_path} has none: apt-get install python3-dev" in str(
        why_no_compiler(on_gpu=False)
    )
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert "needs Triton on a GPU" in str(why_no_compiler(on_gpu=True))


def test_a_run_that_asks_for_neither_or_trains_nothing_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_kernels(config_of(), no_gpu)
    asked = "ajet.trainer_common.compile=true"
    check_kernels(config_of(asked, "ajet.trainer_common.val_only=true"), no_gpu)
    with pytest.raises(ConfigError, match=r"^ajet\.trainer_common\.compile: .*, or leave the key out$"):
        check_kernels(config_of(asked), no_gpu)


def test_liger_is_refused_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    with pytest.raises(MissingDependencyError, match="liger needs liger-kernel"):
        check_kernels(config_of("ajet.trainer_common.logits_kernel=liger"), lambda: 1)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ajet.trainer_common.compile=true", "ajet.trainer_common.compile: PyTorch's compiler needs no-such-compiler"),
        ("ajet.trainer_common.logits_kernel=liger", "ajet.trainer_common.logits_kernel: liger needs"),
    ],
)
def test_a_run_ends_with_code_2_and_one_line(
    override: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(QUICKSTART.parents[1])
    assert main(["--conf", str(QUICKSTART), "--exp-dir", str(tmp_path / "runs"), override]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[0] and len(lines) <= 2 and not (tmp_path / "runs").exists()
