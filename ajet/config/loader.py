"""`load_config`: YAML file + command-line overrides → `Config`, or one readable `ConfigError`.

Layers: defaults ← YAML ← overrides; then interpolation, types and ranges, files, and contradictions. Loading takes a
fraction of a second, imports nothing heavy and runs nothing that the file names. `make_config` builds a config from
Python, for notebooks and tests.

Overrides have the form `rollout.num_repeat=8`: keys in full or short form, values as YAML reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ajet.config.contradictions import contradictions
from ajet.config.effects import IGNORED_BLOCKS, left_to_recipe, value_at
from ajet.config.interpolation import InterpolationProblem, is_interpolated, resolve
from ajet.config.keys import known_keys, nearest, section_of, where_it_belongs
from ajet.config.kinds import BackboneName
from ajet.config.old_keys import Translated, is_old, translate
from ajet.config.problems import COMMAND_LINE, KeyPath, Override, Problem, Sources, config_error, from_validation
from ajet.config.root import READ_YAML_NAME, AjetConfig, Config
from ajet.config.section import Section
from ajet.config.tasks import TaskJudgeConfig
from ajet.config.yaml_source import Unfilled, parse_value, read_yaml_file
from ajet.schema.errors import ConfigError, ImportPathError
from ajet.schema.printable import encodable, printable
from ajet.schema.user_code import find_file, find_named, holds, likely_places, looked_in, neighbours, split_import_path

HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
"""`name` or `owner/name`; anything with more slashes can only be a folder."""


def locate_files(ajet: AjetConfig, folder: Path) -> Iterator[Problem]:
    """Make relative file names absolute, and yield a problem for each file that isn't there."""
    for key in OWN_CODE:
        yield from _import_path(ajet, tuple(key.split(".")), folder)
    for path, is_there in _files_in_use(ajet):
        yield from _existing(ajet, path, folder, is_there)
    for kind, block in _judges_in_use(ajet.task_judge):
        if kind == "llm_judge":
            yield from _existing(ajet, (*block, "prompt_file"), folder, Path.is_file)
        elif kind == "rubrics_auto_grader":
            for split in SPLITS:
                yield from _existing(ajet, (*block, "jsonl_dataset_file", split, "file_path"), folder, Path.is_file)
            rubrics = value_at(ajet, (*block, "rubrics_file"))  # written if missing
            if rubrics is not None and (found := find_named(rubrics, [folder], Path.is_file)):
                _put(ajet, (*block, "rubrics_file"), str(found))
    if ajet.task_judge.judge_type == "composite":
        for name in ajet.task_judge.parts:
            yield from _import_path(ajet, ("task_judge", "parts", name, "judge"), folder)
    if ajet.task_reader.type == "huggingface_dat_repo":
        yield from _folder_or_hub(ajet, ("task_reader", "huggingface_dat_repo", "dataset_path"), folder)
    for path in (("model", "path"), ("trainer_common", "algorithm", "distillation", "teacher")):
        yield from _model_folder(ajet, path, folder)


OWN_CODE = (
    "rollout.user_workflow",
    "rollout.environment.source",
    "rollout.agent.type",
    "task_judge.judge_protocol",
    "task_reader.type",
    "trainer_common.algorithm.adv_estimator",
    "trainer_common.algorithm.policy_loss",
    "prompt_tuning.algorithm",
    "prompt_tuning.proposer",
)
"""Keys that may name the user's own code."""
SPLITS = ("training", "validation")


def _files_in_use(ajet: AjetConfig) -> Iterator[tuple[KeyPath, Callable[[Path], bool]]]:
    """Each key that names a file or folder of the kinds that this run uses."""
    reader = ajet.task_reader.type
    if reader in ("jsonl_dataset_file", "dataset_file"):
        for split in SPLITS:
            yield ("task_reader", "jsonl_dataset_file", split, "file_path"), Path.is_file
    if reader == "harbor":
        for split in SPLITS:
            yield ("task_reader", "harbor", f"{split}_path"), Path.is_dir
    for name, template in ajet.prompt_tuning.templates.items():
        if not isinstance(template, str):
            yield ("prompt_tuning", "templates", name, "file"), Path.is_file
    if ajet.rollout.engine == "scripted":
        yield ("rollout", "scripted_replies"), Path.is_file
    if ajet.trainer_common.resume not in ("auto", "never"):
        yield ("trainer_common", "resume"), Path.is_dir


