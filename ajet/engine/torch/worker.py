"""What the engine's thread does: load, then step until told to stop.

Faults stay where they belong. A request that can't be served fails alone; memory that runs out shrinks batch and step,
and the same step is tried again; a step that fails for another reason fails the requests in it. After a few such steps
in a row the engine is dead, and says why.
"""

from __future__ import annotations

import logging
import math
import random
from typing import TYPE_CHECKING, Any

import torch

from ajet.engine.sampling_rules import Stop, StopRule, check_request
from ajet.engine.torch.kv import KVPool
from ajet.engine.torch.memory import kv_budget
from ajet.engine.torch.messages import Cancel, Close, Command, Inbox, Message, Outbox, Pause, Resume, Submit, Ticket
from ajet.engine.torch.prefix_cache import Trail
from ajet.engine.torch.runner import Runner, Work
from ajet.engine.torch.sampler import Drawer, draw_tokens
from ajet.engine.torch.scheduler import CHUNK, DoesNotFitError, Job, Scheduler, Step
from ajet.engine.torch.settings import TorchEngineSettings
from ajet.engine.torch.weights import load_into
from ajet.schema.errors import EngineError, ModelCallError
from ajet.schema.generation import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ONE_THREAD_BELOW = 8_000_000
"""Parameters. The matrices of a smaller model are done before a second core has woken up, and the workflows need it."""

FAULTS_TO_DIE = 3
"""Steps that may fail in a row: one can be a bad request's doing, three are the engine's."""


