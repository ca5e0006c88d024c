"""Rules in the helper model's place, for this example's data only: they grade questions and extract what was asked.

    python3 tutorial/example_learning_to_ask/rule_judge.py --port 8123

It knows the few things that a doctor asks about in `data/`, by key words. For data of your own, use a real model.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from helper_endpoint import Unanswerable, main

TOPICS = {
    "duration": "since when",
    "fever": "fever",
    "allergy": "allergic",
    "medicine": "medicine",
    "pain": "pain",
}
"""What a doctor may ask about, and the words by which a question is known."""
GENERAL = ("how are you", "anything else")


def topics(text: str) -> list[str]:
    """What a text asks about."""
    return [name for name, words in TOPICS.items() if words in text.lower()]


def answer(question: str) -> str:
    """The reply to either of the two questions that this example asks its helper."""
    if "<reply>" in question:
        return grade(_between(question, "missing").split("\n"), _between(question, "reply"))
    if "<remaining_chat>" in question:
        asked = [line for line in _between(question, "remaining_chat").split("\n") if line.startswith("assistant:")]
        return json.dumps({"info_set": sorted({name for line in asked for name in topics(line)})})
    raise Unanswerable("these rules know only the questions of example_learning_to_ask")


def grade(missing: list[str], reply: str) -> str:
    """Both scores, as the judge asks for them."""
    questions = reply.count("?")
    asked = topics(reply)
    if asked:
        content = 1.0 if set(asked) <= set(missing) else 0.0
    else:
        content = 0.1 if any(words in reply.lower() for words in GENERAL) else 0.0
    form = {1: 1.0, 2: 0.5}.get(questions, 0.0)
    return (
        f"<think>asks about {', '.join(asked) or 'nothing that I know'}</think>"
        f"<format_score>{form}</format_score><content_score>{content}</content_score>"
    )


def _between(text: str, name: str) -> str:
    found = re.search(rf"<{name}>\n(.*?)\n</{name}>", text, re.DOTALL)
    return found[1] if found else ""


if __name__ == "__main__":
    main(answer, "Rules in the place of example_learning_to_ask's helper model.")
