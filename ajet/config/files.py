"""The files that a config names: looked up (see `ajet.schema.user_code`) and made absolute.

Only files that the run will use are looked up. A missing one is reported here, before anything heavy loads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ajet.config.keys import nearest
from ajet.config.problems import Problem
from ajet.config.root import AjetConfig
from ajet.config.section import Section
from ajet.config.sections import ModelConfig
from ajet.config.tasks import TaskJudgeConfig
from ajet.schema.errors import ImportPathError
from ajet.schema.user_code import find_file, find_named, holds, likely_places, looked_in, split_import_path

LONGEST_SHOWN = 300
HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
"""`name` or `owner/name`; anything with more slashes can only be a folder."""


def locate_files(ajet: AjetConfig, folder: Path) -> Iterator[Problem]:
    """Make relative file names absolute, and yield a problem for each file that isn't there."""
    yield from _import_path(ajet.rollout, "user_workflow", ("ajet", "rollout"), folder)
    world = ajet.rollout.environment
    if world is not None and "->" in (world.source or ""):
        yield from _import_path(world, "source", ("ajet", "rollout", "environment"), folder)
    if ajet.rollout.agent is not None and "->" in ajet.rollout.agent.type:
        yield from _import_path(ajet.rollout.agent, "type", ("ajet", "rollout", "agent"), folder)
    yield from _import_path(ajet.task_judge, "judge_protocol", ("ajet", "task_judge"), folder)
    yield from _judge_files(ajet.task_judge, folder)
    reader, place = ajet.task_reader, ("ajet", "task_reader")
    if "->" in reader.type:
        yield from _import_path(reader, "type", place, folder)
    if reader.type in ("jsonl_dataset_file", "dataset_file"):
        for split in ("training", "validation"):
            where = (*place, "jsonl_dataset_file", split)
            yield from _existing(reader.jsonl_dataset_file[split], "file_path", where, folder, Path.is_file)
    if reader.type == "huggingface_dat_repo":
        yield from _folder_or_hub(reader.huggingface_dat_repo, "dataset_path", (*place, "huggingface_dat_repo"), folder)
    if not ajet.model.path.startswith("tiny:"):
        yield from _model_folder(ajet.model, folder)
    for name, template in ajet.prompt_tuning.templates.items():
        if not isinstance(template, str):
            where = ("ajet", "prompt_tuning", "templates", name)
            yield from _existing(template, "file", where, folder, Path.is_file)
    for key in ("algorithm", "proposer"):
        if "->" in ajet.prompt_tuning[key]:
            yield from _import_path(ajet.prompt_tuning, key, ("ajet", "prompt_tuning"), folder)
    if ajet.rollout.engine == "scripted":
        yield from _existing(ajet.rollout, "scripted_replies", ("ajet", "rollout"), folder, Path.is_file)
    if ajet.trainer_common.resume not in ("auto", "never"):
        yield from _existing(ajet.trainer_common, "resume", ("ajet", "trainer_common"), folder, Path.is_dir)


def _judge_files(judge: TaskJudgeConfig, folder: Path) -> Iterator[Problem]:
    place = ("ajet", "task_judge")
    used: list[tuple[tuple[str, ...], str, Section]] = [(place, judge.judge_type, judge)]
    if judge.judge_type == "composite":
        for name, part in judge.parts.items():
            if "->" in part.judge:
                yield from _import_path(part, "judge", (*place, "parts", name), folder)
            used.append(((*place, "parts", name), part.judge, part))
    for where, kind, section in used:
        if kind == "llm_judge":
            own, at = _own_block(judge, section, kind, where)
            yield from _existing(own, "prompt_file", at, folder, Path.is_file)
        elif kind == "rubrics_auto_grader":
            own, at = _own_block(judge, section, kind, where)
            examples = own["jsonl_dataset_file"]
            for split in ("training", "validation"):
                at_split = (*at, "jsonl_dataset_file", split)
                yield from _existing(examples[split], "file_path", at_split, folder, Path.is_file)
            if own["rubrics_file"] is not None and (found := find_named(own["rubrics_file"], [folder], Path.is_file)):
                own.__dict__["rubrics_file"] = str(found)


def _own_block(
    judge: TaskJudgeConfig, section: Section, kind: str, where: tuple[str, ...]
) -> tuple[Section, tuple[str, ...]]:
    """A part's own block, or else the common one."""
    if section[kind] is not None:
        return section[kind], (*where, kind)
    return judge[kind], ("ajet", "task_judge", kind)


def _import_path(section: Section, key: str, place: tuple[str, ...], folder: Path) -> Iterator[Problem]:
    text = section[key]
    if text is None:
        return
    try:
        path = split_import_path(text)
        if path.is_file:
            section.__dict__[key] = f"{find_file(path.place, [folder])}->{path.name}"
    except ImportPathError as error:
        yield Problem((*place, key), str(error).partition(";")[0], str(error).partition("; ")[2])


def _existing(
    section: Section, key: str, place: tuple[str, ...], folder: Path, is_there: Callable[[Path], bool]
) -> Iterator[Problem]:
    text = section[key]
    if text is None:
        return
    if (found := find_named(text, [folder], is_there)) is not None:
        section.__dict__[key] = str(found)
        return
    candidates = likely_places(text, [folder])
    kind = "folder" if is_there == Path.is_dir else "file"
    present = [
        entry.name
        for candidate in candidates
        if holds(Path.is_dir, candidate.parent)
        for entry in candidate.parent.iterdir()
    ]
    given = Path(text).expanduser()
    near = nearest(given.name, present)
    fix = f"did you mean `{given.with_name(near)}`?" if near else f"looked in {looked_in(text, [folder])}"
    yield Problem((*place, key), f"no {kind} {_named(text)}", fix)


def _named(path: str) -> str:
    return repr(path) if len(path) <= LONGEST_SHOWN else f"{path[:LONGEST_SHOWN]!r}…"


def _model_folder(model: ModelConfig, folder: Path) -> Iterator[Problem]:
    """As `_folder_or_hub`; a folder has to hold a model."""
    problems = list(_folder_or_hub(model, "path", ("ajet", "model"), folder))
    yield from problems
    if problems or not (found := Path(model.path)).is_absolute() or holds(Path.is_file, found / "config.json"):
        return
    what = f"{model.path!r} holds no config.json" if found.is_dir() else f"{model.path!r} is not a folder"
    yield Problem(("ajet", "model", "path"), what, "name a model's folder in Hugging Face form, or a hub id")


def _folder_or_hub(section: Section, key: str, place: tuple[str, ...], folder: Path) -> Iterator[Problem]:
    """A local path, if it exists or looks like one; else a hub's id, which is looked up when it is used.

    What could be an id isn't looked up in the folders above: a folder there may bear a hub's name by chance.
    """
    text = section[key]
    if text is None:
        return
    is_id = bool(HUB_ID.match(text)) and not text.startswith((".", "~", "/"))
    near = next((place.resolve() for place in likely_places(text, [folder]) if holds(Path.exists, place)), None)
    if (found := near if is_id else find_named(text, [folder])) is not None:
        section.__dict__[key] = str(found)
    if is_id or found is not None:
        return
    yield Problem(
        (*place, key), f"no file or folder {_named(text)}", "write a path that exists, or a hub id such as `owner/name`"
    )
