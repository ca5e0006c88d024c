"""Chat templates as they are published, read from wheels that ship them, and a small tokenizer for each.

The wheels (TRL's, and old ones of xinference) lie in `AJET_TEMPLATE_WHEELS`, or in `.templates` of the repository.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from tokenizers import AddedToken
from tracker_families import TEMPLATES, byte_level
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
WHEELS = Path(os.environ.get("AJET_TEMPLATE_WHEELS", ROOT / ".templates"))
CONTROL = re.compile(r"<[|｜][^<>|｜]+[|｜]>|\[gMASK\]|<sop>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>")
TAG = re.compile(r"</?(?:think|tool_call|tool_response)>")


def load(name: str) -> str:
    """The source of a template: TRL's `<name>.jinja`, or that of the model with this name in xinference's list."""
    for wheel in sorted(WHEELS.glob("*.whl")):
        if (source := _templates(wheel).get(name)) is not None:
            return source
    pytest.skip(f"no wheel in {WHEELS} ships the chat template {name}")


@cache
def _templates(wheel: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with ZipFile(wheel) as files:
        for name in files.namelist():
            if "/chat_templates/" in name and name.endswith(".jinja"):
                found[Path(name).stem] = files.read(name).decode()
            elif name.endswith("/llm_family.json"):
                models = json.loads(files.read(name))
                found |= {one["model_name"]: one["chat_template"] for one in models if one.get("chat_template")}
    return found


@cache
def real_tokenizer(name: str) -> Any:
    """A tokenizer with this template, in which what looks like a control token is one.

    A template of that name in `templates`, written for the tests, comes first.
    """
    written = TEMPLATES / f"{name}.jinja"
    source = written.read_text() if written.exists() else load(name)
    backend = byte_level()
    controls = sorted({*CONTROL.findall(source), "<|begin|>", "<|endoftext|>"})
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    backend.add_tokens([AddedToken(text, normalized=False) for text in sorted(set(TAG.findall(source)))])
    ends = ("<｜end▁of▁sentence｜>", "<|im_end|>", "<|endoftext|>")
    eos = next(text for text in ends if text in controls)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<|begin|>")
    tokenizer.chat_template = source
    return tokenizer
