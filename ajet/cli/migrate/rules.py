"""`Migration`: another system's keys, one by one, as ours. What becomes of each is in that system's table of rules.

A rule's key is the other system's, dotted; one that ends in `.` is about everything below. No key is lost in silence:
it is kept, renamed, dropped with a reason, or unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ajet.config.old_keys import Dropped
from ajet.config.root import AjetConfig
from ajet.observe.metrics import flatten
from ajet.observe.tracing import nested

Tree = dict[str, Any]


class NotOurs(Exception):
    """This value has no counterpart. Says why, and what there is."""


class GroupReference(str):
    """`${…}` of a whole group, whose keys are migrated where they stand."""


@dataclass(frozen=True)
class As:
    """The present name, and how to say it there: `convert(value, all keys)` gives the value, or several by name."""

    key: str
    convert: Callable[[Any, Mapping[str, Any]], Any] = lambda value, _: value


Rule = str | As | Dropped


class Line(NamedTuple):
    """What became of one key."""

    what: Literal["kept", "renamed", "added", "dropped", "unknown"]
    key: str
    value: Any
    now: str = ""
    """Its present name, with its value."""
    why: str = ""
    new: Mapping[str, Any] = {}
    """What it says here, by name."""


class System(NamedTuple):
    """A system whose files can be read."""

    title: str
    recognises: Callable[[Tree], bool]
    rules: Mapping[str, Rule]
    always: Mapping[str, Any] = {}
    """Keys of ours that any of its files stands for: its defaults that train something else than ours."""
    rest: str = ""
    """The block of ours that passes its other keys through unchanged. Empty: they are unknown."""
    prepare: Callable[[Tree], Tree] = lambda tree: tree


@dataclass
class Migration:
    """A file's keys as ours."""

    system: System
    keys: dict[str, Any] = field(default_factory=dict)
    """Ours, below `ajet`, dotted."""
    lines: list[Line] = field(default_factory=list)
    unset: int = 0
    """Keys that were null."""

    @classmethod
    def of(cls, system: System, tree: Tree) -> Migration:
        """Migrate what a file holds."""
        done = cls(system, dict(system.always))
        given = dict(flatten(system.prepare(tree)))
        for key, value in given.items():
            if value is None:
                done.unset += 1
            else:
                done.lines.append(done._one(key, value, given))
        done._say_what_is_outvoted()
        done._fit()
        return done

    def _say_what_is_outvoted(self) -> None:
        """Note which of two keys that are one here lost: the file's later one counts."""
        for index, line in enumerate(self.lines):
            if lost := [name for name, value in line.new.items() if self.keys[name] != value]:
                why = f"a later key says {', '.join(f'{name}: {_yaml(self.keys[name])}' for name in lost)}"
                self.lines[index] = line._replace(what="dropped", why=why)

    def _fit(self) -> None:
        """Make the three lengths suit each other: other systems say one or two of them."""
        whole, prompt, response = "rollout.max_model_len", "data.max_prompt_length", "data.max_response_length"
        usual = AjetConfig()
        asked, answered = usual.data.max_prompt_length, usual.data.max_response_length
        room, parts = self.keys.get(whole), [self.keys.get(prompt, asked), self.keys.get(response, answered)]
        if not all(isinstance(each, int) for each in (room or 0, *parts)):
            return  # the file's own mistake, which `ajet validate` names
        if sum(parts) <= (room or usual.rollout.max_model_len):
            return
        if room is None:
            self._add(whole, sum(parts), "prompt and response must fit")
        elif prompt not in self.keys and response not in self.keys:
            self._add(prompt, room // 2, f"both must fit into {whole}: share it as your task needs")
            self._add(response, room - room // 2, f"both must fit into {whole}")
        elif prompt not in self.keys and room > parts[1]:
            self._add(prompt, room - parts[1], f"what is left of {whole}")
        elif response not in self.keys and room > parts[0]:
            self._add(response, room - parts[0], f"what is left of {whole}")

    def _add(self, key: str, value: int, why: str) -> None:
        self.keys[key] = value
        self.lines.append(Line("added", key, value, why=why))

    def _one(self, key: str, value: Any, given: Mapping[str, Any]) -> Line:
        rule = _rule(self.system.rules, key)
        if isinstance(rule, Dropped):
            return Line("dropped", key, value, why=rule.reason)
        if isinstance(value, GroupReference):
            return Line("dropped", key, value, why="what it refers to is carried over itself")
        if rule is None and not self.system.rest:
            return Line("unknown", key, value, why="ajet migrate doesn't know this key: look for its like in the docs")
        if isinstance(value, str) and "${" in value and "${oc.env:" not in value:
            return Line("unknown", key, value, why="it refers to another key, and was not resolved: write the value")
        if rule is None:
            name = f"{self.system.rest}.{key}"
            self.keys[name] = value
            return Line("kept", key, value, f"{name}: {value}")
        rule = As(rule) if isinstance(rule, str) else rule
        try:
            found = rule.convert(value, given)
        except NotOurs as error:
            return Line("dropped", key, value, why=str(error))
        except (TypeError, ValueError, AttributeError, ArithmeticError):
            return Line("unknown", key, value, why=f"not a value that {self.system.title} has here")
        new = found if isinstance(found, Mapping) else {rule.key: found}
        self.keys |= new
        said = ", ".join(f"{name}: {_yaml(one)}" for name, one in new.items())
        return Line("kept" if list(new) == [key] and found == value else "renamed", key, value, said, new=new)

    def tree(self) -> Tree:
        """The file of ours."""
        return {"ajet": nested(self.keys)}


def _rule(rules: Mapping[str, Rule], key: str) -> Rule | None:
    if key in rules:
        return rules[key]
    parts = key.split(".")
    above = (".".join(parts[:count]) + "." for count in range(len(parts) - 1, 0, -1))
    return next((rules[group] for group in above if group in rules), None)


def _yaml(value: Any) -> str:
    return "true" if value is True else "false" if value is False else str(value)


def named(key: str, values: Mapping[Any, Any], otherwise: str) -> As:
    """A key whose values have other names here. `otherwise`: what is said of one that has none."""

    def convert(value: Any, _: Mapping[str, Any]) -> Any:
        try:
            return values[value]
        except (KeyError, TypeError):
            raise NotOurs(f"{value!r} has no counterpart: {otherwise}") from None

    return As(key, convert)


def same_names(theirs: str, ours: str, *names: str) -> dict[str, Rule]:
    """Keys that have the same name in a group of ours."""
    return {f"{theirs}.{name}": f"{ours}.{name}" for name in names}


def unless(key: str, neutral: Any, why: str) -> As:
    """A key whose neutral value says nothing here."""

    def convert(value: Any, _: Mapping[str, Any]) -> Any:
        if value == neutral:
            raise NotOurs(why)
        return value

    return As(key, convert)


def switch(new: Mapping[str, Any], why: str = "false: as by default") -> As:
    """A switch that says something here where it is on. `why`: what is said of one that is off."""

    def convert(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
        if not value:
            raise NotOurs(why)
        return dict(new)

    return As("", convert)


def response_length(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    """Others' limit of all that follows a prompt, which is a reply's limit, too."""
    return {"data.max_response_length": value, "rollout.max_response_length_in_one_turn": value}


def warmup_ratio(steps: str) -> As:
    """A share of all steps, which a number of them in the key `steps` overrides."""

    def convert(value: Any, given: Mapping[str, Any]) -> Any:
        if (given.get(steps) or 0) > 0:
            raise NotOurs(f"{steps.rpartition('.')[2]} counts")
        return value

    return As("trainer_common.optim.lr_warmup_ratio", convert)


ATTENTION = named(
    "model.attn",
    {name: name for name in ("eager", "sdpa", "flex_attention", "flash_attention_2")},
    "model.attn is auto, eager, sdpa, flex_attention or flash_attention_2",
)
SCHEDULER = named(
    "trainer_common.optim.lr_scheduler_type",
    {name: name for name in ("constant", "cosine", "linear")},
    "optim.lr_scheduler_type is constant, cosine or linear",
)


def trackers(value: Any, _: Mapping[str, Any]) -> list[str]:
    """Trackers that we have, too."""
    asked = [value] if isinstance(value, str) else list(value)
    found = [name for name in asked if name in ("console", "tensorboard", "wandb", "swanlab", "mlflow", "file")]
    if not found:
        raise NotOurs(f"trainer_common.logger has no {', '.join(map(str, asked)) or 'empty list'}: the default stays")
    return found
