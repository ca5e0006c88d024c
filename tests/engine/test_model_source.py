"""Models that are not at hand are refused at once, with the reason."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from ajet.engine import model_source
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import ConfigError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The host names that are looked up; none is found."""
    names: list[Any] = []

    def unknown(host: Any, *_: Any) -> Any:
        names.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(model_source, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model_source._hub_is_reachable.cache_clear()
    yield names
    model_source._hub_is_reachable.cache_clear()


def test_without_a_way_to_the_hub_its_cache_is_asked_once(asked: list[Any]) -> None:
    source = ModelSource.resolve("nobody/has-this-model")
    with pytest.raises(ConfigError, match=r"has-this-model.*couldn't find them in the cached files"):
        source.tokenizer()
    with pytest.raises(ConfigError, match=r"has-this-model.*couldn't find them in the cached files"):
        source.model()
    assert len(asked) == 1, "one look-up, and no try to connect"


def test_a_proxy_may_know_the_way(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "getproxies", lambda: {"https": "http://proxy:3128"})
    ModelSource.resolve("some/model")._go_offline_without_hub()
    assert asked == [] and not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["my agent", "a--b", "Qwen/Qwen3 8B"])
def test_what_can_be_no_hub_id_is_in_no_folder(name: str) -> None:
    assert ModelSource.resolve(name).folder() is None


def test_folders_need_no_hub(asked: list[Any]) -> None:
    assert ModelSource.resolve("tiny:qwen2-0.3m").tokenizer() is not None
    assert asked == [] and not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(("family", "attention"), [("qwen2", "sdpa"), ("gpt_oss", "eager")])
def test_auto_takes_the_attention_that_the_model_has(tmp_path: Path, family: str, attention: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        family, **sizes, num_key_value_heads=2, head_dim=16, vocab_size=64, num_local_experts=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = ModelSource.resolve(str(tmp_path)).model("float32")
    assert model.config._attn_implementation == attention


# ------------------------------------------------------------ folders that something is wrong with


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose head isn't tied, as transformers saves it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=512, tie_word_embeddings=False)
    model: Any = AutoModelForCausalLM.from_config(config)
    place = shutil.copytree(ModelSource.resolve("tiny:llama").path, tmp_path / "model")
    model.save_pretrained(place)
    return place


def change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refusals(folder: Path) -> tuple[str, str]:
    """What is said before weights are loaded, and on loading them."""
    source = ModelSource.resolve(folder)
    with pytest.raises(ConfigError) as before:
        source.check_weights(cast(Any, source.on_meta("float32", "cpu")))
    with pytest.raises(ConfigError) as then:
        source.model("float32")
    return str(before.value), str(then.value)


def test_weights_that_are_not_there_are_named_and_never_random(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    for said in refusals(folder):
        assert "lacks weights that its config.json asks for, 1 in all: lm_head.weight" in said


def test_a_tied_head_is_not_missing(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    change_json(folder / "config.json", tie_word_embeddings=True)
    source = ModelSource.resolve(folder)
    source.check_weights(cast(Any, source.on_meta("float32", "cpu")))
    model: Any = source.model("float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_under_other_names_are_missing(folder: Path) -> None:
    def rename(weights: dict[str, Any]) -> None:
        for name in list(weights):
            weights[f"_orig_mod.{name}"] = weights.pop(name)

    change_weights(folder, rename)
    for said in refusals(folder):
        assert "lm_head.weight" in said and "has others that it doesn't ask for: _orig_mod.lm_head.weight" in said


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    change_json(folder / "config.json", vocab_size=600)
    for said in refusals(folder):
        assert "lm_head.weight has shape (512, 32), where the config makes it (600, 32)" in said


def test_weights_that_nobody_asks_for_are_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_json(folder / "config.json", num_hidden_layers=1)
    source = ModelSource.resolve(folder)
    source.check_weights(cast(Any, source.on_meta("float32", "cpu")))
    source.model("float32")
    said = [record.message for record in caplog.records if "doesn't ask for" in record.message]
    assert len(said) == 1 and "has 9 weights" in said[0] and "model.layers.1.input_layernorm.weight" in said[0]


def test_eyes_that_a_model_is_loaded_without_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 1, "vocab_size": 64, "layer_types": ["full_attention"],
    }  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=eyes)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")  # type: ignore[no-untyped-call]
    for _ in range(2):
        model = ModelSource.resolve(str(tmp_path / "whole")).model("float32")
    model.save_pretrained(tmp_path / "text")
    ModelSource.resolve(str(tmp_path / "text")).model("float32")
    [said] = [record.message for record in caplog.records if "text alone" in record.message]
    assert "whole is loaded for text alone: the weights that its vision_config is about are left out" in said


def test_experts_of_a_mixture_are_found_by_their_names_in_the_file(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **experts, vocab_size=64)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    source = ModelSource.resolve(tmp_path)
    source.check_weights(cast(Any, source.on_meta("float32", "cpu")))
    change_weights(tmp_path, lambda weights: weights.pop("model.layers.0.mlp.experts.3.up_proj.weight"))
    for said in refusals(tmp_path):
        assert "some parts are missing, or have another shape, of model.layers.0.mlp.experts.gate_up_proj" in said


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", None, "model.safetensors is damaged, or not all there"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "run `git lfs pull`"),
        ("generation_config.json", b"{", "generation_config.json is no JSON"),
        ("model.safetensors.index.json", b"{", "model.safetensors.index.json is no JSON"),
    ],
)
def test_the_file_that_is_damaged_is_named(folder: Path, file: str, content: bytes | None, said: str) -> None:
    there = folder / file
    if "index" in file:
        (folder / "model.safetensors").unlink()
    there.write_bytes(there.read_bytes()[:5000] if content is None else content)
    with pytest.raises(ConfigError, match=said):
        ModelSource.resolve(folder).model("float32")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", "32", "'hidden_size' expected int, got str"),
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("hidden_act", "swishy", "swishy"),
        ("dtype", "float31", "float31"),
        ("pad_token_id", 5000, "Padding_idx"),
    ],
)
def test_what_config_json_says_wrongly_is_an_error_of_that_file(folder: Path, key: str, value: Any, said: str) -> None:
    change_json(folder / "config.json", **{key: value})
    with pytest.raises(ConfigError, match=rf"(config\.json|can't be built).*{said}"):
        ModelSource.resolve(folder).on_meta("float32", "cpu")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_that_is_no_json_object_is_named(folder: Path, file: str) -> None:
    (folder / file).write_text("[1]")
    source = ModelSource.resolve(folder)
    with pytest.raises(ConfigError, match=rf"{file} must hold a JSON object, not list"):
        source.config() if file == "config.json" else source.tokenizer()


