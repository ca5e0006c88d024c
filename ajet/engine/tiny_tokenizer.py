"""The tiny models' tokenizer and chat templates.

Byte-level, so any UTF-8 text round-trips; digits and ASCII punctuation are single tokens. Ids 0 … 255 are the bytes;
then come merges learned from `CORPUS`, the boilerplate of templates and tool calls, and the special tokens. The size is
always `VOCABULARY_SIZE`, whatever the corpus.

The templates are ChatML with Hermes-style tools: tool definitions are in the system message; a call is
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and its result comes back as `<tool_response>` in a user turn.
`qwen2` and `llama` are prefix-stable: the prompt of a longer conversation begins with that of the shorter one. `qwen3`
treats thinking as Qwen3 does: replies before the last question lose theirs, and `enable_thinking=False` puts an empty
thought before the reply.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

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
"""Raised with any change to `BOILERPLATE`, `CORPUS` or the merges: it changes token ids."""

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

CORPUS = """
You are a helpful assistant. You are a math agent. You are an agent that answers the question of the user.
Answer the question. Give the final answer as a number. The final answer is in the box. Put your final answer within
\\boxed{}. Use the calculator to compute the result. Use the tool when you need it, then answer. Think step by step.
Let me think about this. Let me compute the sum. Let me use the calculator. I will call the calculator tool. I need to
find the value of the expression. The result is correct. The answer is not correct. Try again. Please try again.
What is the sum of the numbers? What is the product of the numbers? What is the difference between the two numbers?
How many are left? How much does it cost? How many apples does she have? He has twice as many as she does. There were
more than the others. Each of them bought some more. Calculate the total. Evaluate the expression. Compute the value.
plus minus times divided by equals. The quotient and the remainder. First, second, third, then next and last.
"calculator" "calculator" "calculator" "expression" "expression" "expression" "description" "description" "python"
"code" "search" "query" "answer" "name" "arguments" "action" "result" "number" "What "What "The "The "You "You
A calculator. Evaluates an arithmetic expression.
python code execute python code to compute the result. search query search the web for information with the search tool.
name description type string arguments function tool result error message invalid expression: syntax error
The code is run and its output is returned. Returns the result of the expression. The expression to evaluate.
Go up, go down, go left, go right. Move up. Move down. Move left. Move right. You are on the frozen lake. The goal is to
reach the gift without falling into a hole. Your turn. Your move. The game is over. You win. You lose. Next state.
Read the file. Write the file. List the files. Open the page. Click the button. The user wants to know something.
The task is to write a short answer. The task is done. This is the end of the conversation. Thank you for the question.
Hello, how can I help you today? I am a language model. I do not know. I can help with that. Here is the answer.
Is it true or false? Yes or no? True. False. Yes. No. ok. It is good. It is bad. Say hello to the world. hello world
The weather is nice today. The capital of the country is a city. The water is cold. The house is on the hill. The man
and the woman were walking with their children. A cat sat on the mat. The quick brown fox jumps over the lazy dog.
"""

Pair = tuple[str, str]


def byte_characters() -> list[str]:
    """The printable character that represents each byte in a byte-level vocabulary (GPT-2's convention)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def learn_merges(text: str, count: int) -> list[Pair]:
    """Byte-pair encoding: join the most frequent neighbours, `count` times; ties go by their text."""
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
    """The id of a boilerplate or special token."""
    added = [*BOILERPLATE, *SPECIAL]
    return VOCABULARY_SIZE - len(added) + added.index(text)


def write_tokenizer(folder: Path, family: str) -> None:
    """Write the files that `AutoTokenizer` and vLLM read."""
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
