"""Who plays: `RulePlayer` by simple rules, `ModelPlayer` by a language model that answers in words."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from game import NAMES, SEER, WOLF, Event, View

if TYPE_CHECKING:
    from ajet.agents.model_function import ModelFunction

SEERS_WORD = 10
"""How much a seer's word counts for a rule player, beside 1 for an accusation of today."""
CHANCE = 2
"""The most that mere chance adds to a rule player's suspicion."""
SHORT_SPEECH = 200
"""Characters of another player's speech that a model is shown."""


def named(text: str, options: Sequence[str]) -> str | None:
    """The first of these names in the text, in any case, or else the first capital letter that stands alone and is the
    initial of one: models that can hardly write still get to play."""
    for form, flags in ((r"\b{}\b", re.IGNORECASE), (r"(?<![A-Za-z]){:.1}(?![A-Za-z])", 0)):
        matches = ((re.search(form.format(name), text, flags), name) for name in options)
        found = [(match.start(), name) for match, name in matches if match is not None]
        if found:
            return min(found)[1]
    return None


@dataclass(frozen=True, slots=True)
class Claims:
    """What those have said who say to be the seer, each believed until another one has said otherwise."""

    seers: list[str]
    accused: list[str]
    cleared: list[str]


def claims(view: View) -> Claims:
    """The claims that all have heard, the newest last."""
    found = Claims([], [], [])
    for event in view.events:
        if event.kind != "said" or SEER not in event.text.lower():
            continue
        for part in event.text.split(";"):
            about = named(part, [name for name in NAMES if name != event.who])
            if about is None:
                continue
            side = found.cleared if re.search(r"\b(no|not)\b", part) else found.accused
            for seen, whom in ((found.seers, event.who), (side, about)):
                if whom not in seen:
                    seen.append(whom)
    return found


class RulePlayer:
    """Plays the village's or the werewolves' side as a beginner would: it believes who says to be the seer."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self._name = name
        self._rng = rng

    async def speak(self, view: View, purpose: str) -> str:
        if view.role == SEER and (learnt := [event.text for event in view.events if event.kind == "checked"]):
            return f"I am the seer: {'; '.join(learnt)}."
        if purpose == "last_words":
            return "Farewell."
        return f"I suspect {self._most_suspected(view, self._others(view))}."

    async def choose(self, view: View, purpose: str, options: list[str]) -> str | None:
        if view.role == WOLF:
            prey = [name for name in options if view.roles.get(name) != WOLF] or options
            seers = [name for name in claims(view).seers if name in prey]
            return seers[0] if seers and purpose == "kill" else self._most_suspected(view, prey)
        if purpose == "heal":
            return options[0]
        if purpose == "poison":  # only whom the seer has named
            return next((name for name in claims(view).accused if name in options), None)
        if purpose == "check":
            return self._rng.choice(options)
        return self._most_suspected(view, options)

    def _others(self, view: View) -> list[str]:
        others = [name for name in view.living if name != self._name]
        return [name for name in others if view.role != WOLF or view.roles.get(name) != WOLF] or others

    def _most_suspected(self, view: View, options: list[str]) -> str:
        """By what a seer has said, what was said today, and chance."""
        points = Counter({name: CHANCE * self._rng.random() for name in options})
        known = claims(view)
        for name in options:
            points[name] += SEERS_WORD * ((name in known.accused) - (name in known.cleared) - (name in known.seers))
        for event in today(view.events):
            accused = named(event.text, options)
            if event.kind == "said" and event.who != self._name and accused is not None:
                points[accused] += 1
        return max(points, key=lambda name: points[name])


def today(events: Sequence[Event]) -> list[Event]:
    """What was said since somebody last died."""
    last = max((index for index, event in enumerate(events) if event.kind in ("died", "voted")), default=-1)
    return list(events[last + 1 :])


class ModelPlayer:
    """Asks a model. Each decision is a conversation of its own that tells all that the player knows.

    `prompts: long` says it in sentences, for models that read; `short` in a few letters, for tiny ones.
    """

    def __init__(self, model: ModelFunction, prompts: str, misplayed: Callable[[str], object] | None = None) -> None:
        """`misplayed` is told the id of each reply that names nobody, or one's own side."""
        self._model = model
        self._misplayed = misplayed
        self._question = {"long": long_question, "short": short_question}[prompts]

    async def speak(self, view: View, purpose: str) -> str:
        return (await self._ask(view, purpose, [])).get("content") or ""

    async def choose(self, view: View, purpose: str, options: list[str]) -> str | None:
        reply = await self._ask(view, purpose, options)
        choice = named(reply.get("content") or "", options)
        if self._misplayed is not None and (choice is None or choice in view.roles):
            self._misplayed(getattr(reply, "reply_id", ""))
        return choice

    async def _ask(self, view: View, purpose: str, options: list[str]) -> dict[str, Any]:
        return await self._model(self._question(view, purpose, options))


