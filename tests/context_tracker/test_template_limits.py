"""Chat templates that loop, or make more text than memory holds, are stopped; those that don't are not touched."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from ajet.context_tracker import template_limits
from ajet.context_tracker.template import ChatTemplate, TemplateRefusal
from ajet.context_tracker.template_limits import LimitedEnvironment, TemplateLimitError, rendering
from ajet.engine.model_source import ModelSource

DOUBLE = "{% set ns = namespace(s=START) %}{% for i in range(99) %}{% set ns.s = STEP %}{% endfor %}"
ATTACKS = [
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ (10**4000) ** 4000 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ ('\n' * 10**6) | indent(10**6) }}",
    "{{ (['a' * 10**6] * 10**6) | join }}",
    "{{ ''.join(['a' * 10**6] * 10**6) }}",
    "{{ [[1] * 10**6] * 10**6 }}",
    "{{ (['a' * 10**6] * 10**6) | tojson }}",
    "{{ range(10**9) | list }}",
    DOUBLE.replace("START", "'a'").replace("STEP", "ns.s ~ ns.s"),
    DOUBLE.replace("START", "'a'").replace("STEP", "ns.s + ns.s"),
    DOUBLE.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]") + "{{ ns.s | tojson }}",
    DOUBLE.replace("START", "[1]").replace("STEP", "[ns.s, ns.s]") + "{{ ns.s }}",
    "{% set s = 'a' * 10**6 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]


def render(source: str, **values: Any) -> str:
    options: dict[str, Any] = {"trim_blocks": True, "extensions": [jinja2.ext.loopcontrols]}
    with rendering():
        limited = LimitedEnvironment(**options).from_string(source).render(**values)
    return limited


@pytest.mark.parametrize("source", ATTACKS)
def test_a_template_that_computes_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_TOTAL", 64 * 1024 * 1024)  # of gigabytes, to be quick
    with pytest.raises((TemplateLimitError, OverflowError, RecursionError)):  # the last one is told to the user, too
        render(source)


def test_filters_that_are_set_later_are_charged_once() -> None:
    """As transformers sets its own `tojson`."""
    environment = LimitedEnvironment()
    environment.filters["tojson"] = later = lambda value: "x" * value
    for compiling in (environment, environment, environment.overlay()):
        template = compiling.from_string("{{ n | tojson | length }}")
        with rendering():
            assert template.render(n=5) == "5"
        with rendering(), pytest.raises(TemplateLimitError):
            template.render(n=template_limits.MAX_VALUE + 1)
    assert environment.filters["tojson"].__wrapped__ is later


def test_other_templates_render_as_before() -> None:
    source = (
        "{% macro m(x) %}<{{ x }}>{% endmacro %}"
        "{% for t in texts if t %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {{ t.upper() ~ '-' ~ t[1:] ~ 3 }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% else %}none{% endfor %}"
        "{{ texts | join('+') | upper }}{{ d | tojson(indent=2) }}{{ 'x'.center(5) }}{{ 2 * 3 + 1 }}"
        "{{ '%s|%5.2f' % ('q', 1.5) }}"
        "{{ m('y') }}{{ texts[::-1] }}{{ texts[-1][:2] }}{{ texts | map('length') | list }}{{ 'a b'.split(' ') }}"
        "{{ undefined }}"
        "{% for k, v in d.items() %}{{ k }}={{ v }}{% endfor %}{{ texts | length }}{{ 'a' in texts[0] }}"
        "{{ 7 // 2 }}{{ 7 % 2 }}"
        "{% for u in missing %}x{% else %}empty{% endfor %}{{ 'aXb'.replace('X', '--') }}{{ 2**8 }}"
        "{{ '{}-{}'.format(1, 2) }}"
    )
    values = {"texts": ["ab", "", "cd", "éf"], "d": {"a": [1, 2], "b": None}}
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, extensions=[jinja2.ext.loopcontrols])
    assert render(source, **values) == plain.from_string(source).render(**values)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ 'a' * 10**10 }}", "more than 33,554,432 elements"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "calls itself without end"),
        ("{{ lipsum(n=10**6) }}", "'lipsum' is undefined"),
    ],
)
def test_a_model_s_template_is_limited(source: str, says: str) -> None:
    tokenizer: Any = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    tokenizer.chat_template = source
    with pytest.raises(TemplateRefusal, match=says):
        ChatTemplate(tokenizer)


def test_a_template_that_stops_only_at_some_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    tokenizer: Any = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if 'boom' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}"
    )
    template = ChatTemplate(tokenizer)
    fine = [{"role": "user", "content": "hello"}]
    assert template.text(fine, None, {}, generate=True) == "hello"
    with pytest.raises(TemplateRefusal, match="loops"):
        template.text([{"role": "user", "content": "boom"}], None, {}, generate=True)
    assert template.text(fine, None, {}, generate=True) == "hello"
