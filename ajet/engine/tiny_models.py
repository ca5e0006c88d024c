"""The `tiny:` models: small, deterministic, built offline. For tests, for teaching, and to try a workflow.

They are written as ordinary Hugging Face folders. Weights are drawn tensor by tensor, in the order of their names, from
one fixed seed: they are the same in every process and under every version of transformers.

The tokenizer is byte-level, so any UTF-8 text round-trips; digits and ASCII punctuation are single tokens. Ids 0 … 255
are the bytes; then come what `MERGES` joins, the boilerplate of templates and tool calls, and the special tokens.

The templates are ChatML with Hermes-style tools: tool definitions are in the system message; a call is
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and its result comes back as `<tool_response>` in a user turn.
`qwen2` and `llama` are prefix-stable: the prompt of a longer conversation begins with that of the shorter one. `qwen3`
treats thinking as Qwen3 does: replies before the last question lose theirs, and `enable_thinking=False` puts an empty
thought before the reply.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch

WEIGHTS_VERSION = 1
"""Raised whenever a model of the same name would come out differently."""
SEED = 20260101
WEIGHT_STD = 0.05
"""More than the usual 0.02: with that, so small a model would hardly react to its input."""
MAX_POSITIONS = 32768
FAMILIES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True, slots=True)
class TinySize:
    """The shape of a model. Head sizes are at least 32, as vLLM's CPU build requires."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int


SIZES = {
    "0.3m": TinySize(hidden=128, layers=2, heads=4, kv_heads=2, head_size=32, intermediate=192),
    "3m": TinySize(hidden=256, layers=4, heads=8, kv_heads=4, head_size=32, intermediate=640),
    "30m": TinySize(hidden=512, layers=10, heads=8, kv_heads=4, head_size=64, intermediate=1408),
}


@dataclass(frozen=True, slots=True)
class TinyName:
    """A parsed `tiny:` name."""

    family: str
    size: str

    @classmethod
    def parse(cls, name: str) -> TinyName:
        """Read what follows `tiny:`: `qwen2-0.3m`, `qwen3`, `30m`, or nothing."""
        family, size = "qwen2", "0.3m"
        for part in filter(None, name.lower().split("-")):
            if part in FAMILIES:
                family = part
            elif part in SIZES:
                size = part
            else:
                raise ConfigError(
                    f"model 'tiny:{name}' does not exist (model.path): {part!r} is neither a family "
                    f"({', '.join(FAMILIES)}) nor a size ({', '.join(SIZES)}). Example: tiny:qwen2-0.3m"
                )
        return cls(family, size)

    def __str__(self) -> str:
        return f"{self.family}-{self.size}"


def model_config(name: TinyName) -> dict[str, Any]:
    """The content of `config.json`."""
    size = SIZES[name.size]
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[name.family]
    return {
        "architectures": [architecture],
        "model_type": name.family,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": WEIGHT_STD,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": token_id(MESSAGE_END),
        "pad_token_id": token_id(END_OF_TEXT),
        "torch_dtype": "float32",
    }


def cache_folder() -> Path:
    """Where built models are kept: `AJET_CACHE`, or `~/.cache/ajet`."""
    return Path(os.environ.get("AJET_CACHE") or Path.home() / ".cache" / "ajet")


def tiny_folder(name: str) -> Path:
    """The folder of a tiny model, built on first use. Several processes may ask at the same time."""
    parsed = TinyName.parse(name)
    folder = cache_folder() / "tiny" / f"{parsed}-v{WEIGHTS_VERSION}.{TOKENIZER_VERSION}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder.parent}: {error.strerror}\n    tiny models are built there: "
                "set AJET_CACHE to a folder that you may write"
            ) from error
        draft = Path(tempfile.mkdtemp(prefix=f".{parsed}-", dir=folder.parent))
        try:
            write_model(draft, parsed)
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def write_model(folder: Path, name: TinyName) -> None:
    """Write configuration, weights and tokenizer."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(model_config(name), indent=2))
    ends = {"eos_token_id": [token_id(MESSAGE_END), token_id(END_OF_TEXT)], "pad_token_id": token_id(END_OF_TEXT)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    save_file(draw_weights(name), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, name.family)


def draw_weights(name: TinyName) -> dict[str, torch.Tensor]:
    """The model's tensors under Hugging Face's names: norms are 1, biases 0, matrices normally distributed."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for key, shape in sorted(weight_shapes(name).items()):
        if key.endswith("norm.weight"):
            weights[key] = torch.ones(shape)
        elif key.endswith(".bias"):
            weights[key] = torch.zeros(shape)
        else:
            weights[key] = torch.randn(shape, generator=generator) * WEIGHT_STD
    return weights


