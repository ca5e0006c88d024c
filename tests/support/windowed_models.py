"""Tiny random models of the families whose layers don't all see everything, or bend their scores."""

from __future__ import annotations

from typing import Any

VOCAB = 32

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8, **EXPERTS},
    "phimoe": {"sliding_window": 8, **EXPERTS},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "layer_types": MIXED},
    "qwen2_moe": {
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": MIXED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "cohere2": {"sliding_window": 8, "layer_types": MIXED},
    "olmo3": {"sliding_window": 8, "layer_types": MIXED},
    "gemma2": {"sliding_window": 8, "layer_types": MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": MIXED, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 8, "layer_types": MIXED, **EXPERTS},
    "llama4_text": {
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "floor_scale": 4,
        "intermediate_size_mlp": 48,
        **EXPERTS,
    },
}


def windowed_model(family: str, **options: Any) -> Any:
    """With sinks and all that is drawn at random, and plain ("eager") attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **WINDOWED[family], **options})
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif not torch.isfinite(parameter).all() or parameter.abs().max() > 1e3:
            torch.nn.init.normal_(parameter, std=0.2)
    return model
