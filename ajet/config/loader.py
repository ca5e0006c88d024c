"""`load_config`: YAML file + command-line overrides → `Config`, or one readable `ConfigError`.

Layers: defaults ← YAML ← overrides; then interpolation, then types and ranges, then files, then contradictions.
Takes a fraction of a second, imports nothing heavy and runs nothing that the file names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ajet.config.contradictions import contradictions
from ajet.config.files import locate_files
from ajet.config.interpolation import InterpolationProblem, is_interpolated, resolve
from ajet.config.legacy import IGNORED_BLOCKS, notes
from ajet.config.nearest import nearest
from ajet.config.overrides import apply_overrides, parse_override
from ajet.config.problems import Problem, Sources, config_error, from_validation
from ajet.config.root import READ_YAML_NAME, AjetConfig, BackboneName, Config
from ajet.config.section import Section
from ajet.config.suggest import section_of
from ajet.config.yaml_source import read_yaml_file

log = logging.getLogger("ajet.config")


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, backbone: BackboneName | None = None, complete: bool = True
) -> Config:
    """The config of a run. `backbone` wins over the file's. `complete=False`: a workflow need not be named yet."""
    file = Path(path).expanduser()
    _, root = read_yaml_file(file)
    tree: dict[str, Any] = root.plain()
    sources = Sources(str(path), root, [parse_override(text, tree) for text in overrides])
    apply_overrides(tree, sources.overrides)
    ignored = {name: tree.pop(name) for name in IGNORED_BLOCKS if name in tree}
    _check_top(tree, sources)
    tree = _without_empty_groups(tree, Config)
    if is_interpolated(tree):
        tree = _interpolated(tree, sources)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise config_error(sources, from_validation(error, tree)) from None
    if config.ajet.experiment_name == READ_YAML_NAME:
        config.ajet.__dict__["experiment_name"] = file.stem
    if backbone is not None:
        config.ajet.backbone = backbone
    problems = list(_problems(config.ajet, file.resolve().parent, sources, complete))
    if problems:
        raise config_error(sources, problems)
    for note in notes(config.ajet, ignored):
        log.info("%s", note)
    config.remember_source(file.resolve())
    return config


def _problems(ajet: AjetConfig, folder: Path, sources: Sources, complete: bool) -> list[Problem]:
    """What is wrong beyond single values."""
    problems = list(locate_files(ajet, folder))
    for found in contradictions(ajet, ajet.backbone or "local"):
        paths = [("ajet", *key.split(".")) for key in found.keys]
        # blame what the user wrote rather than a default
        path = next((path for path in paths if sources.gives(path)), paths[0])
        problems.append(Problem(path, found.what, found.fix))
    if complete and ajet.rollout.user_workflow is None:
        fix = "name your workflow: `user_workflow: path/to/file.py->YourWorkflow`"
        problems.append(Problem(("ajet", "rollout", "user_workflow"), "is needed", fix))
    if complete:
        problems += _needed_for_reader(ajet)
    return problems


def _needed_for_reader(ajet: AjetConfig) -> list[Problem]:
    reader = ajet.task_reader
    path: tuple[str, ...] | None = None
    if reader.type in ("jsonl_dataset_file", "dataset_file") and reader.jsonl_dataset_file.training.file_path is None:
        path = ("ajet", "task_reader", "jsonl_dataset_file", "training", "file_path")
    if reader.type == "huggingface_dat_repo" and reader.huggingface_dat_repo.dataset_path is None:
        path = ("ajet", "task_reader", "huggingface_dat_repo", "dataset_path")
    if path is None:
        return []
    return [Problem(path, f"is needed by `task_reader.type: {reader.type}`", "name a file of tasks")]


def _check_top(tree: dict[str, Any], sources: Sources) -> None:
    """`ajet:` is there, and none of its groups stands beside it by mistake."""
    if not isinstance(tree.get("ajet"), dict | None):
        return  # types are checked later
    if "ajet" not in tree:
        names = [str(name) for name in tree]
        near = nearest("ajet", names)
        groups = [name for name in names if name in AjetConfig.model_fields]
        if near:
            problem = Problem((near,), "unknown block", "did you mean `ajet:`?")
        elif groups:
            problem = Problem((groups[0],), "stands at the top", "indent it, and put `ajet:` above it")
        else:
            problem = Problem((), "there is no `ajet:` block", "begin with `ajet:` and indent its groups below it")
        raise config_error(sources, [problem])
    for name, value in tree.items():
        field = AjetConfig.model_fields.get(str(name))
        section = section_of(field.annotation) if field else None
        if name in Config.model_fields or section is None or not isinstance(value, dict) or not value:
            continue
        if value.keys() <= section.model_fields.keys():
            fix = f"it belongs under `ajet:`: indent it to make it `ajet.{name}`"
            raise config_error(sources, [Problem((name,), "stands at the top, where it has no effect", fix)])


def _without_empty_groups(tree: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """A group with nothing under it (`debug:`) means its defaults."""
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


def _interpolated(tree: dict[str, Any], sources: Sources) -> dict[str, Any]:
    """The tree with its interpolations resolved. They may refer to defaults too."""
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
    """Of all resolved values, those the user gave."""
    if isinstance(resolved, dict) and isinstance(given, dict):
        return {key: _picked(resolved[key], value) for key, value in given.items()}
    return resolved
