"""`ajet config show CONF | schema | docs`: the resolved config, the JSON schema for editors, and the documentation: the
pages of `docs/config/`, from the schema."""

from __future__ import annotations

import copy
import json
import re
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet.config.effects import OF_ONE_BACKBONE, ONLY_ON, entry
from ajet.config.keys import KnownKey, choices, fragment_at, json_schema, kinds, known_keys
from ajet.config.kinds import BACKBONES, load_module
from ajet.config.root import Config
from ajet.config.section import Block
from ajet.system.command_line import CommandParser

EPILOG = """\
ajet config show my.yaml                all keys with defaults, secrets masked
ajet config show my.yaml rollout.num_repeat=8
ajet config schema > ajet.schema.json   for completion in an editor
ajet config docs docs/config            the pages about all keys, into a folder
"""


def run(argv: Sequence[str]) -> int:
    """Print the config, the schema or the documentation."""
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.what == "schema":
        print(json.dumps(editor_schema(), indent=2, ensure_ascii=False))
    elif arguments.what == "docs":
        if arguments.conf is None:
            sys.stdout.write("\n".join(pages().values()))
        else:
            folder = Path(arguments.conf)
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in pages().items():
                (folder / name).write_text(text, encoding="utf-8")
    elif arguments.conf is None:
        parser.error("ajet config show CONF: which file?")
    else:
        print(_resolved(arguments.conf, arguments.overrides, arguments.backbone))
    return 0


def schema(argv: Sequence[str]) -> int:
    """`ajet schema`: what `ajet config schema` prints."""
    CommandParser("ajet schema", description="The JSON schema of configs, for an editor.").parse_args(argv)
    return run(["schema"])


def _parser() -> CommandParser:
    parser = CommandParser("ajet config", epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["show", "schema", "docs"])
    parser.add_argument(
        "conf",
        nargs="?",
        metavar="CONF|FOLDER",
        help="for show: the YAML file; for docs: where to write the pages instead of printing them",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="for show: as in a run")
    parser.add_argument("--backbone", help="for show: print what this backbone is given instead (verl, trinity)")
    return parser


def _resolved(conf: str, overrides: Sequence[str], backbone: str | None) -> str:
    import yaml

    from ajet.backbone.launch import known_backbone
    from ajet.config import load_config
    from ajet.config.interpolation import literal
    from ajet.observe.logs import Masker

    chosen = known_backbone(backbone)
    config = load_config(conf, overrides, backbone=chosen, complete=False)
    resolved = config.model_dump(mode="json")
    masker = Masker(resolved)
    if chosen is not None:
        show = getattr(load_module(BACKBONES, chosen), "show_config", None)
        if show is not None:
            return masker.text(show(config).rstrip())
    return yaml.safe_dump(literal(masker.value(resolved)), sort_keys=False, allow_unicode=True, width=120).rstrip()


# ---------------------------------------------------------------- the schema's own documentation

INTERPOLATION = {"type": "string", "pattern": r"\$\{.*\}"}
"""An interpolation may stand in place of a number."""

FIRST_KEYS = (
    "experiment_name",
    "backbone",
    "model.path",
    "model.lora.enabled",
    "rollout.user_workflow",
    "rollout.agent",
    "rollout.environment",
    "rollout.sandbox",
    "rollout.engine",
    "rollout.num_repeat",
    "rollout.temperature",
    "rollout.max_model_len",
    "rollout.max_env_worker",
    "rollout.episode_timeout",
    "rollout.gamma",
    "rollout.multi_turn.max_steps",
    "task_reader.type",
    "task_reader.jsonl_dataset_file.training.file_path",
    "task_reader.jsonl_dataset_file.validation.file_path",
    "task_reader.huggingface_dat_repo.dataset_path",
    "task_judge.judge_type",
    "task_judge.judge_protocol",
    "task_judge.success_threshold",
    "helper.model",
    "helper.base_url",
    "failure_reward.otherwise",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "trainer_common.algorithm.adv_estimator",
    "trainer_common.algorithm.policy_loss",
    "trainer_common.optim.lr",
    "trainer_common.kl_loss_coef",
    "trainer_common.total_epochs",
    "trainer_common.total_training_steps",
    "trainer_common.save_freq",
    "trainer_common.test_freq",
    "trainer_common.logger",
    "prompt_tuning.templates",
    "prompt_tuning.algorithm",
)
"""The keys that matter first, in the order in which one comes to them."""

