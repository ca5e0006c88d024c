"""What the schema knows about its keys: where each belongs, what it allows, which one was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ajet.config.root import Config
from ajet.config.section import Section

Path = tuple[str, ...]
GROUP = "a group of keys"

PASS_THROUGH = {
    "ajet.rollout.vllm": "\nvLLM's other options go into `rollout.vllm.extra_args`",
    "ajet.trainer_common.fsdp_config": "\nverl's other keys go below `verl.actor_rollout_ref.actor.fsdp_config`, "
    "Trinity's below `trinity.trainer`",
    "ajet.trainer_common.optim": "\nverl's other keys go below `verl.actor_rollout_ref.actor.optim`, "
    "Trinity's below `trinity.algorithm.optimizer`",
}
"""Groups whose further keys belong to another program, and where those go."""


def nearest(name: str, present: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of the names in `present`, if any is similar enough. Ignores case, and `-` or `_`."""
    folded = {key.lower().replace("-", "_"): key for key in reversed(list(present))}
    found = get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=cutoff)
    return folded[found[0]] if found else None


class KnownKey(NamedTuple):
    """One key of the schema."""

    path: Path
    field: FieldInfo
    section: type[Section] | None
    """The class of its keys, if it is a group."""

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def doc(self) -> str:
        """The first sentence of its documentation; of a group without any, of its class's."""
        return _first_sentence(self.field.description or self.about)

    @property
    def about(self) -> str:
        """What a group's class says of it, without the group's name that it begins with."""
        text = " ".join(((self.section and self.section.__doc__) or "").split())
        text = text.partition(": ")[2] or text
        return text[:1].upper() + text[1:]


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ")[0].rstrip(".")


def section_of(annotation: Any) -> type[Section] | None:
    """The `Section` class in a field's type, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((section for part in get_args(annotation) if (section := section_of(part))), None)
    return None


def walk(section: type[Section] = Config, path: Path = ()) -> Iterator[KnownKey]:
    """Every key under a section, groups before their keys."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        yield KnownKey((*path, name), field, inner)
        if inner is not None:
            yield from walk(inner, (*path, name))


@cache
def known_keys() -> dict[Path, KnownKey]:
    """Every key of the schema by its path."""
    return {key.path: key for key in walk()}


def where_it_belongs(path: tuple[Any, ...]) -> str:
    """Say of an unknown path which key was probably meant, or which ones there are."""
    names = tuple(str(part) for part in path)
    parent, last = names[:-1], names[-1]
    siblings = {key.path[-1]: key for key in known_keys().values() if key.path[:-1] == parent}
    ours = [key for key in known_keys().values() if key.path[0] == "ajet" and len(key.path) > 1]
    if parent not in known_keys() and (own := keys_of(parent)):
        meant = nearest(last, own)
        return f"did you mean `{'.'.join((*parent, meant))}`?" if meant else f"its keys: {', '.join(own)}"
    if elsewhere := [key for key in ours if key.path[-1] == last]:
        best = min(elsewhere, key=lambda key: len(key.path))
        return f"`{last}` belongs in `{'.'.join(best.path[:-1])}`: write `{best.dotted}`\n{best.doc}"
    if (near := nearest(last, siblings)) is not None:
        return _did_you_mean(siblings[near])
    by_name = {key.path[-1]: key for key in reversed(ours)}
    if (far := nearest(last, by_name, cutoff=0.7)) is not None:
        return _did_you_mean(by_name[far])
    place = ".".join(parent) or "the top level"
    if not siblings:
        return f"there is no `{place}`"
    return f"the keys of `{place}`: {', '.join(siblings)}" + PASS_THROUGH.get(place, "")


def keys_of(path: Path) -> list[str]:
    """The keys of a group, also of one below a name that is the user's own, such as a service."""
    fragment = fragment_at(path)
    options = [fragment, *fragment.get("anyOf", [])] if fragment else []
    return [name for option in options for name in _dereferenced(option).get("properties", {})]


def _did_you_mean(key: KnownKey) -> str:
    return f"did you mean `{key.dotted}`?\n{key.doc}"


@cache
def json_schema() -> dict[str, Any]:
    """The JSON schema of a whole file."""
    schema = Config.model_json_schema()
    groups = {key.section.__name__: key for key in walk() if key.section is not None}
    for definition in (schema, *schema["$defs"].values()):
        for fragment in definition["properties"].values():
            if "description" not in fragment and (key := groups.get(fragment.get("$ref", "").rpartition("/")[2])):
                fragment["description"] = f"{_first_sentence(key.about)}."
    return schema


def fragment_at(path: tuple[Any, ...]) -> dict[str, Any] | None:
    """The JSON schema of one key."""
    fragment: dict[str, Any] | None = json_schema()
    for part in path:
        fragment = _step(fragment, part) if fragment is not None else None
    return fragment


