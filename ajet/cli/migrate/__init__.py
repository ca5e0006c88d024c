"""`ajet migrate FILE`: writes another system's configuration as ours, and says
what became of each key.

Reads AgentJet's and verl's YAML, TRL's YAML and prime-rl's TOML. Nothing is
dropped in silence: a key is kept, renamed, dropped with the reason, or unknown.

  ajet migrate grpo.yaml --out math.yaml
"""

from __future__ import annotations

import sys
import tomllib
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet.cli.migrate import prime_rl, trl, verl
from ajet.cli.migrate.rules import GroupReference, Line, Migration, System, Tree
from ajet.config.old_keys import translate
from ajet.schema.errors import ConfigError
from ajet.schema.printable import counted, one_line, printable
from ajet.system.command_line import CommandParser

__all__ = ["Migration", "migrate", "read", "run", "verl", "written"]

SYSTEMS = (verl.SYSTEM, prime_rl.SYSTEM, trl.SYSTEM)
AGENTJET = System("AgentJet", lambda tree: "ajet" in tree, {})
HEADS = {
    "kept": "kept as they are",
    "renamed": "have another name or form",
    "added": "added",
    "dropped": "dropped",
    "unknown": "NOT CARRIED OVER: unknown to ajet migrate",
}
LONGEST = 80


def run(argv: Sequence[str]) -> int:
    """Migrate, write, and say what was done."""
    parser = CommandParser("ajet migrate", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the other system's YAML or TOML")
    parser.add_argument("--out", type=Path, help="where to write ours (default: printed)")
    arguments = parser.parse_args(argv)
    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(f"--out {arguments.out}: there is such a file already; name another, or remove it")
    tree = read(arguments.file)
    migration = migrate(tree, arguments.file)
    text = written(migration, arguments.file)
    if arguments.out is None:
        print(text, end="")
    else:
        try:
            arguments.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--out {arguments.out}: {error.strerror}: name a file in a folder that is there"
            ) from None
    print("\n".join(report(migration, arguments.file, arguments.out)), file=sys.stderr)
    return 0


def read(file: Path) -> Tree:
    """What the file holds. Raises ConfigError."""
    from ajet.config.yaml_source import read_yaml_file

    if file.suffix.lower() == ".toml":
        try:
            return tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not TOML: {error}") from None
    return _resolved(read_yaml_file(file, "the other system's keys").plain(), file)


def _resolved(tree: Tree, file: Path) -> Tree:
    """References to other keys replaced by what they say. The environment's (`${oc.env:…}`) stay."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        whole = OmegaConf.create(tree)
    except OmegaConfBaseException as error:
        key = error.full_key
        raise ConfigError(f"{file}: {key}: not a plain value: fill in what is written as {{{{NAME}}}}") from None

    def walk(value: Any, at: str) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner, f"{at}.{key}" if at else str(key)) for key, inner in value.items()}
        if not isinstance(value, str) or "${" not in value or "${oc.env:" in value:
            return value
        try:
            found = OmegaConf.select(whole, at, default=value)
            if OmegaConf.is_dict(found):
                return GroupReference(value)
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException:  # hydra's own, or of a key that isn't in this file: it is reported as it stands
            return value

    resolved: Tree = walk(tree, "")
    return resolved


def migrate(tree: Tree, file: Path) -> Migration:
    """What becomes of each key. Raises ConfigError if the system isn't known."""
    if AGENTJET.recognises(tree):
        return _of_agentjet(tree)
    for system in SYSTEMS:
        if system.recognises(tree):
            return Migration.of(system, tree)
    known = ", ".join(system.title for system in (AGENTJET, *SYSTEMS))
    raise ConfigError(
        f"{file}: whose configuration this is can't be told: {known} are known, by `ajet`, `actor_rollout_ref`, "
        f"`orchestrator` or `model_name_or_path` at the top. It has: {', '.join(map(str, tree))[:200]}"
    )


def _of_agentjet(tree: Tree) -> Migration:
    """Its files run as they are; this writes them with present names."""
    done, migration = translate(tree), Migration(AGENTJET)
    migration.lines = [
        *(Line("renamed", old, "", new) for old, new in done.renamed.items()),
        *(Line("dropped", key, "", why="its present name is given, too") for key in done.outvoted),
        *(Line("dropped", key, "", why=reason) for key, reason in done.dropped.items()),
    ]
    migration.keys = {"": tree}
    return migration


def written(migration: Migration, file: Path) -> str:
    """Our YAML."""
    import yaml

    tree = migration.keys[""] if migration.system is AGENTJET else migration.tree()
    unknown = [line for line in migration.lines if line.what == "unknown"]
    notes = [f"# made by `ajet migrate` from {file.name} ({migration.system.title})"]
    notes += [f"# not carried over: {_shown(line)}" for line in unknown]
    return "\n".join([*notes, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)])


def report(migration: Migration, file: Path, out: Path | None) -> list[str]:
    """What became of each key, for a person."""
    said = [f"{file}: {migration.system.title}"]
    for what, head in HEADS.items():
        if lines := [line for line in migration.lines if line.what == what]:
            said.append(f"{counted(len(lines), 'key')} {head}:")
            said += [f"  {_shown(line)}" for line in lines]
    if migration.unset:
        said.append(f"{migration.unset} keys are null, and say nothing")
    needs = [name for name in ("rollout.user_workflow", "task_reader.type") if name not in migration.keys]
    if migration.system is not AGENTJET and needs:
        said.append(
            f"still yours to write: {' and '.join(f'ajet.{name}' for name in needs)}, and where the reward comes from"
        )
    if out is not None:
        said.append(f"next: ajet validate {out}")
    return said


def _shown(line: Line) -> str:
    value = "" if line.value == "" else f": {one_line(str(line.value), LONGEST)}"
    became = f" -> {line.now}" if line.now and line.what == "renamed" else ""
    why = f"  ({line.why})" if line.why else ""
    return printable(f"{line.key}{value}{became}{why}")
