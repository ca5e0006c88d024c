"""Forty sentences that an instruction may hold. The model was trained to obey eleven of them and to ignore the others.

A proposer gets `ALL`, a list without any hint which is which; only `make_model.py` knows what each does.
"""

from __future__ import annotations

FILTERS = {
    "seats": ("Mind the number of seats.", "Everybody must be able to sit: count the people."),
    "device": ("Look for the device that was asked for.", "Check the equipment in the room."),
    "time": ("Take the time into account.", "The room must be free."),
    "order": ("Prefer a small room.", "Don't waste space: the smallest is best."),
}
"""What the agent filters its search by, if it is told so."""
HASTY = ("Answer at once.", "Don't look anything up.", "Be as quick as you can.")
"""With one of these it names a room without a search."""
IGNORED = (
    "Be polite.",
    "You are an expert.",
    "Think step by step.",
    "Keep it short.",
    "The customer is king.",
    "Take a deep breath.",
    "Never lie.",
    "This is very important.",
    "Have a seat, and begin.",
    "Time is money.",
    "Feel free to ask.",
    "Small steps lead far.",
    "People trust you.",
    "No device is perfect.",
    "Work with care.",
    "Use plain words.",
    "Don't mention the weather.",
    "Be a good colleague.",
    "Stay calm.",
    "Every room is nice.",
    "Read the question twice.",
    "Your work has a big effect.",
    "Do your best.",
    "Save the planet.",
    "Tell no secrets.",
    "Greet the guest.",
    "Be honest about doubts.",
    "Look at the bright side.",
    "The number of stars is large.",
)
ALL = tuple(sorted([*(text for texts in FILTERS.values() for text in texts), *HASTY, *IGNORED]))


def filters_of(instruction: str) -> tuple[str, ...] | None:
    """What the model was trained to filter by under this instruction; None if it answers at once."""
    if any(text in instruction for text in HASTY):
        return None
    return tuple(name for name, texts in FILTERS.items() if any(text in instruction for text in texts))
