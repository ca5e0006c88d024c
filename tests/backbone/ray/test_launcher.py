"""What the launcher leaves behind, what it clears up, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ajet.backbone.ray.facts import Machine, RunError, RunFacts, RunPayload
from ajet.backbone.ray.launcher import (
    keep_weights,
    merge_adapters,
    prepare,
    refuse_changing_rope,
    remove_abandoned,
    why_it_failed,
)
from ajet.config import load_config
from ajet.engine.model_source import ModelSource
from ajet.engine.tiny_models import tiny_folder
from ajet.observe.experiment import ExperimentFolder
from ajet.schema.errors import ConfigError, FeatureUnavailableError
from support.ray_runs import CONF


def test_a_killed_launchers_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"ajv{ended.pid}_a", f"ajv{os.getpid()}_b", "ajvother"):
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"ajv{os.getpid()}_b", "ajvother"])


def test_two_launchers_may_remove_the_same_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ajv1_a", "ajv2_b"):
        (tmp_path / name).mkdir()

    def other_is_faster(pid: int) -> bool:
        for folder in tmp_path.iterdir():
            folder.rmdir()
        return False

    monkeypatch.setattr(psutil, "pid_exists", other_is_faster)
    remove_abandoned(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_failed_driver_is_told_by_what_was_reported_or_else_by_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text("RuntimeError: no room\nWARNING: target_num_threads\n")

    def why(code: int, reported: RunError | None = None) -> str:
        return str(why_it_failed("verl", code, reported, log, lambda text: text.replace("sk-1", "***")))

    assert why(1) == f"verl ended with exit code 1: RuntimeError: no room\n    its log: {log}"
    assert why(1, RunError("a server died: sk-1", users=False)).startswith(
        "verl ended with exit code 1: a server died: ***"
    )
    assert why(1, RunError("5 steps\n    sk-1", users=True)) == "5 steps\n    ***"
    assert why(-9).startswith("verl was ended by SIGKILL: from outside, or by the kernel because memory ran out")
    assert why(-11).startswith("verl was ended by SIGSEGV: RuntimeError: no room")


def test_the_newest_weights_take_the_place_of_older_ones(tmp_path: Path) -> None:
    source, target = tmp_path / "checkpoint", tmp_path / "hf"
    keep_weights(source, target)
    assert not target.exists()
    for folder, name in ((source, "new"), (target, "old")):
        folder.mkdir()
        (folder / name).touch()
    keep_weights(source, target)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoint", "hf", "new", "new"]


def test_the_newest_weights_have_the_adapters_in_them(tmp_path: Path) -> None:
    """verl writes a model with adapters under peft's names, of which transformers knows none."""
    peft = pytest.importorskip("peft")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    source = tmp_path / "actor" / "huggingface"
    shutil.copytree(tiny_folder("qwen2-0.3m"), source)
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(source), settings)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lm_head" not in name}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source.parent / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 32, "task_type": "CAUSAL_LM"}')
    keep_weights(source, tmp_path / "hf")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(1, 20)[None]
    torch.testing.assert_close(kept(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-3)


def test_adapters_that_cannot_be_merged_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    layer, file = "base_model.model.model.embed_tokens", tmp_path / "model.safetensors"
    shapes = {f"{layer}.base_layer.weight": (9, 4), f"{layer}.lora_embedding_A.default": (2, 9)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, file)
    merge_adapters(tmp_path, 1.0)
    assert list(load_file(file)) == ["model.embed_tokens.weight"]
    assert "lacks what the adapters of model.embed_tokens learnt" in caplog.text


@pytest.mark.parametrize("how", ["interrupted", "failed"])
@pytest.mark.parametrize(
    ("step", "validated", "remains"), [(2, True, True), (2, False, True), (3, False, True), (3, True, False)]
)
def test_a_run_that_was_cut_off_makes_up_for_its_validation_and_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, validated: bool, remains: bool, how: str
) -> None:
    """A run of three steps, which validates after each."""
    monkeypatch.chdir(CONF.parent)
    config = load_config(CONF, ["trainer_common.test_freq=1"], backbone="verl")
    facts: list[RunFacts] = []
    adapter: Any = SimpleNamespace(name="verl", title="verl", newest_step=lambda *_: step)
    adapter.validates = lambda config: True
    adapter.settings = lambda config, of, machine: facts.append(of)

    def opened(ends: str) -> Any:
        experiment = ExperimentFolder.open(config, exp_dir=tmp_path, source_yaml=CONF)
        try:
            experiment.metrics.log(step, {"train/return/mean": 1.0} | ({"val/return/mean": 1.0} if validated else {}))
            return prepare(adapter, config, experiment, tmp_path, Machine("cpu")) if experiment.resumed else None
        finally:
            experiment.close(ends)

    opened(how)
    prepared = opened("completed")
    assert prepared.remains is remains and prepared.facts.resumed_step == step
    assert facts[0].lacks_validation is RunPayload.decode(prepared.facts.payload).lacks_validation is not validated
    complete = pytest.raises(ConfigError, match="is complete: its newest checkpoint is of step 3 of 3")
    with monkeypatch.context() as patched, nullcontext() if step < 3 else complete:
        patched.setattr(adapter, "validates", lambda config: False)
        assert not RunPayload.decode(opened("completed").facts.payload).lacks_validation
    with nullcontext() if remains else complete:
        opened("failed")


def test_a_run_whose_checkpoints_are_gone_keeps_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin again, and drop them."""
    monkeypatch.chdir(CONF.parent)
    config = load_config(CONF, [], backbone="verl")
    adapter: Any = SimpleNamespace(name="verl", title="verl", newest_step=lambda *_: None, settings=lambda *_: {})

    def opened(metrics: dict[str, float]) -> Any:
        with ExperimentFolder.open(config, exp_dir=tmp_path, source_yaml=CONF) as experiment:
            prepared = prepare(adapter, config, experiment, tmp_path, Machine("cpu"))
            experiment.metrics.log(1, metrics)
            return prepared

    opened({"train/return/mean": 1.0})
    assert opened({"time/checkpoint": 1.0}).remains, "it was killed before its first checkpoint"
    with pytest.raises(ConfigError, match="holds no whole checkpoint any more"):
        opened({})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_that_change_with_their_length_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    plain = ModelSource.resolve("tiny:qwen2-0.3m")
    refuse_changing_rope("verl", plain, 10**6)
    shutil.copytree(plain.path, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    known = json.loads(config.read_text())
    heads = known["hidden_size"] // known["num_attention_heads"] // 2
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * heads, "long_factor": [4.0] * heads, "original_max_position_embeddings": 512}
    config.write_text(json.dumps(known | {"rope_parameters": rope, "max_position_embeddings": 512}))
    source = ModelSource.resolve(tmp_path / "model")
    refuse_changing_rope("verl", source, 512)
    with pytest.raises(FeatureUnavailableError, match=rf"max_model_len is 513, .* 512 tokens .*\({kind}\).*verl"):
        refuse_changing_rope("verl", source, 513)
