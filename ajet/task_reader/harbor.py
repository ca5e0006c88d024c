"""`harbor`: tasks in Harbor's format, a folder each: `task.toml`, `instruction.md`, `tests/`, `environment/`.

A task says in its metadata which sandbox its episodes need (`sandbox`), which files the agent finds there (`folder`),
and how it is judged (`verifier`, read by `judge_type: harbor`). `solution/` is never read.
"""

from __future__ import annotations

import logging
import math
import posixpath
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ajet.schema.errors import ConfigError, TaskDataError
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader

log = logging.getLogger("ajet.task_reader")

SETTINGS, INSTRUCTION, TEST = "task.toml", "instruction.md", "tests/test.sh"
WORKDIR = "/app"
"""Where an agent works if neither `environment.workdir` nor a Dockerfile says."""
CONTAINERS = ("docker", "podman")
FOLLOWED = {
    "agent.timeout_sec", "verifier.timeout_sec", "verifier.env", "environment.docker_image", "environment.workdir",
    "environment.env", "environment.cpus", "environment.memory_mb", "environment.memory", "environment.storage_mb",
    "environment.storage", "environment.build_timeout_sec",
}  # fmt: skip
DESCRIBES = ("version", "schema_version", "task", "metadata", "solution")
"""What changes nothing for an agent."""
AS_IT_IS: Mapping[str, Any] = {
    "environment.allow_internet": False,
    "environment.network_mode": "no-network",
    "environment.gpus": 0,
    "environment.os": "linux",
}
"""What asks for what a sandbox does anyway."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_MB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


class _Recipe(NamedTuple):
    workdir: str | None
    copies: bool
    """It copies its folder into the working directory."""
    more: str
    """The first line that makes an image which is more than its base and that folder; empty if there is none."""


class HarborReader(BaseTaskReader):
    """Reads `training_path` and `validation_path`."""

    def get_training_tasks(self) -> list[Task]:
        path = self.reader_config.harbor.training_path
        if path is None:
            raise TaskDataError("ajet.task_reader.harbor.training_path is missing: name a folder of tasks")
        return self.read(Path(path))

    def get_validation_tasks(self) -> list[Task]:
        path = self.reader_config.harbor.validation_path
        return [] if path is None else self.read(Path(path))

    def read(self, path: Path) -> list[Task]:
        """All tasks in a folder, or the one that it is."""
        kind = self._sandbox_kind()
        parts = (SETTINGS, INSTRUCTION, TEST)
        places = [path, *sorted(path.iterdir())] if path.is_dir() else []
        folders = [place for place in places if any((place / part).is_file() for part in parts)]
        if not folders:
            raise TaskDataError(f"{path} contains no tasks: expected folders with {', '.join(parts)}")
        ignored: Counter[str] = Counter()
        longest = 0.0
        tasks = []
        for folder in folders:
            toml = _Toml.of(folder)
            tasks.append(_task(folder, toml, kind))
            ignored.update(toml.not_followed())
            longest = max(longest, toml.number("agent.timeout_sec") or 0.0)
        if longest > (limit := self.config.ajet.rollout.episode_timeout):
            ignored[f"agent.timeout_sec: {longest:g} (ajet.rollout.episode_timeout is {limit:g})"] = 1
        if ignored:
            listed = ", ".join(f"{name} ({count} ×)" if count > 1 else name for name, count in sorted(ignored.items()))
            log.warning("%s: %s tasks; not followed in task.toml: %s", path, len(tasks), listed)
        return tasks

    def _sandbox_kind(self) -> str:
        """The kind that episodes get. Raises `ConfigError` if Harbor's tasks can't be played in it, or judged."""
        ajet = self.config.ajet
        judge, sandbox = ajet.task_judge, ajet.rollout.sandbox
        if ajet.rollout.agent is not None and judge.judge_type == "customized_protocol" and not judge.judge_protocol:
            raise ConfigError(
                "ajet.task_reader.type: harbor: a task's tests give the reward: set ajet.task_judge.judge_type: harbor"
            )
        if sandbox is None or sandbox.kind not in ("bubblewrap", *CONTAINERS):
            found = "is not set" if sandbox is None else f"is {sandbox.kind}"
            raise ConfigError(
                f"ajet.rollout.sandbox {found}: Harbor's tasks name folders such as /app and /tests, which they have "
                "in `bubblewrap`, `docker` or `podman`"
            )
        return str(sandbox.kind)


class _Toml:
    """A task's settings, by dotted key."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file = file
        self._values = values

    @classmethod
    def of(cls, folder: Path) -> _Toml:
        """Read `task.toml`. Raises TaskDataError."""
        file = folder / SETTINGS
        try:
            content = tomllib.loads(_text(file))
        except tomllib.TOMLDecodeError as error:
            raise TaskDataError(f"{file} is not TOML: {error}") from None
        if (folder / "steps").is_dir() or "steps" in content:
            raise TaskDataError(f"{file}: a task of several steps can't be played: make a task of each step")
        return cls(file, dict(_flat(content)))

    def not_followed(self) -> Iterator[str]:
        """Keys that would change the task, and don't."""
        for key, value in self._values.items():
            if (
                key not in FOLLOWED
                and key.partition(".")[0] not in DESCRIBES
                and AS_IT_IS.get(key, value is None) != value
            ):
                yield key

    def error(self, key: str, expected: str) -> TaskDataError:
        return TaskDataError(f"{self.file}: {key}: expected {expected}, not {self._values[key]!r:.100}")

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(key, "a text")
        return value

    def number(self, key: str) -> float | None:
        """A number above 0, if it is there."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self.error(key, "a number above 0")
        return float(value)

    def megabytes(self, key: str, old_key: str) -> int | None:
        """A size: a number of MB, or, under its old key, a text such as 4G."""
        if (size := self.number(key)) is not None:
            return math.ceil(size)
        if (text := self.text(old_key)) is None:
            return None
        if (match := _SIZE.fullmatch(text.strip())) is None:
            raise self.error(old_key, "a size such as 512M or 4G")
        return math.ceil(float(match[1]) * _MB[match[2].upper()])

    def variables(self, key: str) -> dict[str, str]:
        value = self._values.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise self.error(key, "a table of texts")
        if taken := next((name for name, text in value.items() if "${" in text), None):
            raise self.error(key, f"texts: {taken} would be taken from this machine; write what it should be")
        return value


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values of a table and its sections. `env` stays one value."""
    for name, value in table.items():
        if isinstance(value, dict) and name != "env":
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _task(folder: Path, toml: _Toml, kind: str) -> Task:
    """One task, for a sandbox of this kind."""
    for part in (INSTRUCTION, TEST):
        if not (folder / part).is_file():
            raise TaskDataError(f"{folder / part} is missing: a task of Harbor's needs it")
    environment = folder / "environment"
    recipe = _recipe(environment / "Dockerfile")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (environment / name).is_file():
            raise TaskDataError(f"{environment / name}: a task of several containers can't be played")
    image = toml.text("environment.docker_image")
    if kind not in CONTAINERS:
        _check_needs_no_image(folder, image, recipe, kind)
        image = None
    elif image is None and recipe is not None:
        name = f"harbor-{folder.name.lower()}"
        raise TaskDataError(
            f"{environment / 'Dockerfile'} has not been built: {kind} build -t {name} {environment}, and write "
            f'docker_image = "{name}" below [environment] in {toml.file}'
        )
    sandbox = {
        "workspace": toml.text("environment.workdir") or (recipe.workdir if recipe is not None else None) or WORKDIR,
        "image": image,
        "cpus": toml.number("environment.cpus"),
        "memory_mb": toml.megabytes("environment.memory_mb", "environment.memory"),
        "disk_mb": toml.megabytes("environment.storage_mb", "environment.storage"),
        "environment": toml.variables("environment.env") or None,
    }
    verifier = {
        "folder": str((folder / TEST).parent.resolve()),
        "seconds": toml.number("verifier.timeout_sec"),
        "env": toml.variables("verifier.env"),
    }
    metadata: dict[str, Any] = {"sandbox": {key: value for key, value in sandbox.items() if value is not None}}
    metadata["verifier"] = verifier
    # an image that was built from a Dockerfile holds the files already
    brings_files = recipe is None if kind in CONTAINERS else recipe is None or recipe.copies
    if brings_files and environment.is_dir():
        metadata["folder"] = str(environment.resolve())
    return Task(main_query=_text(folder / INSTRUCTION).strip(), task_id=folder.name, metadata=metadata)


