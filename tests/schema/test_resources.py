"""Prompt templates: placeholders are known, and a template reads nothing but the values it is given."""

from __future__ import annotations

import pytest

from ajet.schema.resources import PromptTemplate, PromptTemplateError


def test_an_f_string_template_is_filled_by_name() -> None:
    template = PromptTemplate("Solve {question} in {n:>3} steps, as {{json}}")
    assert template.placeholders == {"question", "n"}
    assert template.format(question="1+1", n=2, unused=3) == "Solve 1+1 in   2 steps, as {json}"


def test_a_jinja_template_is_filled_by_name() -> None:
    template = PromptTemplate("{% for step in steps %}{{ step }};{% endfor %} {{ question }}", "jinja")
    assert template.placeholders == {"steps", "question"}
    assert template.format(steps=[1, 2], question="why?") == "1;2; why?"


@pytest.mark.parametrize("engine", ["f-string", "jinja"])
def test_a_missing_value_is_named(engine: str) -> None:
    text = "{question}" if engine == "f-string" else "{{ question }}"
    with pytest.raises(PromptTemplateError, match=r"no value for \{question\}; given: answer"):
        PromptTemplate(text, engine).format(answer=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["{task.__class__}", "{0}", "{}", "{a[0]}", "one { brace", "one } brace", '{"json": 1}', "{a!r:{b.c}}"]
)
def test_only_plain_names_are_placeholders(text: str) -> None:
    with pytest.raises(PromptTemplateError, match=r"\{\{ and \}\}"):
        PromptTemplate(text).format(a=[1], task=1)


def test_a_jinja_template_is_confined() -> None:
    with pytest.raises(PromptTemplateError):
        PromptTemplate("{{ x.__class__.__mro__ }}", "jinja").format(x=1)
    with pytest.raises(PromptTemplateError, match="line 2"):
        _ = PromptTemplate("fine\n{% if %}", "jinja").placeholders


def test_a_value_that_does_not_fit_its_format_is_named() -> None:
    with pytest.raises(PromptTemplateError, match="'d'"):
        PromptTemplate("{n:d}").format(n="text")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(PromptTemplateError, match="there is: f-string, jinja"):
        _ = PromptTemplate("{x}", "poml").placeholders  # type: ignore[arg-type]


def test_a_template_without_placeholders_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    template = PromptTemplate("Solve it.")
    for _ in range(3):
        assert template.format(puzzle="2 + 2") == "Solve it."
    assert PromptTemplate("Be brief.").format() == "Be brief."
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "values for it (puzzle) don't reach the model: write {name}" in warning


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ value + 1 }}", "TypeError"),
        ("{{ value() }}", "TypeError"),
        ("{% for i in range(1000000) %}x{% endfor %}", "Range too big"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    ],
)
def test_whatever_a_jinja_template_does_wrong_is_the_templates_error(text: str, says: str) -> None:
    with pytest.raises(PromptTemplateError, match=says):
        PromptTemplate(text, "jinja").format(value="a")


def test_a_conversion_that_does_not_exist_is_said_before_any_episode() -> None:
    with pytest.raises(PromptTemplateError, match="there are !r, !s and !a"):
        _ = PromptTemplate("{value!z}").placeholders
