"""Compiled layers give what the same layers give, for packs of any length, and leave the model as it was.

Most tests stop before code is generated (`aot_eager`): what is traced, and when anew, is the same, in a tenth of the
time. One generates and runs it.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ajet.trainer import executor, forward
from ajet.trainer.executor import check_same, choose
from ajet.trainer.forward import MOST_VARIANTS, PackForward, layers_to_compile
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Item, Layout, items_of
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import gap, small_model, weights
from support.windowed_models import windowed_model

SGD = OptimSettings(lr=1e-3, eps=1.0, weight_decay=0.0)
"""Steps in proportion to the gradient: Adam itself turns the rounding of tiny gradients into whole steps."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What one test compiled is not there for the next."""
    torch._dynamo.reset()
    forward._compiled.cache_clear()
    yield
    forward._compiled.cache_clear()


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is compiled, by function."""
    from torch._dynamo import convert_frame

    counts: Counter[str] = Counter()
    compile_frame = convert_frame._compile

    def counted(code: Any, *more: Any, **options: Any) -> Any:
        counts[code.co_qualname] += 1
        return compile_frame(code, *more, **options)

    monkeypatch.setattr(convert_frame, "_compile", counted)
    return counts


def settings(**options: Any) -> TrainSettings:
    return TrainSettings(LossSettings(), SGD, mini_batches=2, max_tokens=60, **options)


def items() -> list[Item]:
    return items_of(credited_batch(3, groups=2, repeat=3))


@pytest.mark.slow
def test_updates_are_those_without_and_no_length_is_compiled_anew(
    traced_only: None, compilations: Counter[str]
) -> None:
    """Two mini-batches, packs of many lengths, checkpointed layers and chunks of logits, six batches."""
    thrifty = {"gradient_checkpointing": True, "logits_chunk": 7}
    models = [small_model(), small_model()]
    trainers = [
        Updater(model, settings(compile=asked, **thrifty)) for model, asked in zip(models, (False, True), strict=True)
    ]
    warm: dict[str, int] = {}
    for step in range(6):
        one, other = (trainer.update(credited_batch(step)) for trainer in trainers)
        warm = warm if step > 2 else dict(compilations)
        for name in ("loss/total", "loss/entropy", "train/grad_norm", "loss/ratio_max"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert one["tokens/packs"] > 2
    assert trainers[1]._executor([]).forward.compiled
    assert gap(weights(models[0]), weights(models[1])) < 1e-5
    assert compilations == warm and 0 < max(warm.values()) <= MOST_VARIANTS // 2
    assert all("forward" not in layer.__dict__ for layer in layers_to_compile(models[1]))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_the_code_that_is_generated_gives_the_same() -> None:
    model = small_model("qwen3", num_hidden_layers=1)
    assert check_same(model, items(), PackForward(), PackForward(compiled=True), Layout.TREE) is None


@pytest.mark.slow
def test_windows_and_caps_stay_the_models_own(traced_only: None) -> None:
    model = windowed_model("gemma2", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    assert check_same(model, items(), PackForward(), PackForward(compiled=True), Layout.TREE) is None


def test_what_differs_or_does_not_compile_is_not_used_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model(num_hidden_layers=1)

    def wrong(forward: Any, dynamic: bool) -> Any:
        return lambda *inputs, **options: forward(*inputs, **options) + 1.0

    def broken(forward: Any, dynamic: bool) -> Any:
        raise RuntimeError("no such instruction\nand much more")

    for compiler, said in ((wrong, "logprobs differ by up to"), (broken, "no such instruction")):
        forward._compiled.cache_clear()
        caplog.clear()
        monkeypatch.setattr(torch, "compile", compiler)
        assert choose(model, items(), 16384, None, compiled=True).forward == PackForward()
        assert f"training without compiled layers: {said}" in caplog.text and "much more" not in caplog.text
    monkeypatch.setattr(executor, "layers_to_compile", lambda model: [])
    choose(model, items(), 16384, None, compiled=True)
    assert "Qwen2ForCausalLM doesn't mark its layers" in caplog.text