def _judges_in_use(judge: TaskJudgeConfig) -> Iterator[tuple[str, KeyPath]]:
    """The kind of each judge, and where its settings are: in the part's own block, or else in the common one."""
    yield judge.judge_type, ("task_judge", judge.judge_type)
    if judge.judge_type == "composite":
        for name, part in judge.parts.items():
            above = ("parts", name) if part.get(part.judge) is not None else ()
            yield part.judge, ("task_judge", *above, part.judge)


def _put(ajet: AjetConfig, path: KeyPath, value: Any) -> None:
    """Set what a key stands for. It still counts as given by the user, or not, as before."""
    value_at(ajet, path[:-1]).__dict__[path[-1]] = value


def _import_path(ajet: AjetConfig, path: KeyPath, folder: Path) -> Iterator[Problem]:
    text = value_at(ajet, path)
    if text is None or ("->" not in text and path[-1] not in ("user_workflow", "judge_protocol")):
        return
    try:
        named = split_import_path(text)
        if named.is_file:
            _put(ajet, path, f"{find_file(named.place, [folder])}->{named.name}")
    except ImportPathError as error:
        yield Problem(("ajet", *path), str(error).partition(";")[0], str(error).partition("; ")[2])


def _existing(ajet: AjetConfig, path: KeyPath, folder: Path, is_there: Callable[[Path], bool]) -> Iterator[Problem]:
    if (text := value_at(ajet, path)) is None:
        return
    if (found := find_named(text, [folder], is_there)) is not None:
        _put(ajet, path, str(found))
        return
    kind = "folder" if is_there == Path.is_dir else "file"
    given = Path(os.path.expanduser(text))
    near = nearest(given.name, neighbours(text, [folder], is_there))
    fix = f"did you mean `{given.with_name(near)}`?" if near else f"looked in {looked_in(text, [folder])}"
    if find_named(text, [folder]) is not None:
        fix = "it is a folder: name a file in it" if kind == "file" else "name the folder, not a file"
    yield Problem(("ajet", *path), f"no {kind} {text!r:.300}", fix)


def _model_folder(ajet: AjetConfig, path: KeyPath, folder: Path) -> Iterator[Problem]:
    """As `_folder_or_hub`; a folder has to hold a model."""
    text = value_at(ajet, path)
    if text is None or text.startswith("tiny:") or (path[-1] == "teacher" and "://" in text):  # a server's address
        return
    yield from (problems := list(_folder_or_hub(ajet, path, folder)))
    text = value_at(ajet, path)
    if problems or not (found := Path(text)).is_absolute():
        return
    what, fix = f"{text!r} is not a folder", "name a model's folder in Hugging Face form, or a hub id"
    if holds(Path.is_file, found / "adapter_config.json"):
        what = f"{text!r} holds a LoRA adapter, not a model"
        fix = "merge it into its base model first (peft: merge_and_unload, then save_pretrained), and name that folder"
    elif holds(Path.is_file, found / "config.json"):
        return
    elif found.is_dir():
        what = f"{text!r} holds no config.json"
        if copies := sorted(found.glob("snapshots/*/config.json")):  # of the hub's cache
            fix = f"name {str(copies[-1].parent)!r}"
        elif any(found.glob("*.gguf")):
            what, fix = f"{what}, only GGUF", "name the model that it was made from, in Hugging Face form"
    yield Problem(("ajet", *path), what, fix)


