"""Writes a library about an island that doesn't exist, and questions whose answers are in it.

python3 tutorial/example_deep_research/make_data.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data"
SIZES = {"train": 64, "validation": 16}
TOWNS = 24
STARTS = ("Bel", "Cor", "Dun", "Esk", "Fal", "Gar", "Hol", "Ir", "Kel", "Lor", "Mar", "Nor", "Ost", "Pel", "Ram", "Sel")
ENDS = ("den", "ford", "haven", "mere", "stad", "wick")
FIRST = ("Ada", "Bruno", "Clara", "David", "Edith", "Felix", "Greta", "Hugo", "Iris", "Jonas", "Klara", "Leo")
LAST = ("Abel", "Brandt", "Cole", "Dietz", "Ekman", "Frey", "Gruber", "Holm", "Ives", "Jensen", "Kruse", "Lund")
GOODS = ("glass", "paper", "salt", "cloth", "clocks", "boats", "cheese", "bricks")


def island(rng: random.Random) -> list[dict[str, Any]]:
    """The towns, each with facts that no other has."""
    names = rng.sample([start + end for start in STARTS for end in ENDS], TOWNS)
    rivers = rng.sample([start + "a" for start in STARTS] + [start + "o" for start in STARTS], TOWNS)
    people = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], 2 * TOWNS)
    years = rng.sample(range(1610, 1990), 2 * TOWNS)
    return [
        {
            "town": name,
            "river": rivers[n],
            "mayor": people[n],
            "builder": people[TOWNS + n],
            "founded": years[n],
            "opened": years[TOWNS + n],
            "goods": rng.choice(GOODS),
        }
        for n, name in enumerate(names)
    ]


def pages(towns: list[dict[str, Any]], rng: random.Random) -> list[dict[str, str]]:
    """Two pages a town, in any order: the town's own, and the one of its bridge, which has other facts."""
    written = []
    for t in towns:
        town = (
            f"{t['town']} is a town on the river {t['river']}. It was founded in {t['founded']} and lives on making "
            f"{t['goods']}. Its mayor is {t['mayor']}."
        )
        bridge = (
            f"The old bridge over the {t['river']} was built by {t['builder']} and opened in {t['opened']}. "
            "It is still in use."
        )
        written += [(t["town"], town), (f"Old bridge over the {t['river']}", bridge)]
    rng.shuffle(written)
    return [{"id": f"p{n}", "title": title, "text": text} for n, (title, text) in enumerate(written, start=1)]


def questions(towns: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Half of them need one page, the others two."""
    asked = []
    for t in towns:
        asked += [
            {"question": f"Who is the mayor of {t['town']}?", "answer": t["mayor"], "tag": "one page"},
            {"question": f"When was {t['town']} founded?", "answer": str(t["founded"]), "tag": "one page"},
            {"question": f"Who built the old bridge in {t['town']}?", "answer": t["builder"], "tag": "two pages"},
            {
                "question": f"Who is the mayor of the town whose old bridge was built by {t['builder']}?",
                "answer": t["mayor"],
                "tag": "two pages",
            },
        ]
    return asked


def write(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder.mkdir(exist_ok=True)
    towns = island(rng)
    _write(folder / "corpus.jsonl", pages(towns, rng))
    asked = questions(towns)
    rng.shuffle(asked)
    begin = 0
    for split, size in SIZES.items():
        rows = [{"id": f"{split}-{n:03}", **row} for n, row in enumerate(asked[begin : begin + size])]
        _write(folder / f"{split}.jsonl", rows)
        begin += size


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed)
