"""The chat templates of real model families, read from the packages that ship them (`make test-templates`)."""

from __future__ import annotations

import re
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tracker_families import byte_backend
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / ".chat-templates"
PACKAGES = {
    "trl": ("trl-*.whl", "trl/chat_templates/"),
    "axolotl": ("axolotl-*.whl", "axolotl/utils/chat_templates/templates/"),
    "llama-cpp-python": ("llama_cpp_python-*.tar.gz", "vendor/llama.cpp/models/templates/"),
}
CONTROL = re.compile(
    r"<\|[^|<>\s{}]+\|>|<\|[^|<>\s{}]+>|<[^|<>\s{}/]+\|>|<\|\"\|>|<｜[^｜<>]+｜>|\[\|[^|\]]+\|\]|\[/?[A-Z_]{3,}\]|\[e~\[|\]~!?b\["
    r"|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"
)


@dataclass(frozen=True)
class Source:
    """A family's template: where it is, and the tokens that it leaves to the tokenizer."""

    name: str
    package: str
    file: str
    eos: str
    bos: str | None = None
    kwargs: tuple[tuple[str, Any], ...] = ()

    def template(self) -> str | None:
        """The template's text. None: the package isn't there."""
        return _texts(self.package).get(self.file)

    def tokenizer(self) -> Any:
        """A small tokenizer with this template, and with its control tokens as tokens."""
        return _tokenizer(self)


@cache
def _texts(package: str) -> dict[str, str]:
    pattern, inside = PACKAGES[package]
    archive = next(iter(sorted(FOLDER.glob(pattern))), None)
    if archive is None:
        return {}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(inside) and name.endswith(".jinja")]
            return {Path(name).stem: wheel.read(name).decode() for name in names}
    texts = {}
    with tarfile.open(archive) as source:
        for member in source:
            if inside in member.name and member.name.endswith(".jinja") and (file := source.extractfile(member)):
                texts[Path(member.name).stem] = file.read().decode()
    return texts


@cache
def _tokenizer(source: Source) -> Any:
    template = source.template()
    assert template is not None
    backend = byte_backend()
    controls = [source.eos, *filter(None, [source.bos]), *sorted(set(CONTROL.findall(template)))]
    for text in dict.fromkeys(controls):
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=source.eos, bos_token=source.bos)
    wrapped.chat_template = template
    return wrapped


IM_END, DEEPSEEK = "<|im_end|>", ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
LLAMA = ("<|eot_id|>", "<|begin_of_text|>")
SOURCES = (
    Source("Qwen 2.5", "trl", "qwen2_5", IM_END),
    Source("Qwen 3", "trl", "qwen3", IM_END),
    Source("Qwen 3, without thinking", "trl", "qwen3", IM_END, kwargs=(("enable_thinking", False),)),
    Source("Qwen 3 Instruct 2507", "trl", "qwen3_instruct_2507", IM_END),
    Source("Qwen 3 Coder", "llama-cpp-python", "Qwen3-Coder", IM_END),
    Source("Qwen 3.5", "trl", "qwen3_5_think", IM_END),
    Source("Qwen 3.5, without thinking", "trl", "qwen3_5_nothink", IM_END),
    Source("Qwen 3.6", "trl", "qwen3_6", IM_END),
    Source("Qwen 3.8", "trl", "qwen3_8", IM_END),
    Source("gpt-oss", "trl", "gptoss", "<|return|>", "<|startoftext|>"),
    Source("Llama 3", "trl", "llama3", *LLAMA),
    Source("Llama 3.1", "trl", "llama3_1", *LLAMA),
    Source("Llama 3.2", "trl", "llama3_2", *LLAMA),
    Source("Llama 4", "axolotl", "llama4", "<|eot|>", "<|begin_of_text|>"),
    Source("DeepSeek R1 Distill", "trl", "deepseek_r1_distill", *DEEPSEEK),
    Source("DeepSeek V3", "trl", "deepseekv3", *DEEPSEEK),
    Source("DeepSeek V3.1", "llama-cpp-python", "deepseek-ai-DeepSeek-V3.1", *DEEPSEEK),
    Source("DeepSeek V3.2", "llama-cpp-python", "deepseek-ai-DeepSeek-V3.2", *DEEPSEEK),
    Source("GLM 4.5", "trl", "glm4moe", "<|endoftext|>"),
    Source("GLM 4.6", "llama-cpp-python", "GLM-4.6", "<|endoftext|>"),
    Source("GLM 4.7 Flash", "llama-cpp-python", "GLM-4.7-Flash", "<|endoftext|>"),
    Source("Kimi K2", "llama-cpp-python", "moonshotai-Kimi-K2", "<|im_end|>", "[BOS]"),
    Source("Mistral v7 (Tekken)", "axolotl", "mistral_v7_tekken", "</s>", "<s>"),
    Source("Mistral Nemo", "llama-cpp-python", "mistralai-Mistral-Nemo-Instruct-2407", "</s>", "<s>"),
    Source("Mistral Small 3.2", "llama-cpp-python", "Mistral-Small-3.2-24B-Instruct-2506", "</s>", "<s>"),
    Source("Ministral 3", "llama-cpp-python", "mistralai-Ministral-3-14B-Reasoning-2512", "</s>", "<s>"),
    Source("Gemma 3", "trl", "gemma3", "<eos>", "<bos>"),
    Source("Gemma 4", "trl", "gemma4_v5", "<turn|>", "<bos>"),
    Source("Gemma 4, thinking", "trl", "gemma4_v5", "<turn|>", "<bos>", kwargs=(("enable_thinking", True),)),
    Source("MiniMax M2", "llama-cpp-python", "MiniMax-M2", "[e~["),
    Source("Nemotron 3 Nano", "trl", "nemotron_3_nano", IM_END),
    Source("Nemotron 3 Super", "trl", "nemotron_3_super", IM_END),
    Source("Phi 3.5", "trl", "phi3_5", "<|endoftext|>"),
    Source("Phi 4", "axolotl", "phi_4", "<|im_end|>"),
    Source("Granite 3.3", "llama-cpp-python", "ibm-granite-granite-3.3-2B-Instruct", "<|end_of_text|>"),
    Source("Granite 4", "llama-cpp-python", "ibm-granite-granite-4.0", "<|end_of_text|>"),
    Source("SmolLM3", "llama-cpp-python", "HuggingFaceTB-SmolLM3-3B", IM_END),
    Source("LFM2", "trl", "lfm2_v2", IM_END, "<|startoftext|>"),
    Source("LFM2.5", "trl", "lfm2_2_5_v2", IM_END, "<|startoftext|>"),
    Source(
        "Command R7B",
        "llama-cpp-python",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
    ),
    Source("EXAONE 4", "axolotl", "exaone4", "[|endofturn|]"),
    Source("Seed-OSS", "llama-cpp-python", "ByteDance-Seed-OSS", "<seed:eos>", "<seed:bos>"),
)