def test_code_in_a_models_folder_is_never_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    names = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (folder / "own.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Own: ...\n"
    )
    change_json(folder / "config.json", model_type="own", auto_map=names)
    change_json(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map=names, ajet_tiny=None)
    source = ModelSource.resolve(folder)
    for load in (source.config, source.tokenizer, source.model, lambda: source.on_meta("float32", "cpu")):
        with pytest.raises(ConfigError, match="code of their own"):
            load()
    assert not (folder / "ran").exists()


def to_mxfp4(weights: dict[str, Any]) -> None:
    import torch

    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, before, after = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, after, before // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full((experts, after, before // 32), 120, dtype=torch.uint8)


def to_fp8(weights: dict[str, Any]) -> None:
    import torch

    for name in [name for name in weights if "_proj" in name]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)


@pytest.mark.parametrize(
    ("family", "quantise", "settings"),
    [
        ("gpt_oss", to_mxfp4, {"quant_method": "mxfp4"}),
        ("qwen3_moe", to_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    ],
)
def test_a_model_that_was_dequantized_is_saved_as_what_it_is(
    tmp_path: Path, family: str, quantise: Callable[[dict[str, Any]], None], settings: dict[str, Any]
) -> None:
    """As large mixtures of experts are published: where it can't be computed so, transformers dequantizes them."""
    import torch

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(family, **sizes, **experts, num_key_value_heads=2, head_dim=16, vocab_size=64)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path / "published")
    names = load_names(tmp_path / "published")
    change_weights(tmp_path / "published", quantise)
    change_json(tmp_path / "published" / "config.json", quantization_config=settings)
    published = ModelSource.resolve(tmp_path / "published")
    published.check_weights(cast(Any, published.on_meta("float32", "cpu")))  # which is not said to lack the others
    model: Any = published.model("float32", device="cpu")
    if getattr(model, "hf_quantizer", None) is not None:
        pytest.skip("this machine computes with quantized weights")
    model.save_pretrained(tmp_path / "saved")
    assert load_names(tmp_path / "saved") == names
    again: Any = ModelSource.resolve(tmp_path / "saved").model("float32", device="cpu")
    own, read = model.state_dict(), again.state_dict()
    assert own.keys() == read.keys() and all(torch.equal(own[name], read[name]) for name in own)


def load_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        return set(weights.keys())
