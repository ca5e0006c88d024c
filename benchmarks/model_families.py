"""Which model families the embedded engine serves and the embedded trainer trains as trees: a table.

For each family, a tiny model with random weights is made from transformers' own configuration class, with windows far
shorter than the sequences. The model's own forward pass over plain rows is the truth:

- engine: largest difference of a logprob, over two sequences computed side by side in chunks and rows
- tree: difference of the gradient of packed trees, relative to its norm
- rows: the same for padded batches of rows, against each row alone
- LoRA: the same as tree (or rows, where there are no trees) for the adapters' weights
- bf16: whether trees pass the check before a run, and whether the engine takes the model, in bfloat16
- plan: of models that keep a state, in twice as many and four times as wide layers: what the memory plan says of a pass
  through four rows of 512 tokens (Mamba 1: of 64), against the peak of PyTorch's allocator, with all activations kept

    python benchmarks/model_families.py [--only PART_OF_A_NAME]     # writes the figures and the table in the docs
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from typing import Any

import torch
from common import ROOT, write_result
from torch.profiler import ProfilerActivity, profile
from tree_training import VOCAB, best_of, forgetful, group, items_for

from ajet.backbone.local.learner import linear_modules
from ajet.engine.attention_rules import layer_shapes
from ajet.engine.torch.kv_cache import KVPool
from ajet.engine.torch.readers import PassPart
from ajet.engine.torch.runner import Runner, Work
from ajet.schema.errors import FeatureUnavailableError
from ajet.trainer.executor import check_trees, tree_support
from ajet.trainer.footprint import MAMBA_1, Pass, pass_bytes
from ajet.trainer.forward import Entropy, PackForward, RowForward
from ajet.trainer.pack import Item, Layout, make_packs

sys.path.insert(0, str(ROOT / "tests"))
from support.hybrids import HYBRIDS

PAGE = ROOT / "docs" / "dev" / "checks.md"
MARK, END = "<!-- written by benchmarks/model_families.py -->", "<!-- until here -->"
WINDOW = 16
"""Tokens of every window; paths have up to 70."""
EXACT = 1e-3
"""A difference up to this counts as rounding, in float32."""

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": WINDOW, "layer_types": MIXED}
EIGHT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "vocab_size": VOCAB}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, dynamic RoPE": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 32},
    ),
    "Llama 4 (text)": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "floor_scale": 8,
            "intermediate_size_mlp": 48,
            **EXPERTS,
        },
    ),
    "Qwen2": ("qwen2", {}),
    "Qwen2, sliding": ("qwen2", {**SLIDING, "use_sliding_window": True}),
    "Qwen2-MoE": (
        "qwen2_moe",
        {**SLIDING, "use_sliding_window": True, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS),
    "Mistral": ("mistral", {"sliding_window": WINDOW}),
    "Ministral 3": ("ministral3", {}),
    "Mixtral": ("mixtral", {"sliding_window": WINDOW, **EXPERTS}),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {**SLIDING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "Gemma 3 (text)": ("gemma3_text", {**SLIDING, "query_pre_attn_scalar": 8}),
    "gpt-oss": ("gpt_oss", {**SLIDING, **EXPERTS}),
    "Phi-2": ("phi", {}),
    "Phi-3": ("phi3", {"sliding_window": WINDOW}),
    "Phi-3, long RoPE": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "Phi-MoE": ("phimoe", {"sliding_window": WINDOW, **EXPERTS}),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", SLIDING),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", SLIDING),
    "OLMoE": ("olmoe", EXPERTS),
    "Granite": ("granite", {}),
    "Granite-MoE": ("granitemoe", EXPERTS),
    "GLM": ("glm", {}),
    "GLM-4": ("glm4", {}),
    "SmolLM3": ("smollm3", {}),
    "EXAONE 4": ("exaone4", {**SLIDING, "sliding_window_pattern": 2}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Seed-OSS": ("seed_oss", {}),
    "StarCoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "StableLM": ("stablelm", {}),
    "Nemotron": ("nemotron", {}),
    "Helium": ("helium", {}),
    "BitNet": ("bitnet", {}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {**LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, **EXPERTS},
    ),
    "GPT-2": ("gpt2", EIGHT),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-J": ("gptj", {**EIGHT, "rotary_dim": 4}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Bloom": ("bloom", {"n_head": 4, "n_layer": 4}),
    "Falcon": ("falcon", {"multi_query": False, "head_dim": None}),
    **HYBRIDS,
}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model of a family, always with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = FAMILIES[family]
    settings = {key: value for key, value in {**COMMON, **options}.items() if value is not None}
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(kind, **settings)).eval()
    for name, parameter in model.named_parameters():
        empty = not torch.isfinite(parameter).all() or parameter.abs().max() > 1e3
        if empty or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def calls() -> list[Item]:
    """Trees with several branches, whose paths go beyond every window."""
    return items_for([*group(3, 2, 20, 8, 12), forgetful(2, 14, 6, 8, 6), best_of(2, 2, 12, 6, 8)])


def gradient(model: Any, forward: RowForward, layout: Layout) -> list[torch.Tensor]:
    """Of a weighted sum of all logprobs."""
    model.zero_grad(set_to_none=True)
    with forward.session(model):
        for pack in make_packs(calls(), layout):
            logprob_E = forward(model, pack).logprob_E
            order_E = torch.from_numpy(pack.edges.token + pack.edges.call).to(logprob_E.dtype)
            (logprob_E * (1 + order_E % 3)).sum().backward()  # type: ignore[no-untyped-call]
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Relative to the norm of all together."""
    off = torch.stack([(a - b).norm() for a, b in zip(one, other, strict=True)]).norm()
    return float(off / torch.stack([b.norm() for b in other]).norm())