def weight_shapes(name: TinyName) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor; the output layer shares the embedding's."""
    size = SIZES[name.size]
    query, keys = size.heads * size.head_size, size.kv_heads * size.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY_SIZE, size.hidden),
        "model.norm.weight": (size.hidden,),
    }
    for layer in range(size.layers):
        part = {
            "input_layernorm.weight": (size.hidden,),
            "post_attention_layernorm.weight": (size.hidden,),
            "self_attn.q_proj.weight": (query, size.hidden),
            "self_attn.k_proj.weight": (keys, size.hidden),
            "self_attn.v_proj.weight": (keys, size.hidden),
            "self_attn.o_proj.weight": (size.hidden, query),
            "mlp.gate_proj.weight": (size.intermediate, size.hidden),
            "mlp.up_proj.weight": (size.intermediate, size.hidden),
            "mlp.down_proj.weight": (size.hidden, size.intermediate),
        }
        if name.family == "qwen2":
            part |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (keys,)}
            part |= {"self_attn.v_proj.bias": (keys,)}
        if name.family == "qwen3":
            part |= {"self_attn.q_norm.weight": (size.head_size,), "self_attn.k_norm.weight": (size.head_size,)}
        shapes |= {f"model.layers.{layer}.{key}": shape for key, shape in part.items()}
    return shapes


# ------------------------------------------------------------ tokenizer and templates

TOOLS_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_CLOSING = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


_OPENING = (
    """\
{%- set start = '<|im_start|>' %}{% set end = '<|im_end|>\\n' %}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools %}
    {{- start + 'system\\n' + (messages[0].content + '\\n\\n' if has_system else '') }}
    {{- """
    + _quoted(TOOLS_INTRODUCTION)
    + """ }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- """
    + _quoted(TOOLS_CLOSING)
    + """ + end }}
{%- elif has_system %}
    {{- start + 'system\\n' + messages[0].content + end }}
{%- endif %}
"""
)

_LAST_QUESTION = """\
{%- set question = namespace(index=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not question.found and message.role == 'user' %}
        {%- set question.index = messages | length - 1 - loop.index0 %}
        {%- set question.found = true %}
    {%- endif %}
{%- endfor %}
"""

_MESSAGES = """\
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {{- start + 'user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- end if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- elif message.role == 'assistant' %}
        {{- start + 'assistant\\n' }}
        THINKING
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- end }}
    {%- else %}
        {{- start + message.role + '\\n' + content + end }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- start + 'assistant\\n' }}GENERATION
{%- endif %}
"""

_KEEP_THINKING = """\
{%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}"""

_QWEN3_THINKING = """\
{%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > question.index and (thought or loop.last) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {%- set content = content.lstrip('\\n') %}
        {%- endif %}"""

_QWEN3_GENERATION = """
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}"""


def chat_template(family: str) -> str:
    """The Jinja template of a family: `qwen2`, `qwen3` or `llama`."""
    if family == "qwen3":
        messages = _MESSAGES.replace("THINKING", _QWEN3_THINKING).replace("GENERATION", _QWEN3_GENERATION)
        return _OPENING + _LAST_QUESTION + messages
    return _OPENING + _MESSAGES.replace("THINKING", _KEEP_THINKING).replace("GENERATION", "")


TOKENIZER_VERSION = 1
"""Raised with any change to `BOILERPLATE` or `MERGES`: it changes token ids."""

