"""`ajet audit CONF`: measure the model on a task and test the reward, before training; ends with what to do next.

`--time` measures a few training steps instead, and says what the whole run will take.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from shlex import join, quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from ajet.observe.logs import Masker
from ajet.schema.errors import EXIT_FAILED, ConfigError
from ajet.schema.printable import printable
from ajet.system.command_line import ArgumentError, CommandParser, fail, real, whole

if TYPE_CHECKING:
    from ajet.backbone.plan import Measured, RunPlan
    from ajet.backbone.trainability import AuditFigures, AuditVerdict, Probe
    from ajet.config import Config
    from ajet.engine.base import Engine
    from ajet.engine.scripted import ScriptedCall
    from ajet.schema.chat import Tool
    from ajet.schema.episode import Episode, EpisodeGroup
    from ajet.schema.task import Task
    from ajet.task_runner.runtime import Runtime

T = TypeVar("T")
PROBED_TASKS = 4
FORMS = ("{answer}", "\\boxed{{answer}}", "The answer is {answer}.", "#### {answer}", "<answer>{answer}</answer>")
"""How a right answer may be written, where no rewarded reply shows it."""
PLAYING_SHARE = 0.8
"""The share of the time limit for playing; the rest is for the reward."""
CALIBRATION_STEPS = 3
"""The first also warms up; the others are averaged."""


def run(argv: Sequence[str]) -> int:
    """Print figures and one verdict. Returns 0 for `train`, 1 for the other verdicts."""
    arguments = _parser().parse_intermixed_args(argv)
    from ajet.config.loader import load_config

    if arguments.gpu_hour and not arguments.time:
        raise ArgumentError("--gpu-hour is the price of what --time measures: add --time")
    if arguments.time:
        return _show_time(load_config(arguments.conf, arguments.overrides, backbone="local"), arguments)
    config = load_config(arguments.conf, arguments.overrides, backbone="debug")  # which trains nothing, on any engine
    from ajet.backbone.trainability import verdict
    from ajet.system.services import yaml_services

    with yaml_services(config):
        audit = _Audit(config, arguments)
        found = audit.play()
        if found.mixed is None:
            return fail(_nothing_to_say(found, audit.stopped), EXIT_FAILED)
        hole = audit.test_reward(found)
    decided = verdict(found, hole, audit.limits, config.ajet.data.train_batch_size)
    advice = _advice(decided, arguments, config)
    if arguments.json:
        result = {"figures": asdict(found), "planned": audit.planned, "stopped_early": audit.stopped}
        result |= {"probes": [asdict(probe) for probe in audit.probed.probes], "skipped": audit.probed.skipped}
        print(json.dumps({**result, "verdict": decided._asdict(), "advice": advice, "overlap": dict(audit.overlap)}))
    else:
        audit.show(found)
        audit.show_probes()
        print(printable(f"\nverdict: {decided.what}\n    {decided.why}" + "".join(f"\n    {line}" for line in advice)))
    return 0 if decided.what == "train" else EXIT_FAILED


def _parser() -> CommandParser:
    parser = CommandParser("ajet audit", description=__doc__)
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tasks", type=whole(1), default=16, metavar="N", help="play this many training tasks (16)")
    parser.add_argument("--repeats", type=whole(2), default=8, metavar="K", help="episodes of each task (8)")
    minutes = real(0.001, 1e6, "minutes")
    parser.add_argument("--max-minutes", type=minutes, default=10.0, metavar="M", help="stop after this long (10)")
    parser.add_argument("--answer-field", metavar="FIELD", help="field of the tasks with the right answer")
    parser.add_argument("--answer-form", metavar="TEXT", help="a reply that should be rewarded, with {answer} in it")
    parser.add_argument("--time", action="store_true", help="measure training steps: what the whole run will take")
    parser.add_argument("--gpu-hour", type=real(0, 1e6), metavar="PRICE", help="with --time: the price of a GPU's hour")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _nothing_to_say(found: AuditFigures, stopped: bool) -> str:
    """No group has two episodes with a reward."""
    why = [f"{count} × {reason}" for reason, count in list(found.failures.items())[:3]]
    why += ["time was up: raise --max-minutes, or play fewer with --tasks and --repeats"] * stopped
    first = f"no task was played twice with a reward: {found.usable} of {found.episodes} episodes have one"
    return "\n    ".join([first, *why])


def _advice(decided: AuditVerdict, arguments: Namespace, config: Config) -> list[str]:
    """What to run or to change, line by line."""
    command = join(["ajet", "--conf", str(arguments.conf), *arguments.overrides])
    command = Masker(config.model_dump(mode="json")).text(command)
    if decided.what == "change limits":
        return [f"{decided.key}: {'raise it' if decided.value is None else decided.value}, or ask for shorter replies"]
    if decided.what == "imitate first":
        run = config.experiment_path.with_name(f"{config.experiment_path.name}_cold_start")
        sft = "trainer_common.algorithm.policy_loss=sft trainer_common.algorithm.sft.demonstrations=talks.jsonl"
        talks = 'talks.jsonl: conversations that succeed, one a line ({"messages": […]})'
        own = f"experiment_name={run.name}" if config.ajet.experiment_dir == "auto" else f"experiment_dir={run}"
        return [f"{command} {quote(own)} {sft}", talks, f"then train: {quote(f'model.path={run}/hf')}"]
    return [command] if decided.what == "train" else []


Script = tuple[str, str]
"""The kind of a probe, and its reply."""


class _Audit:
    """One audit: the model's episodes, then the scripted ones."""

    def __init__(self, config: Config, arguments: Namespace) -> None:
        from ajet.backbone.checks import ELSEWHERE
        from ajet.backbone.trainability import LengthLimits, Probed
        from ajet.observe.viewer import answer_names
        from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
        from ajet.task_reader.quality import overlap_lines

        rollout = config.ajet.rollout
        if (wrapper := config.ajet.task_runner.wrapper_type) in ELSEWHERE:
            key = f"ajet.task_runner.wrapper_type: {wrapper}"
            raise ConfigError(f"{key}: an audit plays its episodes here. Try it with task_runner.wrapper_type=asyncio")
        reader = build_reader(config)
        tasks = read_training_tasks(reader)
        self.overlap = list(overlap_lines(tasks, read_validation_tasks(reader)))
        names = [arguments.answer_field] if arguments.answer_field else answer_names(config.model_dump())
        if arguments.answer_field and not any(arguments.answer_field in task.metadata for task in tasks):
            has = ", ".join(map(repr, sorted(tasks[0].metadata))) or "nothing"
            raise ConfigError(f"--answer-field {arguments.answer_field}: no task has this field; the first has {has}")
        if arguments.answer_form and "{answer}" not in arguments.answer_form:
            raise ConfigError(f"--answer-form {arguments.answer_form!r}: write {{answer}} where the answer stands")
        rollout.enable_oversample, rollout.min_group_size = False, 1  # every episode counts, and none ends the others
        self.config, self.names, self.form = config, names, arguments.answer_form
        self.limits = LengthLimits(
            rollout.max_response_length_in_one_turn, rollout.max_model_len, rollout.multi_turn.max_steps
        )
        count = min(arguments.tasks, len(tasks))
        self.tasks = [tasks[index * len(tasks) // count] for index in range(count)]
        self.repeats, self.planned = arguments.repeats, count * arguments.repeats
        self.threshold = config.ajet.task_judge.success_threshold
        self.stopped, self.probed = False, Probed()
        self.seconds, self.began = 60.0 * arguments.max_minutes, time.monotonic()
        self.seen: list[tuple[Episode, str]] = []
        """The usable episodes, and their last reply."""

    def _bounded(self, runtime: Runtime, work: Coroutine[Any, Any, T], share: float) -> T:
        """Its result; when the time is up, with what has ended by then."""
        running = runtime.submit(work)
        try:
            left = share * self.seconds - (time.monotonic() - self.began)
            if not wait([running], timeout=max(0.0, left)).done:
                self.stopped = True
                runtime.loop.call_soon_threadsafe(runtime.pool.stop_all)
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def play(self) -> AuditFigures:
        """Play the tasks as training would."""
        from ajet.backbone.failures import FailureWatch
        from ajet.backbone.trainability import count_tool_calls, figures
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

        def read(ids: list[int], tools: list[Tool]) -> tuple[list[str], int]:
            parsed = model.parser.parse(model.tokenizer.decode(ids, skip_special_tokens=False), tools)
            return [call["function"]["name"] for call in parsed.message.get("tool_calls") or ()], len(parsed.malformed)

        count_tool_calls(found, groups, read)
        return found

    def test_reward(self, found: AuditFigures) -> str | None:
        """Play the probes. Returns the hole."""
        from ajet.backbone.trainability import GOLD, WHAT, find_hole
        from ajet.task_judge.base_judge import GroupJudge, load_judge

        rollout = self.config.ajet.rollout
        if rollout.agent is not None and rollout.agent.type == "cli":
            self.probed.skipped = dict.fromkeys((GOLD, *WHAT), "the agent is a program, which one reply can't play")
            return None
        judge = load_judge(self.config)
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
        from ajet.backbone.metrics import is_success
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
        tried = [(GOLD, form.replace("{answer}", answers[first.task_id])) for form in forms]
        (group,) = self._replay([first], [tried])
        results = self._results(first, tried, group)
        best = max(range(len(forms)), key=lambda i: (results[i].success, results[i].reward or 0.0))
        plays_on = any(call.turn for episode, _ in self.seen for call in episode.tree.calls)
        if not results[best].success and (cut := sum(result.cut for result in results)):
            why = f"the limits cut {cut} of {len(forms)} forms of the right answer"
        elif not results[best].success and (plays_on or any(is_success(one, self.threshold) for one, _ in self.seen)):
            why = f"none of {len(forms)} forms of the right answer is rewarded on its own: see --answer-form"
        if why:
            self.probed.skipped |= dict.fromkeys((GOLD, FORMAT), why)
            return {}, tasks
        if len(tasks) == 1:
            self.probed.skipped[FORMAT] = "all tasks have the same answer"
        return {task.task_id: forms[best].replace("{answer}", answers[task.task_id]) for task in tasks}, tasks

    def _seen_forms(self) -> Iterator[str]:
        """A rewarded reply with its answer taken out: the form that the reward surely understands."""
        from ajet.backbone.metrics import is_success

        answers = {task.task_id: self._answer(task) for task in self.tasks}
        for episode, reply in self.seen:
            answer = answers.get(episode.task_id)
            if answer and answer in reply and is_success(episode, self.threshold):
                before, _, after = reply.rpartition(answer)
                yield f"{before}{{answer}}{after}"
                return

    def _scripts(self, task: Task, gold: dict[str, str], tasks: list[Task]) -> Iterator[Script]:
        """The probes of one task."""
        from ajet.backbone.trainability import ECHO, EMPTY, FORMAT, GOLD, LONGEST, SHORTEST
        from ajet.schema.chat import plain_text

        yield (EMPTY, "")
        said = (plain_text(message.get("content")) for message in reversed(task.init_messages))
        if asked := task.main_query or next(filter(str.strip, said), ""):
            yield (ECHO, asked)
        else:
            self.probed.skipped[ECHO] = "the tasks have no question (main_query, init_messages)"
        if task.task_id in gold:
            yield (GOLD, gold[task.task_id])
            others = [gold[other.task_id] for other in tasks if other.task_id != task.task_id]
            yield from [(FORMAT, other) for other in others[:1]]
        answer = self._answer(task)
        if answer is None or LONGEST in self.probed.skipped:
            return
        strange = [reply for episode, reply in self.seen if episode.task_id != task.task_id and answer not in reply]
        if strange := [reply for reply in strange if reply]:
            yield (LONGEST, max(strange, key=len))
            yield (SHORTEST, min(strange, key=len))
        else:
            self.probed.skipped |= dict.fromkeys((LONGEST, SHORTEST), "no reply to another task was seen")

    def _replay(self, tasks: Sequence[Task], scripts: Sequence[Sequence[Script]]) -> list[EpisodeGroup]:
        """One group per task, with one episode per scripted reply, which answers every call of it."""
        from ajet.engine.model_source import ModelSource
        from ajet.engine.scripted import ScriptedEngine
        from ajet.schema.task import WorkflowTask
        from ajet.task_runner.runtime import Runtime

        replies: dict[str, str] = {}

        def remember(started: WorkflowTask) -> None:
            script = scripts[started.task_batch_index]
            replies[started.episode_uuid] = script[started.task_thread_index][1]

        def reply(call: ScriptedCall) -> str:
            return replies[call.session_id.partition(".")[0]]  # a second attempt has `.2`

        def scripted(config: Config) -> Engine:
            tokenizer = ModelSource.resolve(config.ajet.model.path).tokenizer
            return ScriptedEngine(reply, tokenizer, max_model_len=self.limits.conversation)

        async def all_groups(runtime: Runtime) -> list[EpisodeGroup]:
            play = runtime.pool.run_group
            groups = enumerate(zip(tasks, map(len, scripts), strict=True))
            work = [play(task, batch_index=i, num_repeat=size, validation=True) for i, (task, size) in groups]
            return await asyncio.gather(*work)

        with Runtime(self.config, make_engine=scripted, on_start=remember) as runtime:
            return self._bounded(runtime, all_groups(runtime), 1.0)

    def _results(self, task: Task, script: Sequence[Script], group: EpisodeGroup) -> list[Probe]:
        from ajet.backbone.metrics import is_success, played
        from ajet.backbone.trainability import Probe
        from ajet.schema.episode import EpisodeStatus

        ended = {episode.repeat: episode for episode in played((*group.episodes, *group.failed))}
        probes = []
        for number, (kind, reply) in enumerate(script):
            episode = ended.get(number)
            if episode is None:
                probes.append(Probe(kind, task.task_id, reply, None, False, "time was up"))
                continue
            why = "" if episode.failure is None else f"{episode.status}, {episode.failure.in_short}"
            failed, success = episode.status is EpisodeStatus.JUDGE_ERROR, is_success(episode, self.threshold)
            probes.append(
                Probe(kind, task.task_id, reply, episode.reward, success, why, failed, bool(episode.outcomes))
            )
        return probes

    def show(self, found: AuditFigures) -> None:
        from ajet.backbone.trainability import lines

        for label, text in (*lines(found, self.limits, self.planned), *self.overlap):
            print(f"{label:<20} {printable(text)}")
        if self.stopped:
            print(f"{'stopped early':<20} after {self.seconds / 60:g} minutes (--max-minutes)")

    def show_probes(self) -> None:
        from ajet.backbone.trainability import GOLD, WHAT, quoted

        print("\nreward of scripted replies")
        for kind in (GOLD, *WHAT):
            probes = self.probed.of(kind)
            if not probes:
                print(f"  {kind:<18} skipped: {self.probed.skipped.get(kind, 'nothing to try')}")
                continue
            earned = " ".join("-" if probe.reward is None else f"{probe.reward:g}" for probe in probes)
            why = next((probe.failure for probe in probes if probe.reward is None), "")
            print(printable(f"  {kind:<18} {earned:<12} {why or quoted(probes[0].reply, 60)}"))


def _show_time(config: Config, arguments: Namespace) -> int:
    from ajet.backbone.checks import read_tasks
    from ajet.backbone.plan import RunPlan, time_lines, training_samples

    if config.ajet.trainer_common.val_only:
        raise ConfigError("ajet.trainer_common.val_only: true: there is no training to measure")
    tasks = read_tasks(config)
    plan = RunPlan.of(config, "local", training_samples(config, tasks.training), len(tasks.validation))
    if plan.steps < CALIBRATION_STEPS:
        raise ConfigError(f"the run has {plan.steps} steps, and {CALIBRATION_STEPS} would be measured: just run it")
    measured = _calibrate(config, plan)
    if measured is None:
        return fail("the training steps could not be measured: run the config to see why", EXIT_FAILED)
    whole = measured.whole_run(plan)
    whole |= _price(config, plan, measured.episodes, whole["hours"], arguments.gpu_hour)
    if arguments.json:
        print(json.dumps(whole))
    else:
        for label, text in time_lines(plan, whole):
            print(f"{label:<20} {text}")
    return 0


def _calibrate(config: Config, plan: RunPlan) -> Measured | None:
    """A short run in a folder that is deleted afterwards. None: it ended too soon."""
    from ajet.backbone import LaunchOptions
    from ajet.backbone.launch import LaunchArguments, launch
    from ajet.backbone.plan import Measured
    from ajet.observe.metrics import read_metrics

    common = config.ajet.trainer_common
    common.total_training_steps, common.save_freq = CALIBRATION_STEPS, 0
    common.test_freq, common.val_before_train = CALIBRATION_STEPS if plan.validations else 0, bool(plan.validations)
    common.resume, common.checkpoint_base_dir, common.logger = "never", None, ["file"]
    common.early_stop.target = common.early_stop.patience = None
    config.ajet.backbone = "local"
    with TemporaryDirectory(prefix="ajet-audit-") as folder:
        began = time.perf_counter()
        launch(LaunchArguments(exp_dir=folder, options=LaunchOptions(quiet=True)), config)
        took = time.perf_counter() - began
        found = [line for file in Path(folder).glob("*/metrics.jsonl") for line in read_metrics(file)]
    if len(steps := [line for line in found if "time/step" in line]) < CALIBRATION_STEPS:
        return None
    seconds = [line["time/step"] for line in steps]
    validations = [line["time/validate"] for line in found if "time/validate" in line]
    tokens = sum(line.get("episode/sampled_tokens_total", 0.0) for line in steps) / len(steps)
    episodes = sum(line.get("episode/count", 0) + line.get("val/episode/count", 0) for line in found)
    return Measured(seconds, validations, took - sum(seconds) - sum(validations), tokens, int(episodes))


def _price(config: Config, plan: RunPlan, episodes: int, hours: float, gpu_hour: float | None) -> dict[str, Any]:
    """`episodes`: those of the short run, in which the helper was asked."""
    from ajet.backbone.local import place, visible_gpus
    from ajet.task_judge.helper import HelperModel

    result: dict[str, Any] = {}
    if config.ajet.helper.model is not None and episodes:
        used = HelperModel.from_config(config).budget
        scale = (plan.episodes + plan.validations * plan.validation_episodes) / episodes
        spent = {"helper_calls": used.calls, "helper_tokens": used.tokens, "helper_cost": used.cost}
        result |= {name: count * scale for name, count in spent.items()}
    if gpu_hour is not None:
        result["gpus"] = place(config, visible_gpus).gpus
        result["gpu_cost"] = hours * result["gpus"] * gpu_hour
    return result