WIDER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "head_dim": 32,
    "attention_hidden_size": 256,
    "attention_head_dim": 64,
    "mamba_d_head": 32,
    "mamba_headdim": 32,
    "vocab_size": 2048,
}


def wider(family: str) -> Any:
    """The configuration of a hybrid whose layers outweigh what is around them."""
    from transformers import AutoConfig

    kind, options = HYBRIDS[family]
    settings = {**COMMON, **options}
    settings |= {key: size for key, size in WIDER.items() if settings.get(key) is not None}
    if kind == "mamba2":
        settings["head_dim"] = 32
    if kind == "falcon_h1":
        settings["mamba_d_head"] = 8
    for key in ("layer_types", "layers_block_type"):
        settings |= {key: settings[key] * 2} if key in settings else {}
    return AutoConfig.for_model(kind, **{key: value for key, value in settings.items() if value is not None})


def plan_difference(family: str) -> float:
    """Of the planned bytes of a pass, relative to those that it takes."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(wider(family)).eval()
    with torch.device("meta"):
        planned = auto.from_config(wider(family)).eval()
    by_token = any(hasattr(model.config, key) for key in MAMBA_1)
    (pack,) = make_packs(items_for(group(4, 1, *((52, 8, 13) if by_token else (491, 20, 22)))), Layout.MERGED)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        forward = RowForward(budget=len(pack), chunk=100)
        forward(model, pack, entropy=Entropy.VALUE).logprob_E.sum().backward()  # type: ignore[no-untyped-call]
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    taken = peak + sum(parameter.nbytes for parameter in model.parameters())
    return pass_bytes(planned, Pass(len(pack), len(pack.edges), logits_chunk=100)) / taken - 1


ALONE = RowForward(budget=1)
"""Every row by itself."""


def engine_difference(model: Any) -> float:
    """Of logprobs, over all tokens that are drawn from."""
    runner = Runner(model)
    pool = KVPool(runner.kv_shape, runner.dtype, runner.device, 4096)
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(3, VOCAB, (2, 70), generator=generator).tolist()
    slots = [pool.allocate(70, 70) for _ in sequences]
    drawn: list[list[torch.Tensor]] = [[], []]
    done = 0
    for count in (40, 12, *[1] * 18):
        parts = [PassPart(kv, done, count) for kv in slots if kv is not None]
        work = [Work(part, row[done : done + count], True) for part, row in zip(parts, sequences, strict=True)]
        logits = runner.forward(work, []) if count == 1 else runner.forward([], work)
        done += count
        for found, row in zip(drawn, logits.log_softmax(-1), strict=True):
            found.append(row)
    with torch.inference_mode():
        own = model(input_ids=torch.tensor(sequences), use_cache=False).logits.float().log_softmax(-1)
    return float((torch.stack([torch.stack(found) for found in drawn]) - own[:, [39, *range(51, 70)]]).abs().max())


def with_adapters(model: Any) -> Any:
    """Adapters at every layer that `model.lora.target_modules: all-linear` means, as after some updates."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=linear_modules(model))).eval()


def short(error: str) -> str:
    """The reason alone."""
    return error.split(": ", 1)[-1].split(". Use rollout.engine")[0]


