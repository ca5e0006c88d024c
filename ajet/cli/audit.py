"""`ajet audit CONF`: whether a task can be trained, before anything is: the model is measured, then the reward is tested.

`--time` measures a few training steps instead, and says what the whole run will take.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ajet.schema.errors import EXIT_FAILED, ConfigError
from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser, fail

if TYPE_CHECKING:
    from ajet.backbone.plan import RunPlan
    from ajet.backbone.trainability import Figures, Probe, Probed, Verdict
    from ajet.config import Config
    from ajet.engine.base import Engine
    from ajet.engine.scripted import ScriptedCall
    from ajet.schema.episode import Episode, EpisodeGroup
    from ajet.schema.task import Task
    from ajet.task_runner.runtime import Runtime

T = TypeVar("T")
PROBED_TASKS = 4
FORMS = ("{answer}", "\\boxed{{{answer}}}", "The answer is {answer}.", "#### {answer}", "<answer>{answer}</answer>")
"""How a right answer may be written, where no rewarded reply shows it."""
PLAYING_SHARE = 0.8
"""Of the time limit, for playing; the rest is for the reward."""
CALIBRATION_STEPS = 3
"""The first also warms up; the others are averaged."""


def run(argv: Sequence[str]) -> int:
    """Print figures and one verdict. Returns 0 for `train`, 1 for the other verdicts."""
    arguments = _parser().parse_intermixed_args(argv)
    from ajet.config.loader import load_config

    if arguments.time:
        return _show_time(load_config(arguments.conf, arguments.overrides, backbone="local"), arguments)
    config = load_config(arguments.conf, arguments.overrides, backbone="debug")  # which trains nothing, on any engine
    from ajet.backbone.trainability import verdict
    from ajet.system.services import yaml_services

    with yaml_services(config):
        audit = _Audit(config, arguments)
        found = audit.play()
        if not found.usable:
            audit.show(found)
            return fail(_nothing_usable(found, audit.stopped), EXIT_FAILED)
        hole = audit.test_reward(found)
    decided = verdict(found, hole, audit.limits, config.ajet.data.train_batch_size)
    advice = _advice(decided, arguments, config)
    if arguments.json:
        result = {"figures": asdict(found), "planned": audit.planned, "stopped_early": audit.stopped}
        result |= {"probes": [asdict(probe) for probe in audit.probed.probes], "skipped": audit.probed.skipped}
        print(json.dumps({**result, "verdict": decided._asdict(), "advice": advice}))
    else:
        audit.show(found)
        audit.show_probes()
        print(printable(f"\nverdict: {decided.what}\n    {decided.why}" + "".join(f"\n    {line}" for line in advice)))
    return 0 if decided.what == "train" else EXIT_FAILED


def _parser() -> CommandParser:
    parser = CommandParser("ajet audit", description=__doc__)
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--tasks", type=_count, default=16, metavar="N", help="play this many training tasks (16)")
    parser.add_argument("--repeats", type=_count, default=8, metavar="K", help="episodes of each task (8)")
    parser.add_argument("--max-minutes", type=_positive, default=10.0, metavar="M", help="stop after this long (10)")
    parser.add_argument("--answer-field", metavar="FIELD", help="field of the tasks with the right answer")
    parser.add_argument(
        "--answer-form", metavar="TEXT", help="a reply that the reward understands, with {answer} in it"
    )
    parser.add_argument("--time", action="store_true", help="measure training steps: what the whole run will take")
    parser.add_argument(
        "--gpu-hour", type=_positive, metavar="PRICE", help="with --time: the price of a GPU for an hour"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) <= 100_000:
        return int(text)
    raise ArgumentTypeError(f"{text!r} is not a count: write a whole number from 1")


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < 1e6:
            return number
    raise ArgumentTypeError(f"{text!r} is not a number above 0")


def _nothing_usable(found: Figures, stopped: bool) -> str:
    if not found.episodes:
        return "no episode ended in time: raise --max-minutes, or play fewer with --tasks and --repeats"
    reasons = "".join(f"\n    {count} × {reason}" for reason, count in list(found.failures.items())[:3])
    late = "; time was up before the others ended" * stopped
    return f"nothing can be said: all {found.episodes} episodes failed{late}:{reasons}"


def _advice(decided: Verdict, arguments: Namespace, config: Config) -> list[str]:
    """What to run or to change, line by line."""
    command = " ".join(["ajet --conf", str(arguments.conf), *arguments.overrides])
    if decided.what == "train":
        return [command]
    if decided.what == "change limits":
        new = f": {decided.value}" if decided.value is not None else ": raise it"
        return [f"{decided.key}{new}, or ask for shorter replies"]
    if decided.what == "imitate first":
        name = f"{Path(config.experiment_path).name}_cold_start"
        sft = "trainer_common.algorithm.policy_loss=sft trainer_common.algorithm.sft.demonstrations=talks.jsonl"
        return [
            f"{command} experiment_name={name} {sft}",
            f"{command} model.path=saved_experiments/{name}/hf",
            'talks.jsonl: conversations that succeed, one a line ({"messages": […]})',
        ]
    return []


class _Script(NamedTuple):
    kind: str
    reply: str


class _Audit:
    """One audit: the model's episodes, then the scripted ones."""

    def __init__(self, config: Config, arguments: Namespace) -> None:
        from ajet.backbone.checks import ELSEWHERE
        from ajet.backbone.trainability import Limits, Probed
        from ajet.observe.viewer import answer_names
        from ajet.task_reader import build_reader, read_training_tasks

        rollout = config.ajet.rollout
        if (wrapper := config.ajet.task_runner.wrapper_type) in ELSEWHERE:
            raise ConfigError(
                f"ajet.task_runner.wrapper_type: {wrapper}: these episodes are played elsewhere, and an audit plays its "
                "own. Try it with asyncio or multi-processing"
            )
        tasks = read_training_tasks(build_reader(config))
        names = [arguments.answer_field] if arguments.answer_field else answer_names(config.model_dump())
        if arguments.answer_field and not any(arguments.answer_field in task.metadata for task in tasks):
            has = ", ".join(map(repr, sorted(tasks[0].metadata))) or "nothing"
            raise ConfigError(f"--answer-field {arguments.answer_field}: no task has this field; the first has {has}")
        if arguments.answer_form and "{answer}" not in arguments.answer_form:
            raise ConfigError(f"--answer-form {arguments.answer_form!r}: write {{answer}} where the answer stands")
        rollout.enable_oversample, rollout.min_group_size = False, 1  # every episode counts, and none ends the others
        self.config, self.names, self.form = config, names, arguments.answer_form
        self.limits = Limits(
            rollout.max_response_length_in_one_turn, rollout.max_model_len, rollout.multi_turn.max_steps
        )
        count = min(arguments.tasks, len(tasks))
        self.tasks = [tasks[index * len(tasks) // count] for index in range(count)]
        self.repeats = arguments.repeats
        self.planned = count * self.repeats
        self.threshold = config.ajet.task_judge.success_threshold
        self.stopped = False
        self.probed = Probed()
        self.seconds = 60.0 * arguments.max_minutes
        self.began = time.monotonic()
        self.seen: list[tuple[Episode, str]] = []
        """The usable episodes, and their last reply."""

    def _bounded(self, runtime: Runtime, work: Coroutine[Any, Any, T], share: float) -> T:
        """Its result; when the time is up, with what has ended by then."""
        running = runtime.submit(work)
        try:
            while not wait([running], timeout=0.2).done:
                if not self.stopped and time.monotonic() - self.began > share * self.seconds:
                    self.stopped = True
                    runtime.loop.call_soon_threadsafe(runtime.pool.stop_all)
        except BaseException:
            running.cancel()
            raise
        return running.result()

    def play(self) -> Figures:
        """Play the tasks as training would."""
        from ajet.backbone.failures import FailureWatch
        from ajet.backbone.trainability import figures
        from ajet.task_runner.runtime import Runtime

        with Runtime(self.config) as runtime:
            runtime.engine_ready()
            groups = self._bounded(runtime, runtime.pool.run_groups(self.tasks, num_repeat=self.repeats), PLAYING_SHARE)
            model = runtime.model()
        FailureWatch(self.config).look_at_groups("the audit", groups)
        found = figures(groups, self.limits, self.threshold)
        for group in groups:
            for episode in group.episodes:
                calls = [call for call in episode.tree.calls if call.run >= 0]
                if calls:
                    ids = episode.tree.runs[calls[-1].run].ids.tolist()
                    self.seen.append((episode, model.tokenizer.decode(ids, skip_special_tokens=True).strip()))
        _count_tool_calls(found, groups, model)
        return found

    # ------------------------------------------------------------------------------------------------ the reward

    def test_reward(self, found: Figures) -> str | None:
        """Play the probes. Returns the hole."""
        from ajet.backbone.trainability import GOLD, WHAT, find_hole
        from ajet.task_judge.base_judge import GroupJudge, load_judge

        rollout = self.config.ajet.rollout
        if rollout.agent is not None and rollout.agent.type == "cli":
            self.probed.skipped = dict.fromkeys(
                [GOLD, *WHAT], "the agent is a program, which a scripted reply would end"
            )
            return None
        judge = load_judge(self.config, self.config.base_dirs)
        relative = isinstance(judge, GroupJudge) and not judge.per_episode
        gold, tasks = self._gold()
        scripts = [list(self._scripts(task, gold, tasks)) for task in tasks]
        groups = self._replay(tasks, scripts)
        for task, script, group in zip(tasks, scripts, groups, strict=True):
            self.probed.probes += self._results(task, script, group)
        low, _, high = found.reward
        return find_hole(self.probed, (low, high), self.threshold, relative=relative)

    def _answer(self, task: Task) -> str | None:
        from ajet.observe.viewer import gold_answer

        value = gold_answer(task.metadata, self.names)
        value = value[0] if isinstance(value, list) and value else value
        if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
            return None
        return str(value).rpartition("####")[2].strip()  # GSM8K's answers end so, after their reasoning

    def _gold(self) -> tuple[dict[str, str], list[Task]]:
        """The form in which a right answer earns most, filled in per task, and the tasks to probe: with different
        answers, if they have any."""
        from ajet.backbone.trainability import FORMAT, GOLD, LONGEST, SHORTEST

        distinct = {answer: task for task in reversed(self.tasks) if (answer := self._answer(task)) is not None}
        answers = {task.task_id: answer for answer, task in distinct.items()}
        tasks = [task for task in self.tasks if task.task_id in answers][:PROBED_TASKS]
        kinds, why = (GOLD, FORMAT, LONGEST, SHORTEST), ""
        if self.config.ajet.rollout.environment is not None:
            why = "the reward comes from what an environment is in, not from a reply"
        elif not tasks:
            why = "the tasks have no right answer: --answer-field names where it is"
        if why:
            self.probed.skipped |= dict.fromkeys(kinds, why)
            return {}, self.tasks[:PROBED_TASKS]
        forms = [self.form] if self.form else [*self._seen_forms(), *FORMS]
        first = tasks[0]
        tried = [_Script(GOLD, form.format(answer=answers[first.task_id])) for form in forms]
        (group,) = self._replay([first], [tried])
        results = self._results(first, tried, group)
        best = max(range(len(forms)), key=lambda index: _worth(results[index]))
        plays_on = any(call.turn for episode, _ in self.seen for call in episode.tree.calls)
        high = max(episode.reward or 0.0 for episode, _ in self.seen)
        reached = any(self._succeeded(episode) for episode, _ in self.seen) or high >= self.threshold
        if not results[best].success and not self.form and (reached or plays_on):
            why = (
                f"no single reply could be written that is rewarded ({len(forms)} forms were tried): see --answer-form"
            )
            self.probed.skipped |= dict.fromkeys((GOLD, FORMAT), why)
            return {}, tasks
        if len(tasks) == 1:
            self.probed.skipped[FORMAT] = "all tasks have the same answer"
        return {task.task_id: forms[best].format(answer=answers[task.task_id]) for task in tasks}, tasks

    def _succeeded(self, episode: Episode) -> bool:
        from ajet.backbone.metrics import is_success

        return is_success(episode, self.threshold)

    def _seen_forms(self) -> Iterator[str]:
        """A rewarded reply with its answer taken out: the form that the reward surely understands."""
        answers = {task.task_id: self._answer(task) for task in self.tasks}
        for episode, reply in self.seen:
            answer = answers.get(episode.task_id)
            if answer and answer in reply and self._succeeded(episode):
                before, _, after = reply.rpartition(answer)
                yield f"{_escaped(before)}{{answer}}{_escaped(after)}"
                return

    def _scripts(self, task: Task, gold: dict[str, str], tasks: list[Task]) -> Iterator[_Script]:
        """The probes of one task."""
        from ajet.backbone.trainability import ECHO, EMPTY, FORMAT, GOLD, LONGEST, SHORTEST

        yield _Script(EMPTY, "")
        asked = task.main_query or next((m["content"] for m in reversed(task.init_messages) if m.get("content")), "")
        if isinstance(asked, str) and asked.strip():
            yield _Script(ECHO, asked)
        else:
            self.probed.skipped[ECHO] = "the tasks have no question (main_query, init_messages)"
        if task.task_id in gold:
            yield _Script(GOLD, gold[task.task_id])
            others = [gold[other.task_id] for other in tasks if other.task_id != task.task_id]
            if others:
                yield _Script(FORMAT, others[0])
        answer = self._answer(task)
        if answer is None or LONGEST in self.probed.skipped:
            return
        strange = [reply for episode, reply in self.seen if episode.task_id != task.task_id and answer not in reply]
        if strange := [reply for reply in strange if reply]:
            yield _Script(LONGEST, max(strange, key=len))
            yield _Script(SHORTEST, min(strange, key=len))
        else:
            self.probed.skipped |= dict.fromkeys((LONGEST, SHORTEST), "no reply to another task was seen")

    def _replay(self, tasks: Sequence[Task], scripts: Sequence[Sequence[_Script]]) -> list[EpisodeGroup]:
        """One group per task, with one episode per scripted reply, which answers every call of it."""
        from ajet.engine.model_source import ModelSource
        from ajet.engine.scripted import ScriptedEngine
        from ajet.schema.task import WorkflowTask
        from ajet.task_runner.runtime import Runtime

        replies: dict[str, str] = {}

        def remember(started: WorkflowTask) -> None:
            script = scripts[started.task_batch_index]
            replies[started.episode_uuid] = script[started.task_thread_index].reply

        def reply(call: ScriptedCall) -> str:
            return replies[call.session_id.partition(".")[0]]  # a second attempt has `.2`

        def scripted(config: Config) -> Engine:
            source = config.ajet.model.path
            return ScriptedEngine(
                reply, lambda: ModelSource.resolve(source).tokenizer(), max_model_len=self.limits.conversation
            )

        async def all_groups(runtime: Runtime) -> list[EpisodeGroup]:
            pool = runtime.pool
            return [
                await pool.run_group(task, batch_index=index, num_repeat=len(script), validation=True)
                for index, (task, script) in enumerate(zip(tasks, scripts, strict=True))
            ]

        with Runtime(self.config, make_engine=scripted, on_start=remember) as runtime:
            return self._bounded(runtime, all_groups(runtime), 1.0)

    def _results(self, task: Task, script: Sequence[_Script], group: EpisodeGroup) -> list[Probe]:
        from ajet.backbone.metrics import played
        from ajet.backbone.trainability import Probe
        from ajet.schema.episode import EpisodeStatus

        ended = {episode.repeat: episode for episode in played((*group.episodes, *group.failed))}
        probes = []
        for number, (kind, reply) in enumerate(script):
            episode = ended.get(number)
            if episode is None:
                probes.append(Probe(kind, task.task_id, reply, None, False, "time was up"))
                continue
            failed = episode.status is EpisodeStatus.JUDGE_ERROR
            why = "" if episode.failure is None else f"{episode.status}, {episode.failure.in_short}"
            success = episode.usable and self._succeeded(episode)
            probes.append(Probe(kind, task.task_id, reply, episode.reward, success, why, failed))
        return probes

    # ------------------------------------------------------------------------------------------------ the report

    def show(self, found: Figures) -> None:
        for label, text in _lines(found, self.limits, self.planned):
            print(f"{label:<20} {printable(text)}")
        if self.stopped:
            print(f"{'stopped early':<20} after {self.seconds / 60:g} minutes (--max-minutes)")

    def show_probes(self) -> None:
        from ajet.backbone.trainability import GOLD, WHAT

        print("\nreward of scripted replies")
        for kind in (GOLD, *WHAT):
            probes = self.probed.of(kind)
            if not probes:
                print(f"  {kind:<18} skipped: {self.probed.skipped.get(kind, 'nothing to try')}")
                continue
            earned = " ".join("-" if probe.reward is None else f"{probe.reward:g}" for probe in probes)
            text = repr(probes[0].reply)
            shown = text if len(text) <= 60 else text[:59] + "…"
            print(printable(f"  {kind:<18} {earned:<12} {shown}"))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _worth(probe: Probe) -> tuple[bool, float]:
    return probe.success, -1e9 if probe.reward is None else probe.reward


def _count_tool_calls(found: Figures, groups: Sequence[EpisodeGroup], model: Any) -> None:
    """Read the replies again, for what could not be read in them: an episode keeps only what could."""
    trees = [episode.tree for group in groups for episode in (*group.episodes, *group.failed)]
    for tree in trees:
        for call in tree.calls:
            for message in call.new_messages:
                if message.get("role") == "tool":
                    found.tool_errors += str(message.get("content") or "").lstrip().lower().startswith("error")
            if call.run < 0 or call.tools < 0:
                continue
            tools = tree.toolsets[call.tools]
            text = model.tokenizer.decode(tree.runs[call.run].ids.tolist(), skip_special_tokens=False)
            read = model.parser.parse(text, tools)
            offered = {tool.get("function", tool).get("name") for tool in tools}
            made = [one["function"]["name"] for one in read.message.get("tool_calls") or ()]
            bad = len(read.malformed) + sum(name not in offered for name in made)
            found.tool_calls += len(made) + len(read.malformed)
            found.bad_tool_calls += bad


def _lines(found: Figures, limits: Any, planned: int) -> Iterator[tuple[str, str]]:
    yield "episodes", f"{found.episodes} of {planned} played, {found.usable} with a reward, {found.tasks} tasks"
    for reason, count in list(found.failures.items())[:5]:
        yield "  failed", f"{count} × {reason}"
    for k, share in found.pass_at.items():
        yield f"pass@{k}", f"{share}" + f"   95 % interval (Wilson) over {found.tasks} tasks" * (k == 1)
    if found.mixed is not None:
        yield "mixed groups", f"{found.mixed}   only these teach"
    low, mean, high = found.reward
    yield "return", f"{mean:.3f}, from {low:g} to {high:g}"
    mean, most = found.reply_tokens
    yield "reply tokens", f"{mean:.0f}, at most {most} (limit {limits.reply:,})"
    mean, most = found.conversation_tokens
    yield "prompt and reply", f"{mean:.0f}, at most {most} (limit {limits.conversation:,})"
    yield "cut replies", f"{found.cut_replies} of {found.calls}"
    for key, count in found.cut_by.items():
        yield "  cut short", f"{count} episodes, by {key}"
    if found.tool_calls:
        bad = f"{found.bad_tool_calls} unreadable or of unknown tools, {found.tool_errors} results begin with error"
        yield "tool calls", f"{found.tool_calls}, {bad}"
    yield "an episode", f"{found.seconds:.2f} s, {found.sampled_tokens:.0f} sampled tokens"


# ---------------------------------------------------------------------------------------------------- --time


def _show_time(config: Config, arguments: Namespace) -> int:
    from ajet.backbone.checks import read_tasks
    from ajet.backbone.plan import RunPlan, training_samples

    if config.ajet.trainer_common.val_only:
        raise ConfigError("ajet.trainer_common.val_only: true: there is no training to measure")
    tasks = read_tasks(config)
    plan = RunPlan.of(config, "local", training_samples(config, tasks.training), len(tasks.validation))
    measured = _calibrate(config, plan)
    if measured is None:
        return fail("no two training steps were completed: run the config to see why", EXIT_FAILED)
    result = measured.extrapolate(plan) | _price(config, plan, measured, arguments.gpu_hour)
    if arguments.json:
        print(json.dumps(result))
        return 0
    for label, text in _time_lines(plan, result):
        print(f"{label:<20} {text}")
    return 0


class _Measured(NamedTuple):
    """Seconds of a short run."""

    steps: list[float]
    validation: float
    start: float
    """Whatever is neither step nor validation: loading, the last checkpoint."""
    sampled_tokens: float
    """Of an average later step."""
    episodes: int
    """All of the short run's, validation included."""

    @property
    def later(self) -> float:
        return sum(self.steps[1:]) / len(self.steps[1:])

    def extrapolate(self, plan: RunPlan) -> dict[str, Any]:
        training = self.steps[0] + (plan.steps - 1) * self.later
        total = self.start + training + plan.validations * self.validation
        counts = {"steps": plan.steps, "validations": plan.validations, "episodes_per_step": plan.episodes_per_step}
        seconds = {"first_step_s": self.steps[0], "step_s": self.later, "validation_s": self.validation}
        whole = {"start_s": self.start, "hours": total / 3600, "sampled_tokens": self.sampled_tokens * plan.steps}
        return {**counts, **seconds, **whole}


def _calibrate(config: Config, plan: RunPlan) -> _Measured | None:
    """A short run in a folder that is deleted afterwards."""
    from ajet.backbone import LaunchOptions
    from ajet.backbone.launch import LaunchArguments, launch
    from ajet.observe.metrics import read_metrics

    common = config.ajet.trainer_common
    steps = min(CALIBRATION_STEPS, plan.steps)
    if steps < 2:
        raise ConfigError(f"the run has {plan.steps} steps: there is nothing to extrapolate. Run it")
    common.total_training_steps, common.test_freq, common.save_freq = steps, 0, 0
    common.val_before_train, common.resume, common.checkpoint_base_dir = bool(plan.validations), "never", None
    common.logger = ["file"]
    common.early_stop.target = common.early_stop.patience = None
    config.ajet.backbone = "local"
    with TemporaryDirectory(prefix="ajet-audit-") as folder:
        options = LaunchOptions(quiet=True)
        began = time.perf_counter()
        launch(LaunchArguments(exp_dir=folder, options=options), config)
        took = time.perf_counter() - began
        (metrics,) = list(Path(folder).glob("*/metrics.jsonl")) or [Path(folder) / "none"]
        lines = read_metrics(metrics) if metrics.exists() else []
    times = [line["time/step"] for line in lines if "time/step" in line]
    if len(times) < 2:
        return None
    validation = sum(line.get("time/validate", 0.0) for line in lines)
    tokens = [line.get("episode/sampled_tokens_total", 0.0) for line in lines if "time/step" in line][1:]
    episodes = sum(line.get("episode/count", 0) + line.get("val/episode/count", 0) for line in lines)
    return _Measured(times, validation, took - sum(times) - validation, sum(tokens) / len(tokens), int(episodes))


def _price(config: Config, plan: RunPlan, measured: _Measured, gpu_hour: float | None) -> dict[str, Any]:
    from ajet.backbone.local.placement import place, visible_gpus
    from ajet.task_judge.helper import HelperModel

    result: dict[str, Any] = {}
    if config.ajet.helper.model is not None and measured.episodes:
        budget = HelperModel.from_config(config).budget
        scale = (plan.episodes + plan.validations * plan.validation_episodes) / measured.episodes
        result |= {"helper_calls": budget.calls * scale, "helper_tokens": budget.tokens * scale}
        result["helper_cost"] = budget.cost * scale
    if gpu_hour is not None:
        placed = place(config, visible_gpus)
        result["gpus"] = len({placed.trainer or "cuda:0", *(f"cuda:{gpu}" for gpu in placed.engine)})
        hours = measured.extrapolate(plan)["hours"]
        result["gpu_cost"] = hours * result["gpus"] * gpu_hour
    return result


def _time_lines(plan: RunPlan, result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seconds = result["hours"] * 3600
    yield "the run", f"{plan.steps:,} steps of {plan.episodes_per_step:,} episodes"
    yield "validation", f"{plan.validations:,} × {plan.validation_episodes:,} episodes"
    yield "a step", f"{result['step_s']:.2f} s (the first {result['first_step_s']:.2f} s)"
    yield "a validation", f"{result['validation_s']:.2f} s"
    yield "start and end", f"{result['start_s']:.1f} s"
    yield "in all", f"{result['hours']:.2f} hours ({seconds:,.0f} s), {result['sampled_tokens']:,.0f} sampled tokens"
    if "helper_tokens" in result:
        calls, tokens, cost = (result[f"helper_{name}"] for name in ("calls", "tokens", "cost"))
        yield "helper", f"{calls:,.0f} calls, {tokens:,.0f} tokens, {cost:,.2f} by ajet.helper.price_per_million"
    if "gpu_cost" in result:
        yield "cost", f"{result['gpu_cost']:,.2f} for {result['gpus']} GPU" + "s" * (result["gpus"] > 1)
    yield "note", "replies that grow while the model learns make steps longer than those measured here"
