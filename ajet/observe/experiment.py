"""`ExperimentFolder`: the folder of one run, with all its files except episodes and checkpoints.

In: the loaded config. Out: paths, a metrics sink, an event log. Only one process can have it open.

`run_environment` describes where a run took place (commit, versions, machine); it is stored in `environment.json`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from ajet.observe.logs import FileLog, Masker
from ajet.observe.metrics import flatten, make_sinks, rewind_metrics
from ajet.observe.run_files import EventLog, read_regular
from ajet.schema.errors import UserError
from ajet.system.processes import main_memory, output_of

log = logging.getLogger(__name__)

PACKAGES = ("agentjet", "torch", "transformers", "vllm", "verl", "trinity-rft", "ray", "openai", "agentscope", "peft")
_WAIT_S = 5.0
_GIB = 1024**3
_LOCK = ".running"
_WRITTEN_AT_START = ("config.yaml", "config.resolved.yaml", "environment.json")
OWN_FOLDER = ("debug", "prompt")
"""Backbones whose runs don't share the folder of the runs that train the same YAML: `<name>-<backbone>`."""
_NAMES = ("ajet.experiment_", "ajet.project_name", "ajet.backbone")
JUDGE = "judge"
"""The key in `environment.json` that names the judge of the run's episodes."""
_DECISIVE = (JUDGE, "ajet.model.", "ajet.task_judge.", "ajet.trainer_common.optim.", "ajet.rollout.user_workflow")
_CODE_SUFFIXES = {".py", ".j2", ".jinja", ".txt", ".md", ".yaml", ".yml", ".toml"}
_CODE_FILES = 200
_CODE_FILE_BYTES = 256 * 1024


def run_environment() -> dict[str, str]:
    """The run's commit, versions and machine, by name. Anything absent (a GPU, a package) is left out."""
    found = {"Python": f"{platform.python_version()}, {sys.prefix}", "system": platform.platform()}
    found["machine"] = f"{os.cpu_count()} cores, {main_memory().total / _GIB:.1f} GiB memory"
    if gpus := output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader", within_s=_WAIT_S):
        found["GPUs"] = "; ".join(gpus.splitlines())
    for label, folder in (("commit here", Path.cwd()), ("commit of ajet", Path(__file__).parent)):
        describe = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12")
        if commit := output_of(*describe, within_s=_WAIT_S):
            found[label] = commit
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["command"] = " ".join(sys.argv)
    return found


class ExperimentBusyError(UserError):
    """Another process is running this experiment."""


class ExperimentPlaceError(UserError):
    """The experiment folder can't be created."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The state of a folder before a run opened it, which is restored if the run is refused."""

    files: dict[Path, bytes]
    """Contents of the config and the copied code, by path within the folder."""
    sizes: dict[str, int]
    """Sizes of the files that are only appended to, and of those that show whether the run has done anything."""
    checkpoints: frozenset[str]
    aside: Path | None = None
    """Where `--fresh` has moved it."""

    @classmethod
    def of(cls, path: Path, aside: Path | None = None) -> EarlierRun | None:
        """Read the state of a folder; None if there was no run."""
        if aside is None and not (path / "config.resolved.yaml").exists():
            return None
        kept = [*(path / name for name in _WRITTEN_AT_START), *(path / "code").rglob("*")]
        return cls(
            {file.relative_to(path): file.read_bytes() for file in kept if file.is_file()},
            {name: _size(path / name) for name in ("events.jsonl", "metrics.jsonl")},
            _checkpoints(path),
            aside,
        )

    def has_changed(self, path: Path) -> bool:
        """Whether there are new results."""
        return _size(path / "metrics.jsonl") != self.sizes["metrics.jsonl"] or _checkpoints(path) != self.checkpoints

    def restore(self, path: Path) -> None:
        """Restore everything except `run.log`."""
        if self.aside is not None:
            shutil.rmtree(path)
            self.aside.rename(path)
            return
        shutil.rmtree(path / "code", ignore_errors=True)
        for name, content in self.files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        if (path / "events.jsonl").exists():
            os.truncate(path / "events.jsonl", self.sizes["events.jsonl"])


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _checkpoints(path: Path) -> frozenset[str]:
    folder = path / "checkpoints"
    return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


