"""Makes arithmetic problems in words with their results.

python tutorial/example_calc_x/make_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DATA = Path(__file__).parent / "data"
PROBLEMS = (
    ("A crate holds {a} boxes of {b} nails. {c} nails are bent. How many are good?", "{a} * {b} - {c}"),
    ("{a} people share {b} euros equally. How much does each one get?", "{b} / {a}"),
    ("Ada walks {a} km on each of {b} days and then {c} km more. How far is that in km?", "{a} * {b} + {c}"),
    ("What is ({a} + {b}) * {c}?", "({a} + {b}) * {c}"),
)


def main() -> None:
    DATA.mkdir(exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", 64), ("validation", 16)):
        with (DATA / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                text, formula = draw.choice(PROBLEMS)
                values = {name: draw.randint(12, 98) for name in "abc"}
                result = eval(formula.format(**values))  # noqa: S307 - a formula of our own
                file.write(json.dumps({"question": text.format(**values), "result": str(round(result, 4))}) + "\n")


if __name__ == "__main__":
    main()
