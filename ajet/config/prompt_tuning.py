"""`ajet.prompt_tuning`: the prompt templates that workflows are given by name."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from ajet.config.section import Section


class TemplateConfig(Section):
    """One prompt template: its text, or a file that holds it."""

    text: str | None = None
    file: str | None = None
    engine: Literal["f-string", "jinja"] = "f-string"
    """How placeholders are written: `{name}`, or Jinja's `{{ name }}`."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TemplateConfig:
        if (self.text is None) == (self.file is None):
            raise PydanticCustomError("template", "should have either `text` or `file`")
        return self


class PromptTuningConfig(Section):
    """Prompt templates."""

    templates: dict[str, str | TemplateConfig] = {}
    """First texts by name, for `tuner.prompt("name")`: a text, or `{text: …}` or `{file: …}` with `engine: f-string |
    jinja`. A file is looked up in the working directory, or else in the YAML's folder."""
