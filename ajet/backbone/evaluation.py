"""Models on tasks, several times each: what each came to, how sure that is, and how they differ task by task.

A *cell* is one model on one set of tasks. In a folder it is kept like a run, so that `ajet view`, `ajet runs` and `ajet
compare` read it, and playing it again plays only what is missing. What its result depends on is its *fingerprint*: a
folder with another one is refused.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone.failures import FailureWatch, warn_of
from ajet.backbone.launch import user_files
from ajet.backbone.metrics import by_group, is_success, pass_at, played, usable
from ajet.backbone.plan import validation_repeats
from ajet.backbone.report import validation_metrics
from ajet.config import AjetConfig
from ajet.engine.model_source import TINY, ModelSource
from ajet.gateway.chat import validation_temperature
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.logs import Masker
from ajet.observe.metrics import flatten
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.run_files import read_regular
from ajet.observe.statistics import Gain, Share
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.printable import one_line
from ajet.schema.user_code import ARROW, PROGRAM
from ajet.task_judge.base_judge import scored_by
from ajet.task_reader import build_reader, read_validation_tasks
from ajet.task_runner.runtime import Runtime

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.task import Task
    from ajet.task_runner.pool import RolloutPool

BASE = "base"
"""The model that the configuration names."""
FINGERPRINT = "fingerprint.json"
WITHOUT_LIMIT_GB = 1e6
HOW_NOT_WHAT = """
    abandoned_calls enable_oversample episode_retries gamma kv_cache_gb max_env_worker max_num_seqs max_staleness
    min_group_size n_vllm_engine num_repeat oversample_keep remote.api_key remote.max_attempts remote.max_parallel
    remote.requests_per_minute remote.timeout submit_oversample_multiplier tensor_model_parallel_size untrained_models
    val_kwargs.num_repeat vllm weights_folder
""".split()  # noqa: SIM905 - as one reads it
"""Keys of `ajet.rollout` on which no validation's result depends."""
DEPENDS_ON = ("task_judge", "failure_reward", "model.dtype", "helper.model", "prompt_tuning.templates", "rollout")


class FingerprintError(UserError):
    """A folder whose episodes were played with something else."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost."""

    input: float = 0.0
    output: float = 0.0


@dataclass(slots=True)
class Evaluation:
    """What one model came to on one set of tasks. All figures but `failures` are about the episodes with a reward."""

    model: str
    tasks: str
    repeats: int
    episodes: int
    rewards: dict[str, list[float]]
    """By task."""
    solved: dict[str, list[bool]]
    """By task."""
    pass_at: dict[int, Share]
    """The chance that one of k attempts solves a task; Wilson's interval over the tasks."""
    metrics: dict[str, float]
    """The metrics of a validation, such as `val/return/mean`."""
    failures: dict[str, int]
    prompt_tokens: int
    reply_tokens: int
    seconds: float
    """Mean of an episode."""
    cost: float | None
    """None: no price is known."""
    fingerprint: dict[str, str]
    """What the result depends on: agent code, settings, judge, tasks and model."""
    folder: Path | None = None

    @property
    def mean_rewards(self) -> dict[str, float]:
        """The mean reward of each task."""
        return {task: sum(found) / len(found) for task, found in self.rewards.items()}

    def gain_over(self, other: Evaluation) -> Gain | None:
        """How much higher its rewards are than those of another model, task by task. None: they share no task."""
        return Gain.of(other.mean_rewards, self.mean_rewards)

    def as_json(self) -> dict[str, Any]:
        """The same with names in place of numbers, as a JSON file holds it."""
        shares = {str(k): share._asdict() for k, share in self.pass_at.items()}
        return {**asdict(self), "pass_at": shares, "folder": None if self.folder is None else str(self.folder)}