class ExperimentFolder:
    """An open experiment folder, made by `open` and closed when the run ends."""

    def __init__(self, path: Path, config: Any, masker: Masker, lock: int, *, with_trackers: bool = True) -> None:
        self.path = path
        self.name = path.name
        self.masker = masker
        """Masks this run's secrets."""
        self._lock = lock
        self.events = EventLog(path / "events.jsonl", masker)
        self.metrics = make_sinks(config, path, masker, with_trackers=with_trackers)
        self._log = FileLog(path / "run.log", masker)
        self._earlier: EarlierRun | None = None
        self.resumed = False
        """The folder holds an earlier start of this run."""
        self.has_results = False
        """And that start completed a step, or saved a checkpoint."""
        self._withdrawn = False

    @classmethod
    def open(
        cls,
        config: Any,
        *,
        exp_dir: str | Path | None = None,
        fresh: bool = False,
        source_yaml: Path | None = None,
        backbone: str = "",
        judge: str = "",
    ) -> ExperimentFolder:
        """Create the folder, or reopen it to resume.

        `exp_dir` is the folder of all experiments (default: `saved_experiments`). `fresh` moves an earlier run aside. A
        debug run has its own folder (`<name>-debug`) and always starts afresh; a search for prompt templates has its
        own as well (`<name>-prompt`). `judge`: what will score the episodes.
        """
        path = folder_of(config, exp_dir, source_yaml)
        if backbone in OWN_FOLDER:
            path = path.with_name(f"{path.name}-{backbone}")
        try:
            return cls._open(config, path, fresh, source_yaml, backbone, judge)
        except OSError as error:
            key = "--exp-dir" if exp_dir is not None else "ajet.experiment_dir"
            raise ExperimentPlaceError(
                f"the experiment's folder can't be made or written: {error.strerror} ({error.filename or path})\n    "
                f"choose another with {key} or ajet.experiment_name, or make room there"
            ) from error

    @classmethod
    def _open(
        cls, config: Any, path: Path, fresh: bool, source_yaml: Path | None, backbone: str, judge: str
    ) -> ExperimentFolder:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        aside: Path | None = None
        if backbone == "debug":
            _empty(path)
        elif fresh and (path / "config.resolved.yaml").exists():
            os.close(lock)
            aside = path.rename(_aside(path))
            path.mkdir()
            lock = _lock(path)
            if (aside / "cache").is_dir():  # by content, so it needs no reset
                shutil.copytree(aside / "cache", path / "cache")
        earlier = None
        try:
            earlier = EarlierRun.of(path, aside)
            folder = cls._begin(config, path, lock, source_yaml, backbone, judge)
            folder._earlier = earlier
            return folder
        except BaseException:
            if earlier is not None:
                with suppress(OSError):  # the first error says what is wrong
                    earlier.restore(path)
            os.close(lock)  # this process may try again
            raise

    @classmethod
    def _begin(
        cls, config: Any, path: Path, lock: int, source_yaml: Path | None, backbone: str, judge: str
    ) -> ExperimentFolder:
        """Write what a start writes, and open what the run writes."""
        resumed = (path / "config.resolved.yaml").exists()
        # a start that was refused, or interrupted before its first step, leaves nothing to compare with
        has_results = resumed and (_size(path / "metrics.jsonl") > 0 or bool(_checkpoints(path)))
        resolved = config.model_dump(mode="json")
        asked = source_yaml.read_text(encoding="utf-8") if source_yaml else ""
        masker = Masker(resolved, _parsed(asked))
        if asked:
            (path / "config.yaml").write_text(masker.text(asked), encoding="utf-8")
        masked = masker.value(resolved)
        defaults = type(config)().model_dump(mode="json")
        changes = _changes(path / "config.resolved.yaml", masked, defaults) if has_results else {}
        (path / "config.resolved.yaml").write_text(yaml.safe_dump(masked, sort_keys=False, allow_unicode=True), "utf-8")
        if has_results and judge and (before := _judge_before(path)) and judge != before:
            changes[JUDGE] = [before, judge]
        environment = run_environment() | ({JUDGE: judge} if judge else {})
        (path / "environment.json").write_text(json.dumps(masker.value(environment), indent=2), encoding="utf-8")
        folder = cls(path, config, masker, lock, with_trackers=backbone != "debug")
        folder.resumed, folder.has_results = resumed, has_results
        _log_changes(changes)
        folder.events.write("resumed" if resumed else "started", backbone=backbone, pid=os.getpid(), changed=changes)
        return folder

    def withdraw(self) -> None:
        """Call this if the start was refused. If the run has recorded nothing yet, closing the folder then restores
        it."""
        self._withdrawn = self._earlier is not None and not self._earlier.has_changed(self.path)

    @property
    def checkpoints(self) -> Path:
        """Holds the `step_N/` folders."""
        return self.path / "checkpoints"

    def keep_checkpoints_in(self, base: str | None) -> None:
        """Make `checkpoints` a link to a folder of its own there. A run that goes on keeps its place, and doesn't begin
        again where that is missing, perhaps for lack of a disk."""
        link = self.checkpoints
        is_placed = link.is_symlink()
        if not is_placed and (base is None or link.exists()):
            return
        folder = link.readlink() if is_placed else Path(str(base)).expanduser().absolute() / self.name
        if self.has_results and is_placed and not folder.is_dir():
            raise ExperimentPlaceError(
                f"{link} leads to {folder}, which isn't there: mount its disk, or delete the link to begin again"
            )
        if is_placed and not f"{folder.name}.".startswith(f"{self.name}."):  # renamed or copied
            for other in self.path.parent.glob("*/checkpoints"):
                if other != link and other.is_symlink() and other.readlink() == folder:
                    raise ExperimentPlaceError(
                        f"{link} leads to the checkpoints of {other.parent}, of which this run is a copy, and would "
                        f"replace them. Give it its own: rm {link} && cp -r {folder} {link}"
                    )
        if not is_placed and folder.exists():  # another run's
            folder = _aside(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not is_placed:
                link.symlink_to(folder, target_is_directory=True)
        except OSError as error:
            key = "ajet.trainer_common.checkpoint_base_dir"
            raise ExperimentPlaceError(f"{key}: {folder} can't be made ({error.strerror}): name another") from error

    @property
    def hf(self) -> Path:
        """The newest weights in Hugging Face format."""
        return self.path / "hf"

    @property
    def episodes(self) -> Path:
        """The database of episodes."""
        return self.path / "episodes.sqlite"

    def save_code(self, files: Iterable[Path]) -> None:
        """Keep the user's files as they ran: these, and the source and text files next to them."""
        code = self.path / "code"
        for file in dict.fromkeys(path.resolve() for path in files):
            target = code / file.parent.name
            target.mkdir(parents=True, exist_ok=True)
            beside = (path for path in sorted(file.parent.iterdir()) if path != file and path.suffix in _CODE_SUFFIXES)
            readable = (path for path in beside if path.is_file() and os.access(path, os.R_OK))
            small = [path for path in readable if path.stat().st_size <= _CODE_FILE_BYTES]
            for source in (file, *small[:_CODE_FILES]):
                text = source.read_text(encoding="utf-8", errors="replace")
                copy, masked = target / source.name, self.masker.text(text)
                if self.has_results and copy.exists() and copy.read_text(encoding="utf-8") != masked:
                    log.info("%s has changed since the last run in this folder", source.name)
                copy.write_text(masked, encoding="utf-8")

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, as the run resumes there. (The recorder deletes the episodes.)"""
        self.events.write("rewound", step=step)
        rewind_metrics(self.path / "metrics.jsonl", step)
        for folder in (self.path / "trajectories").glob("step_*"):
            number = folder.name.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                shutil.rmtree(folder)

    def close(self, status: str = "completed", **fields: Any) -> None:
        """Record the end of the run and release the folder. `status`: completed | failed | interrupted."""
        self.metrics.close(in_a_hurry=status == "interrupted")
        self.events.write("ended", status=status, **fields)
        self.events.close()
        self._log.close()
        if self._withdrawn and self._earlier is not None:
            self._earlier.restore(self.path)
        os.close(self._lock)

    def __enter__(self) -> ExperimentFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted")
        else:
            self.close("failed", error=f"{type(error).__name__}: {error}")


def read_environment(path: Path) -> dict[str, str]:
    """The recorded machine, versions and judge of a run."""
    file = path / "environment.json"
    found = json.loads(read_regular(file)) if file.exists() else {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _judge_before(path: Path) -> str:
    """The judge of the last run in this folder; empty if there was none or it isn't recorded."""
    try:
        return read_environment(path).get(JUDGE, "")
    except ValueError as error:
        log.warning("%s is damaged (%s), so what scored the run is unknown", path / "environment.json", error)
        return ""


def is_running(path: Path) -> bool:
    """Whether a process has this experiment open."""
    try:
        handle = os.open(path / _LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def folder_of(config: Any, exp_dir: str | Path | None, source_yaml: Path | None) -> Path:
    """Where a run's folder is, or will be (those of `OWN_FOLDER` are beside it)."""
    if exp_dir is None:
        return Path(config.experiment_path)
    name = config.ajet.experiment_name
    if name == "read_yaml_name":
        name = source_yaml.stem if source_yaml else "experiment"
    return Path(exp_dir).expanduser() / str(name)


def typed(path: Path) -> str:
    """An experiment as the user may type it: its name, if it is where commands look for it."""
    return shlex.quote(path.name if path.parent == Path("saved_experiments") else str(path))


def _lock(path: Path) -> int:
    """Lock the folder. The kernel releases the lock when the process ends, however it ends."""
    handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    for attempt in range(20):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt == 19:  # `is_running` holds the lock for a moment
                os.close(handle)
                raise ExperimentBusyError(
                    f"{path}: another process is running this experiment. Wait for it, stop it (`ajet --kill` stops "
                    "all your runs), or set another ajet.experiment_name."
                ) from None
            time.sleep(0.05)
    os.register_at_fork(after_in_child=lambda: _close_quietly(handle))
    return handle


def _close_quietly(handle: int) -> None:
    """Close it in a forked child, which must not keep the folder locked after its parent died."""
    with suppress(OSError):  # closed before the fork
        if os.readlink(f"/proc/self/fd/{handle}").endswith(_LOCK):
            os.close(handle)


def _aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.{stamp}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.{stamp}-{count}")
    return aside


def _empty(path: Path) -> None:
    """Delete what an earlier run wrote, and nothing else."""
    files = ("metrics.jsonl", "events.jsonl", "run.log", "config.yaml", "config.resolved.yaml")
    for name in (*files, "episodes.sqlite", "episodes.sqlite-wal", "episodes.sqlite-shm"):
        (path / name).unlink(missing_ok=True)
    for name in ("code", "trajectories"):
        shutil.rmtree(path / name, ignore_errors=True)


def _parsed(text: str) -> Any:
    """The user's YAML as written: an override may have replaced a secret in it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # the stricter config loader has already accepted the file
        return None


def _changes(path: Path, now: dict[str, Any], defaults: dict[str, Any]) -> dict[str, list[Any]]:
    """The keys that differ from the last run in this folder: `{key: [before, now]}`. A key that an older version didn't
    have is no change while it has its default."""
    try:
        before = dict(flatten(yaml.safe_load(read_regular(path)) or {}))
    except (yaml.YAMLError, AttributeError) as error:  # cut off by a kill or a full disk
        log.warning("%s is damaged (%s), so what has changed since is unknown", path, " ".join(str(error).split()))
        return {}
    after, unset = dict(flatten(now)), dict(flatten(defaults))
    pairs = {key: [before.get(key, unset.get(key)), after.get(key)] for key in {**before, **after}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _log_changes(changes: dict[str, list[Any]]) -> None:
    """Log the changed keys. A change to the model, the data or the training settings is a warning."""
    for key, (before, now) in changes.items():
        if not key.startswith(_NAMES):
            level = logging.WARNING if key.startswith(_DECISIVE) else logging.INFO
            log.log(level, "since the last run in this folder, %s has changed: %s → %s", key, before, now)
