"""The apps of the small world, their data and their tasks, made from a task's id alone: the same in every process."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PEOPLE = ("Ada", "Bruno", "Clara", "David", "Edith", "Felix")
SUBJECTS = ("garden", "recipes", "travel", "books", "music")
REASONS = ("lunch", "tickets", "rent", "coffee")


class AppError(Exception):
    """An app refuses a call: says why, for the agent."""


@dataclass(slots=True)
class World:
    """The supervisor's things."""

    passwords: dict[str, str]
    notes: dict[int, dict[str, str]]
    payments: list[dict[str, Any]]
    contacts: list[dict[str, str]]
    answer: Any = None
    completed: bool = False
    tokens: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the supervisor wants, and how it is checked: named tests of (world before, world after)."""

    text: str
    tests: dict[str, Callable[[World, World], bool]]


def make_world(rng: random.Random) -> World:
    """A world."""
    return World(
        passwords={app: f"{app}-{rng.randrange(1000, 9999)}" for app in ("notes", "wallet")},
        notes={n: {"subject": rng.choice(SUBJECTS), "text": f"Number {rng.randrange(100)}"} for n in range(1, 9)},
        payments=[
            {"to": rng.choice(PEOPLE), "amount": rng.randrange(2, 60), "reason": rng.choice(REASONS)} for _ in range(9)
        ],
        contacts=[{"name": name, "phone": str(rng.randrange(10**6, 10**7))} for name in PEOPLE],
    )


def make_assignment(rng: random.Random, world: World) -> Assignment:
    """One of four kinds."""
    person, subject, reason = rng.choice(PEOPLE), rng.choice(SUBJECTS), rng.choice(REASONS)
    amount = rng.randrange(2, 60)
    paid = sum(payment["amount"] for payment in world.payments if payment["to"] == person)
    phone = next(contact["phone"] for contact in world.contacts if contact["name"] == person)

    def answered(right: Any) -> Callable[[World, World], bool]:
        return lambda _, after: str(after.answer) == str(right)

    unchanged: dict[str, Callable[[World, World], bool]] = {
        "notes are as they were": lambda before, after: before.notes == after.notes,
        "payments are as they were": lambda before, after: before.payments == after.payments,
    }
    kinds: list[Assignment] = [
        Assignment(f"How much have I paid to {person} in all?", {"answer": answered(paid), **unchanged}),
        Assignment(f"What is the phone number of {person}?", {"answer": answered(phone), **unchanged}),
        Assignment(
            f"Delete all my notes about {subject}.",
            {
                "none about it is left": lambda _, after: all(n["subject"] != subject for n in after.notes.values()),
                "the others are left": lambda before, after: all(
                    name in after.notes for name, note in before.notes.items() if note["subject"] != subject
                ),
                "payments are as they were": unchanged["payments are as they were"],
            },
        ),
        Assignment(
            f"Pay {amount} to {person} for {reason}.",
            {
                "it is paid": lambda before, after: (
                    after.payments == [*before.payments, {"to": person, "amount": amount, "reason": reason}]
                ),
                "notes are as they were": unchanged["notes are as they were"],
            },
        ),
    ]
    return rng.choice(kinds)


class Apps:
    """What `apis.APP.NAME(…)` calls. Public methods named `APP__NAME` are the apps; their docstrings document them."""

    def __init__(self, task_id: str) -> None:
        rng = random.Random(f"small world: {task_id}")
        self.world = make_world(rng)
        self.assignment = make_assignment(rng, self.world)
        self._before = copy.deepcopy(self.world)

    def call(self, app: str, name: str, arguments: dict[str, Any]) -> Any:
        """Raises AppError for what doesn't exist or doesn't fit."""
        function = self._functions().get((app, name))
        if function is None:
            raise AppError(f"there is no apis.{app}.{name}: see apis.api_docs.show_api_descriptions(app_name=…)")
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise AppError(f"apis.{app}.{name}: {error}") from None
        return copy.deepcopy(function(**arguments))

    def test_results(self) -> dict[str, bool]:
        """The tests of the task, and whether each holds now."""
        results = {name: test(self._before, self.world) for name, test in self.assignment.tests.items()}
        return {"completed": self.world.completed, **results}

    def _functions(self) -> dict[tuple[str, str], Callable[..., Any]]:
        names = (name for name in dir(self) if "__" in name and not name.startswith("_"))
        return {(name.partition("__")[0], name.partition("__")[2]): getattr(self, name) for name in names}

    # ------------------------------------------------------------ apps

    def api_docs__show_app_descriptions(self) -> list[str]:
        """The names of all apps."""
        return sorted({app for app, _ in self._functions()})

    def api_docs__show_api_descriptions(self, app_name: str) -> list[str]:
        """What an app can do."""
        found = [f"{n}: {f.__doc__}" for (app, n), f in sorted(self._functions().items()) if app == app_name]
        return found or [f"there is no app {app_name!r}"]

    def api_docs__show_api_doc(self, app_name: str, api_name: str) -> dict[str, Any]:
        """How a call is made."""
        function = self._functions().get((app_name, api_name))
        if function is None:
            raise AppError(f"there is no apis.{app_name}.{api_name}")
        return {"description": function.__doc__, "parameters": list(inspect.signature(function).parameters)}

    def supervisor__show_account_passwords(self) -> list[dict[str, str]]:
        """The passwords for the supervisor's apps."""
        return [{"account_name": app, "password": word} for app, word in self.world.passwords.items()]

    def supervisor__complete_task(self, answer: Any = None) -> dict[str, str]:
        """End the task. `answer`: if the task asks for something."""
        if not isinstance(answer, str | int | float | None):
            raise AppError("the answer is a text or a number")
        self.world.answer, self.world.completed = answer, True
        return {"message": "Marked the task as complete."}

    def contacts__show_contacts(self) -> list[dict[str, str]]:
        """Everyone in the address book, with the phone number."""
        return self.world.contacts

    def notes__login(self, password: str) -> dict[str, str]:
        """The access token for notes."""
        return self._login("notes", password)

    def notes__show_notes(self, access_token: str) -> list[dict[str, Any]]:
        """All notes: note_id, subject, text."""
        self._check("notes", access_token)
        return [{"note_id": number, **note} for number, note in self.world.notes.items()]

    def notes__delete_note(self, access_token: str, note_id: int) -> dict[str, str]:
        """Delete a note."""
        self._check("notes", access_token)
        if not isinstance(note_id, int) or self.world.notes.pop(note_id, None) is None:
            raise AppError("there is no such note")
        return {"message": "Deleted."}

    def wallet__login(self, password: str) -> dict[str, str]:
        """The access token for the wallet."""
        return self._login("wallet", password)

    def wallet__show_payments(self, access_token: str) -> list[dict[str, Any]]:
        """All payments made: to, amount, reason."""
        self._check("wallet", access_token)
        return self.world.payments

    def wallet__pay(self, access_token: str, to: str, amount: int, reason: str) -> dict[str, str]:
        """Pay an amount to somebody."""
        self._check("wallet", access_token)
        if to not in PEOPLE or isinstance(amount, bool) or not isinstance(amount, int) or not 0 < amount < 10_000:
            raise AppError("pay needs the name of a contact and a whole amount from 1 to 9999")
        if len(self.world.payments) > 200:
            raise AppError("that is enough for today")
        self.world.payments.append({"to": to, "amount": amount, "reason": str(reason)})
        return {"message": "Paid."}

    def _login(self, app: str, password: str) -> dict[str, str]:
        if password != self.world.passwords[app]:
            raise AppError("wrong password")
        self.world.tokens[app] = f"token-of-{app}"
        return {"access_token": self.world.tokens[app]}

    def _check(self, app: str, token: str) -> None:
        if self.world.tokens.get(app) is None or token != self.world.tokens[app]:
            raise AppError(f"log in first: apis.{app}.login(password=…)")
