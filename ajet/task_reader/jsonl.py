"""`jsonl_dataset_file`: tasks from JSON Lines files, one object per line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NoReturn

from ajet.schema.errors import TaskDataError
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BadRecord, BaseTaskReader, task_from_record

log = logging.getLogger("ajet.task_reader")


class JsonlReader(BaseTaskReader):
    """Reads `training.file_path` and `validation.file_path`."""

    def get_training_tasks(self) -> list[Task]:
        path = self.reader_config.jsonl_dataset_file.training.file_path
        if path is None:
            raise TaskDataError("ajet.task_reader.jsonl_dataset_file.training.file_path is missing: name a file")
        return self.read(Path(path))

    def get_validation_tasks(self) -> list[Task]:
        path = self.reader_config.jsonl_dataset_file.validation.file_path
        return [] if path is None else self.read(Path(path))

    def read(self, path: Path) -> list[Task]:
        """All tasks in a file. `skip_bad_lines` bad lines are skipped; one more is an error."""
        try:
            content = path.expanduser().read_bytes()
        except OSError as error:
            raise TaskDataError(f"{path}: {error.strerror or error}") from None
        content = content.removeprefix(b"\xef\xbb\xbf")
        tasks: list[Task] = []
        skipped: list[str] = []
        query_needed = not self._acts_in_an_environment()
        # split at \n only: JSON text may contain U+2028 and other separators
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                tasks.append(task_from_record(_parse(line), self.reader_config.fields, query_needed=query_needed))
            except BadRecord as error:
                place = f"{path}:{number}: {error}"
                if len(skipped) >= self.reader_config.skip_bad_lines:
                    self._refuse(path, place, content, skipped)
                skipped.append(place)
        for place in skipped:
            log.warning("skipped %s", place)
        if not tasks:
            raise TaskDataError(f"{path} contains no tasks: expected one JSON object per line")
        return tasks

    def _acts_in_an_environment(self) -> bool:
        """Whether episodes have an environment. Then its first observation may replace the query, so records need
        none."""
        config = getattr(self, "config", None)  # None: the reader is used without a run
        return config is not None and config.ajet.rollout.environment is not None

    def _refuse(self, path: Path, place: str, content: bytes, skipped: list[str]) -> NoReturn:
        if content.lstrip().startswith(b"["):
            hint = "The file is one JSON list: write one object per line, or use `type: huggingface_dat_repo`."
        elif path.suffix in (".csv", ".parquet", ".arrow"):
            hint = f"`task_reader.type: huggingface_dat_repo` reads {path.suffix} files, as its `dataset_path`."
        elif skipped:
            hint = f"{len(skipped)} bad lines before it were skipped, as many as skip_bad_lines allows."
        else:
            hint = "`task_reader.skip_bad_lines: N` skips up to N such lines."
        raise TaskDataError(f"{place}\n{hint}")


def _parse(line: bytes) -> Any:
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadRecord("not usable JSON: nested too deeply") from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise BadRecord(f"not usable JSON: {error}") from None
    if b"\\u" in line:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise BadRecord(f"\\u{half:04x} is half of a surrogate pair, which is not a character") from None
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't a JSON number")