@dataclass(slots=True)
class EvaluationCell:
    """One model on one set of tasks."""

    config: Config
    tasks: Sequence[Task]
    repeats: int
    model_name: str = BASE
    tasks_name: str = "validation"
    out: Path | None = None
    """The folder of all cells. None: nothing is kept."""
    price: Price = Price()
    episodes: dict[tuple[str, int], Episode] = field(default_factory=dict)
    """The newest of each task and repeat."""

    @classmethod
    def of(cls, config: Config, repeats: int | None = None, **more: Any) -> EvaluationCell:
        """What a config asks for, on its validation tasks. Several repeats are sampled, unless it says otherwise:
        greedy ones are all alike."""
        tasks = read_validation_tasks(build_reader(config))
        if not tasks:
            raise ConfigError(
                "ajet.task_reader: this config has no validation tasks\n    "
                "give it some, or name a file of tasks: ajet eval CONF --tasks FILE"
            )
        if repeats is not None and repeats > 1:
            config.ajet.trainer_common.val_pass_n = repeats
        return cls(config, tasks, repeats or validation_repeats(config), **more)

    @property
    def folder(self) -> Path | None:
        return None if self.out is None else self.out / _file_name(f"{self.model_name}-{self.tasks_name}")

    def missing(self, task: Task) -> list[int]:
        """The repeats that no episode with a reward stands for."""
        mine = (self.episodes.get((task.task_id, repeat)) for repeat in range(self.repeats))
        return [repeat for repeat, episode in enumerate(mine) if episode is None or not episode.usable]

    def take(self, episode: Episode) -> None:
        if episode.status is not EpisodeStatus.CANCELLED:
            self.episodes[episode.task_id, episode.repeat] = episode

    def groups(self) -> list[EpisodeGroup]:
        found = []
        for index, task in enumerate(self.tasks):
            mine = [self.episodes.get((task.task_id, repeat)) for repeat in range(self.repeats)]
            there = [episode for episode in mine if episode is not None]
            name = self.group_id(index)
            for episode in there:
                episode.group_id = name
            failed = [episode for episode in there if not episode.usable]
            found.append(EpisodeGroup(name, task.task_id, usable(there), failed))
        return found

    def group_id(self, index: int) -> str:
        return f"0-{index}-{self.tasks[index].task_id}"

    def evaluation(self) -> Evaluation:
        """What it came to. Raises if its services were down."""
        groups, threshold = self.groups(), self.config.ajet.task_judge.success_threshold
        FailureWatch(self.config).look_at_groups("the validation", groups)
        metrics = validation_metrics(groups, threshold)
        warn_of(0, metrics)
        whole = played(episode for group in groups for episode in (*group.episodes, *group.failed))
        by_task = {group[0].task_id: group for group in by_group(usable(whole))}
        solved = {task: [is_success(one, threshold) for one in group] for task, group in by_task.items()}
        spent = [episode.tree.spent for episode in whole]
        prompt, reply = sum(read for read, _ in spent), sum(written for _, written in spent)
        failures = Counter(f"{one.status}, {one.failure.in_short}" for one in whole if one.failure is not None)
        return Evaluation(
            model=self.model_name,
            tasks=self.tasks_name,
            repeats=self.repeats,
            episodes=len(whole),
            rewards={task: [float(one.reward or 0.0) for one in group] for task, group in by_task.items()},
            solved=solved,
            pass_at=pass_at(list(solved.values())),
            metrics=metrics,
            failures=dict(failures.most_common()),
            prompt_tokens=prompt,
            reply_tokens=reply,
            seconds=sum(one.timings.get("total", 0.0) for one in whole) / max(1, len(whole)),
            cost=(prompt * self.price.input + reply * self.price.output) / 1e6
            if any(asdict(self.price).values())
            else None,
            fingerprint=fingerprint(self.config, self.tasks),
            folder=self.folder,
        )


