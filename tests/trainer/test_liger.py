"""Liger's kernel gives what our chunks give; where it can't run it is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from ajet.schema.errors import ConfigError, MissingDependencyError
from ajet.trainer.forward import require_liger, why_not_liger
from ajet.trainer.trainer import TrainSettings, Updater
from support import SUPPORT
from support.small_models import small_model

FUNCTIONS = "liger_kernel.transformers.functional"


@pytest.mark.skipif(
    find_spec("liger_kernel") is None or find_spec("triton") is None, reason="needs liger-kernel and triton"
)
def test_its_kernel_gives_the_same_in_tritons_interpreter() -> None:
    program = SUPPORT / "liger_on_cpu.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    for case in ("tree", "rows", "untied"):
        assert found[case]["logprobs"] < 1e-5 and found[case]["gradient"] < 1e-5
    assert found["updates"] == pytest.approx({"weights": 0, "loss": 0, "entropy": 0}, abs=1e-6)
    assert found["used"] == [False, True]


def test_without_the_package_it_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FUNCTIONS, None)
    with pytest.raises(
        MissingDependencyError, match=r"trainer_common\.logits_kernel: liger needs liger-kernel .*\[liger\]"
    ):
        Updater(small_model(), TrainSettings(liger=True))


def test_without_a_gpu_it_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ModuleType(FUNCTIONS)  # a stand-in: that it is installed is all that counts here
    there.liger_fused_linear_cross_entropy = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FUNCTIONS, there)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a CUDA GPU, and this run trains on the CPU: set it to chunks"):
        require_liger("cpu")
    require_liger("cuda")


def test_an_output_layer_that_it_does_not_know_is_named() -> None:
    assert why_not_liger(small_model()) is None
    assert "logits_scaling" in str(why_not_liger(small_model("granite", logits_scaling=3.0)))
    model = small_model(tie_word_embeddings=False)
    model.set_output_embeddings(type("Packed", (type(model.lm_head),), {})(32, 32, bias=False))
    assert why_not_liger(model) == "its output layer is a Packed"
