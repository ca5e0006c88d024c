"""Models that are not at hand are refused at once, with the reason."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_weights_that_were_cut_off_are_said_to_be(tmp_path: Path) -> None:
    folder = shutil.copytree(ModelSource.resolve("tiny:qwen2").path, tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"the weights of model .* are damaged"):
        ModelSource.resolve(folder).model()
