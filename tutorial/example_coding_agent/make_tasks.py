"""Makes the tasks: a small module in which one function is broken, and the tests that fail because of it.

python tutorial/example_coding_agent/make_tasks.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
SIZES = {"train": 32, "validation": 16}

MODULE = """\
def add(a, b):
    return a + b


def largest(numbers):
    best = numbers[0]
    for number in numbers:
        if number > best:
            best = number
    return best


def mean(numbers):
    return sum(numbers) / len(numbers)


def reverse_words(text):
    return " ".join(reversed(text.split()))
"""
TESTS = """\
from calc import add, largest, mean, reverse_words

assert add(2, 3) == 5, f"add(2, 3) is {add(2, 3)}, not 5"
assert largest([3, 9, 4]) == 9, f"largest([3, 9, 4]) is {largest([3, 9, 4])}, not 9"
assert mean([1, 2, 6]) == 3, f"mean([1, 2, 6]) is {mean([1, 2, 6])}, not 3"
assert reverse_words("a b c") == "c b a", f"reverse_words('a b c') is {reverse_words('a b c')!r}, not 'c b a'"
print("all tests passed")
"""
FAULTS = {
    "add": [("a + b", "a - b"), ("a + b", "a * b"), ("a + b", "a")],
    "largest": [("number > best", "number < best"), ("return best", "return number"), ("best = number\n", "pass\n")],
    "mean": [("/ len(numbers)", "// 2"), ("sum(numbers)", "max(numbers)"), ("len(numbers)", "(len(numbers) - 1)")],
    "reverse_words": [("reversed(text.split())", "text.split()"), ('" ".join', '"".join'), ("text.split()", "text")],
}
"""What is broken in each function: the right text and the wrong one."""


def task(split: str, index: int) -> dict[str, object]:
    """A task, the same every time."""
    draw = random.Random(f"{split}:{index}")
    name = draw.choice(sorted(FAULTS))
    right, wrong = draw.choice(FAULTS[name])
    assert right in MODULE
    return {
        "id": f"{split}-{index}",
        "question": f"The function {name} in calc.py is broken. Repair it so that the tests pass.",
        "files": {"calc.py": MODULE.replace(right, wrong, 1)},
        "test_files": {"test_calc.py": TESTS},
        "test_command": "python3 test_calc.py",
        "tag": name,
    }


def main() -> None:
    (FOLDER / "data").mkdir(exist_ok=True)
    for split, count in SIZES.items():
        lines = [json.dumps(task(split, index)) + "\n" for index in range(count)]
        (FOLDER / "data" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
