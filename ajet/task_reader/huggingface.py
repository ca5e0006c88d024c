"""`huggingface_dat_repo`: tasks read with the `datasets` library from the hub, a local folder or a data file."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ajet.config.kinds import nearest_name
from ajet.schema.errors import TaskDataError
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BadRecord, BaseTaskReader, task_from_record

log = logging.getLogger("ajet.task_reader")

FILE_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
SECTION = "ajet.task_reader.huggingface_dat_repo"
TEXT_AS_IT_IS = {"keep_default_na": False, "na_values": [""]}
"""For CSV files: pandas takes `None`, `NA` and `null`, which may be answers, for missing values."""
UNNAMED = "__index_level_0__"
"""A column of a CSV file that its first line doesn't name. pandas takes the first for it, and moves all others."""


class HuggingFaceReader(BaseTaskReader):
    """Reads `training_split` and `validation_split` of `dataset_path`. A row without an id gets its index."""

    def get_training_tasks(self) -> list[Task]:
        split = self.reader_config.huggingface_dat_repo.training_split
        if split is None:
            raise TaskDataError(f"{SECTION}.training_split is missing: name the split to train on")
        return self._tasks("training_split", split)

    def get_validation_tasks(self) -> list[Task]:
        split = self.reader_config.huggingface_dat_repo.validation_split
        return [] if split is None else self._tasks("validation_split", split)

    def _tasks(self, key: str, split: str) -> list[Task]:
        path = self.reader_config.huggingface_dat_repo.dataset_path
        if split not in self._splits:
            there = f"it has {', '.join(map(repr, self._splits))}{nearest_name(split, self._splits)}"
            raise TaskDataError(f"{SECTION}.{key}: {path} has no split {split!r}; {there}")
        tasks: list[Task] = []
        skipped = 0
        for index, row in enumerate(self._splits[split]):
            try:
                task = task_from_record(row, self.reader_config.fields, query_needed=False)
                tasks.append(task if task.task_id else task.model_copy(update={"task_id": f"{split}-{index}"}))
            except BadRecord as error:
                place = f"{path} [{split}], row {index + 1}: {error}"
                if skipped >= self.reader_config.skip_bad_lines:
                    raise TaskDataError(place) from None
                skipped += 1
                log.warning("skipped %s", place)
        if not tasks:
            raise TaskDataError(f"{path} [{split}] contains no tasks")
        if without := [task for task in tasks if not task.main_query]:
            log.warning(
                "%s [%s]: %d of %d records have no field %s: their main_query is empty, their fields are in metadata "
                "(%s); ajet.task_reader.fields.main_query names yours",
                *(path, split, len(without), len(tasks), " / ".join(self.reader_config.fields.main_query)),
                ", ".join(without[0].metadata),
            )
        return tasks

    @cached_property
    def _splits(self) -> dict[str, Iterable[dict[str, Any]]]:
        settings = self.reader_config.huggingface_dat_repo
        if settings.dataset_path is None:
            raise TaskDataError(f"{SECTION}.dataset_path is missing: give a hub name, a folder or a file")
        import datasets

        path, name = settings.dataset_path, settings.dataset_name
        local = Path(path).expanduser()
        datasets.disable_progress_bars()
        is_csv = False
        saved = (local / "dataset_dict.json").is_file() or (local / "state.json").is_file()
        try:
            if local.is_file():
                if local.suffix not in FILE_FORMATS:
                    raise TaskDataError(f"{path}: unknown file type; expected one of {', '.join(FILE_FORMATS)}")
                if is_csv := local.suffix == ".csv":
                    loaded = _tables("csv", data_files=str(local), sep=_separator(local))
                else:
                    loaded = datasets.load_dataset(FILE_FORMATS[local.suffix], data_files=str(local))
            elif saved:
                loaded = datasets.load_from_disk(str(local))
            else:
                source = str(local) if local.is_dir() else path
                is_csv = local.is_dir() and datasets.load_dataset_builder(source, name).info.builder_name == "csv"
                loaded = (_tables if is_csv else datasets.load_dataset)(source, name)
        # many kinds of errors (network, hub, arrow, its own), which all mean that the source can't be read
        except (OSError, ValueError, RuntimeError, LookupError, TypeError, datasets.exceptions.DatasetsError) as error:
            hint = "" if local.exists() else " (there is no such file or folder, so it was looked up on the hub)"
            cause = f": {error.__cause__}".rstrip() if error.__cause__ else ""
            if isinstance(error.__cause__ or error, UnicodeDecodeError):
                cause += ": save it as UTF-8"
            raise TaskDataError(f"{SECTION}.dataset_path: can't read {path!r}{hint}: {error}{cause}") from error
        splits = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or settings.training_split): loaded}
        # a Parquet file may hold such a column
        if is_csv and any(UNNAMED in split.column_names for split in splits.values()):
            raise TaskDataError(
                f"{path}: its rows have more columns than its first line names: put texts that contain what separates "
                "columns in quotes, or name all columns"
            )
        return splits if saved else {name: _as_written(split) for name, split in splits.items()}


def _tables(*given: Any, **options: Any) -> Any:
    """Load CSV files, as they are written if that can be: a column may have `NA` after 10,000 rows of numbers."""
    from datasets import exceptions, load_dataset

    with suppress(exceptions.DatasetGenerationError):
        return load_dataset(*given, **options, **TEXT_AS_IT_IS)
    return load_dataset(*given, **options)


def _as_written(split: Any) -> Any:
    """The split without two guesses of its builder: dates in JSON without a time of day are text, and a blank in a CSV
    column makes no whole number a fraction."""
    from datasets import Value

    for name, feature in split.features.items():
        steps = []
        column = split.data.column(name)
        if split.info.builder_name == "json" and feature == Value("timestamp[s]"):
            steps = ["date32", "string"] if column.cast("date32").cast(column.type).equals(column) else []
        elif split.info.builder_name == "csv" and feature == Value("float64") and column.null_count:
            steps = ["int64"]
        with suppress(ValueError):  # some are no whole numbers
            for step in steps:
                split = split.cast_column(name, Value(step))
    return split


def _separator(table: Path) -> str:
    """What separates the columns of a CSV file, by its first line without what is in quotes: where a comma is the
    decimal sign, Excel writes semicolons."""
    with table.open("rb") as file:
        header = re.sub(rb'"[^"]*"', b"", file.readline())
    return max((",", ";", "\t"), key=lambda sign: header.count(sign.encode()))
