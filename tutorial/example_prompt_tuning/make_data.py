"""Writes the requests: 29 to search on and 28 to validate and confirm on."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rooms import DEVICES, HOURS, Request, best_room

FOLDER = Path(__file__).parent / "data"
FORMS = (
    "{people} people, at {hour}, with a {device}.",
    "At {hour} we are {people} and need a {device}.",
    "A room with a {device} at {hour} for {people}.",
)


def draw_request(draw: random.Random) -> Request:
    """A request that some room of the house suits."""
    while True:
        request = Request(draw.randint(2, 18), draw.choice(DEVICES), draw.choice(HOURS))
        if best_room(request) is not None:
            return request


def text_of(request: Request, draw: random.Random) -> str:
    """The request in words."""
    return draw.choice(FORMS).format(people=request.people, hour=request.hour, device=request.device)


def main() -> None:
    draw = random.Random(0)
    requests: dict[Request, str] = {}
    while len(requests) < 57:
        request = draw_request(draw)
        requests.setdefault(request, text_of(request, draw))
    rows = [
        {"id": f"booking-{n}", "question": text, "people": one.people, "device": one.device, "hour": one.hour,
         "room": best_room(one)}
        for n, (one, text) in enumerate(requests.items())
    ]  # fmt: skip
    FOLDER.mkdir(exist_ok=True)
    for name, part in (("train.jsonl", rows[:29]), ("validation.jsonl", rows[29:])):
        (FOLDER / name).write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    main()
