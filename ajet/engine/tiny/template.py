"""The chat templates of the tiny models: ChatML with Hermes-style tools.

Tool definitions are in the system message; a call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and its
result comes back as `<tool_response>` in a user turn. `qwen2` and `llama` are prefix-stable: the prompt of a longer
conversation begins with that of the shorter one. `qwen3` treats thinking as Qwen3 does: replies before the last
question lose theirs, and `enable_thinking=False` puts an empty thought before the reply.
"""

from __future__ import annotations

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