def _dereferenced(fragment: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in fragment:
        return fragment
    target: dict[str, Any] = json_schema()["$defs"][fragment["$ref"].rpartition("/")[2]]
    return {**target, **{key: value for key, value in fragment.items() if key != "$ref"}}


def _step(fragment: dict[str, Any], part: Any) -> dict[str, Any] | None:
    fragment = _dereferenced(fragment)
    for option in fragment.get("anyOf", []):
        if (found := _step(option, part)) is not None:
            return found
    if isinstance(part, int):
        items: dict[str, Any] | None = fragment.get("items")
        return items
    inner: dict[str, Any] | None = fragment.get("properties", {}).get(part)
    if inner is None:  # a mapping whose names are the user's own
        named = [fragment.get("additionalProperties"), *fragment.get("patternProperties", {}).values()]
        inner = next((each for each in named if isinstance(each, dict)), None)
    return inner


def allowed(fragment: dict[str, Any]) -> str:
    """What a key takes, in words."""
    words = list(dict.fromkeys(kinds(fragment)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def kinds(fragment: dict[str, Any]) -> list[str]:
    """Each kind of value that a key takes."""
    fragment = _dereferenced(fragment)
    if "anyOf" in fragment:
        options = fragment["anyOf"]
        single = {kind for one in options if "items" not in one for kind in kinds(one)}
        return [kind for one in options for kind in _or_list_of_them(one, single)]
    if "const" in fragment:
        return [f"`{fragment['const']}`"]
    if fragment.get("pattern") == "->":
        return [f"`{fragment['description']}`"]
    if "enum" in fragment:
        return [f"`{value}`" for value in fragment["enum"]]
    kind = fragment.get("type")
    if kind in ("integer", "number"):
        return [("a whole number" if kind == "integer" else "a number") + _bounds(fragment)]
    if kind == "array":
        return [_list_words(fragment)]
    words = {"boolean": "true or false", "string": "text", "null": "null", "object": GROUP}
    return [words.get(str(kind), "anything")]


def _or_list_of_them(fragment: dict[str, Any], single: set[str]) -> list[str]:
    items = fragment.get("items")
    return ["a list of them"] if items and single.issuperset(kinds(items)) else kinds(fragment)


def _list_words(fragment: dict[str, Any]) -> str:
    """A list, by what its items may be and how many there must be."""
    if not fragment.get("items"):
        return "a list"
    count = fragment.get("minItems")
    if count is not None and count == fragment.get("maxItems"):
        return f"a list of {count} values, each {allowed(fragment['items'])}"
    return f"a list of {allowed(fragment['items'])}"


def choices(fragment: dict[str, Any]) -> list[str]:
    """The fixed words that a key takes."""
    fragment = _dereferenced(fragment)
    inner = [choice for option in fragment.get("anyOf", []) for choice in choices(option)]
    items = choices(fragment["items"]) if isinstance(fragment.get("items"), dict) else []
    own = [*fragment.get("enum", []), *([fragment["const"]] if "const" in fragment else [])]
    return list(dict.fromkeys((*map(str, own), *inner, *items)))


def _bounds(fragment: dict[str, Any]) -> str:
    low, high = fragment.get("minimum"), fragment.get("maximum")
    above, below = fragment.get("exclusiveMinimum"), fragment.get("exclusiveMaximum")
    parts = [
        f"{word} {bound:g}"
        for word, bound in (("at least", low), ("above", above), ("at most", high), ("below", below))
        if bound is not None
    ]
    return f" ({' and '.join(parts)})" if parts else ""


SHORT_NAMES = {
    "model": "model.path",
    "backbone": "backbone",
    "n_gpu": "trainer_common.n_gpus_per_node",
    "num_repeat": "rollout.num_repeat",
    "batch_size": "data.train_batch_size",
    "lr": "trainer_common.optim.lr",
    "algorithm": "trainer_common.algorithm.adv_estimator",
}
TRAINER_NAMES = SHORT_NAMES | {
    "name": "experiment_name",
    "project": "project_name",
    "n_runners": "rollout.max_env_worker",
    "steps": "trainer_common.total_training_steps",
    "epochs": "trainer_common.total_epochs",
    "engine": "rollout.engine",
    "temperature": "rollout.temperature",
    "judge": "task_judge.judge_protocol",
    "seed": "rollout.seed",
    "logger": "trainer_common.logger",
}
"""Keyword arguments of `Trainer`, and the keys that they set."""
JOB_NAMES = SHORT_NAMES | {
    "project_name": "project_name",
    "experiment_name": "experiment_name",
    "experiment_dir": "experiment_dir",
    "logging": "trainer_common.logger",
    "grpo_n": "rollout.num_repeat",
    "max_env_worker": "rollout.max_env_worker",
}
"""Arguments of `AgentJetJob`, and the keys that they set."""
