"""Actions of a JSON schema: described in words, and read from a reply."""

from __future__ import annotations

from typing import Any

import pytest

from ajet.environment.gymnasium_environment import SpaceError
from ajet.environment.openenv_environment import describe_action, read_action

METADATA = {"type": "object"}
GUESS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"metadata": METADATA, "number": {"type": "integer", "description": "your guess", "maximum": 9}},
    "required": ["number"],
}
SAY = {"type": "object", "properties": {"metadata": METADATA, "text": {"type": "string"}}, "required": ["text"]}
MOVE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"metadata": METADATA, "x": {"type": "number"}, "how": {"enum": ["walk", "run"]}},
    "required": ["x", "how"],
}


def test_one_field_is_answered_by_its_value() -> None:
    assert describe_action(GUESS) == "a whole number for number (your guess)"
    assert read_action(GUESS, "I think.\nAction: 7") == {"number": 7}
    assert read_action(GUESS, '{"number": 7}') == {"number": 7}
    assert read_action(SAY, "Action: hello there") == {"text": "hello there"}


def test_a_text_may_have_an_object_in_it_and_a_fence_around_it() -> None:
    code = 'print({"a": 1})'
    assert read_action(SAY, code) == {"text": code}
    assert read_action(SAY, f"Action:\n```python\n{code}\n```") == {"text": code}
    assert read_action(SAY, 'Action: `{"text": "hello"}`') == {"text": "hello"}
    steps = "# action: go\naction = 3\nstep(action)"
    assert read_action(SAY, f"Action:\n```python\n{steps}\n```") == {"text": steps}
    assert read_action(SAY, "action = 3") == {"text": "action = 3"}
    assert read_action(MOVE, '```json\n{"x": 1.5, "how": "run"}\n```') == {"x": 1.5, "how": "run"}


def test_the_value_of_the_only_field_may_be_an_object() -> None:
    place = {"type": "object", "properties": {"place": {"type": "object"}}, "required": ["place"]}
    assert read_action(place, 'Action: {"row": 1}') == {"place": {"row": 1}}
    assert read_action(place, '{"place": {"row": 1}}') == {"place": {"row": 1}}


def test_several_fields_are_an_object() -> None:
    words = describe_action(MOVE)
    assert words.startswith("a JSON object of this JSON schema: ") and "metadata" not in words
    assert read_action(MOVE, 'Let me run: ```{"x": 1.5, "how": "run"}```') == {"x": 1.5, "how": "run"}


@pytest.mark.parametrize(
    ("schema", "reply", "complaint"),
    [
        (GUESS, "", "empty"),
        (GUESS, "seven", "'seven' is not of type 'integer'"),
        (GUESS, "12", "12 is greater than the maximum of 9"),
        (GUESS, '{"nomber": 3}', "nomber"),
        (SAY, '{"txet": "hello"}', "'text' is a required property"),
        (MOVE, "go", "'go' is not a JSON object"),
        (MOVE, '{"x": 1}', "'how' is a required property"),
        (MOVE, '{"x": 1, "how": "fly"}', "'fly' is not one of"),
        (MOVE, "{" * 100_000, "is not a JSON object"),
    ],
)
def test_a_reply_that_does_not_fit_is_explained(schema: dict[str, Any], reply: str, complaint: str) -> None:
    with pytest.raises(SpaceError, match=complaint) as caught:
        read_action(schema, reply)
    assert len(str(caught.value)) <= 200
