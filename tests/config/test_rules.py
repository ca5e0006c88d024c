"""The table of contradictions: its keys, and those that its messages show, are keys of the schema."""

from __future__ import annotations

from string import Formatter

import pytest

from ajet.config.contradictions import RULES
from ajet.config.keys import known_keys
from ajet.config.problems import ContradictionRule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.keys[0])
def test_rules_name_keys_that_exist(rule: ContradictionRule) -> None:
    messages = [text for text in (rule.what, rule.fix) if isinstance(text, str)]
    shown = [name for text in messages for _, name, _, _ in Formatter().parse(text) if name is not None]
    for key in (*rule.keys, *shown):
        assert ("ajet", *key.split(".")) in known_keys()
