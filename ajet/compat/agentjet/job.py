"""`AgentJetJob`: a run described in Python, for programs written for older versions: a YAML file plus arguments.

`dump_job_as_yaml` writes the file that `ajet --conf` takes; `tune` runs it.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from ajet.config.keys import JOB_NAMES
from ajet.config.section import Block
from ajet.schema.errors import ConfigError

READERS = {"hf": "huggingface_dat_repo", "huggingface": "huggingface_dat_repo", "jsonl": "jsonl_dataset_file"}
"""Short names in `set_data` of `task_reader.type`s."""


class AgentJetJob:
    """`AgentJetJob(base_yaml_config="x.yaml", model=…, num_repeat=8)`; what isn't given stays as in the file."""

    def __init__(self, base_yaml_config: str | Path | None = None, *, lora_rank: int | None = None, **given: Any):
        """`given`: the names in `JOB_NAMES`."""
        unknown = given.keys() - JOB_NAMES.keys()
        if unknown:
            raise ConfigError(f"AgentJetJob takes no {', '.join(sorted(unknown))}; it takes {', '.join(JOB_NAMES)}")
        self._tree = Block({"ajet": {}})
        if base_yaml_config is not None:
            self.load_job_from_yaml(base_yaml_config)
        for name, value in given.items():
            if value is not None:
                self._set(JOB_NAMES[name], value)
        if lora_rank:
            self._set("model.lora.enabled", True)
            self._set("model.lora.rank", lora_rank)

    @property
    def config(self) -> Block:
        """What the YAML file will hold; readable and settable as attributes."""
        return self._tree

    def set_workflow(self, workflow: type[Any] | str) -> None:
        """The workflow: a class in a file, or `module->Class`."""
        if not isinstance(workflow, str):
            file = _file_of(workflow)
            if file is None:
                raise ConfigError(
                    f"{workflow.__name__} is defined in no file: write it to one, so that runs can load it"
                )
            workflow = f"{file.resolve()}->{workflow.__qualname__}"
        self._set("rollout.user_workflow", workflow)

    def set_data(self, type: str, dataset_path: str, **options: Any) -> None:
        """The tasks: `type="hf"` (a hub's id or a folder) or `"jsonl"` (a file). `options`: further keys of it."""
        kind = READERS.get(type, type)
        self._set("task_reader.type", kind)
        if kind == "jsonl_dataset_file":
            options = {"training": {"file_path": dataset_path}, **options}
        else:
            options = {"dataset_path": dataset_path, **options}
        self._set(f"task_reader.{kind}", options)

    def load_job_from_yaml(self, path: str | Path) -> None:
        """Start again from a file."""
        self._tree = Block({"ajet": {}} | (yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}))

    def dump_job_as_yaml(self, path: str | Path) -> Path:
        """Write the YAML file of the job."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(_plain(self._tree), sort_keys=False, allow_unicode=True), encoding="utf-8")
        return file

    def tune(self, *arguments: str) -> int:
        """Run the job, as `ajet --conf` with these further arguments would. Returns its exit code."""
        with tempfile.TemporaryDirectory() as folder:
            name = self._tree["ajet"].get("experiment_name", "job")
            file = self.dump_job_as_yaml(Path(folder) / f"{name}.yaml")
            return subprocess.run(
                [sys.executable, "-m", "ajet", "--conf", str(file), *arguments], check=False
            ).returncode

    def _set(self, key: str, value: Any) -> None:
        *groups, last = key.split(".")
        place: Block = self._tree["ajet"]
        for group in groups:
            place = place[group] if place.get(group) is not None else _new_group(place, group)
        place[last] = value


def _file_of(workflow: type[Any]) -> Path | None:
    """The file that defines a class; None for one from a notebook or a prompt."""
    try:
        return Path(inspect.getfile(workflow))
    except (OSError, TypeError):
        return None


def _new_group(place: Block, name: str) -> Block:
    place[name] = Block()
    group: Block = place[name]
    return group


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