# ------------------------------------------------------------ questions

RULES = (
    "You play Werewolf with nine players: three werewolves, three villagers, a seer, a witch and a hunter. At night "
    "the werewolves kill somebody, the seer learns whether one player is a werewolf, and the witch may heal the victim "
    "once and poison somebody once. By day all living players speak and then vote somebody out; the hunter may shoot "
    "somebody when dying. The werewolves win as soon as they are half of the living, and the village when no werewolf "
    "lives."
)
PURPOSES = {
    "discuss": "The werewolves talk in secret: say to the others whom to kill tonight, and why.",
    "speech": "It is day. Say to all what you think: whom do you suspect? One or two sentences.",
    "last_words": "You are about to die. Your last words to all, in one or two sentences:",
    "kill": "Whom do the werewolves kill tonight?",
    "vote": "Whom do you vote out?",
    "check": "Of whom do you want to know whether they are a werewolf?",
    "heal": "The werewolves have attacked this player. Do you heal them? Name them if so, or answer: nobody.",
    "poison": "Do you poison somebody? Name them, or answer: nobody.",
    "shoot": "You die and may shoot somebody. Name them, or answer: nobody.",
}


def long_question(view: View, purpose: str, options: list[str]) -> list[dict[str, str]]:
    """The rules, the role, what happened, and what is asked."""
    pack = [name for name, role in view.roles.items() if role == WOLF and name != view.name]
    you = f"You are {view.name}, and your role is: {view.role}."
    if view.role == WOLF:
        you += f" The other werewolves: {' and '.join(pack)}. Don't let the village find out."
    lines = [_told(event) for event in view.events]
    lines.append(f"Alive: {', '.join(view.living)}. Round {view.round}.")
    lines.append(PURPOSES[purpose])
    if options:
        lines.append(f"Answer with one name: {', '.join(options)}.")
    return [{"role": "system", "content": f"{RULES}\n{you}"}, {"role": "user", "content": "\n".join(lines)}]


def _told(event: Event) -> str:
    if event.kind in ("said", "night_said"):
        secretly = " (to the werewolves)" if event.kind == "night_said" else ""
        return f"{event.who}{secretly}: {event.text[:SHORT_SPEECH]}"
    return {
        "died": f"{event.who} died, and was: {event.text}.",
        "checked": f"You have learnt: {event.text}.",
        "voted": f"{event.who} voted for {event.text}.",
    }[event.kind]


def short_question(view: View, purpose: str, options: list[str]) -> list[dict[str, str]]:
    """Initials only, each of those who may be chosen once: who says to be the seer, the others, the own side; then the
    purpose."""
    may = options or [name for name in view.living if name != view.name]
    own = [name for name in may if name in view.roles]
    seers = [name for name in claims(view).seers if name in may and name not in own]
    others = [name for name in may if name not in own and name not in seers]
    lines = [_initials(seers), _initials(others), _initials(own), "heal" if purpose == "heal" else purpose[0]]
    return [{"role": "user", "content": "\n".join(lines)}]


def _initials(names: Sequence[str]) -> str:
    return "".join(name[0] for name in names) or "-"
