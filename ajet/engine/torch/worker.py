"""`EngineThread`: the engine's thread, which runs steps until it is stopped.

Faults stay contained. A request that can't be served fails alone. If memory runs out, batch and step shrink, and the
step is retried. If a step fails for another reason, its requests fail; after a few such steps in a row the engine stops
with that error.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ajet.engine.base import StopMatch, StopRule, check_request
from ajet.engine.model_source import stored_weights
from ajet.engine.torch.commands import Inbox, Outbox, Ticket, TorchEngineSettings
from ajet.engine.torch.kv_cache import STATES, KVPool, Sequence
from ajet.engine.torch.runner import DrawState, Runner, Work, draw_tokens
from ajet.engine.torch.scheduler import CHUNK, DoesNotFitError, Job, Scheduler, Step
from ajet.schema.chat import Completion
from ajet.schema.errors import EngineError, ModelCallError
from ajet.system.processes import main_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ONE_THREAD_BELOW = 8_000_000
"""Parameter count. A smaller model's matrices are done before a second core has woken up, and the workflows need that
core."""

FAULTS_TO_DIE = 3
"""Failed steps in a row after which the engine ends: one may be due to a bad request, three are the engine's fault."""


class EngineThread:
    """Model, scheduler and everything in flight. Only the engine's thread touches it."""

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
        self.runner = Runner(model, settings.max_model_len, notes_experts=settings.notes_experts)
        self.end_ids = end_ids(model, tokenizer)
        self.outbox = Outbox()
        self.jobs: dict[Ticket, Job] = {}
        self.pauses: list[Future[None]] = []
        """Pauses that were asked for. They begin when the replies in flight have ended."""
        self.paused = False
        self.closed = False
        self.death: EngineError | None = None
        """Set when the thread has ended: what still comes fails with it."""
        self.faults = 0
        self.prompt_tokens = 0
        self._unseeded = random.Random(settings.seed)
        self._step_width = 0
        self.cpu_threads = cpu_threads
        """The number of threads that the whole process may use."""
        self._threads = 1 if _is_small(model) else cpu_threads
        torch.set_num_threads(self._threads)
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        settings, runner = self.settings, self.runner
        max_running = settings.max_num_seqs
        if settings.deterministic:
            if not runner.rows_are_alike(max_running):
                log.warning(
                    "rollout.deterministic: equal rows of a batch come out differently on this machine, so replies are "
                    "generated one at a time"
                )
                max_running = 1
            self._step_width = max_running
        limit = settings.max_model_len
        pool = KVPool(runner.kv_shape, runner.dtype, runner.device, kv_budget(runner, settings))
        return Scheduler(
            pool,
            max_model_len=limit,
            max_running=max_running,
            tokens_per_step=settings.tokens_per_step,
            deterministic=settings.deterministic,
        )

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Step until closed."""
        while self._read_inbox():
            if not self.paused or self.scheduler.running:
                self._step()
            self._finish_pauses()
            self.outbox.flush()

    def _read_inbox(self) -> bool:
        """Handle all messages; wait for one if there is nothing else to do. Returns False once closed."""
        idle = not self.scheduler.running and (self.paused or not self.scheduler.waiting)
        if idle:
            self.inbox.get()(self)
            torch.set_num_threads(self._threads)  # a trainer in this process may have set another number
        while not self.inbox.empty():
            self.inbox.get()(self)
        return not self.closed

    def _finish_pauses(self) -> None:
        if self.pauses and not self.scheduler.running:
            for pause in self.pauses:
                pause.set_result(None)
            self.pauses.clear()

    # ------------------------------------------------------------ what comes through the inbox

    def submit(self, ticket: Ticket) -> None:
        """Begin a reply."""
        request = ticket.request
        try:
            if self.death is not None:
                raise self.death
            room = check_request(request, max_model_len=self.scheduler.max_model_len, vocabulary=self.runner.vocabulary)
        except ModelCallError as error:
            self.outbox.fail(ticket, error)
            return
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._unseeded.getrandbits(64)
        draw_state = DrawState(sampling, request.prompt_ids, request.top_logprobs, random.Random(seed))
        rule = StopRule.of(sampling, self.end_ids, room)
        job = Job(draw_state, rule, ticket, Sequence(list(request.prompt_ids)))
        self.jobs[ticket] = job
        self.prompt_tokens += len(request.prompt_ids)
        self.scheduler.submit(job)

    def cancel(self, ticket: Ticket) -> None:
        """End a reply that nobody waits for any more."""
        job = self.jobs.pop(ticket, None)
        if job is not None:
            self.scheduler.release(job)

    def answer(self, action: Callable[[EngineThread], Any], done: Future[Any]) -> None:
        """Do this now, if the one who asked still waits."""
        if done.set_running_or_notify_cancel():
            try:
                if self.death is not None:
                    raise self.death
                done.set_result(action(self))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)

    def pause(self, done: Future[None]) -> None:
        """Start no new requests; `done` when none is in flight."""
        if done.set_running_or_notify_cancel():
            self.paused = True
            self.pauses.append(done)

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------ the ends of replies

    def _finish(self, job: Job, stop: StopMatch, experts: NDArray[np.int16] | None) -> None:
        ticket: Ticket = job.ticket
        del self.jobs[ticket]
        tops = job.tops if ticket.request.top_logprobs else None
        self.outbox.complete(
            ticket,
            Completion(
                job.draw_state.drawn,
                job.logprobs,
                stop.reason,
                stop.by,
                job.versions,
                tops,
                job.cached_tokens,
                experts,
            ),
        )

    def _fail(self, job: Job, error: Exception) -> None:
        self.jobs.pop(job.ticket, None)
        self.scheduler.release(job)
        self.outbox.fail(job.ticket, error)

    def die(self, error: EngineError) -> None:
        """Fail all that waits for this thread."""
        self.death = error
        for job in list(self.jobs.values()):
            self._fail(job, error)
        while not self.inbox.empty():
            self.inbox.get()(self)
        for pause in self.pauses:
            pause.set_exception(error)
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
        draws = draw_tokens(logits, [job.draw_state for job in jobs])
        for job, draw in zip(jobs, draws, strict=True):
            if math.isnan(draw.logprob):
                self._fail(job, EngineError("the model's logits are NaN: its weights are broken"))
                continue
            kv = job.sequence.kv
            stop = self.scheduler.drawn(job, draw, self._decode)
            self.outbox.tokens(job.ticket, draw.token, draw.logprob)
            if stop is not None:
                self._finish(job, stop, np.stack(kv.experts) if kv is not None and kv.experts else None)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _shrink(self, step: Step, error: RuntimeError) -> None:
        if self.scheduler.shrink():
            log.warning(
                "out of memory: at most %d replies at a time and %d tokens per step until new weights come",
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
        """Replace the weights (None: they were changed in place), and drop what the old ones computed."""
        if source is not None:
            load_into(self.runner.model, source)
        self.scheduler.start_version(version)

    def stats(self) -> dict[str, int]:
        """Counters, and the requests and memory in use now."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return {
            "version": scheduler.version,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "prompt_tokens": self.prompt_tokens,
            "computed_prompt_tokens": scheduler.computed_prompt_tokens,
            "kv_tokens": pool.used_tokens,
            "kv_tokens_peak": pool.peak_tokens,
            "kv_tokens_max": pool.max_tokens,
            "preemptions": scheduler.preemptions,
        }


