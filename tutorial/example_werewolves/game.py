"""The game of werewolves for nine: its rules, and nothing about who plays. One `Game` plays itself with nine `Player`s.

In: players by name, and a source of chance. Out: `Result`. Each player is shown only what their role may know; a
player's answer that names nobody who may be chosen counts as no choice, and never ends the game.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

NAMES = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo")
WOLF, VILLAGER, SEER, WITCH, HUNTER = "werewolf", "villager", "seer", "witch", "hunter"
ROLES = (WOLF,) * 3 + (VILLAGER,) * 3 + (SEER, WITCH, HUNTER)
VILLAGE = frozenset({VILLAGER, SEER, WITCH, HUNTER})
MOST_ROUNDS = 7
"""Werewolves who are still alive after so many have not won: stalling does not pay."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `seen_by`: who knows of it; None: everyone."""

    kind: str
    """said · night_said · died · checked · voted"""
    who: str
    text: str
    seen_by: frozenset[str] | None = None


@dataclass(slots=True)
class View:
    """What one player may know."""

    name: str
    role: str
    living: list[str]
    roles: dict[str, str]
    """The roles that this player is sure of: one's own, and the werewolves' if one is a werewolf."""
    events: list[Event]
    round: int


class Player(Protocol):
    """Whoever decides for a name."""

    async def speak(self, view: View, purpose: str) -> str:
        """Say something: `discuss` (werewolves among themselves), `speech` or `last_words`."""

    async def choose(self, view: View, purpose: str, options: list[str]) -> str | None:
        """One of the options, or None: `kill`, `vote`, `check`, `heal`, `poison` or `shoot`."""


@dataclass(slots=True)
class Result:
    """How a game ended."""

    wolves_won: bool
    rounds: int
    living: list[str]
    chose_own: int = 0
    """How often a werewolf chose a werewolf."""
    chose_nobody: int = 0
    """How often a werewolf chose nobody."""
    events: list[Event] = field(default_factory=list)


def deal(rng: random.Random) -> dict[str, str]:
    """Who plays what."""
    roles = list(ROLES)
    rng.shuffle(roles)
    return dict(zip(NAMES, roles, strict=True))


class Game:
    """One game."""

    def __init__(
        self, roles: Mapping[str, str], players: Mapping[str, Player], rng: random.Random, *, discussion_rounds: int = 0
    ) -> None:
        self._roles = dict(roles)
        self._players = players
        self._rng = rng
        self._discussion_rounds = discussion_rounds
        self._living = list(NAMES)
        self._events: list[Event] = []
        self._potions = {"heal", "poison"}
        self._round = 0
        self._against_own = self._empty = 0

    async def play(self) -> Result:
        """The whole game."""
        while self._winner() is None and self._round < MOST_ROUNDS:
            self._round += 1
            dead, poisoned = await self._night()
            await self._die(dead, last_words=self._round == 1, disarmed=poisoned)
            if self._winner() is None:
                await self._day()
        return Result(self._winner() == WOLF, self._round, self._living, self._against_own, self._empty, self._events)

    def _winner(self) -> str | None:
        wolves = len(self._of(WOLF))
        if wolves == 0:
            return VILLAGER
        return WOLF if 2 * wolves >= len(self._living) else None

    def _of(self, role: str) -> list[str]:
        return [name for name in self._living if self._roles[name] == role]

    # ------------------------------------------------------------ night

    async def _night(self) -> tuple[list[str], set[str]]:
        """Who dies, and who of them by poison."""
        wolves = self._of(WOLF)
        pack = frozenset(wolves)
        for _ in range(self._discussion_rounds):
            for wolf in wolves:
                self._note("night_said", wolf, await self._say(wolf, "discuss"), pack)
        # without a talk among them, one decides for all
        victim = await self._elect("kill", wolves if self._discussion_rounds else wolves[:1])
        for seer in self._of(SEER):
            known = {event.text.split()[0] for event in self._events if event.kind == "checked"}
            suspect = await self._pick(seer, "check", [n for n in self._living if n != seer and n not in known])
            if suspect is not None:
                side = "a werewolf" if self._roles[suspect] == WOLF else "no werewolf"
                self._note("checked", seer, f"{suspect} is {side}", frozenset({seer}))
        dead, poisoned = [victim] if victim is not None else [], set[str]()
        for witch in self._of(WITCH):
            if dead and "heal" in self._potions and witch not in dead and await self._pick(witch, "heal", list(dead)):
                self._potions.discard("heal")
                dead = []
            elif "poison" in self._potions:
                others = [name for name in self._living if name != witch and name not in dead]
                target = await self._pick(witch, "poison", others)
                if target is not None:
                    self._potions.discard("poison")
                    dead.append(target)
                    poisoned.add(target)
        return dead, poisoned

    # ------------------------------------------------------------ day

    async def _day(self) -> None:
        for name in list(self._living):
            self._note("said", name, await self._say(name, "speech"))
        chosen = await self._elect("vote", list(self._living))
        if chosen is not None:
            await self._die([chosen], last_words=True)

    async def _die(self, names: Iterable[str], *, last_words: bool, disarmed: Iterable[str] = ()) -> None:
        for name in names:
            if name not in self._living:
                continue
            self._living.remove(name)
            self._note("died", name, self._roles[name])
            if last_words:
                self._note("said", name, await self._say(name, "last_words"))
            if self._roles[name] == HUNTER and name not in disarmed and self._winner() is None:
                target = await self._pick(name, "shoot", list(self._living))
                if target is not None:
                    await self._die([target], last_words=False)

    # ------------------------------------------------------------ players

    async def _elect(self, purpose: str, voters: list[str]) -> str | None:
        """Whoever gets most votes. Equal numbers are decided by lot, with the game's own chance."""
        votes = Counter[str]()
        for voter in voters:
            choice = await self._pick(voter, purpose, [name for name in self._living if name != voter])
            if choice is not None:
                votes[choice] += 1
                if purpose == "vote":
                    self._note("voted", voter, choice)
        most = max(votes.values(), default=0)
        return self._rng.choice(sorted(name for name, count in votes.items() if count == most)) if most else None

    async def _pick(self, name: str, purpose: str, options: list[str]) -> str | None:
        choice = await self._players[name].choose(self._view(name), purpose, options) if options else None
        choice = choice if choice in options else None
        if self._roles[name] == WOLF:
            self._empty += choice is None
            self._against_own += choice is not None and self._roles[choice] == WOLF
        return choice

    async def _say(self, name: str, purpose: str) -> str:
        return " ".join((await self._players[name].speak(self._view(name), purpose)).split())[:400]

    def _note(self, kind: str, who: str, text: str, seen_by: frozenset[str] | None = None) -> None:
        self._events.append(Event(kind, who, text, seen_by))

    def _view(self, name: str) -> View:
        role = self._roles[name]
        known = {n: r for n, r in self._roles.items() if n == name or (role == WOLF and r == WOLF)}
        seen = [event for event in self._events if event.seen_by is None or name in event.seen_by]
        return View(name, role, list(self._living), known, seen, self._round)
