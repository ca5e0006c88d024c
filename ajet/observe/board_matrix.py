"""The matrix of `ajet bench`: which runs a YAML file asks for, and which of their figures it holds to a band.

A row is a config with overrides, each of its seeds a cell. `variants` make a row of each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ajet.config.keys import nearest
from ajet.config.kinds import BACKBONES
from ajet.config.yaml_source import YamlNode, read_yaml_file
from ajet.observe.experiment import OWN_FOLDER
from ajet.schema import __version__
from ajet.schema.errors import ConfigError
from ajet.schema.user_code import find_named, looked_in

SEEDS = ("rollout.seed", "trainer_common.seed", "task_reader.seed")
"""The keys that a cell's seed sets."""
FIGURES = (
    "start", "end", "gain", "steps_to_80", "steps", "tokens", "seconds", "cpu_seconds", "memory_mib", "sampler_gap",
    "sampler_kl",
)  # fmt: skip
"""What a record says of a run, in figures. A band may also name a metric (`val/success`): its last value counts."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
ROW_KEYS = (
    "name", "title", "conf", "backbone", "overrides", "variants", "seeds", "band", "cold_start", "prepare",
)  # fmt: skip

Overrides = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StartingRun:
    """A run that comes before a row's cells: they start from its weights."""

    named: str
    """The config as the matrix names it."""
    conf: Path
    overrides: Overrides = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"cold_start-{self.conf.parent.name}-{_digest([self.identity(), __version__])[:8]}"

    def identity(self) -> list[Any]:
        return [self.conf.read_text(encoding="utf-8"), self.overrides]


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """A config with overrides, of which each seed is a cell."""

    name: str
    title: str
    named: str
    """The config as the matrix names it."""
    conf: Path
    backbone: str
    overrides: Overrides
    seeds: tuple[int, ...]
    band: Mapping[str, tuple[float | None, float | None]]
    cold_start: StartingRun | None = None
    prepare: Path | None = None
    """A Python program that makes the data."""

    def cells(self) -> list[MatrixCell]:
        return [MatrixCell(self, seed) for seed in self.seeds]


