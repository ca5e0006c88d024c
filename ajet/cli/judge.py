"""`ajet judge CONF --scores FILE`: how well a config's judge agrees with scores that you trust.

Each line of the file is a task, as a task reader takes it, with a `reply` to it and the `score` that it deserves.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import correlation, fmean, stdev
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import EXIT_FAILED, TaskDataError
from ajet.schema.printable import one_line, printable
from ajet.system.command_line import CommandParser, fail

if TYPE_CHECKING:
    from ajet.observe.statistics import Share
    from ajet.schema.task import Task
    from ajet.task_judge.base_judge import BaseJudge, Judgement

AT_ONCE = 16
"""Rows that are judged at the same time."""
EQUAL = 1e-6
WORST = 5
SHOWN_CHARS = 60


@dataclass(slots=True)
class Scored:
    """A reply, the score that it deserves, and what the judge gave it."""

    task: Task
    reply: str
    score: float
    judged: float | None = None
    why: str = ""
    """Why the judge gave nothing."""

    @property
    def name(self) -> str:
        """The task, by its id if it has one."""
        return self.task.task_id or self.task.main_query

    @property
    def difference(self) -> float:
        return 0.0 if self.judged is None else self.judged - self.score


@dataclass(frozen=True, slots=True)
class Agreement:
    """A judge beside given scores."""

    rows: int
    judged: int
    equal: Share
    """Rows with the very score."""
    correlation: tuple[float, float, float] | None
    """Pearson's, and Fisher's 95 % interval. None: fewer than four rows, or one side never varies."""
    bias: float
    """Mean of judged − given."""
    bias_error: float | None
    """Half of its 95 % interval, by Student's t. None: one row has none."""


