"""Which layers `model.lora.target_modules: all-linear` means, in every family with windows or experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ajet.backbone.local.learner import linear_modules, with_adapters
from ajet.config import make_config
from ajet.schema.errors import ConfigError
from support.hybrids import hybrid_model
from support.small_models import small_model
from support.windowed_models import WINDOWED, windowed_model

pytest.importorskip("peft")


def config(**lora: Any) -> Any:
    return make_config({"model.lora": {"enabled": True, "rank": 2, **lora}})


@pytest.mark.parametrize("family", list(WINDOWED))
def test_every_family_takes_adapters_at_all_linear_layers(family: str) -> None:
    model = windowed_model(family)
    adapted = with_adapters(model, config().ajet.model.lora)
    wrapped = {name for name, _ in adapted.named_modules() if name.endswith(".lora_A")}
    assert any("q_proj" in name for name in wrapped)
    assert not any("router" in name or "lm_head" in name for name in wrapped)
    logits = adapted(torch.arange(1, 13)[None]).logits
    logits.sum().backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "q_proj.lora_B" in name)


@pytest.mark.parametrize("family", ["Mamba", "Jamba"])
def test_no_adapter_does_nothing(family: str) -> None:
    """Layers of Mamba whose weight is read past them take none."""
    adapted = with_adapters(hybrid_model(family), config().ajet.model.lora)
    adapted(torch.arange(1, 25)[None]).logits.sum().backward()
    grads = {name: p.grad for name, p in adapted.named_parameters() if "lora_B" in name}
    assert grads and all(grad is not None and grad.abs().sum() > 0 for grad in grads.values())
    with pytest.raises(
        ConfigError, match=r"lora\.target_modules: .* dt_proj itself: an adapter there would do nothing"
    ):
        with_adapters(hybrid_model(family), config(target_modules=["x_proj", "dt_proj"]).ajet.model.lora)


def test_a_layer_of_that_name_takes_one_elsewhere() -> None:
    """Doge computes its mask with one."""
    model = small_model("doge", pad_token_id=0)
    assert "dt_proj" in linear_modules(model)
    with_adapters(model, config(target_modules=["dt_proj"]).ajet.model.lora)
    with pytest.raises(ConfigError, match="the model has no module 'dt_proj'"):
        with_adapters(windowed_model("qwen2"), config(target_modules=["dt_proj"]).ajet.model.lora)


def test_the_names_of_a_model_whose_layers_all_qualify_are_short() -> None:
    names = linear_modules(windowed_model("qwen2"))
    assert names == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_a_layer_that_only_shares_its_name_is_left_out() -> None:
    model = windowed_model("mistral")
    model.model.layers[0].self_attn.q_proj = torch.nn.Identity()
    names = linear_modules(model)
    assert "q_proj" not in names
    assert [name for name in names if name.endswith("q_proj")] == [
        f"model.layers.{i}.self_attn.q_proj" for i in (1, 2, 3)
    ]


def test_a_layer_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"lora\.target_modules.*w_q.*q_proj, k_proj"):
        with_adapters(windowed_model("qwen2"), config(target_modules=["w_q"]).ajet.model.lora)


def test_one_that_does_not_exist_is_named_beside_others_that_do() -> None:
    with pytest.raises(ConfigError, match=r"lora\.target_modules: the model has no module 'gate_prj'.* gate_proj"):
        with_adapters(windowed_model("qwen2"), config(target_modules=["q_proj", "gate_prj"]).ajet.model.lora)
    found = with_adapters(windowed_model("qwen2"), config(target_modules=["self_attn.q_proj"]).ajet.model.lora)
    assert any(name.endswith("q_proj.lora_A") for name, _ in found.named_modules())
