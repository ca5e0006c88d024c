"""Writes made-up sessions of doctor and patient (`data/*_origin.jsonl`), and talks of a doctor who asks at random.

python tutorial/example_learning_to_ask/make_data.py
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

SIZES = {"train": 48, "test": 12}
CONVERSATIONS = 768
QUESTIONS = {
    "duration": "Since when: today or longer?",
    "fever": "A fever: yes or no?",
    "allergy": "Allergic: yes or no?",
    "medicine": "Taking medicine: yes or no?",
    "pain": "Any pain: yes or no?",
}
ANSWERS = {
    "duration": ["Since today.", "For a week."],
    "fever": ["I have a fever.", "No fever."],
    "allergy": ["I am allergic to pollen.", "Not allergic."],
    "medicine": ["I take medicine.", "I take no medicine."],
    "pain": ["It is a pain.", "No pain."],
}
COMPLAINTS = {
    "I cough.": ["duration", "fever", "allergy"],
    "I have a rash.": ["duration", "allergy", "medicine"],
    "My ear is red.": ["duration", "fever", "pain"],
    "I feel dizzy.": ["medicine", "pain", "fever"],
}
"""What a doctor needs to know, for each complaint."""
DIAGNOSES = ["cold", "eczema", "infection", "exhaustion"]


def session(rng: random.Random, number: int, split: str) -> dict[str, Any]:
    """A whole conversation: the patient tells a little, the doctor asks for the rest, and closes."""
    which = rng.randrange(len(COMPLAINTS))
    complaint, needed = list(COMPLAINTS.items())[which]
    told = rng.sample(needed, rng.choice([0, 1, 1, 2]))
    first = " ".join([complaint, *(rng.choice(ANSWERS[name]) for name in told)])
    messages = [{"role": "user", "content": first}]
    missing = [name for name in needed if name not in told]
    rng.shuffle(missing)
    for name in missing:
        messages.append({"role": "assistant", "content": QUESTIONS[name]})
        messages.append({"role": "user", "content": rng.choice(ANSWERS[name])})
    messages.append({"role": "assistant", "content": f"It is probably: {DIAGNOSES[which]}."})
    return {"session_id": f"{split}-{number:03}", "diagn": DIAGNOSES[which], "messages": messages}


def conversation(rng: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """A doctor who knows what a question looks like, but neither which one to ask nor when to stop."""
    from learning_to_ask import prompt

    said = rng.choice(list(QUESTIONS.values()))
    habit = rng.random()
    if habit < 0.25:
        said = "<stop />"
    elif habit < 0.4:
        said += " " + rng.choice(list(QUESTIONS.values()))
    elif habit < 0.5:
        said = "Anything else?"
    return {"messages": [*prompt(row["messages"]), {"role": "assistant", "content": said}]}


def write(folder: Path, seed: int) -> None:
    from process import rounds

    rng = random.Random(seed)
    folder.mkdir(exist_ok=True)
    seen: list[dict[str, Any]] = []
    for split, size in SIZES.items():
        sessions = [session(rng, number, split) for number in range(size)]
        _write(folder / f"{split}_origin.jsonl", sessions)
        if split == "train":
            seen = [row for made in sessions for row in rounds(made)]
    _write(folder / "conversations.jsonl", [conversation(rng, rng.choice(seen)) for _ in range(CONVERSATIONS)])


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "data")
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed)
