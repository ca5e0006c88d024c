"""Small tokenizers with the chat templates and control tokens of the model families in use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = Path(__file__).parent / "corpus.txt"


@dataclass(frozen=True)
class Family:
    """A model family: what its tokenizer has beyond plain text."""

    name: str
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    """Added tokens that are not special, as `<think>` often is."""
    strips_right: tuple[str, ...] = ()
    sentencepiece: bool = False


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEEPSEEK = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    *THINK,
)
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5", "<|im_end|>", special=CHATML, added=TOOL_TAGS),
        Family("qwen3", "<|im_end|>", special=CHATML, added=(*TOOL_TAGS, *THINK)),
        Family("llama3", "<|eot_id|>", "<|begin_of_text|>", special=("<|end_of_text|>", *LLAMA)),
        Family("mistral", "</s>", "<s>", special=MISTRAL, sentencepiece=True),
        Family("deepseek_r1", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", added=DEEPSEEK),
        Family("gemma", "<eos>", "<bos>", special=("<start_of_turn>", "<end_of_turn>"), sentencepiece=True),
        Family("phi", "<|endoftext|>", special=PHI, strips_right=("<|end|>", "<|user|>", "<|assistant|>")),
        Family("glm", "<|endoftext|>", special=GLM, added=(*TOOL_TAGS, *THINK)),
        Family("chatml", "<|endoftext|>", special=CHATML),
    )
}


@cache
def tokenizer(name: str) -> Any:
    """The tokenizer of a family, with a few thousand merges learned here."""
    family = FAMILIES[name]
    backend = _backend(family.sentencepiece)
    specials = dict.fromkeys((family.eos, *((family.bos,) if family.bos else ()), *family.special))
    for text in specials:
        backend.add_special_tokens(
            [AddedToken(text, special=True, rstrip=text in family.strips_right, normalized=False)]
        )
    for text in family.added:
        backend.add_tokens([AddedToken(text, special=False, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos)
    wrapped.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return wrapped


@cache
def _trained(sentencepiece: bool) -> str:
    backend = Tokenizer(models.BPE(byte_fallback=sentencepiece))
    if sentencepiece:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=1200, special_tokens=["<unk>", *alphabet], show_progress=False, max_token_length=12
        )
    else:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    backend.train_from_iterator(CORPUS.read_text().splitlines(), trainer)
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] == "<unk>"]
    return json.dumps(definition)


def byte_backend() -> Tokenizer:
    """A byte-level tokenizer without any control token."""
    return _backend(sentencepiece=False)


def _backend(sentencepiece: bool) -> Tokenizer:
    backend = Tokenizer.from_str(_trained(sentencepiece))
    if sentencepiece:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    else:
        backend.decoder = decoders.ByteLevel()
    return backend