def check(family: str) -> dict[str, Any]:
    """One row of the table."""
    model = model_of(family)
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    alone = gradient(model, ALONE, Layout.FLAT)
    row["rows"] = distance(gradient(model, RowForward(), Layout.MERGED), alone)
    row["no_tree"] = tree_support(model) or check_trees(model, calls())
    if row["no_tree"] is None:
        row["tree"] = distance(gradient(model, PackForward(), Layout.TREE), alone)
        rules = [layer.rule for layer in layer_shapes(model)]
        found = {f"{rule.visibility.sight} {rule.visibility.size}" for rule in rules if rule.visibility.size}
        found |= {"soft cap" for rule in rules if rule.softcap} | {
            "sinks" for rule in rules if rule.sinks_H is not None
        }
        row["rules"] = sorted(found)
    try:
        row["engine"] = engine_difference(model)
    except FeatureUnavailableError as error:
        row["no_engine"] = short(str(error))
    model = with_adapters(model_of(family))
    tree = row["no_tree"] is None
    forward, layout = (PackForward(), Layout.TREE) if tree else (RowForward(), Layout.MERGED)
    row["lora"] = distance(gradient(model, forward, layout), gradient(model, ALONE, Layout.FLAT))
    model = model_of(family, torch.bfloat16)
    if family in HYBRIDS:
        row["plan"] = plan_difference(family)
    row["bf16_tree"] = tree and check_trees(model, calls()) is None
    try:
        Runner(model)
        row["bf16_engine"] = True
    except FeatureUnavailableError:
        row["bf16_engine"] = False
    return row


def table(figures: dict[str, dict[str, Any]]) -> str:
    """In Markdown: the families that share branches, the largest differences, and the others one by one."""
    shared = {family: row for family, row in figures.items() if row["no_tree"] is None and family not in HYBRIDS}
    named = []
    for family, row in shared.items():
        special = ["no engine"] if "no_engine" in row else []
        special += [f"not {what} in bfloat16" for what in ("tree", "engine") if not row[f"bf16_{what}"]]
        named.append(f"{family} ({', '.join(special)})" if special else family)
    largest = {what: max(row[what] for row in shared.values()) for what in ("engine", "tree", "rows", "lora")}
    lines = [
        f"{len(shared)} families, in the engine and as trees, also in bfloat16: {'; '.join(named)}.",
        "",
        "| largest difference | engine | trees | rows | LoRA |",
        "|---|---|---|---|---|",
        f"| of these families | {' | '.join(f'{value:.0e}' for value in largest.values())} |",
        "",
        "| only as rows, because | not in the engine | rows | LoRA |",
        "|---|---|---|---|",
    ]
    reasons: dict[str, dict[str, dict[str, Any]]] = {}
    for family, row in figures.items():
        if family not in shared and family not in HYBRIDS:
            whose = "its " if "'s " in row["no_tree"] else "it "
            why = re.sub(r"^\w+(ForCausalLM|Attention)('s)? ", whose, row["no_tree"])
            reasons.setdefault(re.sub(r" \([\w., ]+\)", "", why), {})[family] = row
    for why, rows in reasons.items():
        found = [max(row[name] for row in rows.values()) for name in ("rows", "lora")]
        lines.append(f"| {why} | {'; '.join(rows)} | {' | '.join(map(cell, found))} |")
    lines += ["", "| keeps a state | engine | trees | rows | LoRA | plan |", "|---|---|---|---|---|---|"]
    for family in HYBRIDS:
        row = figures[family]
        cells = [cell(row[name]) if name in row else "no" for name in ("engine", "tree", "rows", "lora")]
        percent = round(100 * row["plan"])
        lines.append(f"| {family} | {' | '.join(cells)} | {f'{percent:+}' if percent else 0} % |")
    return "\n".join(lines)


def cell(difference: float) -> str:
    """A figure, in bold if it is more than rounding."""
    text = f"{difference:.0e}" if difference else "0"
    return text if difference <= EXACT else f"**{text}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families whose name contains this; writes nothing")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    figures = {}
    for family in FAMILIES:
        if only.lower() in family.lower():
            figures[family] = check(family)
            print(family, figures[family], flush=True)
    if only:
        return
    write_result("model_families", figures)
    before, after = PAGE.read_text().split(MARK)[0], PAGE.read_text().split(END)[1]
    PAGE.write_text(f"{before}{MARK}\n\n{table(figures)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
