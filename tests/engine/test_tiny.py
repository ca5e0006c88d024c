"""Tiny models: built offline, the same everywhere, loadable by transformers; a tokenizer that loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.engine.model_source import ModelSource
from ajet.engine.tiny_models import FAMILIES, SIZES, TinyName, draw_weights
from ajet.schema.errors import ConfigError

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CONVERSATION = [
    {"role": "system", "content": "You are a math agent."},
    {"role": "user", "content": "What is 12 + 345?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "12+345"}}}],
    },
    {"role": "tool", "content": "357"},
    {"role": "assistant", "content": "It is 357."},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["0.3m", "3m"])
def test_transformers_loads_every_tensor_and_counts_about_what_the_name_says(family: str, size: str) -> None:
    model = ModelSource.resolve(f"tiny:{family}-{size}").model()
    weights = draw_weights(TinyName(family, size))
    state = model.state_dict()
    assert set(weights) == set(state) - {"lm_head.weight"}
    assert all(bool((state[key] == value).all()) for key, value in weights.items())
    wanted = float(size.removesuffix("m")) * 1e6
    assert abs(sum(parameter.numel() for parameter in model.parameters()) - wanted) < 0.1 * wanted


def test_a_name_may_leave_out_family_and_size() -> None:
    assert TinyName.parse("") == TinyName("qwen2", "0.3m")
    assert TinyName.parse("llama") == TinyName("llama", "0.3m")
    assert TinyName.parse("30m") == TinyName("qwen2", "30m")
    with pytest.raises(ConfigError, match="gpt"):
        TinyName.parse("gpt-3m")


def test_head_sizes_suit_every_engine() -> None:
    assert all(size.head_size in (32, 64) for size in SIZES.values())


def test_two_processes_may_build_the_same_model_at_once(tmp_path: Path) -> None:
    program = "from ajet.engine.tiny_models import tiny_folder; print(tiny_folder('qwen2'))"
    environment = {"AJET_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    folders = {process.communicate()[0].strip() for process in started}
    assert all(process.returncode == 0 for process in started)
    (folder,) = folders
    assert sorted(path.name for path in Path(folder).parent.iterdir()) == [Path(folder).name]


@pytest.mark.slow
@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    tokenizer = _tokenizer("qwen2")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_and_punctuation_stand_alone() -> None:
    tokenizer = _tokenizer("qwen2")
    text = "(12+345)*-6.7"
    assert len(tokenizer.encode(text)) == len(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_with_a_tool_is_short(family: str) -> None:
    assert len(_render(family, CONVERSATION[:2])) < 100


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_longer_conversation_begins_with_the_shorter_ones_prompt(family: str) -> None:
    for length in (2, 4):
        shorter = _render(family, CONVERSATION[:length])
        assert _render(family, [*CONVERSATION, {"role": "user", "content": "More?"}])[: len(shorter)] == shorter


def test_qwen3_drops_earlier_thinking_and_shows_the_current() -> None:
    tokenizer = _tokenizer("qwen3")
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    question = {"role": "user", "content": "q"}
    assert "hm" in tokenizer.apply_chat_template([question, thought], tokenize=False)
    assert "hm" not in tokenizer.apply_chat_template([question, thought, question], tokenize=False)
    silent = tokenizer.apply_chat_template(
        [question], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert silent.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c", ""])
def test_a_missing_model_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        ModelSource.resolve(name)


def test_a_saved_tokenizer_still_round_trips(tmp_path: Path) -> None:
    source = ModelSource.resolve("tiny:qwen2")
    source.model().save_pretrained(tmp_path)
    source.tokenizer().save_pretrained(tmp_path)
    decomposed = "e\u0301"  # normalisation would join the two
    tokenizer = ModelSource.resolve(tmp_path).tokenizer()
    assert tokenizer.decode(tokenizer.encode(decomposed)) == decomposed


_tokenizers: dict[str, object] = {}


def _tokenizer(family: str):  # type: ignore[no-untyped-def]
    if family not in _tokenizers:
        _tokenizers[family] = ModelSource.resolve(f"tiny:{family}").tokenizer()
    return _tokenizers[family]


def _render(family: str, messages: list[dict[str, object]]) -> list[int]:
    return _tokenizer(family).apply_chat_template(
        messages, tools=[CALCULATOR], add_generation_prompt=messages[-1]["role"] != "assistant", return_dict=False
    )