HEAD = """\
# Configuration

<!-- Written by `ajet config docs docs/config` from the schema in ajet/config/: don't edit. -->

One YAML file describes a run:

```bash
ajet --conf my_agent.yaml
ajet --conf my_agent.yaml rollout.num_repeat=8 trainer_common.optim.lr=2e-6
```

- AgentJet reads what is below `ajet:`. An unknown key is an error that names its line and the key you probably meant.
- On the command line, write a key with or without `ajet.`. Values are YAML: `[a, b]`, `null`, `true`, `1e-6`.
- Other top-level blocks are yours: the workflow reads `frozen_lake: {size: 4}` as `tuner.config.frozen_lake.size`.
  `+frozen_lake.size=4` adds such a block on the command line.
- Top-level `verl:`, `trinity:` and `trainer:` go to that backbone unchanged; `hydra:` and `defaults:` are ignored.
- A value may refer to another (`${ajet.rollout.num_repeat}`, `${.neighbour}`) or to the environment (`${oc.env:NAME}`,
  `${oc.env:NAME,default}`).
- A file is looked up in the working directory, then in the YAML's folder, then in the folders above it.
- `ajet validate FILE` and the run's log name keys without effect on the chosen backbone or engine.

`ajet config show FILE` prints a file with all defaults. For completion in an editor with a YAML language server, run
`ajet config schema > ajet.schema.json` and begin the file with `# yaml-language-server: $schema=ajet.schema.json`.
"""

FIRST = """\
## The keys that matter first

Most runs set a few of these 40, all below `ajet`. Every other key has a default that works.
"""

TABLE = "| key | default | |\n|---|---|---|\n"
OWN_HEADING = 4
"""A group with fewer keys stands in the table of the group around it."""


def pages() -> dict[str, str]:
    """The pages of `docs/config/`, by file name: one for each block below `ajet`, and one to start from."""
    blocks = [path for path in _groups(("ajet",)) if len(path) == 2]
    index = [HEAD, FIRST, _first_table(), "## All blocks\n", _block_table(blocks)]
    index += ["## `ajet`\n\nKeys outside of any block.\n", _table(("ajet",))]
    found = {f"{path[1]}.md": "\n".join(_section(group) for group in (path, *_groups(path))) for path in blocks}
    return {"index.md": "\n".join(index), **found}


def _first_table() -> str:
    rows = []
    for name in FIRST_KEYS:
        key = known_keys()[("ajet", *name.split("."))]
        default = "" if key.section is not None else _shown(key.field.get_default(call_default_factory=True))
        rows.append(_row(name, default, re.split(r"[:;] | \(", key.doc)[0]))
    return TABLE + "".join(rows)


def _block_table(blocks: Sequence[tuple[str, ...]]) -> str:
    rows = []
    for path in blocks:
        first = re.split("[.:] ", known_keys()[path].about.rstrip("."))[0]
        rows.append(f"| [`{path[1]}`]({path[1]}.md) | {len(_leaves(path))} | {first} |\n")
    return "| block | keys | |\n|---|---|---|\n" + "".join(rows)


def _leaves(path: tuple[str, ...]) -> list[KnownKey]:
    """Every key below a group, however deep."""
    return [key for key in known_keys().values() if key.path[: len(path)] == path and key.section is None]


