"""The loop: groups of episodes → credit → update → the engine serves the new weights → metrics, validation, checkpoint.

Rollout and update alternate, unless `rollout.max_staleness` lets the rollout run ahead (`rollouts.py` says in which
order things then happen). A step is complete when its metrics are written. Checkpoints hold complete steps only, so a
resumed run neither repeats nor skips any.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone import LaunchOptions
from ajet.backbone.checks import RunTasks
from ajet.backbone.failures import FailureWatch, warn_of
from ajet.backbone.local.demonstrations import demonstration_batches
from ajet.backbone.local.learner import Learner, seed_everything
from ajet.backbone.local.placement import check_gpu, place, visible_gpus
from ajet.backbone.local.rollouts import Replay, Rollouts
from ajet.backbone.metrics import episode_metrics, ledger_metrics, staleness, step_names, token_rate
from ajet.backbone.plan import (
    BEFORE_THE_FIRST,
    imitates_a_file,
    lacks_validation,
    training_steps,
    validates_after,
    validation_repeats,
)
from ajet.backbone.report import EarlyStop, Hints, validation_metrics, why_nothing_trained
from ajet.backbone.training_settings import credit_settings, imitate_from, taught_alone
from ajet.engine.base import Engine, EnginePlacement
from ajet.observe.metrics import helper_use, read_metrics
from ajet.observe.progress import Progress
from ajet.observe.progress_state import RunningTotal
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.run_files import read_events, was_cut_off
from ajet.schema.episode import Episode, EpisodeGroup, FloatArray
from ajet.schema.errors import EXIT_FAILED, FRESH, ConfigError
from ajet.schema.task import Task
from ajet.system.command_line import interrupted_when_whole
from ajet.task_judge.helper import HelperMeter
from ajet.task_reader.task_reader_base import Curriculum, TaskStream
from ajet.task_runner.external_episodes import NO_TASK
from ajet.task_runner.model import build_engine
from ajet.task_runner.runtime import Runtime
from ajet.trainer.checkpoint import Checkpoint, CheckpointFolder, load
from ajet.trainer.credit import (
    CallCredit,
    Credit,
    EpisodeCredit,
    ZeroVariance,
    compute_credit,
    imitation_credit,
    summarise,
    teaches,
)

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

log = logging.getLogger("ajet.backbone.local")


class LocalRun:
    def __init__(self, config: Config, experiment: ExperimentFolder, options: LaunchOptions, tasks: RunTasks) -> None:
        self.config = config
        self.experiment = experiment
        self.common = config.ajet.trainer_common
        experiment.keep_checkpoints_in(self.common.checkpoint_base_dir)
        self.outside = config.ajet.task_runner.wrapper_type == "outside"
        self.from_file = imitates_a_file(config)
        self.validation_tasks = tasks.validation
        self.tasks = [Task(task_id=NO_TASK)] if self.outside else tasks.training
        self.task_of = {task.task_id: task for task in [*self.tasks, *self.validation_tasks]}
        self.progress = Progress.create(options.progress_mode())
        self.viewer = options.viewer
        self.recorder = EpisodeRecorder(experiment.episodes, config.ajet, masker=experiment.masker)
        self.checkpoints = CheckpointFolder(
            experiment.checkpoints, keep=self.common.keep_checkpoints, keep_best=self.common.keep_best
        )
        self.placement = place(config, visible_gpus)
        self.helper = HelperMeter(config)
        check_gpu(self.placement)
        self.runtime = Runtime(config, make_engine=self._make_engine, on_episode=self.progress.episode)
        self.credit_settings = credit_settings(config)
        self.threshold = config.ajet.task_judge.success_threshold
        self.stream: TaskStream
        self.taught: list[EpisodeGroup] = []
        """The current step's new groups that have a gradient."""
        self.learner: Learner
        self.rollouts: Rollouts
        self.total = 0
        self.step = 0
        self.saved = 0
        self.changes: int | None = 0
        """The trainer's, when the last step was complete. None while its metrics are written."""
        self.unsaved = False
        self.hints = Hints()
        self.failures = FailureWatch(config)
        self.early_stop = EarlyStop.from_config(config, len(self.validation_tasks))
        self.replay = Replay.from_config(config)
        self.score: tuple[int, float] | None = None
        """Step and mean return of the latest validation that had a score."""
        self.reader_state: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------ the run

    def run(self) -> int:
        """Train to the last step. 0 only if something was trained, or with `val_only`."""
        try:
            with self.progress, self.runtime:
                self._set_up()
                if self.common.val_only:
                    self._note(self._validate())
                    return 0
                before, resumed = self.learner.trainer.applied, self.step
                try:
                    self._train()
                except (KeyboardInterrupt, BrokenPipeError):
                    if self._is_whole():
                        self._save()
                    raise
                finally:
                    self.rollouts.stop()
                trained = self.learner.trainer.applied - before
        finally:
            for episode in self.runtime.external.untrained if self.runtime.external is not None else ():
                self._write_episode(episode, None, self.step)
            self.recorder.close()
            if hasattr(self, "learner"):
                self.learner.close()
        if not trained and (self.step > resumed or not self.learner.trainer.updates):
            # a run that lacked only its end has all of its steps behind it
            steps = (resumed, self.failures.tally) if self.step > resumed else (0, None)
            log.error("%s", why_nothing_trained(self.config, self.experiment.path, *steps))
            return EXIT_FAILED
        if (tally := self.progress.state.tally).failures:
            told = "".join(f"\n    {line}" for line in tally.lines())
            log.warning("%d of %d episodes failed:%s", tally.failures, tally.episodes, told)
        if self.unsaved:
            newest = f"the newest checkpoint is of step {self.saved}" if self.saved else "there is no checkpoint"
            log.error(
                "the weights of step %d are lost: %s could not be written, and %s. Make room, and run the same "
                "command again",
                *(self.step, self.checkpoints.root, newest),
            )
            return EXIT_FAILED
        return 0

    def _make_engine(self, config: Config) -> Engine:
        lora = config.ajet.model.lora
        placement = EnginePlacement(
            device=self.placement.trainer,
            gpus=tuple(self.placement.engine),
            adapter_rank=lora.rank if lora.enabled else 0,
            base_bits=lora.base_bits,
        )
        return build_engine(config, placement)

    def _set_up(self) -> None:
        seed_everything(self.common.seed, deterministic=self.config.ajet.rollout.deterministic)
        if self.from_file:
            self.stream = demonstration_batches(self.config, self.runtime.model().renderer)
        else:
            self.stream = self._task_stream()
        self.total = training_steps(self.config, len(self.stream.tasks))
        checkpoint = self._checkpoint_to_resume()
        done = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None and not self.common.val_only:
            self._refuse_if_complete(checkpoint)
        self.progress.start(self.experiment.name, "local", self.total, done, self.viewer)
        self.progress.phase("load", detail=f"{self.config.ajet.model.path}, engine {self.config.ajet.rollout.engine}")
        self.learner = Learner(self.config, self.runtime, self.total, self.placement.trainer)
        self.recorder.use_tokenizer(self.learner.tokenizer)
        self.reader_state = self.stream.state_dict()
        self.rollouts = Rollouts(self.config, self.runtime, self.stream, self.progress, self._teaches, self.total)
        if checkpoint is not None:
            self.progress.phase("load", detail=f"checkpoint {checkpoint.path}")
            self._resume(checkpoint)
        elif self.experiment.resumed and not self.common.val_only:
            events = read_events(self.experiment.path / "events.jsonl")
            if any(event.get("event") == "checkpoint" for event in events):
                raise ConfigError(
                    f"{self.experiment.checkpoints} holds no whole checkpoint any more: the run would begin anew and "
                    f"drop its records. Bring the checkpoints back, or use {FRESH}: the records are kept aside"
                )
            if self.experiment.has_results:
                log.info("no checkpoint to resume from: the run begins again, and what it had recorded is dropped")
            self._rewind(BEFORE_THE_FIRST)

    def _task_stream(self) -> TaskStream:
        reader, size = self.config.ajet.task_reader, self.config.ajet.data.train_batch_size
        curriculum = reader.curriculum
        if not curriculum.enabled:
            return TaskStream(self.tasks, seed=reader.seed, batch_size=size, shuffle=reader.shuffle)
        return Curriculum(
            self.tasks, seed=reader.seed, batch_size=size, explore=curriculum.explore, memory=curriculum.memory
        )

    def _is_whole(self) -> bool:
        """Whether the trainer is as the last complete step left it."""
        return self.changes == self.learner.trainer.changes

    def _train(self) -> None:
        self.progress.state.spent = RunningTotal.of(read_metrics(self.experiment.path / "metrics.jsonl"))
        self.changes = self.learner.trainer.changes
        if self.step == 0 and self.common.val_before_train and self.validation_tasks:
            self._note(self._validate())
        if self._lacks_validation(self.step):
            asked, metrics = helper_use(self.experiment.path / "metrics.jsonl", self.step), self._validate()
            asked.update(self.helper.since_last())
            self.experiment.metrics.log(self.step, metrics | asked)
            self._save(again=True)  # its checkpoint lacks what the validation measured
            if self._stops_early():
                return
        with interrupted_when_whole(self._is_whole) as end_if_interrupted:
            for step in range(self.step + 1, self.total + 1):
                metrics = self._demonstrate(step) if self.from_file else self._step(step)
                self.replay.add(step, self.taught)
                self.step, self.changes = step, self.learner.trainer.changes
                try:
                    end_if_interrupted()
                    if self.validation_tasks and validates_after(self.config, step, self.total):
                        metrics |= self._validate()
                finally:  # Ctrl-C during the validation saves the step, and its metrics are part of it
                    self.changes = None
                    self._note(metrics)
                    self.changes = self.learner.trainer.changes
                end_if_interrupted()
                every = self.common.save_freq
                if step == self.total or (every > 0 and step % every == 0):
                    self._save()
                if self._stops_early():
                    return

    def _stops_early(self) -> bool:
        if (reason := self.early_stop.reason) is None:
            return False
        self._save()
        self.progress.message(f"stopped after step {self.step} of {self.total}: {reason}")
        self.experiment.events.write("stopped_early", step=self.step, reason=reason)
        return True

    def _lacks_validation(self, step: int) -> bool:
        recorded = read_metrics(self.experiment.path / "metrics.jsonl")
        return bool(self.validation_tasks) and lacks_validation(self.config, recorded, step, self.total)

    # ------------------------------------------------------------------------------------------------ one step

    def _step(self, step: int) -> dict[str, float]:
        began = time.perf_counter()
        drawn = self.rollouts.take(step)
        groups = drawn.groups
        rolled_out = time.perf_counter()
        complete = [group for group in groups if group.complete]
        self.taught = [group for group in complete if self._teaches(group)]
        usable = self._batch(complete)
        replayed = self.replay.draw(step)
        trained = [*usable, *replayed]
        episodes = [episode for group in trained for episode in group.episodes]
        credit, extra = self._credit(trained)
        self.progress.phase("train")
        extra |= self.learner.update(episodes, credit, step)
        self.rollouts.trained(step)
        self.reader_state = drawn.reader_state
        updated = time.perf_counter()
        given = {of.episode_id: of for of in credit.episodes}
        logprobs = self.learner.logprobs_before(episodes)
        everyone = [episode for group in groups for episode in (*group.episodes, *group.failed)]
        for episode in everyone:
            name = episode.episode_id
            self._write_episode(episode, given.get(name), step, logprobs=logprobs.get(name))
        self.hints.look_at(step, everyone)
        self.failures.look_at_step(step, everyone)
        metrics = episode_metrics(everyone, success_threshold=self.threshold)
        metrics |= extra | credit.metrics | ledger_metrics(everyone)
        metrics |= step_names(metrics)
        sampled = ((episode.tree, of) for episode, of in zip(episodes, credit.episodes, strict=True))
        metrics |= staleness(sampled, version=step - 1) | drawn.metrics
        metrics |= {
            "train/incomplete_groups": float(len(groups) - len(complete)),
            "train/surplus_groups": float(len(complete) - len(usable)),
            "train/replayed_groups": float(len(replayed)),
            "time/train": updated - rolled_out,
            "time/step": time.perf_counter() - began,
        }
        if self.runtime.external is None:  # else they were sampled before this step waited for them
            metrics |= token_rate(metrics, metrics["time/rollout"])
        return metrics

    def _batch(self, complete: list[EpisodeGroup]) -> list[EpisodeGroup]:
        """The groups that are trained. With `resample`, no more that teach than `train_batch_size`: as in DAPO, every
        batch is of one size, and what the last round brought beyond it is recorded but not trained."""
        if self.credit_settings.zero_variance is not ZeroVariance.RESAMPLE:
            return complete
        size = self.config.ajet.data.train_batch_size
        surplus = {id(group) for group in self.taught[size:]}
        self.taught = self.taught[:size]
        return [group for group in complete if id(group) not in surplus]

    def _teaches(self, group: EpisodeGroup) -> bool:
        return teaches([summarise(episode) for episode in group.episodes], self.credit_settings)

    def _credit(self, groups: list[EpisodeGroup]) -> tuple[Credit, dict[str, float]]:
        summaries = [[summarise(episode) for episode in group.episodes] for group in groups]
        if (least := imitate_from(self.config)) is not None:
            chosen = [[s for s in group if s.reward >= least] for group in summaries]
            kept = imitation_credit(chosen, self.credit_settings)
            by_id = {episode.episode_id: episode for episode in kept.episodes}
            rows = [
                [by_id.get(s.episode_id) or EpisodeCredit(s.episode_id, [CallCredit() for _ in s.calls]) for s in group]
                for group in summaries
            ]
            imitated = kept.metrics["credit/episodes_trained"]
            return Credit(rows, metrics=kept.metrics), {"train/imitated_episodes": imitated}
        if taught_alone(self.config):
            return imitation_credit(summaries, self.credit_settings, advantage=0.0), {}
        extra: dict[str, float] = {}
        if self.common.algorithm.use_kl_in_reward:
            given = list(zip(groups, summaries, strict=True))
            if self.credit_settings.leaves_equal_groups_out:
                # the divergence would make them differ, too, and an estimator blow up that difference
                given = [(group, of) for group, of in given if teaches(of, self.credit_settings)]
            flat = [summary for _, of in given for summary in of]
            episodes = [episode for group, _ in given for episode in group.episodes]
            extra["train/kl_in_reward"] = self.learner.penalise_drift(episodes, flat)
        return compute_credit(summaries, self.credit_settings), extra

    def _demonstrate(self, step: int) -> dict[str, float]:
        began = time.perf_counter()
        episodes: list[Episode] = [task.metadata["episode"] for task in self.stream.next_batch()]
        self.progress.phase("train")
        credit = imitation_credit([[summarise(episode) for episode in episodes]], self.credit_settings)
        metrics = self.learner.update(episodes, credit, step)
        metrics |= {"train/loss": metrics.get("loss/policy", 0.0), "train/epoch": self.stream.epoch}
        self.reader_state = self.stream.state_dict()
        metrics["time/step"] = time.perf_counter() - began
        return metrics

    # ------------------------------------------------------------------------------------------------ around it

    def _validate(self) -> dict[str, float]:
        began = time.perf_counter()
        repeats = validation_repeats(self.config)
        self.progress.phase("validate", len(self.validation_tasks) * repeats)
        groups = self.runtime.run(
            self.runtime.pool.run_groups(self.validation_tasks, step=self.step, num_repeat=repeats, validation=True)
        )
        for episode in (each for group in groups for each in (*group.episodes, *group.failed)):
            self._write_episode(episode, None, self.step, validation=True)
        self.failures.look_at_groups(f"the validation after step {self.step}", groups)
        metrics = validation_metrics(groups, self.threshold)
        metrics["time/validate"] = time.perf_counter() - began
        self._look_for_an_end(metrics)
        if "val/return/mean" in metrics:
            self.score = (self.step, metrics["val/return/mean"])
            self.progress.validation(self.step, metrics)
        return metrics

    def _look_for_an_end(self, metrics: dict[str, float]) -> None:
        try:
            self.early_stop.look_at(self.step, metrics)
        except ConfigError:
            self._save()  # a misspelt metric must not cost the steps so far
            raise

    def _note(self, metrics: dict[str, float]) -> None:
        metrics |= self.helper.since_last() | {"perf/total_steps": float(self.total)}
        if self.learner.on_gpu:
            metrics["perf/gpus"] = float(self.placement.gpus)
        self.experiment.metrics.log(self.step, metrics)
        warn_of(self.step, metrics)
        if self.step:
            self.progress.step(self.step, metrics)
        else:
            self.progress.state.spent.add(metrics)

    def _write_episode(
        self,
        episode: Episode,
        credit: Any,
        step: int,
        *,
        validation: bool = False,
        logprobs: list[FloatArray] | None = None,
    ) -> None:
        external = self.runtime.external
        task = external.task_of(episode.episode_id) if external is not None else self.task_of.get(episode.task_id)
        self.recorder.record(episode, step, credit, validation=validation, task=task, trainer_logprobs=logprobs)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _save(self, *, again: bool = False) -> None:
        if self.step == 0 or (self.step == self.saved and not again):
            return
        self.progress.phase("checkpoint")
        self.recorder.flush()
        state: dict[str, Any] = {"reader": self.reader_state, "early_stop": self.early_stop.state_dict()}
        if self.score is not None and self.score[0] == self.step:
            state["score"] = self.score[1]
        saved = self.checkpoints.save(self.step, state, self._write_checkpoint)
        self.unsaved = saved is None and self.step != self.saved
        if saved is not None:
            self.saved = self.step
            self.checkpoints.point(self.experiment.hf, saved)
            self.experiment.events.write("checkpoint", step=self.step, path=str(saved.path))

    def _write_checkpoint(self, folder: Path) -> None:
        self.learner.write(folder)
        self.replay.write(folder)

    def _checkpoint_to_resume(self) -> Checkpoint | None:
        if self.common.resume == "never":
            return None
        return self.checkpoints.newest() if self.common.resume == "auto" else load(Path(self.common.resume))

    def _refuse_if_complete(self, checkpoint: Checkpoint) -> None:
        """Raise ConfigError if no step is left. A run that was cut off at its last step may still lack its end."""
        done, stop = checkpoint.step, self.early_stop
        stop.load_state_dict(checkpoint.state.get("early_stop", stop.state_dict()))
        if done < self.total and stop.reason is None:
            return
        if was_cut_off(self.experiment.path) or self._lacks_validation(done):
            self.total = done
            return
        key = "ajet.trainer_common.total_training_steps"
        early = f"stopped early, after step {done}: {stop.reason}. To continue, change that key"
        whole = f"is complete: its newest checkpoint is step {done} of {self.total}. To continue, raise {key}"
        raise ConfigError(f"{self.experiment.path} {early if stop.reason else whole}; to start over: {FRESH}")

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.learner.restore(checkpoint)
        self.replay.read(checkpoint.path)
        self.stream.load_state_dict(checkpoint.state["reader"])
        self.reader_state = self.stream.state_dict()
        self.step = self.saved = checkpoint.step
        if not self.common.val_only:
            self._rewind(checkpoint.step)
            self.checkpoints.point(self.experiment.hf, checkpoint)

    def _rewind(self, step: int) -> None:
        """Drop what the folder holds of later steps: they are run again."""
        self.experiment.rewind(step)
        self.recorder.rewind(step, validated=not self._lacks_validation(step))
        self.checkpoints.rewind(step)