def _folder_or_hub(ajet: AjetConfig, path: KeyPath, folder: Path) -> Iterator[Problem]:
    """A local path, if it exists or looks like one; else a hub's id, which is looked up when it is used.

    What could be an id isn't looked up in the folders above: a folder there may bear a hub's name by chance.
    """
    if (text := value_at(ajet, path)) is None:
        return
    is_id = bool(HUB_ID.match(text)) and not text.startswith((".", "~", "/"))
    near = next((place.resolve() for place in likely_places(text, [folder]) if holds(Path.exists, place)), None)
    if (found := near if is_id else find_named(text, [folder])) is not None:
        _put(ajet, path, str(found))
    elif not is_id:
        fix = "write a path that exists, or a hub id such as `owner/name`"
        yield Problem(("ajet", *path), f"no file or folder {text!r:.300}", fix)


OVERRIDE = re.compile(r"^(?P<new>\+{0,2})(?P<key>[^=\s]+)=(?P<value>.*)$", re.DOTALL)


def load_config(
    path: str | Path,
    overrides: Sequence[str | tuple[str, Any]] = (),
    *,
    backbone: BackboneName | None = None,
    complete: bool = True,
    overrides_from: str = COMMAND_LINE,
) -> Config:
    """The config of a run. An override is a text, or from a program a key and its value. `backbone` overrides the
    file's. `complete=False`: a workflow need not be named yet. `overrides_from`: what errors say of where the overrides
    are from."""
    file = Path(os.path.expanduser(path))
    root = read_yaml_file(file)
    tree: dict[str, Any] = root.plain()
    sources = Sources(str(path), root, [parse_override(each, tree, overrides_from) for each in overrides])
    apply_overrides(tree, sources.overrides)
    ignored = [name for name in IGNORED_BLOCKS if name in tree]
    for name in ignored:
        del tree[name]
    _check_top(tree, sources)
    tree = _without_empty_groups(tree, Config)
    if unfilled := list(_unfilled(tree)):
        raise config_error(sources, unfilled)
    if is_interpolated(tree):
        tree = _interpolated(tree, sources)
    old_keys = translate(tree)
    old_keys.ignored_blocks = ignored
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        found = [problem._replace(path=old_keys.written(problem.path)) for problem in from_validation(error, tree)]
        raise config_error(sources, found) from None
    if config.ajet.experiment_name == READ_YAML_NAME:
        config.ajet.__dict__["experiment_name"] = file.stem
    if backbone is not None:
        config.ajet.backbone = backbone
    apply_recipe(config.ajet)
    problems = list(_problems(config.ajet, file.resolve().parent, sources, old_keys, complete))
    if problems:
        raise config_error(sources, problems)
    config.remember_source(file.resolve(), old_keys)
    return config


def make_config(overrides: dict[str, Any] | None = None, /, **blocks: Any) -> Config:
    """The defaults, with overrides such as `{"rollout.num_repeat": 2}` (keys as on the command line).

    Keyword arguments are the user's own top-level blocks. Types and ranges are checked; files aren't.
    """
    tree: dict[str, Any] = {"ajet": {}, **blocks}
    for key, value in (overrides or {}).items():
        parts = key.removeprefix("ajet.").split(".")
        place = tree["ajet"]
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    old_keys = translate(tree)
    config = Config.model_validate(tree)
    config.remember_source(None, old_keys)
    apply_recipe(config.ajet)
    return config


def apply_recipe(ajet: AjetConfig) -> None:
    """Give what the recipe sets to the keys that the user doesn't. They still count as not given."""
    for key, value in left_to_recipe(ajet).items():
        _put(ajet, tuple(key.split(".")), value)


def _problems(ajet: AjetConfig, folder: Path, sources: Sources, old_keys: Translated, complete: bool) -> list[Problem]:
    """What is wrong with the config as a whole, each value being valid."""
    problems = [problem._replace(path=old_keys.written(problem.path)) for problem in locate_files(ajet, folder)]
    for found in contradictions(ajet, ajet.backbone or "local"):
        paths = [("ajet", *key.split(".")) for key in found.keys]
        # blame what the user wrote rather than a default
        path = next((path for path in map(old_keys.written, paths) if sources.gives(path)), paths[0])
        problems.append(Problem(path, found.what, found.fix))
    remote = ajet.task_runner.wrapper_type in ("remote", "outside")  # others have it
    if complete and ajet.rollout.user_workflow is None and ajet.rollout.agent is None and not remote:
        fix = (
            "name your workflow: `user_workflow: path/to/file.py->YourWorkflow`\n"
            "or a ready agent: `agent: {type: react, tools: [calculator]}`"
        )
        problems.append(Problem(("ajet", "rollout", "user_workflow"), "is needed", fix))
    if complete:
        problems += _needed_for_reader(ajet)
    return problems


