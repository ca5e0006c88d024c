"""Base weights in 4 bits: the same gradient as with the numbers that they stand for, checkpoints, and a whole run.

Most of it needs bitsandbytes: `make test-bitsandbytes`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ajet.backbone.local.learner import with_adapters
from ajet.config import load_config, make_config
from ajet.engine import quantization as four_bits
from ajet.engine.model_source import ModelSource
from ajet.observe.metrics import read_metrics
from ajet.schema.errors import ConfigError, MissingDependencyError
from ajet.trainer import forward
from ajet.trainer.checkpoint import CheckpointFolder, read_trainer, write_trainer
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import gap, small_model, weights

ROOT = Path(__file__).parents[2]
LORA = make_config({"model.lora": {"enabled": True, "rank": 4}}).ajet.model.lora
SETTINGS = TrainSettings(LossSettings(correction=None), OptimSettings(lr=1e-2, weight_decay=0.0))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Of a gradient, relative to its norm: the two differ in the order of sums, and in where PEFT rounds to bfloat16."""


def adapted(model: Any) -> Any:
    """With adapters that do something."""
    torch.manual_seed(1)
    model = with_adapters(model, LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return model


def in_4_bits(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    pytest.importorskip("bitsandbytes")
    return adapted(four_bits.quantise(small_model(seed=seed).to(dtype), "cpu"))


def written_out(dtype: torch.dtype = torch.float32) -> Any:
    """The same model with the numbers that the 4 bits stand for, in whole layers."""
    packed, whole = four_bits.quantise(small_model().to(dtype), "cpu"), small_model().to(dtype)
    with torch.no_grad():
        for name, layer in four_bits.linear_layers(packed):
            whole.get_submodule(name).weight.copy_(four_bits.whole_weight(layer))
    return adapted(whole)


def is_packed(model: Any) -> bool:
    return any(each.dtype is torch.uint8 for each in model.parameters())


def gradient(model: Any) -> dict[str, torch.Tensor]:
    """Of one update, as the optimiser gets it, with packs as trees."""
    trainer = Updater(model, SETTINGS)
    found: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step

    def noted(lr: float) -> Any:
        found.update({name: each.grad.detach().float().clone() for name, each in trainer.optimizer.parameters.items()})
        return step(lr)

    trainer.optimizer.step = noted  # type: ignore[method-assign]
    assert trainer.update(credited_batch())["tokens/packing_ratio"] > 1.2
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_that_of_the_numbers_that_4_bits_stand_for(dtype: torch.dtype) -> None:
    packed, whole = gradient(in_4_bits(dtype)), gradient(written_out(dtype))
    assert packed.keys() == whole.keys() and all("lora_" in name for name in packed)
    size = sum(float(each.norm()) ** 2 for each in whole.values()) ** 0.5
    difference = sum(float((packed[name] - whole[name]).norm()) ** 2 for name in whole) ** 0.5
    assert size > 0 and difference <= TOLERANCE[dtype] * size


def test_compiled_layers_in_4_bits_update_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpointed layers, a KL term, two mini-batches and several packs; traced, but no code generated."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    forward._compiled.cache_clear()
    loss = LossSettings(kl_coef=0.1)
    optim = OptimSettings(lr=1e-3, eps=1.0, weight_decay=0.0)
    options: dict[str, Any] = {"gradient_checkpointing": True, "mini_batches": 2, "max_tokens": 60}
    trainers = [Updater(in_4_bits(), TrainSettings(loss, optim, compile=asked, **options)) for asked in (False, True)]
    one, other = (trainer.update(credited_batch()) for trainer in trainers)
    assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
    assert trainers[1]._executor([]).forward.compiled
    adapters = [dict(trainer.optimizer.parameters) for trainer in trainers]
    assert gap(*adapters) < 1e-5
    forward._compiled.cache_clear()


def test_only_frozen_linear_layers_are_in_4_bits_and_take_what_the_plan_says() -> None:
    model = in_4_bits()
    packed = {name for name, each in model.named_parameters() if each.dtype is torch.uint8}
    assert len(packed) == 2 * 7 and all(name.endswith("base_layer.weight") for name in packed)
    assert not any(is_packed(module) for module in (small_model(), written_out()))
    for _, layer in four_bits.linear_layers(model):
        if layer.weight.dtype is torch.uint8:
            state = layer.weight.quant_state
            tables = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
            size = layer.weight.nbytes + sum(each.nbytes for each in tables)
            numbers = four_bits.parameter_count(layer.weight)
            assert numbers == layer.in_features * layer.out_features
            assert abs(size - four_bits.bytes_in_4_bits(numbers)) <= 64


def test_a_checkpoint_holds_whole_weights_and_a_resume_is_exact(tmp_path: Path) -> None:
    trainer, again = Updater(in_4_bits(), SETTINGS), Updater(in_4_bits(), SETTINGS)
    trainer.update(credited_batch(0))
    found = CheckpointFolder(tmp_path).save(1, {}, lambda path: write_trainer(trainer, None, path))
    assert found is not None
    ids = torch.arange(1, 21)[None]
    plain: Any = ModelSource.resolve(found.path / "hf").model("float32")
    assert "quantization_config" not in json.loads((found.path / "hf" / "config.json").read_text())
    with torch.no_grad():
        assert float((plain(ids).logits - trainer.model(ids).logits).abs().max()) < 1e-4
    read_trainer(again, found)
    for step in (1, 2):
        trainer.update(credited_batch(step))
        again.update(credited_batch(step))
    assert gap(weights(trainer.model), weights(again.model)) == 0.0


def test_a_run_samples_and_trains_the_same_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, with the embedded engine: what it sampled is what the trainer computes, before and after an
    update."""
    pytest.importorskip("bitsandbytes")
    from ajet.cli.main import main

    monkeypatch.chdir(ROOT)
    keys = ["model.lora.enabled=true", "model.lora.base_bits=4", "trainer_common.optim.lr=1e-2"]
    keys += ["trainer_common.total_training_steps=2", "trainer_common.test_freq=-1", "data.train_batch_size=4"]
    keys += ["trainer_common.val_before_train=false"]
    assert main(["--conf", "configs/quickstart.yaml", "--exp-dir", str(tmp_path), "--quiet", *keys]) == 0
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    steps = read_metrics(metrics)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["train/updates"] == 1 and step["loss/sampler_gap_max"] < 1e-3 for step in steps)
    plain: Any = ModelSource.resolve(metrics.parent / "hf").model("float32")
    assert not is_packed(plain)


def test_without_bitsandbytes_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingDependencyError, match=r"model\.lora\.base_bits: 4 needs bitsandbytes"):
        ModelSource.resolve("tiny:qwen2-0.3m").model(base_bits=4)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([], r"can't be trained: adapters beside them can"),
        (["model.lora.enabled=true", "rollout.engine=vllm"], r"it would sample another policy"),
    ],
)
def test_what_it_does_not_go_with_is_refused(tmp_path: Path, keys: list[str], why: str) -> None:
    yaml = tmp_path / "x.yaml"
    yaml.write_text("ajet: {project_name: p, model: {path: 'tiny:qwen2-0.3m', lora: {base_bits: 4}}}")
    with pytest.raises(ConfigError, match=rf"model\.lora\.base_bits[\s\S]*{why}"):
        load_config(yaml, keys, backbone="local", complete=False)
