"""Small real models for the trainer's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

VOCAB = 32


def small_model(family: str = "qwen2", seed: int = 0, attn: str = "sdpa", **options: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model(family, **{**settings, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()


def recompute_layers(model: Any) -> None:
    """Have transformers compute the layers again in the backward pass. Only they are in training mode."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        module.training = bool(getattr(module, "gradient_checkpointing", False))


def weights(model: Any) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gap(one: Tensors, other: Tensors) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def packed_gradient(model: Any, forward: Any, items: Any, layout: Any, budget: int | None = None) -> Tensors:
    """The gradient of weighted log-probabilities, added up over the packs of these items."""
    import torch

    from ajet.trainer.pack import make_packs

    model.zero_grad(set_to_none=True)
    with forward.session(model):
        for pack in make_packs(items, layout, budget):
            logprob_E = forward(model, pack).logprob_E
            (logprob_E * torch.from_numpy(pack.edges.sampler_logprob).float()).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(one: Tensors, other: Tensors) -> float:
    """Relative to the norm of all gradients together."""
    import torch

    assert one.keys() == other.keys()
    norm = torch.stack([value.norm() for value in other.values()]).norm()
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm() / norm)