VOCABULARY_SIZE = 512

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is split before merging: Qwen2's rule, which transformers would also use if it loaded the tokenizer of a
`qwen2` model its own way. Merges join letters only, so digits and punctuation stay single either way."""
MARK = "ajet_tiny"
"""Key of `tokenizer_config.json` that makes `ModelSource` load the tokenizer exactly as written. transformers would
make it a `Qwen2Tokenizer`, whose Unicode normalisation breaks the round trip."""

BOILERPLATE = (
    TOOLS_INTRODUCTION,
    TOOLS_CLOSING,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {',
    '": {"type": "string"',
    '": {"type": "number"',
    '": {"type": "integer"',
    '}, "required": ["',
    '{"name": "',
    '", "arguments": {',
    "system\n",
    "user\n",
    "assistant\n",
)
"""Added tokens that are ordinary text: they keep prompts short and decode to exactly this text."""

MERGES = """
h+e Ġ+t Ġt+he Ġ+a r+e o+n Ġ+i a+t a+l e+r Ġ+T Ġ+c o+u Ġi+s i+on o+r Ġ+w ĠT+he Ġ+s e+s i+n Ġ+m re+s u+l Ġt+o Ġ+f Ġa+n
a+n e+x Ġ+n Ġ+o Ġ+d Y+ou i+t s+w sw+er u+m e+n ex+p exp+res expres+s express+ion o+w s+e Ġ+I al+c alc+ul alcul+at q+u
t+ion u+t Ġ+You Ġ+b Ġ+l Ġan+swer Ġc+o Ġo+f alculat+or c+h e+t h+at v+e Ġ+g d+e i+l it+h res+ul resul+t v+al Ġ+H
Ġ+expression Ġ+h Ġ+qu W+hat a+r b+er en+t he+l i+c o+l o+ve p+ut r+i s+t um+ber val+u Ġ+hel Ġ+p Ġ+result Ġ+u Ġa+re
Ġd+o Ġg+o Ġw+ith M+ove ar+ch e+d e+re f+t in+g m+e m+put mput+e y+ou Ġ+L Ġ+Move Ġ+you Ġa+g Ġa+s Ġan+d Ġc+alculator
Ġf+in Ġi+n Ġi+t Ġm+an Ġn+umber Ġs+e Ġs+t Ġt+h Ġto+ol a+g a+in a+me a+s a+y ag+e at+e c+alculator c+ri c+t cri+p
crip+tion e+ft es+cription es+tion g+h gh+t h+on i+r l+d l+o o+t o+x ou+t ow+n r+n r+u r+y t+hon u+rn v+er y+thon Ġ+A
Ġ+C Ġ+E Ġ+What Ġ+on Ġ+re ĠH+ow ĠL+et ĠT+h Ġco+de Ġco+mpute Ġdo+es Ġf+il Ġfin+al Ġhel+p Ġl+a Ġl+eft Ġm+e Ġm+o Ġman+y
Ġnumber+s Ġqu+estion Ġse+arch T+he U+se Y+es a+ch a+d al+l al+se an+t as+k at+ion c+tion d+ay d+escription e+ed e+p
ent+s er+r er+y err+or ex+t g+um gum+ents he+r i+s i+st ic+e ic+k il+l in+k it+e k+n kn+ow m+et n+t o+d or+ld or+re
orre+ct r+ite ri+ght ru+e s+er u+s valu+ate valu+e Ġ+F Ġ+G Ġ+N Ġ+P Ġ+R Ġ+Use Ġ+Yes Ġ+e Ġ+error Ġ+know Ġ+or Ġ+right
Ġ+value
"""
"""What is joined, in this order: byte-pair encoding of English sentences such as tasks have. Ġ is a space."""


def byte_characters() -> list[str]:
    """The printable character that represents each byte in a byte-level vocabulary (GPT-2's convention)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


ADDED = (*BOILERPLATE, *SPECIAL)


def token_id(text: str) -> int:
    """The id of a boilerplate or special token."""
    return VOCABULARY_SIZE - len(ADDED) + ADDED.index(text)


def write_tokenizer(folder: Path, family: str) -> None:
    """Write the files that `AutoTokenizer` and vLLM read."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    merges = [(left, right) for left, right in (pair.split("+") for pair in MERGES.split())]
    pieces = [*byte_characters(), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    in_bytes = ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(Regex(WORDS), "isolated"), in_bytes])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in BOILERPLATE])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
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
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
