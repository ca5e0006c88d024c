"""The tiny tokenizer: byte-level, so any UTF-8 text round-trips; every digit and ASCII punctuation mark stands alone.

Ids 0 … 255 are the bytes themselves; then come merges learned from `vocabulary.CORPUS`, the boilerplate of templates
and tool calls, and the special tokens. The size is `VOCABULARY_SIZE`, whatever the corpus.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from ajet.engine.tiny.template import chat_template
from ajet.engine.tiny.vocabulary import BOILERPLATE, CORPUS, END_OF_TEXT, MESSAGE_END, SPECIAL

VOCABULARY_SIZE = 512
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before merging. It is Qwen2's rule: transformers puts that in place of ours when it loads the
tokenizer of a `qwen2` model by itself. As merges join letters only, digits and punctuation stand alone in any case."""
MARK = "ajet_tiny"
"""Key of `tokenizer_config.json`. `ModelSource` loads a tokenizer that has it exactly as it is written: left to itself,
transformers makes a `Qwen2Tokenizer` of it, whose Unicode normalisation would break the round trip."""

Pair = tuple[str, str]


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (the convention of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def learn_merges(text: str, count: int) -> list[Pair]:
    """Byte-pair encoding: join the most frequent neighbours, `count` times; equals in the order of their text."""
    characters = byte_characters()
    words = Counter(re.findall(r" ?[A-Za-z]+", text.replace("\n", " ")))
    spelled = {word: [characters[byte] for byte in word.encode()] for word in words}
    merges: list[Pair] = []
    while len(merges) < count:
        pairs: Counter[Pair] = Counter()
        for word, parts in spelled.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = {word: _join(parts, best) for word, parts in spelled.items()}
    return merges


def _join(parts: list[str], pair: Pair) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair and len(joined[-1]) == len(pair[0]):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def tokenizer_definition() -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    merges = learn_merges(CORPUS, VOCABULARY_SIZE - 256 - len(BOILERPLATE) - len(SPECIAL))
    pieces = [*byte_characters(), *("".join(pair) for pair in merges)]
    added = [*BOILERPLATE, *SPECIAL]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": len(pieces) + index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": text in SPECIAL,
            }
            for index, text in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in merges],
        },
    }


def token_id(text: str) -> int:
    """The id of a piece of boilerplate or of a special token."""
    added = [*BOILERPLATE, *SPECIAL]
    return VOCABULARY_SIZE - len(added) + added.index(text)


def write_tokenizer(folder: Path, family: str) -> None:
    """Write what `AutoTokenizer` and vLLM read."""
    config = {
        MARK: True,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": chat_template(family),
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_definition(), ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
