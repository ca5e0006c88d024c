"""Rules in the helper model's place, for this example's questions only: they write rubrics and grade by them.

    python3 tutorial/example_rubrics_judge/rule_grader.py --port 8124

They look for two things in the rubrics, that the order is named and that the wait is regretted, and grade by those that
are there: whoever edits the rubrics changes what is trained. For tasks of your own, use a real model.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from helper_endpoint import Unanswerable, main

NAMED = "The answer must name the customer's order; this matters most."
SORRY = "It should say sorry for the wait."


def answer(question: str) -> str:
    """The reply to one of the questions that `ajet.task_judge.rubrics_auto_grader` asks its helper."""
    if "Grade the answer by the rubrics" in question:
        asked, said = _between(question, "query"), _between(question, "answer")
        return json.dumps(grade(_between(question, "rubrics"), asked, said))
    if "You write rubrics" in question:
        return json.dumps({"rubrics": [f"{NAMED} {SORRY}"]})
    if "Sum them up" in question:
        found = re.search(r"exactly (\d+) themes", question)
        return json.dumps({"rubrics": [NAMED, SORRY] if found and found[1] == "2" else [f"{NAMED} {SORRY}"]})
    raise Unanswerable("these rules know only the questions of example_rubrics_judge")


def grade(rubrics: str, asked: str, said: str) -> dict[str, object]:
    """0.6 for the right order and 0.4 for the regret, as far as the rubrics ask for them."""
    order = re.findall(r"\d+", asked)
    if len(order) != 1:
        raise Unanswerable(f"not a question about one order: {asked!r}")
    named, sorry = re.findall(r"\d+", said) == order, "sorry" in said.lower()
    score = 0.6 * (named and "name the customer's order" in rubrics) + 0.4 * (sorry and "say sorry" in rubrics)
    reason = f"{'names' if named else 'does not name'} the order, {'regrets' if sorry else 'does not regret'} the wait"
    return {"reason": reason, "score": score}


def _between(text: str, name: str) -> str:
    found = re.search(rf"<{name}>\n(.*?)\n</{name}>", text, re.DOTALL)
    return found[1] if found else ""


if __name__ == "__main__":
    main(answer, "Rules in the place of example_rubrics_judge's helper model.", port=8124)