def compute_alone() -> int:
    """Make this thread compute without helper threads; returns how many threads it could have used.

    OpenMP keeps the helpers that a thread once had. If a process has more of them than cores, all go to sleep after
    each piece of work: an engine that used two threads just to load would make its trainer a third slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads


def _is_small(model: PreTrainedModel) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) < ONE_THREAD_BELOW


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a reply, according to the model's generation settings and its tokenizer."""
    found: set[int] = set()
    for ends in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        for end in ends if isinstance(ends, list | tuple) else [ends]:
            if not isinstance(end, int | None):
                raise EngineError(f"generation_config.json: eos_token_id must be token ids (numbers), not {end!r}")
            found |= set() if end is None else {end}
    return frozenset(found)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out. PyTorch's GPU allocator raises its own error type; the CPU's error is only recognisable
    by its message."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


CPU_SHARE = 0.25
"""Share of the free main memory: episodes, trainer and the user's program need theirs too."""
GPU_SHARE = 0.4
"""Share of the free GPU memory: the local trainer's activations need the rest."""
FULL_LENGTH_CACHE = 2
"""By default, the cache has room for at most this many times `max_num_seqs` conversations of full length: more would be
wasted."""


def kv_budget(runner: Runner, settings: TorchEngineSettings) -> int:
    """How many tokens of keys and values to keep: by `kv_cache_gb`, or by a share of the memory that is free now."""
    size = runner.kv_shape.bytes_per_token(runner.dtype)
    longest = settings.max_model_len + runner.kv_shape.state_tokens(runner.dtype)
    if settings.kv_cache_gb is not None:
        tokens = int(settings.kv_cache_gb * 1e9 / size)
    else:
        share = GPU_SHARE if runner.device.type == "cuda" else CPU_SHARE
        tokens = min(
            int(free_bytes(runner.device) * share / size),
            FULL_LENGTH_CACHE * settings.max_num_seqs * longest,
        )
    if tokens < longest:
        states = runner.kv_shape.state_bytes
        raise EngineError(
            f"the memory for keys and values holds {tokens} tokens, less than one conversation of max_model_len="
            f"{settings.max_model_len}: raise rollout.kv_cache_gb (a token takes {size} bytes"
            + (f", and a conversation's states {STATES * states} more" if states else "")
            + ") or lower rollout.max_model_len"
        )
    return tokens


def free_bytes(device: torch.device) -> int:
    """Memory that is available now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return main_memory().available


def load_into(model: PreTrainedModel, source: Any) -> None:
    """Copy weights from a state dict or a Hugging Face folder: all of them fit, or none is changed."""
    if isinstance(source, Mapping):
        weights = source
    else:
        try:
            weights = stored_weights(Path(source), model)
        except (OSError, ValueError) as error:
            raise EngineError(f"the weights in {source} can't be served as this model's: {error}") from error
    own = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(own.keys() - weights.keys() - tied)
    unknown = sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise EngineError(f"these weights don't belong to this model: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise EngineError(
                f"weight {name} has shape {tuple(value.shape)}, but the model's has {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