def _groups(above: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The groups below another one that have a page or heading."""
    below = [path for path, key in known_keys().items() if key.section and path[: len(above)] == above != path]
    return [path for path in below if len(path) == 2 or len(_leaves(path)) >= OWN_HEADING]


def _section(path: tuple[str, ...]) -> str:
    heading = f"{'#' if len(path) == 2 else '##'} `{'.'.join(path)}`"
    only = _only(path)
    if len(path) > 2 and only == _only(path[:-1]):
        only = ""
    return f"{heading}\n\n{known_keys()[path].about}{only}\n\n{_table(path)}"


def _table(path: tuple[str, ...]) -> str:
    rows = []
    for key in _leaves(path):
        if any(key.path[: len(group)] == group for group in _groups(path)):
            continue
        text = " ".join((key.field.description or "").split())
        if (only := _only(key.path)) != _only(path):
            text += only or " (on all backbones)"
        rows.append(_row(".".join(key.path[len(path) :]), _default(key), text))
    return TABLE + "".join(rows)


def _row(*cells: str) -> str:
    name, default, text = (cell.replace("|", "\\|") for cell in cells)
    return f"| `{name}` | {default} | {text} |\n"


def _only(path: tuple[str, ...]) -> str:
    """The backbones that read a key or group, unless all do, or its name says which."""
    backbones = entry(ONLY_ON, ".".join(path[1:]))
    if not backbones or set(backbones) == set(BACKBONES) or path[1] in OF_ONE_BACKBONE:
        return ""
    return f" ({', '.join(backbones)} only)"


def _default(key: KnownKey) -> str:
    """The default, and what else the key takes, unless the default or the help shows it."""
    value = key.field.get_default(call_default_factory=True)
    if isinstance(value, Block):
        return "any keys"
    fragment = fragment_at(key.path) or {}
    words = [word for word in choices(fragment) if word != str(value)]
    told = set(words) <= set(re.findall(r"`([^`]*)`", key.field.description or ""))
    takes = [f"`{word}`" for word in words if not told] if words else _takes(fragment, value)
    return f"null or {', '.join(takes)}" if value is None and takes else ", ".join([_shown(value), *takes])


def _takes(fragment: dict[str, Any], value: Any) -> list[str]:
    """Limits of a number, unless they are plain; and of null, what it may be instead, unless that is text."""
    words = [_BOUNDS.sub(lambda found: _SIGNS[found[0]], word) for word in kinds(fragment) if word != "null"]
    words = [re.sub(r"≥ (\S+) ≤ (\S+)", r"\1 to \2", word) for word in words]
    if value is None:
        return [] if words == ["text"] else words
    limits = [word.partition(" ")[2] for word in words if word.startswith(("int ", "number "))]
    return [limit for limit in limits if limit not in ("", *PLAIN)]


PLAIN = ("≥ 0", "≥ 1", "> 0")
"""Limits that nobody looks up."""
_SIGNS = {"a whole number": "int", "a number": "number", "at least": "≥", "at most": "≤", "above": ">", "below": "<",
          " and": "", "(": "", ")": "", "a list": "list"}  # fmt: skip
_BOUNDS = re.compile("|".join(map(re.escape, _SIGNS)))


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`" if abs(value) < 1e-3 or value != int(value) else f"`{value:.1f}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if str(value) else "`''`"


def editor_schema() -> dict[str, Any]:
    """The JSON schema of a whole file, for editors: interpolations are allowed everywhere."""
    schema = copy.deepcopy(json_schema())
    for definition in [schema, *schema.get("$defs", {}).values()]:
        properties = definition.get("properties", {})
        for name, fragment in properties.items():
            properties[name] = _or_interpolation(fragment)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": Config.__name__}


def _or_interpolation(fragment: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {key: fragment.pop(key) for key in ("title", "description", "default") if key in fragment}
    options = fragment["anyOf"] if list(fragment) == ["anyOf"] else [fragment]
    empty = [{"type": "null"}] if isinstance(shown.get("default"), dict) else []  # a group with nothing below it
    return {**shown, "anyOf": [*options, *empty, INTERPOLATION]}
