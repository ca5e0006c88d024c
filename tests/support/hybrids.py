"""Tiny random models of the families that keep a state from token to token beside keys and values."""

from __future__ import annotations

from typing import Any

VOCAB = 512
"""That of the tiny tokenizers."""

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
ZAMBA: dict[str, Any] = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4, "mamba_d_state": 8}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3-Next": ("qwen3_next", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "Kimi Linear": (
        "kimi_linear",
        {
            **LATENT,
            **EXPERTS,
            "layer_types": LINEAR["layer_types"],
            "num_key_value_heads": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "head_dim": None,
        },
    ),
    "Nemotron-H": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "num_hidden_layers": None,
        },
    ),
    "Granite 4": (
        "granitemoehybrid",
        {**MAMBA_2, **EXPERTS, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    ),
    "Falcon-H1": ("falcon_h1", {**MAMBA_2, "mamba_d_ssm": 64}),
    "Bamba": ("bamba", {**MAMBA_2, "attn_layer_indices": [1, 3]}),
    "LFM2": ("lfm2", CONV),
    "LFM2-MoE": ("lfm2_moe", {**CONV, **EXPERTS}),
    "LFM3": ("lfm3", CONV),
    "Jamba": ("jamba", {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "Zamba": (
        "zamba",
        {
            **ZAMBA,
            "attention_hidden_size": 64,
            "n_mamba_heads": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            "attention_head_dim": 16,
        },
    ),
    "Zamba 2": (
        "zamba2",
        {
            **ZAMBA,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
        },
    ),
    "OLMo hybrid": ("olmo_hybrid", LINEAR),
    "MiniMax": ("minimax", {"layer_types": LINEAR["layer_types"], **EXPERTS, "block_size": 16}),
    "RecurrentGemma": ("recurrent_gemma", {"block_types": ["recurrent", "attention"], "lru_width": 32}),
    "Mamba": ("mamba", {"state_size": 4}),
    "Mamba 2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}),
}
STATEFUL = [family for family in HYBRIDS if family not in ("MiniMax", "RecurrentGemma", "Mamba", "Mamba 2")]
"""Those that the embedded engine serves."""


def hybrid_config(family: str) -> Any:
    from transformers import AutoConfig

    kind, options = HYBRIDS[family]
    return AutoConfig.for_model(
        kind, **{key: value for key, value in {**COMMON, **options}.items() if value is not None}
    )


def hybrid_model(family: str) -> Any:
    """Always with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(hybrid_config(family)).eval()
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all() or parameter.abs().max() > 1e3:
            torch.nn.init.normal_(parameter, std=0.1)
    model.config.name_or_path = "tiny:qwen2"  # whose tokenizer it has
    return model
