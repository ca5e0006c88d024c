"""The house: nine rooms, what is in them, when they are taken, and which of them suits a request."""

from __future__ import annotations

from dataclasses import dataclass

DEVICES = ("screen", "phone", "board")
HOURS = range(9, 18)


@dataclass(frozen=True)
class Room:
    number: int
    seats: int
    devices: frozenset[str]
    taken: frozenset[int]


@dataclass(frozen=True)
class Request:
    people: int
    device: str
    hour: int


ROOMS = tuple(
    Room(number, seats, frozenset(devices.split()), frozenset(taken))
    for number, seats, devices, taken in (
        (1, 3, "phone", (9, 10, 13, 14, 16)),
        (2, 20, "screen phone board", (9, 11, 12, 15, 17)),
        (3, 6, "screen board", (10, 11, 14)),
        (4, 12, "screen", (9, 13, 16)),
        (5, 4, "board screen", (12, 14, 15)),
        (6, 16, "phone board", (10, 12, 17)),
        (7, 8, "phone screen", (11, 13, 15)),
        (8, 10, "board phone", (9, 14, 16)),
        (9, 24, "screen phone board", (13, 17)),
    )
)


def find(*, seats: int = 0, device: str = "", time: int | None = None, order: str = "") -> list[int]:
    """The numbers of the rooms that pass every filter given, in the order of the house or of their size."""
    passed = [
        room
        for room in ROOMS
        if room.seats >= seats and (not device or device in room.devices) and time not in room.taken
    ]
    if order == "size":
        passed.sort(key=lambda room: room.seats)
    return [room.number for room in passed]


def best_room(request: Request) -> int | None:
    """The smallest room that has seats for all and the device, and is free."""
    rooms = find(seats=request.people, device=request.device, time=request.hour, order="size")
    return rooms[0] if rooms else None


def judge(request: Request, number: int | None, *, looked: bool) -> tuple[float, str]:
    """A quarter for each wish that the room meets, and what is wrong with it, in words."""
    room = next((one for one in ROOMS if one.number == number), None)
    if room is None:
        return 0.0, "The agent named no room of this house."
    complaints = []
    if room.seats < request.people:
        complaints.append(f"Room {number} has {room.seats} seats, but {request.people} people come.")
    if request.device not in room.devices:
        complaints.append(f"Room {number} lacks the device that was asked for, a {request.device}.")
    if request.hour in room.taken:
        complaints.append(f"Room {number} is not free at this time, {request.hour}.")
    if not complaints and number != best_room(request):
        complaints.append(f"Room {number} is too big: room {best_room(request)} is the smallest that is enough.")
    reward = 1 - (len(complaints) + (number != best_room(request) and "too big" not in "".join(complaints))) / 4
    if not looked:
        complaints.append("The agent never looked for a room.")
    return max(reward, 0.0), " ".join(complaints)