def _file_name(text: str) -> str:
    """Letters, digits and `._-` of a text; where others were left out, a digest keeps it apart from its like."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in text)
    plain = plain.strip(".-")[-80:]
    same = plain == text or plain == text.replace(":", "-")
    return plain if same else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


# ---------------------------------------------------------------- what is played


def play(
    cells: Sequence[EvaluationCell], on_episode: Callable[[EvaluationCell, Episode], None] = lambda cell, episode: None
) -> None:
    """Play what is missing in cells of one model, one cell after the other. Their configs differ in tasks only."""
    with ExitStack() as stack:
        records = {id(cell): stack.enter_context(_record(cell)) for cell in cells}
        wanting = [cell for cell in cells if any(map(cell.missing, cell.tasks))]
        tasks = {id(cell): {task.task_id: task for task in cell.tasks} for cell in wanting}
        current: list[EvaluationCell] = []

        def ended(episode: Episode) -> None:
            cell = current[0]
            if episode.status is EpisodeStatus.CANCELLED:
                return
            record = records[id(cell)]
            if record is not None:
                record.record(episode, 0, validation=True, task=tasks[id(cell)][episode.task_id])
            on_episode(cell, episode)

        if wanting:
            with Runtime(wanting[0].config, on_episode=ended) as runtime:
                runtime.engine_ready()  # the time that it takes to load is no episode's
                for cell in wanting:
                    current[:] = [cell]
                    if (record := records[id(cell)]) is not None:
                        record.use_tokenizer(runtime.model().tokenizer)
                    for episode in runtime.run(_play_missing(runtime.pool, cell)):
                        cell.take(episode)


async def _play_missing(pool: RolloutPool, cell: EvaluationCell) -> list[Episode]:
    in_part = any(0 < len(cell.missing(task)) < cell.repeats for task in cell.tasks)
    whole_groups = in_part and await pool.judges_groups()

    async def one(index: int, task: Task) -> list[Episode]:
        missing, name = cell.missing(task), cell.group_id(index)
        if not missing:
            return []
        if len(missing) == cell.repeats or whole_groups:
            group = await pool.run_group(
                task, group_id=name, num_repeat=cell.repeats, batch_index=index, validation=True
            )
            return [*group.episodes, *group.failed]
        return await asyncio.gather(
            *(
                pool.run_episode(task, group_id=name, batch_index=index, repeat=repeat, validation=True)
                for repeat in missing
            )
        )

    found = await asyncio.gather(*(one(index, task) for index, task in enumerate(cell.tasks)))
    return [episode for group in found for episode in group]


@contextmanager
def _record(cell: EvaluationCell) -> Iterator[EpisodeRecorder | None]:
    """Writes the cell's episodes, after those that its folder holds were read."""
    folder = cell.folder
    if folder is None or cell.out is None:
        yield None
        return
    made_of = fingerprint(cell.config, cell.tasks)
    _check_fingerprint(folder, made_of)
    config = cell.config.model_copy(deep=True)
    config.ajet.experiment_dir, config.ajet.experiment_name = "auto", folder.name
    config.ajet.trainer_common.logger = ["file"]
    with ExperimentFolder.open(config, exp_dir=cell.out, backbone="eval", judge=scored_by(config)) as experiment:
        (folder / FINGERPRINT).write_text(json.dumps(made_of, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        experiment.save_code(user_files(config))
        threshold = config.ajet.task_judge.success_threshold
        kept = AjetConfig()  # whatever the config says, all of them, and nowhere else
        kept.recorder.max_gb, kept.task_judge.success_threshold = WITHOUT_LIMIT_GB, threshold
        with closing(EpisodeRecorder(experiment.episodes, kept, masker=experiment.masker)) as recorder:
            with closing(EpisodeStore(experiment.episodes)) as store:
                for recorded in store.all(EpisodeFilter(validation=True)):
                    cell.take(recorded.episode)
            before = dict(cell.episodes)
            yield recorder
        if cell.episodes != before:
            experiment.metrics.log(0, validation_metrics(cell.groups(), threshold))


# ---------------------------------------------------------------- the fingerprint


def fingerprint(config: Config, tasks: Sequence[Task]) -> dict[str, str]:
    """What a result depends on, each part by its name: keys with their values, and digests of code, tasks and model."""
    resolved = config.model_dump(mode="json")
    masked = Masker(resolved).value(resolved)
    keys = {**masked["ajet"], **{f"+{name}": masked[name] for name in config.user_blocks()}}
    found = {name: str(value) for name, value in flatten(keys) if _matters(name)}
    if validation_temperature(config) > 0:  # `val_pass_n` asks for it, too
        found["rollout.val_kwargs.do_sample"] = str(True)
    files = set[Path]()
    for file in user_files(config):
        _with_imports(file.resolve(), files)
    for name in sorted({file.name for file in files}):  # packages have an `__init__.py` each
        found[f"code {name}"] = _digest(b"".join(file.read_bytes() for file in sorted(files) if file.name == name))
    agent = config.ajet.rollout.user_workflow or ""
    if agent.startswith(f"{PROGRAM}{ARROW}"):
        symbol = inspect.unwrap(getattr(sys.modules[PROGRAM], agent.partition(ARROW)[2]))
        found["code of the agent"] = _source_digest(symbol)
    found["tasks"] = _digest("\n".join(sorted(map(_task_text, tasks))).encode())
    return {**found, "model": _model_identity(config)}


def _task_text(task: Task) -> str:
    """A task as JSON. What JSON can't hold is written by its `repr`, without addresses; a picture or an array, whose
    `repr` doesn't show all of it, by its bytes too."""
    try:
        return task.model_dump_json()
    except ValueError:
        return json.dumps(task.model_dump(), default=_opaque)


def _opaque(value: Any) -> Any:
    if str(getattr(value, "dtype", "")) == "object":  # whose bytes are addresses
        return value.tolist()
    named = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return f"{named} {_digest(value.tobytes())}" if hasattr(value, "tobytes") else named


def _with_imports(file: Path, found: set[Path]) -> None:
    """A file of the user's, and those beside it or in packages beside it that it imports."""
    if file in found or not file.is_file():
        return
    found.add(file)
    for node in ast.walk(ast.parse(file.read_bytes())):
        home, names = file.parent, list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):  # each name may be a module
            home = file.parents[max(node.level - 1, 0)]
            names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        for name in names:
            place = home
            for part in name.split("."):
                place /= part
                _with_imports(place / "__init__.py", found)
                _with_imports(place.with_suffix(".py"), found)


def _matters(key: str) -> bool:
    if key.startswith("+"):
        return True
    within = key.removeprefix("rollout.")
    if within != key and any(within == name or within.startswith(f"{name}.") for name in HOW_NOT_WHAT):
        return False
    return any(key == name or key.startswith(f"{name}.") for name in DEPENDS_ON)


def _source_digest(symbol: Any) -> str:
    """Digest an agent that a program holds as an object: its function's source, or its code where no file has it."""
    function = getattr(symbol, "function", symbol)
    try:
        return _digest(inspect.getsource(function).encode())
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return _digest(code.co_code + repr(code.co_consts).encode()) if code is not None else "unknown"


def _model_identity(config: Config) -> str:
    ajet = config.ajet
    if ajet.rollout.engine in ("remote", "sglang"):
        return f"{ajet.rollout.remote.model or ajet.model.path} at {ajet.rollout.remote.base_url}"
    source = ModelSource.resolve(ajet.model.path)
    folder = Path(source.path)
    if source.name.startswith(TINY.rstrip(":")) or not folder.is_dir():
        return source.name
    weights = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".json"))
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    return f"{folder.resolve()} {_digest(repr(stamps).encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _check_fingerprint(folder: Path, made_of: dict[str, str]) -> None:
    file = folder / FINGERPRINT
    if not file.exists():
        if (folder / "config.resolved.yaml").exists():
            raise FingerprintError(f"{folder} is a run's folder, not an evaluation's: choose another --out")
        return
    try:
        before = json.loads(read_regular(file))
    except ValueError as error:
        raise FingerprintError(f"{file} can't be read ({error}): choose another folder, or delete this one") from None
    other = [name for name in sorted(before.keys() | made_of.keys()) if before.get(name) != made_of.get(name)]
    if other:
        then, now = ({name: one_line(made.get(name, "nothing"), 60) for name in other} for made in (before, made_of))
        shown = [f"{name}: {then[name]} then, {now[name]} now" for name in other[:6]]
        more = [f"and {len(other) - 6} more"] if len(other) > 6 else []
        raise FingerprintError(
            "\n    ".join(
                [f"{folder} was played with something else", *shown, *more, "choose another folder, or delete this one"]
            )
        )


def model_keys(model: str, engine: str) -> dict[str, Any]:
    """The keys that make a config play this model: `base`, a folder, a hub id, `tiny:…`, or `NAME@URL` of a server.

    `engine`: the config's. A server's models are not loaded here, and a model that is loaded here needs an engine.
    """
    if model == BASE:
        return {}
    if "://" not in model:
        return {"model.path": model} | ({"rollout.engine": "torch"} if engine in ("remote", "sglang") else {})
    name, _, address = model.rpartition("@")
    if not name or not address.startswith(("http://", "https://")):
        raise UserError(f"model {model!r}: write a server's model as NAME@http://HOST/v1 or NAME@https://HOST/v1")
    return {"rollout.engine": "remote", "rollout.remote.base_url": address, "rollout.remote.model": name}


def tasks_keys(file: Path) -> dict[str, Any]:
    """The keys that make a config validate on the tasks of a file."""
    if not file.is_file():
        raise UserError(f"tasks {file}: no such file")
    keys = dict.fromkeys(("training", "validation"), str(file.resolve()))  # the reader wants both
    return {"task_reader.type": "jsonl_dataset_file"} | {
        f"task_reader.jsonl_dataset_file.{split}.file_path": path for split, path in keys.items()
    }