NEEDED_BY_READER = {
    "jsonl_dataset_file": ("jsonl_dataset_file.training.file_path", "name a file of tasks"),
    "dataset_file": ("jsonl_dataset_file.training.file_path", "name a file of tasks"),
    "huggingface_dat_repo": ("huggingface_dat_repo.dataset_path", "name a file of tasks"),
    "harbor": ("harbor.training_path", "name a folder of tasks"),
    "env_service": ("env_service.env_url", "write http://host:port"),
}
"""`task_reader.type` → the key below `task_reader` without which it has no tasks, and what to do."""


def _needed_for_reader(ajet: AjetConfig) -> Iterator[Problem]:
    kind = ajet.task_reader.type
    if kind not in NEEDED_BY_READER or ajet.task_runner.wrapper_type == "outside":
        return
    key, fix = NEEDED_BY_READER[kind]
    path = ("task_reader", *key.split("."))
    if not value_at(ajet, path):
        yield Problem(("ajet", *path), f"is needed by `task_reader.type: {kind}`", fix)


def _check_top(tree: dict[str, Any], sources: Sources) -> None:
    """Check that there is an `ajet:` block, and none of its groups beside it."""
    if not isinstance(tree.get("ajet"), dict | None):
        return  # its type is checked later
    if "ajet" not in tree:
        names = [str(name) for name in tree]
        near = nearest("ajet", names)
        groups = [name for name in names if name in AjetConfig.model_fields]
        if near:
            problem = Problem((near,), "unknown block", "did you mean `ajet:`?")
        elif groups:
            problem = Problem((groups[0],), "is at the top level", "indent it, and put `ajet:` above it")
        else:
            problem = Problem((), "there is no `ajet:` block", "begin with `ajet:` and indent its groups below it")
        raise config_error(sources, [problem])
    for name, value in tree.items():
        field = AjetConfig.model_fields.get(str(name))
        section = section_of(field.annotation) if field else None
        if name in Config.model_fields or section is None or not isinstance(value, dict) or not value:
            continue
        if not value.keys().isdisjoint(section.model_fields):
            fix = f"it belongs under `ajet:`: indent it to make it `ajet.{name}`"
            raise config_error(sources, [Problem((name,), "is at the top level, where it has no effect", fix)])