class Worker:
    """Model, scheduler and everything in flight. Touched by the engine's thread only."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: TorchEngineSettings,
        inbox: Inbox,
        cpu_threads: int,
    ) -> None:
        self.inbox = inbox
        self.settings = settings
        self.tokenizer = tokenizer
        self.runner = Runner(model)
        self.end_ids = end_ids(model, tokenizer)
        self.outbox = Outbox()
        self.jobs: dict[Ticket, Job] = {}
        self.pauses: list[Pause] = []
        self.paused = False
        self.closed = False
        self.faults = 0
        self.steps = 0
        self.drawn_tokens = 0
        self.prompt_tokens = 0
        self._unseeded = random.Random(settings.seed)
        self._step_width = 0
        self.cpu_threads = cpu_threads
        """What this process may use in all."""
        self._threads = 1 if _is_small(model) else cpu_threads
        torch.set_num_threads(self._threads)
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        settings, runner = self.settings, self.runner
        max_running = settings.max_num_seqs
        if settings.deterministic:
            if not runner.rows_are_alike(max_running):
                log.warning("deterministic: this machine computes equal rows of a batch differently: one row at a time")
                max_running = 1
            self._step_width = max_running
        limit = settings.max_model_len
        pool = KVPool(runner.kv_shape, runner.dtype, runner.device, kv_budget(runner, settings))
        return Scheduler(
            pool,
            max_model_len=limit,
            max_running=max_running,
            tokens_per_step=settings.tokens_per_step,
            prefix_cache=settings.prefix_cache,
            deterministic=settings.deterministic,
        )

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until closed."""
        while self._read_inbox():
            if not self.paused or self.scheduler.running:
                self._step()
            self._settle_pauses()
            self.outbox.flush()

    def _read_inbox(self) -> bool:
        """Handle all messages; wait for one if there is nothing else to do. False once closed."""
        idle = not self.scheduler.running and (self.paused or not self.scheduler.waiting)
        if idle:
            self._handle(self.inbox.get())
            torch.set_num_threads(self._threads)  # a trainer in this process sets its own number
        while not self.inbox.empty():
            self._handle(self.inbox.get())
        return not self.closed

    def _handle(self, message: Message) -> None:
        match message:
            case Submit(ticket):
                self._submit(ticket)
            case Cancel(ticket):
                job = self.jobs.pop(ticket, None)
                if job is not None:
                    self.scheduler.release(job)
            case Command(action, done):
                try:
                    done.set_result(action(self))
                except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who asked
                    done.set_exception(error)
            case Pause():
                self.paused = True
                self.pauses.append(message)
            case Resume():
                self.paused = False
            case Close():
                self.closed = True

    def _settle_pauses(self) -> None:
        if self.pauses and not self.scheduler.running:
            for pause in self.pauses:
                pause.done.set_result(None)
            self.pauses.clear()

    # ------------------------------------------------------------ requests

    def _submit(self, ticket: Ticket) -> None:
        request = ticket.request
        try:
            room = check_request(request, max_model_len=self.scheduler.max_model_len, vocabulary=self.runner.vocabulary)
        except ModelCallError as error:
            self.outbox.fail(ticket, error)
            return
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._unseeded.getrandbits(64)
        drawer = Drawer(sampling, request.prompt_ids, request.top_logprobs, random.Random(seed))
        rule = StopRule.of(sampling, self.end_ids, room)
        job = Job(drawer, rule, ticket, Trail(list(request.prompt_ids)))
        self.jobs[ticket] = job
        self.prompt_tokens += len(request.prompt_ids)
        self.scheduler.submit(job)

    def _finish(self, job: Job, stop: Stop) -> None:
        ticket: Ticket = job.ticket
        del self.jobs[ticket]
        tops = job.tops if ticket.request.top_logprobs else None
        self.outbox.complete(
            ticket,
            Completion(job.drawer.drawn, job.logprobs, stop.reason, stop.by, job.versions, tops, job.cached_tokens),
        )

    def _fail(self, job: Job, error: Exception) -> None:
        self.jobs.pop(job.ticket, None)
        self.scheduler.release(job)
        self.outbox.fail(job.ticket, error)

    def fail_all(self, error: Exception) -> None:
        """Nobody waits for a thread that is gone."""
        for job in list(self.jobs.values()):
            self._fail(job, error)
        while not self.inbox.empty():
            match self.inbox.get():
                case Submit(ticket):
                    self.outbox.fail(ticket, error)
                case Command(_, done) | Pause(done):
                    done.set_exception(error)
        for pause in self.pauses:
            pause.done.set_exception(error)
        self.outbox.flush()

    # ------------------------------------------------------------ a step

    def _step(self) -> None:
        step = Step([], [])
        try:
            step = self.scheduler.plan(admit=not self.paused)
            if step.rows or step.chunks:
                logits = self._forward(step)
                self.scheduler.computed(step)
                self._draw(step.drawing, logits)
                self.steps += 1
        except DoesNotFitError as error:
            self._fail(error.job, EngineError(f"{error}: raise rollout.kv_cache_gb or shorten the conversation"))
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._shrink(step, error)
            else:
                self._fault(step, error)
        else:
            self.faults = 0

    def _forward(self, step: Step) -> torch.Tensor:
        rows: list[Work] = [work for _, work in step.rows]
        chunks: list[Work] = [work for _, work in step.chunks]
        if not self._step_width:
            return self.runner.forward(rows, chunks)
        return self.runner.forward(rows, chunks, pad_to=self._step_width if rows else CHUNK)

    def _draw(self, jobs: list[Job], logits: torch.Tensor) -> None:
        if not jobs:
            return
        draws = draw_tokens(logits, [job.drawer for job in jobs])
        for job, draw in zip(jobs, draws, strict=True):
            if math.isnan(draw.logprob):
                self._fail(job, EngineError("the model's logits are not numbers: its weights are broken"))
                continue
            stop = self.scheduler.drawn(job, draw, self._decode)
            self.outbox.tokens(job.ticket, draw.token, draw.logprob)
            if stop is not None:
                self._finish(job, stop)
        self.drawn_tokens += len(jobs)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _shrink(self, step: Step, error: RuntimeError) -> None:
        if self.scheduler.shrink():
            log.warning(
                "out of memory: going on with at most %d replies at once and %d tokens a step",
                self.scheduler.max_running,
                self.scheduler.tokens_per_step,
            )
            if self.runner.device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            self._fault(step, error)

    def _fault(self, step: Step, error: RuntimeError) -> None:
        self.faults += 1
        log.error("a step of the engine failed: %s", error)
        if self.faults >= FAULTS_TO_DIE:
            raise EngineError(f"the embedded engine failed {self.faults} times in a row: {error}") from error
        for job, _ in [*step.rows, *step.chunks]:
            self._fail(job, EngineError(f"the model failed on this request: {error}"))

    # ------------------------------------------------------------ between steps

    def load_weights(self, source: Any, version: int) -> None:
        """Put weights in place (None: the trainer has), and forget what the old ones computed."""
        if source is not None:
            load_into(self.runner.model, source)
        self.scheduler.start_version(version)

    def facts(self) -> dict[str, Any]:
        """For logs."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return {
            "engine": "torch",
            "version": scheduler.version,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "paused": self.paused,
            "steps": self.steps,
            "drawn_tokens": self.drawn_tokens,
            "prompt_tokens": self.prompt_tokens,
            "computed_prompt_tokens": scheduler.computed_prompt_tokens,
            "cached_prefixes": len(scheduler.cache),
            "kv_tokens": pool.used_tokens,
            "kv_tokens_peak": pool.peak_tokens,
            "kv_tokens_max": pool.max_tokens,
            "kv_bytes": pool.bytes(pool.used_tokens),
            "preemptions": scheduler.preemptions,
        }


def compute_alone() -> int:
    """From here on this thread computes without helpers; says how many threads it could have used.

    OpenMP keeps the helpers that a thread has once had, and where there are more in a process than cores, they all go
    to sleep after each piece of work: an engine that has two for loading alone makes its trainer a third slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads


def _is_small(model: PreTrainedModel) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) < ONE_THREAD_BELOW


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a reply, by the model's generation settings and by its tokenizer."""
    found: set[int] = set()
    for ends in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(ends, int):
            found.add(ends)
        elif ends is not None:
            found.update(int(end) for end in ends)
    return frozenset(found)


def is_out_of_memory(error: RuntimeError) -> bool:
    """A GPU's allocator raises its own type; a CPU's says it in words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