class MatrixCell(NamedTuple):
    """One run of the matrix."""

    row: MatrixRow
    seed: int

    @property
    def name(self) -> str:
        return f"{self.row.name}-{self.seed}"

    def overrides(self) -> Overrides:
        return {**self.row.overrides, **dict.fromkeys(SEEDS, self.seed)}

    def fingerprint(self) -> str:
        """What the cell's result may depend on that its row can change, and the version of ajet."""
        row = self.row
        before = row.cold_start.identity() if row.cold_start else None
        text = row.conf.read_text(encoding="utf-8")
        return _digest([text, row.backbone, self.overrides(), before, __version__])[:16]

    def folder(self, runs: Path) -> Path:
        """The experiment that its run writes."""
        backbone = self.row.backbone
        return runs / (f"{self.name}-{backbone}" if backbone in OWN_FOLDER else self.name)


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def words(overrides: Overrides) -> list[str]:
    """Overrides as the command line takes them."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in overrides.items()]


# ---------------------------------------------------------------- the matrix


def read_matrix(path: Path) -> list[MatrixRow]:
    """The rows of a matrix, each variant a row. Raises ConfigError with file and line."""
    root = read_yaml_file(path, "a `rows:` list")
    reading = _MatrixReader(path)
    reading.known(root, ("rows", "overrides"), "the matrix")
    common = reading.overrides(root, "overrides")
    listed = root.value.get("rows")
    if listed is None or not isinstance(listed.value, list) or not listed.value:
        reading.wrong(root.line_of(("rows",)), "rows: a list of rows is needed, each with `name` and `conf`")
    rows = [row for node in listed.value for row in reading.rows(node, common)]
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            reading.wrong(root.line_of(("rows",)), f"two rows are called {name!r}: give each a name")
    return rows


class _MatrixReader:
    """Checks a matrix file; errors name its line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, line: int, text: str) -> NoReturn:
        raise ConfigError(f"{self.path}:{line}: {text}")

    def known(self, node: YamlNode, keys: Sequence[str], what: str) -> None:
        if not isinstance(node.value, dict):
            self.wrong(node.line, f"{what} is not a mapping: its keys are {', '.join(keys)}")
        for key in node.value:
            if key not in keys:
                near = nearest(str(key), keys)
                fix = f"did you mean `{near}`?" if near else f"known: {', '.join(keys)}"
                self.wrong(node.key_lines[key], f"{key}: unknown key of {what}\n    {fix}")

    def rows(self, node: YamlNode, common: Overrides) -> Iterator[MatrixRow]:
        self.known(node, ROW_KEYS, "a row")
        name = self.text(node, "name")
        if not NAME.fullmatch(name):
            self.wrong(node.line_of(("name",)), f"name: {name!r}: write small letters, digits, _ and -, as for a file")
        title = self.text(node, "title", name.replace("_", " "))
        backbone = self.text(node, "backbone", "local")
        if backbone not in BACKBONES:
            fix = f"known: {', '.join(BACKBONES)}"
            self.wrong(node.line_of(("backbone",)), f"backbone: {backbone!r} is unknown\n    {fix}")
        base = MatrixRow(
            name=name,
            title=title,
            named=self.text(node, "conf"),
            conf=self.file(node, "conf"),
            backbone=backbone,
            overrides={**common, **self.overrides(node, "overrides")},
            seeds=self.seeds(node),
            band=self.band(node),
            cold_start=self.cold_start(node),
            prepare=self.file(node, "prepare") if "prepare" in node.value else None,
        )
        variants = node.value.get("variants")
        if variants is None:
            yield base
            return
        if not isinstance(variants.value, dict) or not variants.value:
            self.wrong(variants.line, "variants: write `name: {key: value}` for each")
        for variant in variants.value:
            if not NAME.fullmatch(str(variant)):
                self.wrong(variants.key_lines[variant], f"{variant!r}: write small letters, digits, _ and -")
            own = {**base.overrides, **self.overrides(variants, variant)}
            yield replace(base, name=f"{name}-{variant}", title=f"{title}, {variant}", overrides=own)

    def text(self, node: YamlNode, key: str, default: str | None = None) -> str:
        found = node.value.get(key)
        if found is None and default is not None:
            return default
        if found is None or not isinstance(found.value, str) or not found.value:
            self.wrong(node.line_of((key,)), f"{key}: text is needed")
        return str(found.value)

    def file(self, node: YamlNode, key: str) -> Path:
        """Find it from the working directory, the matrix's folder, or one above, as a config's files are found."""
        given = self.text(node, key)
        found = find_named(given, [self.path.parent], Path.is_file)
        if found is None:
            looked = looked_in(given, [self.path.parent])
            self.wrong(node.line_of((key,)), f"{key}: there is no file {given!r}\n    looked in {looked}")
        return found

    def overrides(self, node: YamlNode, key: str) -> Overrides:
        found = node.value.get(key)
        if found is None or found.value is None:
            return {}
        if not isinstance(found.value, dict):
            self.wrong(found.line, f"{key}: write `rollout.num_repeat: 8`, one override a line")
        return {str(name): value.plain() for name, value in found.value.items()}

    def seeds(self, node: YamlNode) -> tuple[int, ...]:
        found = node.value.get("seeds")
        if found is None:
            return (1,)
        values = found.plain()
        whole = isinstance(values, list) and all(type(seed) is int and seed >= 0 for seed in values)
        if not whole or not values or len(set(values)) < len(values):
            self.wrong(node.line_of(("seeds",)), "seeds: write different whole numbers, as in [1, 2, 3]")
        return tuple(values)

    def band(self, node: YamlNode) -> dict[str, tuple[float | None, float | None]]:
        band: dict[str, tuple[float | None, float | None]] = {}
        for name, limits in self.overrides(node, "band").items():
            line = node.line_of(("band", name))
            if "/" not in name and name not in FIGURES:
                near = nearest(name, FIGURES)
                fix = (
                    f"did you mean `{near}`?"
                    if near
                    else f"known: {', '.join(FIGURES)}, or a metric such as val/success"
                )
                self.wrong(line, f"band: {name}: unknown figure\n    {fix}")
            numbers = isinstance(limits, list) and [_is_limit(one) for one in limits] == [True, True]
            if not numbers or limits == [None, None]:
                self.wrong(line, f"band: {name}: write [lowest, highest]; null leaves one side open")
            band[name] = (limits[0], limits[1])
        return band

    def cold_start(self, node: YamlNode) -> StartingRun | None:
        found = node.value.get("cold_start")
        if found is None:
            return None
        self.known(found, ("conf", "overrides"), "cold_start")
        return StartingRun(self.text(found, "conf"), self.file(found, "conf"), self.overrides(found, "overrides"))


def _is_limit(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def chosen(cells: Sequence[MatrixCell], patterns: Sequence[str]) -> list[MatrixCell]:
    """The cells that `--only` names: by their name, their row's, or a pattern such as `frozen_lake*`."""
    found: set[str] = set()
    for pattern in patterns:
        hits = {cell.name for cell in cells if pattern == cell.row.name or fnmatchcase(cell.name, pattern)}
        if not hits:
            names = list(dict.fromkeys(name for cell in cells for name in (cell.row.name, cell.name)))
            near = nearest(pattern, names)
            fix = f"did you mean {near}?" if near else "`--list` shows all"
            raise ConfigError(f"--only {pattern}: no cell and no row has this name\n    {fix}")
        found |= hits
    return [cell for cell in cells if not patterns or cell.name in found]
