"""Checkpoints are complete or absent, survive kills, and bring a trainer back bit for bit."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ajet.backbone.local.learner import with_adapters
from ajet.config.root import LoraConfig
from ajet.trainer.checkpoint import (
    MARKER,
    CheckpointError,
    CheckpointFolder,
    load,
    read_trainer,
    write_model,
    write_trainer,
)
from ajet.trainer.loss import AdaptiveKL, LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.trainer import TrainSettings, Updater
from support import SUPPORT
from support.random_batches import credited_batch
from support.small_models import gap, small_model, weights


def fill(folder: Path) -> None:
    (folder / "hf").mkdir()
    (folder / "hf" / "model.safetensors").write_bytes(b"weights")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4)):
        assert folder.save(step, {"score": score}, fill) is not None
    assert names(tmp_path) == ["step_2", "step_4", "step_5"]
    assert folder.best() == tmp_path / "step_2"
    newest = folder.newest()
    assert newest is not None and newest.state == {"step": 5, "score": 0.4}


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_file: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, {}, fill)
    monkeypatch.setattr(Path, "unlink", refuse)  # as if another user had made it
    folder.save(2, {}, fill)
    assert names(tmp_path) == ["step_1", "step_2"] and "step_1 can't be removed, and stays" in caplog.text


def test_what_comes_after_a_rewind_is_the_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 3):
        folder.save(step, {}, fill)
    folder.rewind(2)
    assert names(tmp_path) == ["earlier_step_3", "step_2"]
    folder.save(3, {}, fill)
    assert names(tmp_path) == ["earlier_step_3", "step_2", "step_3"]
    folder.rewind(2)
    newest = folder.newest()
    assert newest is not None and newest.step == 2 and names(tmp_path) == ["earlier_step_3", "step_2"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.save(step, {}, fill)
    (tmp_path / "step_3" / "hf" / "model.safetensors").write_bytes(b"wEights")  # same size, other content
    (tmp_path / "step_2" / MARKER).write_text("{")
    found = folder.newest()
    assert found is not None and found.step == 1
    assert "step_3" in caplog.text and "step_2" in caplog.text
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "step_3")


def test_a_checkpoint_that_cannot_be_read_at_present_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, {}, fill)

    def stale(_file: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("ajet.trainer.checkpoint._digest", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        folder.newest()


def test_a_full_disk_leaves_the_previous_checkpoint_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {}, fill)

    def full(path: Path) -> None:
        fill(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert folder.save(2, {}, full) is None
    assert names(tmp_path) == ["step_1"]
    assert "No space left" in caplog.text and "step 2" in caplog.text


def test_a_disk_without_room_for_the_folder_itself_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()  # as a full disk, a place where no folder can be made
    assert CheckpointFolder(tmp_path / "file" / "checkpoints").save(1, {}, fill) is None
    assert "step 1" in caplog.text and "the run goes on" in caplog.text


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (tmp_path / ".step_7.99").mkdir(parents=True)
    (tmp_path / "step_6").mkdir()
    assert folder.newest() is None
    folder.save(1, {}, fill)
    assert names(tmp_path) == ["step_1"]


def test_the_link_to_the_newest_weights_moves_in_one_step(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2):
        saved = folder.save(step, {}, fill)
        assert saved is not None
        folder.point(tmp_path / "hf", saved)
        assert (tmp_path / "hf").resolve() == saved.path / "hf"


def test_a_disk_that_takes_no_link_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refused)
    folder = CheckpointFolder(tmp_path)
    saved = folder.save(1, {}, fill)
    assert saved is not None
    folder.point(tmp_path / "hf", saved)
    assert not (tmp_path / "hf").exists() and "they are in" in caplog.text and "step_1/hf" in caplog.text


def kill_and_resume(root: Path, kills: int, seed: int) -> int:
    """SIGKILL a run at random moments; each resume must not be older than the last announced step.

    Returns how many of the kills left a checkpoint behind that was half written.
    """
    script = SUPPORT / "checkpointing_run.py"
    rng = random.Random(seed)
    announced = unfinished = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, str(script), str(root), "100000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline().split()
        assert first[:1] == ["resumed"], process.communicate()[1]
        assert int(first[1]) >= announced
        for _ in range(rng.randrange(4)):
            process.stdout.readline()
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        unfinished += any(path.name.endswith(f".{process.pid}") for path in root.iterdir())
        said = [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        announced = max([int(first[1]), *(int(line[1]) for line in said if line[0] == "saved")])
    found = CheckpointFolder(root).newest()
    assert found is not None and found.step >= announced
    return unfinished


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_announced(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=20, seed=1)


# ------------------------------------------------------------------------------------------- of a real trainer

SETTINGS = TrainSettings(LossSettings(), OptimSettings(lr=1e-2, schedule="cosine", total_steps=10), mini_batches=2)


def test_a_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = Updater(small_model(), SETTINGS)
    for step in range(6):
        straight.update(credited_batch(step))

    first = Updater(small_model(), SETTINGS)
    for step in range(3):
        first.update(credited_batch(step))
    folder = CheckpointFolder(tmp_path)
    assert folder.save(3, {}, lambda path: write_trainer(first, None, path)) is not None
    draws = (random.random(), np.random.random(), float(torch.rand(1)))

    second = Updater(small_model(seed=5), SETTINGS)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    found = folder.newest()
    assert found is not None
    read_trainer(second, found)
    assert (random.random(), np.random.random(), float(torch.rand(1))) == draws
    for step in range(3, 6):
        second.update(credited_batch(step))
    assert gap(weights(straight.model), weights(second.model)) == 0.0
    assert second.updates == straight.updates


def test_experts_come_back_whatever_names_the_files_give_them(tmp_path: Path) -> None:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "pad_token_id": 0}
    first, second = (Updater(small_model("qwen3_moe", seed=seed, **options), SETTINGS) for seed in (0, 5))
    first.update(credited_batch(0))
    found = CheckpointFolder(tmp_path).save(1, {}, lambda path: write_trainer(first, None, path))
    assert found is not None
    read_trainer(second, found)
    assert gap(weights(first.model), weights(second.model)) == 0.0


def test_a_moving_reference_and_coefficient_resume_bit_for_bit(tmp_path: Path) -> None:
    settings = TrainSettings(
        LossSettings(kl_coef=0.1), OptimSettings(lr=1e-2, eps=1e-5, schedule="linear", total_steps=9, warmup_steps=2),
        kl_adaptive=AdaptiveKL(0.01), reference_sync=2, mini_batches=2, epochs=2,
    )  # fmt: skip

    def build(seed: int = 0) -> Updater:
        return Updater(small_model(seed=seed), settings, reference=small_model())

    straight, first, second = build(), build(), build(seed=5)
    for step in range(6):
        expected = straight.update(credited_batch(step))
    for step in range(3):
        first.update(credited_batch(step))
    found = CheckpointFolder(tmp_path).save(3, {}, lambda path: write_trainer(first, None, path))
    assert found is not None
    read_trainer(second, found)
    for step in range(3, 6):
        got = second.update(credited_batch(step))
    assert gap(weights(straight.model), weights(second.model)) == 0.0
    assert gap(weights(straight.reference), weights(second.reference)) == 0.0
    assert (second.updates, second.steps, second.kl_coef) == (straight.updates, straight.steps, straight.kl_coef)
    assert {key: got[key] for key in ("train/lr", "train/kl_coef", "loss/kl")} == {
        key: expected[key] for key in ("train/lr", "train/kl_coef", "loss/kl")
    }
    assert second.kl_coef != 0.1


def test_a_lowered_scale_of_float16_resumes_bit_for_bit(tmp_path: Path) -> None:
    def batch(step: int) -> Any:
        found = credited_batch(step)
        for _, credit in found:
            for call in credit.calls:
                call.entries = [(1e3 * each, weight) for each, weight in call.entries]
        return found

    straight, first, second = (Updater(small_model(seed=seed).half(), SETTINGS) for seed in (0, 0, 5))
    for step in range(3):
        straight.update(batch(step))
    assert first.update(batch(0))["train/updates"] == 1  # of two: the first is too large for the usual scale
    found = CheckpointFolder(tmp_path).save(1, {}, lambda path: write_trainer(first, None, path))
    assert found is not None
    read_trainer(second, found)
    for step in range(1, 3):
        second.update(batch(step))
    assert gap(weights(straight.model), weights(second.model)) == 0.0
    assert second.optimizer.loss_scale == straight.optimizer.loss_scale


def test_states_in_8_bits_resume_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = TrainSettings(optim=OptimSettings(lr=1e-3, state_bits=8))

    def build(seed: int = 0) -> Updater:
        # bitsandbytes leaves parameters below 4096 numbers in 32 bits
        return Updater(small_model(seed=seed, intermediate_size=256), settings)

    trainer, again = build(), build(seed=5)
    trainer.update(credited_batch(0))
    assert {str(tensor.dtype) for name, tensor in trainer.optimizer.tensors().items() if "state1" in name} == {
        "torch.uint8", "torch.float32",
    }  # fmt: skip
    found = CheckpointFolder(tmp_path).save(1, {}, lambda path: write_trainer(trainer, None, path))
    assert found is not None
    read_trainer(again, found)
    for step in (1, 2):
        trainer.update(credited_batch(step))
        again.update(credited_batch(step))
    assert gap(weights(trainer.model), weights(again.model)) == 0.0


def test_dropout_of_adapters_resumes_bit_for_bit(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def build() -> Updater:
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.3)
        torch.manual_seed(3)
        return Updater(peft.get_peft_model(small_model(), config), SETTINGS)

    trainer, again = build(), build()
    for step in range(2):
        trainer.update(credited_batch(step))
    found = CheckpointFolder(tmp_path).save(2, {}, lambda path: write_trainer(trainer, None, path))
    assert found is not None
    trainer.update(credited_batch(2))
    read_trainer(again, found)
    again.update(credited_batch(2))
    assert gap(weights(trainer.model), weights(again.model)) == 0.0


def test_the_weights_load_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = Updater(small_model(), SETTINGS)
    trainer.update(credited_batch())
    saved = CheckpointFolder(tmp_path).save(1, {}, lambda folder: write_trainer(trainer, None, folder))
    assert saved is not None
    assert gap(weights(AutoModelForCausalLM.from_pretrained(saved.path / "hf")), weights(trainer.model)) == 0.0
    files = [path for path in saved.path.rglob("*") if path.is_file() and path.name != MARKER]
    assert {path.suffix for path in files} <= {".safetensors", ".json"}
    assert len({path.stat().st_mode for path in files}) == 1, "who may read the one may read the other"


def test_a_lora_checkpoint_holds_adapter_and_merged_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    def build() -> Updater:
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(3)
        return Updater(peft.get_peft_model(small_model(), config), SETTINGS)

    trainer = build()
    trainer.update(credited_batch())
    folder = CheckpointFolder(tmp_path)
    found = folder.save(1, {}, lambda path: write_trainer(trainer, None, path))
    assert found is not None
    again = build()
    read_trainer(again, found)
    trainer.update(credited_batch(1))
    again.update(credited_batch(1))
    assert gap(weights(trainer.model), weights(again.model)) == 0.0
    ids = torch.arange(12)[None]
    merged = AutoModelForCausalLM.from_pretrained(found.path / "hf")
    restored = build()
    read_trainer(restored, found)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, restored.model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("modules", ["all-linear", ["down_proj"]])
def test_merged_experts_and_what_is_no_parameter_are_saved(tmp_path: Path, modules: str | list[str]) -> None:
    from ajet.engine.model_source import ModelSource

    layers = {"first_k_dense_replace": 1, "n_routed_experts": 4, "moe_intermediate_size": 16, "pad_token_id": 0}
    routes = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    trained = with_adapters(small_model("glm4_moe", **layers, **routes), LoraConfig(rank=2, target_modules=modules))
    assert any(type(module).__name__ == "ParamWrapper" for module in trained.modules())
    with torch.no_grad():
        for name, value in (*trained.named_parameters(), *trained.named_buffers()):
            if "lora_" in name or "e_score_correction_bias" in name:
                value.normal_(0.0, 0.1)
    write_model(trained, None, tmp_path)
    saved: Any = ModelSource.resolve(tmp_path / "hf").model("float32")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(saved(ids).logits, trained(ids).logits, atol=1e-4)


@pytest.mark.parametrize(("module", "tied"), [("embed_tokens", False), ("lm_head", False), ("q_proj", True)])
def test_an_adapter_at_one_of_two_tied_layers_parts_them_when_merged(tmp_path: Path, module: str, tied: bool) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    base = small_model(tie_word_embeddings=True)
    trained = with_adapters(base, LoraConfig(rank=2, target_modules=[module]))
    with torch.no_grad():
        for name, value in trained.named_parameters():
            if "lora_" in name:
                value.normal_(0.0, 0.1)
    write_model(trained, None, tmp_path)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(ids).logits
        assert torch.allclose(saved, trained(ids).logits, atol=1e-5)
    assert AutoConfig.from_pretrained(tmp_path / "hf").tie_word_embeddings is tied, "vLLM reads nothing else"
    assert base.config.tie_word_embeddings
    assert ("lm_head.weight" in load_file(tmp_path / "hf" / "model.safetensors")) is not tied


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    trainer = Updater(small_model(), SETTINGS)
    found = CheckpointFolder(tmp_path).save(1, {}, lambda path: write_trainer(trainer, None, path))
    assert found is not None
    with pytest.raises(CheckpointError, match="step_1 does not fit") as refused:
        read_trainer(Updater(small_model(num_hidden_layers=1), SETTINGS), found)
    assert len(str(refused.value)) < 600
    in_8_bits = {"norm.weight|state1": torch.zeros(1)}
    with pytest.raises(ValueError, match="optimiser has 8 bits, this run's 32"):
        trainer.optimizer.load(in_8_bits)
    adapted = Updater(with_adapters(small_model(), LoraConfig(rank=2)), SETTINGS)
    with pytest.raises(CheckpointError, match="this run is with LoRA, the checkpoint's was without"):
        read_trainer(adapted, found)
    found = CheckpointFolder(tmp_path).save(2, {}, lambda path: write_trainer(adapted, None, path))
    assert found is not None
    with pytest.raises(CheckpointError, match="this run is without LoRA, the checkpoint's was with"):
        read_trainer(trainer, found)


def test_the_marker_lists_every_file(tmp_path: Path) -> None:
    found = CheckpointFolder(tmp_path).save(1, {}, fill)
    assert found is not None
    assert set(json.loads((found.path / MARKER).read_text())) == {"hf/model.safetensors", "state.json"}
