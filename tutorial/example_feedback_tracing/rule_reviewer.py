"""Rules in the helper model's place, for this example's traces only: they say which answers are fit for training.

    python3 tutorial/example_feedback_tracing/rule_reviewer.py --port 8125

For traces of your own, use a real model.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from helper_endpoint import Unanswerable, main


def answer(question: str) -> str:
    """The reply to the question whether an exchange may be used."""
    found = re.search(r"<answer>\n(.*?)\n</answer>", question, re.DOTALL)
    if found is None:
        raise Unanswerable("these rules know only the question of example_feedback_tracing")
    good = re.search(r"\d", found[1]) is not None
    return json.dumps({"reason": "a number" if good else "no number is given", "good": good})


if __name__ == "__main__":
    main(answer, "Rules in the place of example_feedback_tracing's helper model.", port=8125)
