"""What training is said to allocate is what PyTorch's allocator hands out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from ajet.backbone.local.learner import with_adapters
from ajet.config.root import LoraConfig
from ajet.engine.layers import layers_of
from ajet.schema.episode import ROOT, Call, CallTree, Run
from ajet.trainer import footprint
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit
from ajet.trainer.footprint import Pass, few_layers, pass_bytes, trained_as, training_bytes
from ajet.trainer.forward import Entropy, PackForward, RowForward
from ajet.trainer.optimizer import MasterAdamW, OptimSettings
from ajet.trainer.pack import Layout, Pack, items_of, make_packs
from support.hybrids import hybrid_config, hybrid_model
from support.random_batches import credited_batch
from support.small_models import recompute_layers, small_model

SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 256, "num_hidden_layers": 3}


def allocated(model: Any, pack: Pack, *, chunk: int | None, rows: bool = False) -> int:
    """The most that the CPU's allocator had given out during a forward and backward pass, gradients included."""
    gradients = 0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        gradients += parameter.grad.nbytes
    forward = RowForward(chunk=chunk) if rows else PackForward(chunk=chunk)
    with forward.session(model), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        forward(model, pack, entropy=Entropy.VALUE).logprob_E.sum().backward()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak + gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_a_pass_takes_what_was_said(family: str, checkpointing: bool) -> None:
    options = {**SHAPE, "vocab_size": 5000, "tie_word_embeddings": family == "qwen3"}
    if family == "qwen3_moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (pack,) = make_packs(items_of(credited_batch(3, groups=8, repeat=4)))
    with torch.device("meta"):
        planned = small_model(family, **options)
    one = Pass(len(pack), len(pack.edges), checkpointing=checkpointing, logits_chunk=50, warm=True)
    said = pass_bytes(planned, one)
    assert all(parameter.grad is None for parameter in planned.parameters())
    model = small_model(family, **options)
    if checkpointing:
        recompute_layers(model)
    assert said == pytest.approx(allocated(model, pack, chunk=50), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["Qwen3.5", "Granite 4", "LFM2"])
def test_short_passes_tell_what_a_long_one_takes_through_layers_with_a_state(family: str, checkpointing: bool) -> None:
    pack = rows_of(2, 512)
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(hybrid_config(family)).eval()
    said = pass_bytes(planned, Pass(len(pack), len(pack.edges), checkpointing=checkpointing, logits_chunk=50))
    model = hybrid_model(family)
    if checkpointing:
        recompute_layers(model)
    assert said == pytest.approx(allocated(model, pack, chunk=50, rows=True), rel=0.1)


def rows_of(count: int, length: int) -> Pack:
    """Rows that share nothing, whose last 30 tokens are sampled."""
    trees = []
    for row in range(count):
        ids = np.arange(row, row + length + 1, dtype=np.int32) % 100
        tree = CallTree([Run(ids[:-30], ROOT, 0), Run(ids[-30:], 0, length - 29, call=0)])
        logprobs, mask = np.zeros(30, np.float32), np.ones(30, np.bool_)
        tree.calls.append(Call("call", "agent", "target", 0, 0, length - 29, 1, logprobs, mask))
        trees.append((tree, EpisodeCredit("e", [CallCredit([(1.0, 1.0)])])))
    (pack,) = make_packs(items_of(trees), Layout.FLAT)
    return pack


def test_less_is_said_where_less_is_kept() -> None:
    with torch.device("meta"):
        model = small_model(**SHAPE, vocab_size=5000)
    plain = pass_bytes(model, Pass(4000, 4000, logits_chunk=0))
    assert plain > pass_bytes(model, Pass(4000, 4000, logits_chunk=100)) > 0
    assert plain > pass_bytes(model, Pass(4000, 4000, logits_chunk=0, checkpointing=True))
    assert plain > pass_bytes(model, Pass(4000, 4000, "cuda", logits_chunk=0))  # heads share keys and values
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradients_and_states_are_counted_exactly(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        planned = small_model().to(dtype)
    said = training_bytes(planned, Pass(100, 10))
    model = small_model().to(dtype)
    optimizer = MasterAdamW(model.named_parameters(), OptimSettings())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert said.weights == said.gradients == sum(p.nbytes for p in model.parameters())
    optimizer.step(1e-3)
    states = {name: tensor.nbytes for name, tensor in optimizer.tensors().items()}
    assert said.moments == sum(size for name, size in states.items() if "exp_avg" in name)
    assert said.copies == sum(size for name, size in states.items() if name.endswith("|master"))


def test_adapters_train_little() -> None:
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = small_model(**SHAPE)
    whole = training_bytes(model, Pass(200, 50))
    adapted = training_bytes(
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")), Pass(200, 50)
    )
    assert adapted.gradients < whole.gradients / 2
    assert adapted.weights == whole.weights + adapted.gradients


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_three_layers_tell_what_six_take(lora: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is the most: activations, logits of all tokens, or the embeddings' gradient."""
    with torch.device("meta"):
        model = small_model(**{**SHAPE, "vocab_size": 3000, "num_hidden_layers": 6, "tie_word_embeddings": lora})
    if lora:
        model = with_adapters(model, LoraConfig(enabled=True, rank=4))
    assert few_layers(model) is not None
    passes = [Pass(n, n, checkpointing=checkpointing, logits_chunk=chunk) for n in (20, 3000) for chunk in (0, 100)]
    found = [pass_bytes(model, one) for one in passes]
    assert len(layers_of(model)) == 6
    monkeypatch.setattr(footprint, "few_layers", lambda model: None)
    assert found == [pass_bytes(model, one) for one in passes]


def test_layers_that_are_not_alike_are_all_computed() -> None:
    with torch.device("meta"):
        model = small_model(**SHAPE | {"num_hidden_layers": 5})
        assert few_layers(model) is not None
        model.model.layers[3].mlp.up_proj = torch.nn.Linear(64, 300, bias=False)
        assert few_layers(model) is None
        assert few_layers(small_model(**SHAPE)) is None


def test_a_model_that_passes_its_mask_on_by_name_can_be_trained() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_dense_layers": 1}
    with torch.device("meta"):
        model = small_model("afmoe", **SHAPE, **experts).bfloat16()
    assert trained_as(model).why_rows is None