def run(argv: Sequence[str]) -> int:
    """Judge the replies, and compare."""
    parser = CommandParser("ajet judge", description="How well the config's judge agrees with scores that you trust.")
    from ajet.cli.tasks import add_config, config_of

    add_config(parser)
    parser.add_argument("--scores", type=Path, required=True, metavar="FILE", help="tasks with reply and score, JSONL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args(argv)

    from ajet.system.services import yaml_services
    from ajet.task_judge.base_judge import load_judge

    config = config_of(arguments)
    rows = read_scores(arguments.scores, config.ajet.task_reader.fields)
    judge = load_judge(config)
    if judge is None:
        return fail("the config has no judge: set ajet.task_judge.judge_type, or judge_protocol")
    with yaml_services(config):
        judge_rows(judge, rows)
    done = [row for row in rows if row.judged is not None]
    if not done:
        return fail(f"the judge gave no score: {rows[0].why}", EXIT_FAILED)
    found = agreement(rows)
    worst = sorted(done, key=lambda row: -abs(row.difference))[:WORST]
    if arguments.json:
        listed = [{"task": row.name, "reply": row.reply, "score": row.score, "judged": row.judged} for row in worst]
        errors = [{"task": row.name, "why": row.why} for row in rows if row.why]
        equal = found.equal._asdict()
        print(json.dumps({**asdict(found), "equal": equal, "worst": listed, "errors": errors}))
        return 0
    show(found, rows, worst)
    return 0


def read_scores(file: Path, fields: Any) -> list[Scored]:
    """The rows of the file. Raises TaskDataError that names a bad one."""
    from ajet.task_reader.task_reader_base import BadRecord, task_from_record

    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskDataError(f"--scores {file}: {getattr(error, 'strerror', None) or error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise BadRecord("expected an object")
            reply, score = record.pop("reply", None), record.pop("score", None)
            if not isinstance(reply, str):
                raise BadRecord(f"`reply` should be a text, not {reply!r:.50}")
            if not isinstance(score, int | float) or not math.isfinite(score):
                raise BadRecord(f"`score` should be a number, not {score!r:.50}")
            rows.append(Scored(task_from_record(record, fields), reply, float(score)))
        except (ValueError, OverflowError, RecursionError) as error:  # BadRecord is a ValueError
            raise TaskDataError(f"{file}:{number}: {error}") from None
    if not rows:
        raise TaskDataError(f"{file} holds no rows: expected tasks with `reply` and `score`, one JSON object a line")
    return rows


def judge_rows(judge: BaseJudge, rows: Sequence[Scored]) -> None:
    """Have each row judged; those of one task together, if the judge compares."""
    from ajet.task_judge.base_judge import GroupJudge
    from ajet.task_reader.task_reader_base import content_id

    groups: dict[object, list[Scored]] = {}
    whole = isinstance(judge, GroupJudge) and not judge.per_episode
    for number, row in enumerate(rows):
        groups.setdefault((row.task.task_id or content_id(row.task)) if whole else number, []).append(row)
    if isinstance(judge, GroupJudge):
        judge.prepare()
    threads = ThreadPoolExecutor(AT_ONCE)  # a judge may block, and each call has a loop of its own as in a run
    try:
        for _ in threads.map(lambda group: _judge_in_thread(judge, group), groups.values()):
            pass
    finally:  # after Ctrl-C, a judge that hangs is not waited for
        threads.shutdown(wait=False, cancel_futures=True)


def _judge_in_thread(judge: BaseJudge, rows: list[Scored]) -> None:
    from ajet.task_runner.thread_control import run_with_pauses

    with asyncio.Runner() as runner:
        run_with_pauses(runner.get_loop(), _judge(judge, rows))


async def _judge(judge: BaseJudge, rows: list[Scored]) -> None:
    try:
        for row, judgement in zip(rows, await _judgements(judge, rows), strict=True):
            row.judged = judgement.reward
    except Exception as error:  # noqa: BLE001 - user code, and the helper's server: shown with its rows
        for row in rows:
            row.why = f"{type(error).__name__}: {error}"


async def _judgements(judge: BaseJudge, rows: list[Scored]) -> list[Judgement]:
    """As a run would ask: the reply is all that the workflow reports."""
    from ajet.schema.task import WorkflowOutput, WorkflowTask
    from ajet.task_judge.base_judge import (
        GroupJudge,
        JudgedCall,
        JudgedEpisode,
        Later,
        validate_reward,
        validate_rewards,
    )
    from ajet.task_runner.results import called

    said: list[Judgement | JudgedEpisode] = []
    for row in rows:
        task = WorkflowTask(task=row.task, task_id=row.task.task_id)
        output = WorkflowOutput(metadata={"final_answer": row.reply, "last_reply": row.reply})
        value = await called(judge.compute_reward, task, output)
        if isinstance(value, Later):
            asked = row.task.init_messages or [{"role": "user", "content": row.task.main_query}]
            call = JudgedCall("", asked, {"role": "assistant", "content": row.reply})
            said.append(JudgedEpisode(task, output, [call], value))
        else:
            said.append(validate_reward(value, type(judge).__name__))
    waiting = [each for each in said if isinstance(each, JudgedEpisode)]
    late: Iterator[Judgement] = iter(())
    if waiting:
        assert isinstance(judge, GroupJudge), "only such a judge decides later"
        values = await called(judge.compute_group_rewards, waiting)
        late = iter(validate_rewards(values, len(waiting), type(judge).__name__))
    return [next(late) if isinstance(each, JudgedEpisode) else each for each in said]


def agreement(rows: Sequence[Scored]) -> Agreement:
    """The figures of the rows that were judged; there is at least one."""
    from ajet.observe.statistics import Share, t_quantile

    done = [row for row in rows if row.judged is not None]
    differences = [row.difference for row in done]
    return Agreement(
        rows=len(rows),
        judged=len(done),
        equal=Share.of([float(abs(row.difference) <= EQUAL) for row in done]),
        correlation=_correlation([row.score for row in done], [row.judged or 0.0 for row in done]),
        bias=fmean(differences),
        bias_error=t_quantile(len(done) - 1) * stdev(differences) / math.sqrt(len(done)) if len(done) > 1 else None,
    )


def _correlation(given: list[float], judged: list[float]) -> tuple[float, float, float] | None:
    if len(given) < 4 or len(set(given)) == 1 or len(set(judged)) == 1:
        return None
    value = max(-1.0, min(1.0, correlation(given, judged)))
    if abs(value) > 1 - 1e-12:
        return (value, value, value)
    from ajet.observe.statistics import Z

    middle, half = math.atanh(value), Z / math.sqrt(len(given) - 3)
    return (value, math.tanh(middle - half), math.tanh(middle + half))


def show(found: Agreement, rows: Sequence[Scored], worst: Sequence[Scored]) -> None:
    """The report."""
    print(f"{'judged':<14} {found.judged:,} of {found.rows:,} rows")
    print(f"{'same score':<14} {found.equal}")
    if found.correlation is None:
        print(f"{'correlation':<14} none: it takes four rows, and scores that differ on both sides")
    else:
        value, low, high = found.correlation
        print(f"{'correlation':<14} {value:.2f}  ({low:.2f} … {high:.2f})")
    error = "" if found.bias_error is None else f" ± {found.bias_error:.3f}"
    print(f"{'difference':<14} {found.bias:+.3f}{error} (judged − given, mean)")
    for label, row in zip(
        ["worst", *[""] * len(worst)], (row for row in worst if abs(row.difference) > EQUAL), strict=False
    ):
        asked, said = (one_line(text, SHOWN_CHARS) for text in (row.task.main_query, row.reply))
        print(printable(f"{label:<14} given {row.score:g}, judged {row.judged:g}: {asked} → {said}"))
    for label, row in zip(["not judged", *[""] * WORST], (row for row in rows if row.why), strict=False):
        print(printable(f"{label:<14} {one_line(row.task.main_query, SHOWN_CHARS)}: {row.why.splitlines()[0][:200]}"))