def _check_needs_no_image(folder: Path, image: str | None, recipe: _Recipe | None, kind: str) -> None:
    """Without containers, a base image is left out: the programs are this machine's. Raises TaskDataError."""
    if recipe is not None and recipe.more:
        where, why = folder / "environment/Dockerfile", f"it makes an image: {recipe.more}"
    elif recipe is None and image is not None:
        where, why = folder / SETTINGS, f"environment.docker_image is {image!r}"
    else:
        return
    raise TaskDataError(
        f"{where}: the task needs an image, and rollout.sandbox.kind: {kind} has none ({why})\n"
        "    expected no Dockerfile, or one of FROM, WORKDIR and `COPY . .`; for images, set "
        "rollout.sandbox.kind: docker, or podman"
    )


def _recipe(dockerfile: Path) -> _Recipe | None:
    if not dockerfile.is_file():
        return None
    workdir, copies, more, bases = None, False, "", 0
    for line in re.sub(r"\\\s*\n", " ", _text(dockerfile)).splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        does, given = words[0].upper(), words[1:]
        here = workdir or "/"
        bases += does == "FROM"
        if does == "WORKDIR" and len(given) == 1 and "$" not in given[0]:
            workdir = posixpath.normpath(posixpath.join(here, given[0].strip("\"'")))
        elif does == "COPY" and len(given) == 2 and posixpath.normpath(given[0]) == ".":
            copies = True
            if workdir is None or posixpath.normpath(posixpath.join(here, given[1])) != workdir:
                more = more or line.strip()
        elif does != "FROM" or bases > 1:
            more = more or line.strip()
    return _Recipe(workdir, copies, more)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskDataError(f"{file}: {error.strerror or error}: a task of Harbor's needs it") from None
    except UnicodeDecodeError as error:
        raise TaskDataError(f"{file} is not UTF-8 (byte {error.start + 1})") from None
