"""`Trainer`: training from a Python program or a notebook, beside the YAML.

    Trainer(model="tiny:…", n_runners=8).fit(solver, train_dataset=tasks)

It builds the same configuration as `ajet --conf` and calls the same launcher; keys, checks and errors are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ajet.config.interpolation import literal
from ajet.config.keys import TRAINER_NAMES, nearest
from ajet.schema.errors import AjetError, ConfigError, UserError
from ajet.schema.files import write_whole
from ajet.schema.install import require_training
from ajet.schema.resources import PromptTemplate, PromptTemplateError
from ajet.schema.task import Task
from ajet.schema.user_code import ARROW, PROGRAM, forget_files, importing, publish, stands_for
from ajet.task_runner.workflow import RECORD_KEY, RolloutFunction, Workflow

if TYPE_CHECKING:
    from ajet.backbone.evaluation import Evaluation
    from ajet.config import Config

QUERY_FIELDS = ("main_query", "question", "query", "prompt", "problem", "instruction", "input")
"""Fields of a record that may hold the text shown as the task's."""


class RunFailedError(AjetError):
    """A run that ended without success. The experiment's folder holds what it left."""

    def __init__(self, reason: str, folder: Path) -> None:
        super().__init__(reason, folder)  # what a pool of processes makes the error of again
        self.reason = reason
        """Why, with the most frequent failures of its episodes, if any failed."""
        self.folder = folder

    def __str__(self) -> str:
        return f"the run failed: {self.reason}\n    its folder: {self.folder}"


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    path: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, as in `metrics.jsonl`."""
        from ajet.observe.metrics import read_metrics

        return read_metrics(self.path / "metrics.jsonl")

    @property
    def weights(self) -> Path:
        """The newest weights, in Hugging Face form."""
        return self.path / "hf"

    @property
    def prompts(self) -> dict[str, PromptTemplate]:
        """The best prompt templates that a run with `backbone="prompt"` has found."""
        from ajet.backbone.prompt.journal import read_best

        templates = read_best(self.path)["templates"]
        return {name: PromptTemplate(one["text"], one["engine"]) for name, one in templates.items()}

    def _repr_html_(self) -> str:
        from html import escape

        last = self.metrics[-1] if self.metrics else {}
        shown = [name for name in ("step", "return/mean", "success/rate", "val/return/mean") if name in last]
        cells = "".join(f"<td>{escape(name)}</td><td>{last[name]:.4g}</td>" for name in shown)
        return f"<table><tr><td>run</td><td>{escape(str(self.path))}</td>{cells}</tr></table>"


class Trainer:
    """Trains, debugs and evaluates agents with one configuration."""

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        exp_dir: str | Path = "saved_experiments",
        fresh: bool = False,
        quiet: bool = False,
        prompt_template: PromptTemplate | str | Mapping[str, PromptTemplate | str] | None = None,
        **keywords: Any,
    ) -> None:
        """`config`: a YAML file, or a dict of keys (`{"rollout": {"num_repeat": 8}}` or `{"rollout.num_repeat": 8}`).
        `keywords`: the names in `TRAINER_NAMES`; any other key is given in `config`. `fresh` starts over; else the same
        call resumes what it began before.
        """
        unknown = sorted(keywords.keys() - TRAINER_NAMES.keys())
        if unknown:
            near = nearest(unknown[0], TRAINER_NAMES)
            raise ConfigError(
                f"Trainer: unknown argument {unknown[0]!r}\n    "
                + (f"did you mean {near}?" if near else f"there are: {', '.join(TRAINER_NAMES)}")
                + ' Any other key goes into `config`, e.g. Trainer({"rollout.top_p": 0.9})'
            )
        if config is not None and not isinstance(config, str | os.PathLike | Mapping):
            raise ConfigError(f"Trainer: config is a YAML file or a dict of keys, not of type {type(config).__name__}")
        self._yaml = Path(config) if isinstance(config, str | os.PathLike) else None
        self._keys: dict[str, Any] = dict(_keys(config)) if isinstance(config, Mapping) else {}
        self._keys |= {TRAINER_NAMES[name]: value for name, value in keywords.items() if value is not None}
        self._take_search(keywords)
        if isinstance(self._keys.get("task_judge.judge_protocol"), type):
            self._keys["task_judge.judge_protocol"] = publish(self._keys["task_judge.judge_protocol"])
        if prompt_template is not None:
            self._keys["prompt_tuning.templates"] = _templates(prompt_template)
        self._exp_dir = Path(exp_dir)
        self._fresh = fresh
        self._quiet = quiet

    def _take_search(self, keywords: Mapping[str, Any]) -> None:
        """Take `algorithm` as a search with `backbone="prompt"`. A search's name, or an object, means that backbone."""
        from ajet.config.kinds import PROMPT_OPTIMISERS

        algorithm = keywords.get("algorithm")
        searches = algorithm in PROMPT_OPTIMISERS if isinstance(algorithm, str) else algorithm is not None
        if searches or keywords.get("backbone") == "prompt":
            self._keys.pop(TRAINER_NAMES["algorithm"], None)
            self._keys.setdefault("backbone", "prompt")
            if algorithm is not None:
                self._keys["prompt_tuning.algorithm"] = algorithm
        for key in ("prompt_tuning.algorithm", "prompt_tuning.proposer"):
            given = self._keys.get(key)
            if given is not None and not isinstance(given, str):
                self._keys[key] = publish(given, key.rpartition(".")[2])

    # ------------------------------------------------------------ what it does

    def fit(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> FinishedRun:
        """Train. `agent`: a `@rollout` function, a `Workflow` class, or `path/file.py->name`. Without a data set, the
        tasks are those of the configuration. Ctrl-C ends the run cleanly and raises KeyboardInterrupt."""
        return self._launch(self._config(agent, train_dataset, val_dataset))

    def dev(self, agent: Any, train_dataset: Any = None, *, n_tasks: int | None = None) -> FinishedRun:
        """Run the first tasks here, one episode each, and show them; breakpoints work, and nothing is trained."""
        keys = {"backbone": "debug", "debug.debug_first_n_tasks": n_tasks}
        return self._launch(self._config(agent, train_dataset, None, keys))

    def evaluate(self, agent: Any, dataset: Any = None) -> dict[str, float]:
        """Validation alone: its metrics, such as `val/return/mean`."""
        require_training("Trainer.evaluate")
        from ajet.backbone.evaluation import EvaluationCell, play

        cell = EvaluationCell.of(self._config(agent, None, dataset, {"backbone": "debug"}, val_argument="dataset"))
        play([cell])
        done = cell.evaluation()
        for why, count in done.failures.items():
            logging.getLogger(__name__).warning("%d of %d episodes failed: %s", count, done.episodes, why)
        return done.metrics

    # ------------------------------------------------------------ the configuration

    def _config(
        self,
        agent: Any,
        train_dataset: Any,
        val_dataset: Any,
        more: Mapping[str, Any] | None = None,
        val_argument: str = "val_dataset",
    ) -> Config:
        from ajet.config.loader import load_config

        if importing():
            raise UserError(
                "this file calls Trainer while it is being imported by a run\n"
                '    put the call under `if __name__ == "__main__":`'
            )
        keys = {**self._keys, **{key: value for key, value in (more or {}).items() if value is not None}}
        forget_files()
        keys["rollout.user_workflow"] = _named(agent)
        if train_dataset is not None:
            keys |= self._file_of(train_dataset, "training", "train_dataset")
        if val_dataset is not None:
            keys |= self._file_of(val_dataset, "validation", val_argument)
            if train_dataset is None:  # the reader wants one, and validation alone reads none of it
                file = keys["task_reader.jsonl_dataset_file.validation.file_path"]
                keys.setdefault("task_reader.jsonl_dataset_file.training.file_path", file)
        keys.setdefault("experiment_name", None if self._yaml else getattr(agent, "__name__", "run"))
        overrides = [(key, _as_data(key, value)) for key, value in keys.items() if value is not None]
        file = self._yaml or self._empty_yaml()
        try:
            config = load_config(file, overrides, overrides_from="Trainer")
        except ConfigError as error:
            if self._yaml is not None:
                raise
            missing = str(error).replace(f"{file}:1: ", "Trainer: ")  # nobody has written that file
            if train_dataset is None and "task_reader." in missing:
                missing += ", or pass a data set"
            raise ConfigError(missing) from None
        config.ajet.backbone = config.ajet.backbone or "local"
        _refuse_elsewhere(config)
        return config

    def _empty_yaml(self) -> Path:
        """The file that a configuration made in Python stands on: all of its keys are overrides."""
        file = self._datasets / "python.yaml"
        if not file.exists():
            write_whole(file, yaml.safe_dump({"ajet": {}}))
        return file

    @property
    def _datasets(self) -> Path:
        folder = self._exp_dir.expanduser().resolve() / ".datasets"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _file_of(self, dataset: Any, split: str, argument: str) -> dict[str, Any]:
        """Write a data set to a file named after its content, so that the same call resumes the same run."""
        lines = [json.dumps(row) + "\n" for row in _rows(dataset, argument)]
        if not lines:
            once = " (a generator gives its items only once)" if isinstance(dataset, Iterator) else ""
            raise UserError(f"{argument} is empty{once}: a run needs at least one task")
        text = "".join(lines)
        file = self._datasets / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        if not file.exists():
            write_whole(file, text)
        return {
            "task_reader.type": "jsonl_dataset_file",
            f"task_reader.jsonl_dataset_file.{split}.file_path": str(file),
        }

    # ------------------------------------------------------------ running

    def _launch(self, config: Config) -> FinishedRun:
        from ajet.backbone import LaunchOptions
        from ajet.backbone.launch import LaunchArguments, launch
        from ajet.observe.experiment import OWN_FOLDER, folder_of
        from ajet.observe.logs import log_to_terminal
        from ajet.observe.run_files import read_events
        from ajet.schema.errors import EXIT_INTERRUPTED

        exp_dir = None if config.ajet.experiment_dir != "auto" else str(self._exp_dir)
        arguments = LaunchArguments(exp_dir=exp_dir, fresh=self._fresh, options=LaunchOptions(quiet=self._quiet))
        with log_to_terminal(quiet=self._quiet):
            code = launch(arguments, config)
        path = folder_of(config, exp_dir, config.yaml_path)
        if config.ajet.backbone in OWN_FOLDER:
            path = path.with_name(f"{path.name}-{config.ajet.backbone}")
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if code != 0:
            events = read_events(path / "events.jsonl")
            raise RunFailedError((events[-1].get("error") if events else None) or "its run.log says why", path)
        return FinishedRun(path.resolve())


def evaluate(
    agent: Any,
    tasks: Any,
    model: str,
    *,
    repeats: int | None = None,
    out: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    price: tuple[float, float] = (0.0, 0.0),
    **keywords: Any,
) -> Evaluation:
    """Play an agent on tasks with a model, and return what it came to.

    `agent`: as for `Trainer.fit`. `tasks`: a data set, or a file of tasks. `model`: a folder, hub id, `tiny:…`, or
    `NAME@URL` of an OpenAI-compatible server. `out`: keeps the episodes there; the same call then plays only what is
    missing. `price`: of a million prompt and reply tokens. `config` and `keywords`: as for `Trainer`.
    """
    require_training("ajet.evaluate")
    from ajet.backbone.evaluation import EvaluationCell, Price, model_keys, play, tasks_keys

    if repeats is not None and repeats < 1:
        raise UserError(f"evaluate: repeats={repeats}: at least 1")
    trainer = Trainer(config, **keywords)
    file = Path(tasks) if isinstance(tasks, str | os.PathLike) else None
    keys = {"backbone": "debug", **model_keys(os.fspath(model), "torch"), **(tasks_keys(file) if file else {})}
    made = trainer._config(agent, None, None if file else tasks, keys, val_argument="tasks")
    rollout = made.ajet.rollout  # its engine may be a server's, with which a model that is loaded here is not played
    rollout.engine = model_keys(os.fspath(model), rollout.engine).get("rollout.engine", rollout.engine)
    cell = EvaluationCell.of(
        made,
        repeats,
        model_name=os.fspath(model),
        tasks_name=file.stem if file else "tasks",
        out=None if out is None else Path(out),
        price=Price(*price),
    )
    play([cell])
    return cell.evaluation()


def _named(agent: Any) -> str:
    if isinstance(agent, str):
        return agent
    if isinstance(agent, type) and issubclass(agent, Workflow):
        return _importable(agent) or publish(agent)
    if callable(agent) and not isinstance(agent, type):
        function = agent if isinstance(agent, RolloutFunction) else RolloutFunction(agent)
        return _importable(function) or publish(function)
    raise UserError(
        f"{agent!r:.100} is not an agent: pass a function decorated with @rollout, a class derived from Workflow, "
        "or `path/file.py->name`"
    )


def _importable(symbol: Any) -> str | None:
    """`file.py->name` for a symbol of an imported file. A program's own symbols (`__main__`) are used as they are."""
    module, name = sys.modules.get(symbol.__module__), getattr(symbol, "__qualname__", "")  # `partial` has none
    file = Path(getattr(module, "__file__", None) or "").resolve()  # in a zip, it is no file
    own = symbol.__module__ == "__main__" or getattr(module, name, None) is not symbol
    if module is None or own or not file.is_file():
        return None
    stands_for(file, module)
    return f"{file}{ARROW}{name}"


def _refuse_elsewhere(config: Config) -> None:
    """What a program holds as an object exists in its own process only."""
    ajet = config.ajet
    named = {"agent": ajet.rollout.user_workflow or "", "judge": ajet.task_judge.judge_protocol or ""}
    here = [what for what, text in named.items() if text.startswith(PROGRAM)]
    if not here:
        return
    fix = f"put the {here[0]} into a file of its own and import it, or name it: `agent.py->name`"
    if ajet.backbone in ("verl", "trinity"):
        raise ConfigError(f"backbone {ajet.backbone} runs the {here[0]} in other processes\n    {fix}")
    if ajet.task_runner.wrapper_type == "multi-processing":
        raise ConfigError(
            f"task_runner.wrapper_type: multi-processing runs the {here[0]} in other processes\n    {fix}"
        )


def _keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A dict as keys of the command line: of `ajet` if it stands alone, else blocks beside it are the user's own."""
    from ajet.observe.metrics import flatten

    yield from flatten(config.get("ajet", config))
    if "ajet" in config:
        yield from flatten({f"+{name}": block for name, block in config.items() if name != "ajet"})


def _as_data(key: str, value: Any) -> Any:
    """A key's value as plain data. NumPy's numbers and paths are what they stand for."""

    def plain(inner: Any) -> Any:
        if isinstance(inner, os.PathLike):
            return os.fspath(inner)
        if hasattr(inner, "tolist"):
            return inner.tolist()
        raise ConfigError(f"Trainer: {key} is of type {type(inner).__name__}, which no key can hold")

    return json.loads(json.dumps(value, default=plain))


def _templates(given: PromptTemplate | str | Mapping[str, PromptTemplate | str]) -> dict[str, Any]:
    named = given if isinstance(given, Mapping) else {"prompt_template": given}
    templates = {name: PromptTemplate(item) if isinstance(item, str) else item for name, item in named.items()}
    for name, template in templates.items():
        if not isinstance(template, PromptTemplate):
            raise ConfigError(f"Trainer: {name} is a text or a PromptTemplate, not of type {type(template).__name__}")
        try:
            _ = template.placeholders
        except PromptTemplateError as error:
            raise PromptTemplateError(f"Trainer: {name}: {error}") from None
    return {name: {"text": literal(one.template), "engine": one.engine} for name, one in templates.items()}


def _rows(dataset: Any, argument: str) -> Iterator[dict[str, Any]]:
    """The records of a list, generator, Hugging Face data set or pandas frame, as lines of a task file."""
    if hasattr(dataset, "to_dict") and hasattr(dataset, "columns"):  # pandas
        dataset = dataset.to_dict("records")
    if isinstance(dataset, str | bytes | Mapping) or not (
        isinstance(dataset, Iterable) or (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))
    ):
        has_parts = isinstance(dataset, Mapping) and dataset
        part = f"\n    pass a part of it: {argument}[{next(iter(dataset))!r}]" if has_parts else ""
        kind = type(dataset).__name__
        raise UserError(f"{argument} should be a list, generator, data set or data frame, not {kind}{part}")
    items = dataset if isinstance(dataset, Iterable) else (dataset[index] for index in range(len(dataset)))
    for index, item in enumerate(items):
        yield _row(item, f"{argument}[{index}]")


def _row(item: Any, where: str) -> dict[str, Any]:
    if isinstance(item, Task):
        return item.model_dump(mode="json")
    record = _plain(item, where)
    if not isinstance(record, dict):
        return {"main_query": str(record), "metadata": {RECORD_KEY: record}}
    texts = (record[name] for name in QUERY_FIELDS if isinstance(record.get(name), str))
    query = next(texts, None) or json.dumps(record, ensure_ascii=False)
    task_id = record.get("task_id", record.get("id"))
    named = {} if task_id is None else {"task_id": str(task_id)}
    return {"main_query": query, **named, "metadata": {**record, RECORD_KEY: True}}


def _plain(value: Any, where: str) -> Any:
    """A value as JSON holds it."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{where}[{name!r}]") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    elif hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(
            f"{where} is {value}, which a task can't hold\n"
            "    tasks hold finite numbers: drop the record, or give it another value (None, in pandas `fillna`)"
        )
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UserError(
        f"{where} is of type {type(value).__name__}, which a task can't hold\n"
        "    tasks hold text, numbers, lists and dicts: pass a path or an id, and load the object in the agent"
    )
