"""How each model family writes reasoning and tool calls, and which family a chat template belongs to.

To add a family: a `ReplyParser` here (its marks, and a function that reads what stands between them), and a line in
`_BY_TEMPLATE` with a mark that only its chat templates contain. Its test is a line in the test's `WRITERS`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from ajet.gateway.chat.reply_parser import MarkedBlock, Markup, ReplyParser
from ajet.gateway.chat.tool_calls import (
    JSON_CALL,
    Incomplete,
    JsonScanner,
    NotACall,
    PythonScanner,
    TagScanner,
    Unreadable,
    WrittenCall,
    expect_end,
    group_name,
    json_arguments,
    json_calls,
    json_string,
    json_value,
    python_value,
    skip_space,
    tagged_arguments,
)
from ajet.schema.chat import Tool

# ------------------------------------------------------------ Hermes and Qwen (2.5, 3)
# <tool_call>{"name": …, "arguments": {…}}</tool_call>

HERMES = ReplyParser("hermes", Markup(blocks=(MarkedBlock("<tool_call>", ("</tool_call>",), json_calls),)))

# ------------------------------------------------------------ Qwen3-Coder
# <tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>

_QWEN_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)


def _read_qwen(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    found = _QWEN_CALL.fullmatch(body)
    if found is None:
        raise (Incomplete if "</function>" not in body else Unreadable)("no <function=name>…</function>")
    return [WrittenCall(found[1], tagged_arguments(_QWEN_PARAMETER, found[2], found[1], tools))]


def _read_bare_qwen(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    return _read_qwen(body + "</function>", tools)


_SCAN_QWEN = partial(TagScanner, first=r"\s*<function=([^>\s]+)>", argument=_QWEN_PARAMETER, close="</parameter>")

QWEN_XML = ReplyParser(
    "qwen_xml",
    Markup(
        blocks=(
            MarkedBlock("<tool_call>", ("</tool_call>",), _read_qwen, scan=_SCAN_QWEN),
            # these models often leave out the outer tag
            MarkedBlock("<function=", ("</function>",), _read_bare_qwen, keep_open=True, scan=_SCAN_QWEN),
        ),
        noise=("</tool_call>",),
    ),
)

# ------------------------------------------------------------ GLM
# <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>

_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL)


def _read_glm(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    found = _GLM_NAME.match(body)
    if found is None:
        raise Unreadable("no name")
    return [WrittenCall(found[1], tagged_arguments(_GLM_ARGUMENT, body[found.end() :], found[1], tools))]


_SCAN_GLM = partial(TagScanner, first=r"\s*([^\s<]+)\s*(?=<arg_key>)", argument=_GLM_ARGUMENT, close="</arg_value>")

GLM = ReplyParser("glm", Markup(blocks=(MarkedBlock("<tool_call>", ("</tool_call>",), _read_glm, scan=_SCAN_GLM),)))

# ------------------------------------------------------------ Llama 3.x
# The whole reply is {"name": …, "parameters": {…}}, with or without <|python_tag|>; further calls follow after ";".

_read_llama = partial(json_calls, separators=";")


def _read_bare_llama(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    """JSON without a name is an answer in JSON, not a broken call."""
    value, _, _ = json_value(body, skip_space(body, 0))
    if not isinstance(value, dict) or "name" not in value:
        raise NotACall("JSON, but not a call")
    return _read_llama(body, tools)


LLAMA = ReplyParser(
    "llama3",
    Markup(
        think_open="",
        think_close="",
        blocks=(
            MarkedBlock("<|python_tag|>", (), _read_llama),
            MarkedBlock("{", (), _read_bare_llama, only_first=True, keep_open=True),
        ),
    ),
)

# ------------------------------------------------------------ Mistral
# [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], and since v11 [TOOL_CALLS]name[ARGS]{…} for each call.

_MISTRAL_CALL, _MISTRAL_ARGS, _MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_mistral(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    if body.lstrip()[:1] in ("[", "{", ""):
        return json_calls(body, tools)
    calls: list[WrittenCall] = []
    at = 0
    while at < len(body):
        args = body.find(_MISTRAL_ARGS, at)
        if args < 0:
            raise Incomplete(f"no {_MISTRAL_ARGS} after the name")
        name, _, call_id = body[at:args].strip().partition(_MISTRAL_ID)
        name = _name(name)
        arguments, at = json_arguments(body, args + len(_MISTRAL_ARGS))
        calls.append(WrittenCall(name, arguments, call_id))
        at = skip_space(body, at)
        if body.startswith(_MISTRAL_CALL, at):
            at += len(_MISTRAL_CALL)
        else:
            expect_end(body, at)
    return calls


_MISTRAL_HEAD = r"([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]*))?\[ARGS\]\s*(?=\{)"


def _mistral_name(found: re.Match[str]) -> tuple[str, str]:
    return (found[2], found[3] or "") if found[2] else json_string(found)


_SCAN_MISTRAL = partial(
    JsonScanner,
    first=rf"\s*(?:\[?\s*{JSON_CALL}|{_MISTRAL_HEAD})",
    further=rf"\s*(?:\}}\s*,\s*{JSON_CALL}|\[TOOL_CALLS\]\s*{_MISTRAL_HEAD})",
    name_of=_mistral_name,
)

MISTRAL = ReplyParser(
    "mistral",
    Markup(
        think_open="[THINK]",
        think_close="[/THINK]",
        blocks=(MarkedBlock(_MISTRAL_CALL, (), _read_mistral, scan=_SCAN_MISTRAL),),
        bare_ids=True,
    ),
)

# ------------------------------------------------------------ DeepSeek V3, R1 and V3.1
# function<｜tool▁sep｜>name and fenced JSON (V3, R1), or name<｜tool▁sep｜>{…} (V3.1)

_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


def _read_deepseek(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    head, separator, rest = body.partition(_DEEPSEEK_SEPARATOR)
    if not separator:
        raise Incomplete(f"no {_DEEPSEEK_SEPARATOR}")
    name = head.strip()
    if name == "function" and _FENCE in rest:
        name, _, rest = rest.partition(_FENCE)
        name, rest = name.strip(), rest.removeprefix("json")
    name = _name(name)
    arguments, at = json_arguments(rest)
    if rest[at:].strip() != _FENCE:
        expect_end(rest, at)
    return [WrittenCall(name, arguments)]


_SCAN_DEEPSEEK = partial(
    JsonScanner,
    first=rf"\s*(?:function{_DEEPSEEK_SEPARATOR}([^\s`{{]+)\s*{_FENCE}(?:json)?|([^\s<]+)\s*{_DEEPSEEK_SEPARATOR})\s*(?=\{{)",
    further=None,
    name_of=group_name,
)

DEEPSEEK = ReplyParser(
    "deepseek",
    Markup(
        blocks=(MarkedBlock("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), _read_deepseek, scan=_SCAN_DEEPSEEK),),
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
)

# ------------------------------------------------------------ DeepSeek V3.2 and V4
# <｜DSML｜invoke name="name"><｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>…</｜DSML｜invoke>…
# inside <｜DSML｜function_calls> (V3.2) or <｜DSML｜tool_calls> (V4). The tag says whether a value is a string.

_DSML_CALL = re.compile(r"\s*<｜DSML｜invoke name=\"([^\"]+)\">(.*?)</｜DSML｜invoke>\s*", re.DOTALL)
_DSML_PARAMETER = re.compile(
    r"\s*<｜DSML｜parameter name=\"(?P<key>[^\"]+)\"(?: string=\"(?P<string>true|false)\")?>"
    r"(?P<value>.*?)</｜DSML｜parameter>\s*",
    re.DOTALL,
)


def _invocations(
    call: re.Pattern[str], parameter: re.Pattern[str], body: str, tools: Sequence[Tool]
) -> list[WrittenCall]:
    """Calls that each have a tag of their own, one after the other."""
    calls: list[WrittenCall] = []
    at = 0
    while found := call.match(body, at):
        calls.append(WrittenCall(found[1], tagged_arguments(parameter, found[2], found[1], tools)))
        at = found.end()
    if not calls or body[at:].strip():
        raise Incomplete('no <invoke name="…">…</invoke>')
    return calls


_read_dsml = partial(_invocations, _DSML_CALL, _DSML_PARAMETER)
_SCAN_DSML = partial(
    TagScanner,
    first=r"\s*<｜DSML｜invoke name=\"([^\"]+)\">",
    further=r"\s*</｜DSML｜invoke>\s*<｜DSML｜invoke name=\"([^\"]+)\">",
    argument=_DSML_PARAMETER,
    close="</｜DSML｜parameter>",
)

DSML = ReplyParser(
    "dsml",
    Markup(
        blocks=tuple(
            MarkedBlock(f"<｜DSML｜{name}>", (f"</｜DSML｜{name}>",), _read_dsml, scan=_SCAN_DSML)
            for name in ("tool_calls", "function_calls")
        )
    ),
)

# ------------------------------------------------------------ gpt-oss (harmony)
# <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…, and a call is
# <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>; "to=" may also precede the channel.

_HARMONY_HEAD = re.compile(  # possessive: trying again after a thousand spaces would take half a minute
    r"([^\s<]++)\s*+(?:<\|channel\|>\s*+\w++\s*+)?+(?:(?:<\|constrain\|>\s*+)?+\w++\s*+)?+<\|message\|>\s*+"
)
_TO = "to=functions."


def _read_harmony(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    head = _HARMONY_HEAD.match(body)
    if head is None:
        raise Incomplete("no <|message|> after the name")
    arguments, at = json_arguments(body, head.end())
    expect_end(body, at)
    return [WrittenCall(head[1], arguments)]


_SCAN_HARMONY = partial(JsonScanner, first=_HARMONY_HEAD.pattern + r"(?=\{)", further=None, name_of=group_name)

HARMONY = ReplyParser(
    "harmony",
    Markup(
        think_open="<|channel|>analysis<|message|>",
        think_close="<|end|>",
        think_again=True,
        blocks=(
            *(
                MarkedBlock(mark + _TO, ("<|call|>",), _read_harmony, scan=_SCAN_HARMONY)
                for mark in ("<|channel|>commentary ", "<|channel|>analysis ", "<|start|>assistant ")
            ),
            MarkedBlock(" " + _TO, ("<|call|>",), _read_harmony, only_first=True, scan=_SCAN_HARMONY),
        ),
        noise=("<|call|>",),
        frame=(
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>commentary<|message|>",
            "<|start|>assistant",
            "<|end|>",
            "<|return|>",
        ),
    ),
)

# ------------------------------------------------------------ Command R7B and Command A
# <|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>. The ids begin anew with
# each reply, so calls get ids of our own.

COMMAND = ReplyParser(
    "command",
    Markup(
        think_open="<|START_THINKING|>",
        think_close="<|END_THINKING|>",
        blocks=(MarkedBlock("<|START_ACTION|>", ("<|END_ACTION|>",), json_calls),),
        frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
)

# ------------------------------------------------------------ Kimi K2
# <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>

_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


def _read_kimi(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    call_id, separator, rest = body.partition(_KIMI_ARGUMENTS)
    if not separator:
        raise Incomplete(f"no {_KIMI_ARGUMENTS}")
    call_id = call_id.strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0]
    if not name:
        raise Unreadable(f"{call_id[:40]!r} is not functions.<name>:<number>")
    arguments, at = json_arguments(rest)
    expect_end(rest, at)
    return [WrittenCall(name, arguments, call_id)]


def _kimi_name(found: re.Match[str]) -> tuple[str, str]:
    return found[1].removeprefix("functions.").rpartition(":")[0], found[1]


_SCAN_KIMI = partial(
    JsonScanner,
    first=rf"\s*([^\s<]*[^\s<.]:[^\s<:]*)\s*{re.escape(_KIMI_ARGUMENTS)}\s*(?=\{{)",
    further=None,
    name_of=_kimi_name,
)

KIMI = ReplyParser(
    "kimi",
    Markup(
        blocks=(MarkedBlock("<|tool_call_begin|>", ("<|tool_call_end|>",), _read_kimi, scan=_SCAN_KIMI),),
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        numbered_ids=True,
    ),
)

# ------------------------------------------------------------ MiniMax M2
# <minimax:tool_call><invoke name="name"><parameter name="key">value</parameter>…</invoke>…</minimax:tool_call>

_MINIMAX_CALL = re.compile(r"\s*<invoke name=\"([^\"]+)\">(.*?)</invoke>\s*", re.DOTALL)
_MINIMAX_PARAMETER = re.compile(r"\s*<parameter name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>\s*", re.DOTALL)

_read_minimax = partial(_invocations, _MINIMAX_CALL, _MINIMAX_PARAMETER)
_SCAN_MINIMAX = partial(
    TagScanner,
    first=r"\s*<invoke name=\"([^\"]+)\">",
    further=r"\s*</invoke>\s*<invoke name=\"([^\"]+)\">",
    argument=_MINIMAX_PARAMETER,
    close="</parameter>",
)

MINIMAX = ReplyParser(
    "minimax",
    Markup(blocks=(MarkedBlock("<minimax:tool_call>", ("</minimax:tool_call>",), _read_minimax, scan=_SCAN_MINIMAX),)),
)

# ------------------------------------------------------------ Granite 3
# <|tool_call|>[{"name": …, "arguments": {…}}, …]

GRANITE = ReplyParser("granite", Markup(blocks=(MarkedBlock("<|tool_call|>", (), json_calls),)))

# ------------------------------------------------------------ LFM2
# <|tool_call_start|>[name(key=value, …), …]<|tool_call_end|>, as calls in Python


def _read_lfm(body: str, tools: Sequence[Tool]) -> list[WrittenCall]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python doesn't know
            tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Incomplete(f"not a list of calls: {error}") from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise Unreadable("not a list of calls")
    return [_python_call(element) for element in tree.elts]


def _python_call(element: ast.expr) -> WrittenCall:
    if not isinstance(element, ast.Call) or element.args or any(one.arg is None for one in element.keywords):
        raise Unreadable("not a call with named arguments")
    try:
        values = {str(one.arg): ast.literal_eval(one.value) for one in element.keywords}
        return WrittenCall(ast.unparse(element.func), python_value(values))
    except (ValueError, TypeError, RecursionError):  # they name a node by its address, and the agent hands this on
        raise Unreadable("an argument is not a plain value, such as a text in quotes, a number or a list") from None


LFM = ReplyParser(
    "lfm", Markup(blocks=(MarkedBlock("<|tool_call_start|>", ("<|tool_call_end|>",), _read_lfm, scan=PythonScanner),))
)

# ------------------------------------------------------------ which family?

_BY_TEMPLATE = (
    ("<|channel|>", HARMONY),
    ("｜DSML｜", DSML),
    ("<|START_ACTION|>", COMMAND),
    ("<｜tool▁call▁begin｜>", DEEPSEEK),
    ("<minimax:tool_call>", MINIMAX),
    ("<|tool_list_start|>", LFM),
    ("<|tool_call_start|>", LFM),
    ("<|tool_call|>", GRANITE),
    ("<arg_key>", GLM),
    ("<function=", QWEN_XML),
    ("<|tool_call_begin|>", KIMI),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ("<tool_call>", HERMES),
    ("<|start_header_id|>", LLAMA),
)
"""The first mark that a template contains decides: from the most specific to the most general."""

FAMILIES = {parser.name: parser for _, parser in _BY_TEMPLATE}


def pick_parser(source: Any) -> ReplyParser:
    """The parser for a chat template, or for a tokenizer by its template. If the template shows no mark: Hermes/Qwen,
    the most common form."""
    template = source if isinstance(source, str) else getattr(source, "chat_template", None)
    if isinstance(template, dict):
        template = "".join(map(str, template.values()))
    for mark, parser in _BY_TEMPLATE:
        if mark in (template or ""):
            return parser
    return HERMES


def _name(text: str) -> str:
    if not text or any(character.isspace() for character in text):
        raise Unreadable(f"{text[:40]!r} is not a tool's name")
    return text
