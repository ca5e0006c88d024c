"""Logits in chunks: the same log-probabilities and gradients, and never a matrix of all tokens by the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ajet.trainer.forward import (
    LOGITS_BYTES,
    Entropy,
    HiddenStates,
    PackForward,
    RowForward,
    chunk_positions,
)
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, Pack, items_of, make_packs
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import gap, small_model, weights

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {"final_logit_softcapping": 5.0, "sliding_window": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "mixtral": {"num_local_experts": 4},
}


def found(model: Any, forward: RowForward, pack: Pack, entropy: Entropy) -> list[torch.Tensor]:
    """Log-probabilities, entropies, and the gradient of something that depends on both."""
    with forward.session(model):
        got = forward(model, pack, entropy=entropy)
        loss = (got.logprob_E * torch.linspace(-1, 1, len(got.logprob_E))).sum()
        if entropy is Entropy.GRADIENT:
            assert got.entropy_E is not None
            loss = loss + 0.1 * got.entropy_E.square().sum()
        loss.backward()
    values = [got.logprob_E.detach(), *([got.entropy_E.detach()] if got.entropy_E is not None else [])]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return [*values, *gradients]


def worst(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest ‖Δ‖∞ / ‖g‖∞ of any of them. Gradients that are zero but for rounding don't count."""
    assert len(ones) == len(others)
    pairs = [(one, other) for one, other in zip(ones, others, strict=True) if one.abs().max() > 1e-4]
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("entropy", list(Entropy))
def test_chunks_change_nothing(family: str, entropy: Entropy) -> None:
    model = small_model(family, **FAMILIES[family])
    items = items_of(credited_batch(5))
    for layout, forward in (
        (Layout.TREE, lambda chunk: PackForward(chunk=chunk)),
        (Layout.FLAT, lambda chunk: RowForward(60, chunk)),
    ):
        (pack,) = make_packs(items, layout)
        whole = found(model, forward(0), pack, entropy)
        for chunk in (1, 7, len(pack.edges) - 1):
            assert worst(whole, found(model, forward(chunk), pack, entropy)) < 1e-5


def test_rows_that_end_in_many_places_get_logits_only_where_they_are_trained() -> None:
    model = small_model()
    (pack,) = make_packs(items_of(credited_batch(5)), Layout.FLAT)
    most = len(pack.edges)
    at_once: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda _head, _given, logits: at_once.append(logits[..., 0].numel()))
    RowForward(chunk=most)(model, pack)
    hook.remove()
    assert sum(at_once) >= most and max(at_once) <= most


def test_two_mini_batches_of_ragged_calls_update_alike() -> None:
    batch = credited_batch(4)
    results = []
    for chunk in (0, 5):
        model = small_model()
        settings = TrainSettings(
            LossSettings(correction=None, entropy_coef=0.01),
            OptimSettings(lr=1e-3),
            mini_batches=2,
            max_tokens=60,
            logits_chunk=chunk,
        )
        metrics = Updater(model, settings).update(batch)
        results.append((weights(model), metrics))
    (one, plain), (other, chunked) = results
    assert chunked["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)
    assert chunked["loss/entropy"] == pytest.approx(plain["loss/entropy"], rel=1e-5)
    assert gap(one, other) < 1e-4


def test_adapters_on_the_output_layer_learn_too() -> None:
    import peft

    pack = make_packs(items_of(credited_batch(2)))[0]
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(small_model(tie_word_embeddings=False), settings)
    whole, chunked = (found(model, PackForward(chunk=chunk), pack, Entropy.VALUE) for chunk in (0, 6))
    assert len(whole) == len(chunked) == 2 + 2 * 2 + 2
    assert worst(whole, chunked) < 1e-5


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that comes out of an operation."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@contextmanager
def largest() -> Iterator[Largest]:
    with Largest() as mode:
        yield mode


@pytest.mark.parametrize("layout", [Layout.TREE, Layout.FLAT])
def test_no_matrix_of_all_tokens_by_the_vocabulary(layout: Layout) -> None:
    vocabulary, chunk = 20_000, 8
    model = small_model(vocab_size=vocabulary, tie_word_embeddings=False)
    (pack,) = make_packs(items_of(credited_batch(5)), layout)
    weight = vocabulary * 32
    assert len(pack.edges) * vocabulary > weight > chunk * vocabulary
    for entropy in (Entropy.VALUE, Entropy.GRADIENT):
        with largest() as mode:
            found(model, PackForward(60, chunk), pack, entropy)
        assert mode.numbers == weight
        with largest() as mode:
            found(model, PackForward(100_000, 0), pack, entropy)
        assert mode.numbers >= len(pack.edges) * vocabulary


def test_the_default_chunk_is_a_quarter_of_a_gibibyte() -> None:
    assert 4 * 151_936 * chunk_positions(151_936) <= LOGITS_BYTES < 4 * 151_936 * (chunk_positions(151_936) + 1)
    assert chunk_positions(10**12) == 1


def test_a_model_without_a_body_of_its_own_computes_all_logits_together() -> None:
    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()
            self.config = self.inner.config

        @property
        def base_model(self) -> Any:
            return self

        def forward(self, **arguments: Any) -> Any:
            return self.inner(**arguments)

    model = Alone()
    assert HiddenStates.of(model, {"input_ids": torch.zeros(1, 2, dtype=torch.long)}) is None
    (pack,) = make_packs(items_of(credited_batch(5)), Layout.FLAT)
    whole, chunked = (found(model, RowForward(60, chunk), pack, Entropy.VALUE) for chunk in (0, 4))
    assert worst(whole, chunked) == 0