def _without_empty_groups(tree: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """A group with nothing under it (`debug:`) stands for its defaults."""
    kept = {}
    for key, value in tree.items():
        field = section.model_fields.get(key) if isinstance(key, str) else None
        inner = section_of(field.annotation) if field else None
        if (
            field is not None
            and value is None
            and isinstance(field.get_default(call_default_factory=True), dict | Section)
        ):
            continue
        kept[key] = _without_empty_groups(value, inner) if inner and isinstance(value, dict) else value
    return kept


def _unfilled(tree: dict[Any, Any] | list[Any], above: tuple[Any, ...] = ()) -> Iterator[Problem]:
    """A problem for each place of a template that neither a program nor an override has filled."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        path = (*above, key)
        if isinstance(value, dict | list):
            yield from _unfilled(value, path)
        elif isinstance(value, Unfilled):
            key = ".".join(map(str, path)).removeprefix("ajet.")
            fix = f"write a value in its place, or add `{key}=…` to the command"
            yield Problem(path, f"{value} stands for a value that nothing has filled in", fix)


def _interpolated(tree: dict[str, Any], sources: Sources) -> dict[str, Any]:
    """The tree with its interpolations resolved. They may also refer to defaults."""
    layered = _layered(Config().model_dump(), tree)
    if isinstance(layered.get("ajet"), dict) and layered["ajet"].get("experiment_name") == READ_YAML_NAME:
        layered["ajet"]["experiment_name"] = Path(sources.name).stem
    try:
        resolved = resolve(layered)
    except InterpolationProblem as problem:
        fix = "`${a.b.c}` refers to a key, `${oc.env:NAME,default}` to an environment variable"
        raise config_error(sources, [Problem(problem.path, str(problem), fix)]) from None
    picked = _picked(resolved, tree)
    assert isinstance(picked, dict)
    return picked


def _layered(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _layered(below.get(key), value) for key, value in above.items()}}
    return above


def _picked(resolved: Any, given: Any) -> Any:
    """Pick the resolved values of the keys that the user gave."""
    if isinstance(resolved, dict) and isinstance(given, dict):
        return {key: _picked(resolved[key], value) for key, value in given.items()}
    return resolved


def parse_override(given: str | tuple[str, Any], tree: dict[str, Any], source: str = COMMAND_LINE) -> Override:
    """Parse one argument. `tree` is the YAML, which tells the user's own blocks."""
    text = given if isinstance(given, str) else f"{given[0]}={given[1]}"
    if encodable(text) != text:
        raise ConfigError(f"{source}: {printable(text)!r} isn't UTF-8 text\n    check the terminal's encoding")
    match = OVERRIDE.match(text)
    if match is None or not all(match["key"].split(".")):
        raise ConfigError(f"{source}: {text!r} isn't an override\n    write `key=value`, e.g. rollout.num_repeat=8")
    try:
        path = _full_path(text, tuple(match["key"].split(".")), bool(match["new"]), tree)
        return Override(text, path, _value(match["value"]) if isinstance(given, str) else given[1], source)
    except ConfigError as error:
        raise ConfigError(f"{source}: {text}: {error}") from None


def _value(value: str) -> Any:
    if value.lstrip().startswith("!!"):
        raise ConfigError("tags are not allowed\n    give the plain value")
    try:
        parsed = parse_value(value, "value")
    except ConfigError:
        if value.lstrip()[:1] in "[{":  # meant as a list or mapping: as text it would fail later, and less clearly
            raise ConfigError("not a YAML value\n    close its quotes and brackets") from None
        return value
    return value if isinstance(parsed, dict) and not value.lstrip().startswith("{") else parsed


def _full_path(text: str, path: tuple[str, ...], new: bool, tree: dict[str, Any]) -> tuple[str, ...]:
    """`rollout.x` means `ajet.rollout.x`; any other first name is a top-level block."""
    first = path[0]
    if first in Config.model_fields or first in IGNORED_BLOCKS:
        return path
    if is_old(path) and first not in tree:
        return ("ajet", *path)
    if first in AjetConfig.model_fields and (("ajet", *path) in known_keys() or first not in tree):
        return ("ajet", *path)
    if first in tree or new:
        return path
    own = [name for name in tree if name not in Config.model_fields and name not in IGNORED_BLOCKS]
    near = nearest(first, [*AjetConfig.model_fields, *map(str, own)], cutoff=0.75)
    if near is None:
        hint = "\n" + where_it_belongs(("ajet", *path))
    else:
        hint = f"\ndid you mean `{'.'.join((near, *path[1:]))}`?"
    hint += f"\n(to add a block of your own: +{text})"
    raise ConfigError(f"unknown key `{'.'.join(path)}`" + hint.replace("\n", "\n    "))


def apply_overrides(tree: dict[str, Any], overrides: list[Override]) -> None:
    """Set each override's value in `tree`."""
    for override in overrides:
        place = tree
        for depth, part in enumerate(override.path[:-1], start=1):
            inner = place.get(part)
            if inner is None:
                inner = place[part] = {}
            if not isinstance(inner, dict):
                above = ".".join(override.path[:depth])
                raise ConfigError(
                    f"{override.source}: {override.text}: `{above}` is {inner!r} and has no keys under it"
                )
            place = inner
        place[override.path[-1]] = override.value
