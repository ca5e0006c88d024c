"""The schema's own documentation: the Markdown reference, and the JSON schema for editors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ajet.config.effects import OF_ONE_BACKBONE, ONLY_ON, entry
from ajet.config.keys import KnownKey, allowed, fragment_at, json_schema, known_keys
from ajet.config.kinds import BACKBONES
from ajet.config.root import Config
from ajet.config.section import Block, Section

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

<!-- Written by `ajet config docs` from the schema in ajet/config/: don't edit. -->

A run is described by one YAML file:

```bash
ajet --conf my_agent.yaml
ajet --conf my_agent.yaml rollout.num_repeat=8 trainer_common.optim.lr=2e-6
```

- Everything AgentJet reads is below `ajet:`. An unknown key is an error that names the line and the key that was
  probably meant.
- On the command line, a key may be written in full (`ajet.rollout.num_repeat=8`) or without `ajet.`
  (`rollout.num_repeat=8`). Values are read as YAML: `[a, b]`, `null`, `true`, `1e-6`.
- Other top-level blocks are yours. `frozen_lake: {size: 4}` is `tuner.config.frozen_lake.size` in the workflow, and
  `ajet.user` is `tuner.config.ajet.user`. To add a block that isn't in the file: `+frozen_lake.size=4`.
- Top-level `verl:`, `trinity:` and `trainer:` blocks are passed on to that backbone unchanged; `hydra:` and `defaults:`
  are ignored.
- A key that has no effect on the chosen backbone or engine is named by `ajet validate` and in the run's log.
- Values may refer to others (`${ajet.rollout.num_repeat}`, `${.neighbour}`) and to the environment
  (`${oc.env:NAME}`, `${oc.env:NAME,default}`).
- File names are looked up in the working directory, then in the YAML's folder, then in the folders above it.

`ajet validate FILE` checks a file and says what would run, `ajet config show FILE` prints it with all defaults filled
in and secrets masked, and `ajet config schema` prints the JSON schema. For completion and checks in an editor with a
YAML language server:

```bash
ajet config schema > ajet.schema.json
```

```yaml
# yaml-language-server: $schema=ajet.schema.json
```
"""


def markdown() -> str:
    """`docs/configuration.md`."""
    parts = [HEAD, FIRST, _first_table()]
    for path, section in _sections():
        level = "##" if len(path) <= 2 else "###"
        parts.append(f"{level} `{'.'.join(path)}`\n\n{_section_text(section)}\n\n{_table(path)}")
    return "\n".join(parts)


FIRST = """\
## The keys that matter first

Most runs set a few of these 40. Everything else has a default that works.
"""


def _first_table() -> str:
    rows = ["| key below `ajet` | default | |", "|---|---|---|"]
    for name in FIRST_KEYS:
        key = known_keys()[("ajet", *name.split("."))]
        default = "" if key.section is not None else _default(key)
        rows.append(f"| `{name}` | {default} | {key.doc.replace('|', chr(92) + '|')}. |")
    return "\n".join(rows) + "\n"


def _sections() -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    for path, key in known_keys().items():
        if path[0] == "ajet" and key.section is not None and any(_leaves(path)):
            yield path, key.section


def _leaves(path: tuple[str, ...]) -> list[KnownKey]:
    return [key for key in known_keys().values() if key.path[:-1] == path and key.section is None]


def _section_text(section: type[Section]) -> str:
    text = " ".join((section.__doc__ or "").split())
    text = text.partition(": ")[2] or text
    return text[:1].upper() + text[1:]


def _table(path: tuple[str, ...]) -> str:
    rows = ["| key | takes | default | |", "|---|---|---|---|"]
    for key in _leaves(path):
        fragment = fragment_at(key.path) or {}
        cells = (f"`{key.path[-1]}`", _takes(key, fragment), _default(key), _description(key))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _takes(key: KnownKey, fragment: dict[str, Any]) -> str:
    return "any keys" if key.field.annotation is Block else allowed(fragment)


def _default(key: KnownKey) -> str:
    value = key.field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, Block):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`" if abs(value) < 1e-3 or value != int(value) else f"`{value:.1f}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if str(value) else "`''`"


def _description(key: KnownKey) -> str:
    text = " ".join((key.field.description or "").split())
    name = ".".join(key.path[1:])
    backbones = entry(ONLY_ON, name)
    if key.path[1] in OF_ONE_BACKBONE:
        return text
    if backbones and set(backbones) != set(BACKBONES):
        text += f" ({', '.join(backbones)} only)"
    return text


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
    return {**shown, "anyOf": [*options, INTERPOLATION]}
