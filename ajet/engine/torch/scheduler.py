"""`Scheduler`: who computes what in the next step. It knows tokens and memory, but neither models nor threads.

Requests wait in order of arrival. An admitted request takes over or copies the longest cached prefix; if another one
is still computing that prefix, it waits, so a group of equal prompts is computed once. Every step computes one token of
each reply in flight and fills the rest of its budget with pieces of prompts. When memory runs out, idle sequences are
dropped first; then the youngest reply gives up its storage and recomputes it later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ajet.engine.base import StopMatch, StopRule
from ajet.engine.torch.kv_cache import KV, KVPool, PrefixCache, Sequence
from ajet.engine.torch.readers import PassPart
from ajet.engine.torch.runner import Draw, DrawState, Work

CHUNK = 64
"""Tokens of a chunk in deterministic mode: prompts are split at its multiples, whatever is cached."""
LOOKAHEAD = 128
"""Tokens of a reply that storage is reserved for at first: most replies are short, and storage can grow."""
WORTH_WAITING = 8
"""Wait for a prefix that another request is computing if that saves at least this many tokens: it is soon done."""
SMALLEST_STEP = 64


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way to a completion."""

    draw_state: DrawState
    stop_rule: StopRule
    ticket: Any
    """Opaque here. The engine uses it to deliver the reply."""
    sequence: Sequence
    waits_for: Sequence | None = None
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next one can be drawn."""
        return len(self.sequence.tokens) - self.sequence.computed

    def take(self, draw: Draw, version: int) -> None:
        """Add a drawn token."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.draw_state.drawn), version))
        self.draw_state.drawn.append(draw.token)
        self.logprobs.append(draw.logprob)
        if draw.top is not None:
            self.tops.append(draw.top)
        self.sequence.tokens.append(draw.token)


class Step(NamedTuple):
    """The work of one forward pass, with the job of each piece."""

    rows: list[tuple[Job, Work]]
    chunks: list[tuple[Job, Work]]

    @property
    def drawing(self) -> list[Job]:
        """The jobs that draw a token, in the order of their logits."""
        return [job for job, work in [*self.rows, *self.chunks] if work.draws]


class DoesNotFitError(Exception):
    """A job needs more memory than there is, even alone."""

    def __init__(self, job: Job) -> None:
        super().__init__("the request needs more memory for keys and values than the engine may use")
        self.job = job


class Scheduler:
    """Waiting jobs, running jobs, and the memory they share with the prefix cache."""

    def __init__(
        self,
        pool: KVPool,
        *,
        max_model_len: int,
        max_running: int,
        tokens_per_step: int,
        deterministic: bool = False,
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self._limits = max_running, tokens_per_step
        self.max_running, self.tokens_per_step = self._limits
        """What is allowed now: less after memory ran out, until new weights come."""
        self._stateful = pool.shape.state_bytes > 0
        self.cache = PrefixCache(stateful=self._stateful)
        self.version = 0
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._deterministic = deterministic
        self.preemptions = 0
        self.computed_prompt_tokens = 0
        """Prompt tokens that went through the model, recomputations included."""

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def plan(self, *, admit: bool = True) -> Step:
        """Admit what fits, and plan the next step. Empty if there is nothing to do."""
        if admit:
            self._admit()
        for job in list(self.running):
            if job in self.running:  # not just preempted for an older one
                self._ensure_room(job)
        rows = [(job, self._work(job, 1)) for job in self.running if job.pending == 1]
        chunks: list[tuple[Job, Work]] = []
        if self._deterministic:
            first = next((job for job in self.running if job.pending > 1), None)
            if first is None:
                return Step(rows, [])
            return Step([], [(first, self._work(first, CHUNK - first.sequence.computed % CHUNK))])
        budget = max(self.tokens_per_step - len(rows), 1)
        for job in self.running:
            if job.pending > 1 and budget > 0:
                work = self._work(job, budget)
                budget -= work.part.count
                chunks.append((job, work))
        return Step(rows, chunks)

    def _work(self, job: Job, budget: int) -> Work:
        sequence = job.sequence
        assert sequence.kv is not None
        count = min(job.pending, budget)
        if self._stateful and sequence.computed < sequence.kv.keep_at:
            count = min(count, sequence.kv.keep_at - sequence.computed)
        tokens = sequence.tokens[sequence.computed : sequence.computed + count]
        return Work(PassPart(sequence.kv, sequence.computed, count), tokens, draws=count == job.pending)

    def computed(self, step: Step) -> None:
        """Note that a step has gone through the model."""
        for job, work in [*step.rows, *step.chunks]:
            job.sequence.computed += work.part.count
            self.computed_prompt_tokens += max(0, min(work.part.end, len(job.draw_state.prompt)) - work.part.context)

    def drawn(self, job: Job, draw: Draw, decode: Any) -> StopMatch | None:
        """Add a drawn token to its job. If that ends the reply, release the job and return how it ended."""
        job.take(draw, self.version)
        self.cache.register(job.sequence)
        stop = job.stop_rule.check(job.draw_state.drawn, decode)
        if stop is not None:
            self.release(job)
        return stop

    def release(self, job: Job) -> None:
        """End a job, finished or not. What it computed stays cached."""
        if job in self.running:
            self.running.remove(job)
            sequence = job.sequence
            if sequence.lendable:
                self.cache.retire(sequence)
            else:
                self._drop(sequence)
        elif job in self.waiting:
            self.waiting.remove(job)

    def start_version(self, version: int) -> None:
        """New weights: drop everything computed so far. Replies in flight continue; their context is recomputed."""
        for sequence in self.cache.clear():
            self._drop(sequence)
        self.version = version
        self.max_running, self.tokens_per_step = self._limits  # a trainer's memory may be free again
        for job in self.running:
            job.sequence.computed = 0
            self.cache.register(job.sequence)

    def shrink(self) -> bool:
        """Memory is short: drop what is idle, halve the step and the batch. False if there was nothing to give up.

        All replies in flight start over: nobody knows how far a step came that ran out of memory.
        """
        could = bool(self.cache) or self.tokens_per_step > SMALLEST_STEP or len(self.running) > 1
        while (oldest := self.cache.oldest()) is not None:
            self._drop(oldest)
        self.tokens_per_step = max(SMALLEST_STEP, self.tokens_per_step // 2)
        self.max_running = max(1, len(self.running) // 2)
        while self.running:
            self._preempt(self.running[-1])
        return could

    # ------------------------------------------------------------ admission

    def _admit(self) -> None:
        held: list[Job] = []
        try:
            while self.waiting and len(self.running) < self.max_running:
                job = self.waiting[0]  # it waits on if its storage can't be made
                if self._is_held(job):
                    held.append(self.waiting.popleft())
                elif self._start(job):
                    self.waiting.popleft()
                elif self.running:
                    break
                else:
                    self.waiting.popleft()
                    raise DoesNotFitError(job)
        finally:
            self.waiting.extendleft(reversed(held))

    def _is_held(self, job: Job) -> bool:
        """Whether another job is computing a prefix that this one needs."""
        return job.waits_for is not None and any(
            other.sequence is job.waits_for and other.pending > 1 for other in self.running
        )

    def _start(self, job: Job) -> bool:
        """Give a job storage, including as much of its prompt as is computed already. False if memory is short."""
        tokens = job.sequence.tokens
        match = self.cache.find(tokens)
        shared = 0
        if match is not None:
            wanted = min(match.length, len(tokens) - 1)
            shared = match.sequence.lends(wanted, self._stateful)
            if self._stateful and match.sequence.kv is not None:  # it will have states there, and nowhere before
                wanted = match.sequence.kv.keep_at if match.sequence.kv.keep_at <= wanted else shared
            busy = any(other.sequence is match.sequence and other.pending > 1 for other in self.running)
            if (
                busy
                and job.waits_for is not match.sequence
                and wanted - shared >= WORTH_WAITING
                and not self._deterministic
            ):
                job.waits_for = match.sequence
                self.waiting.append(job)
                return True
            if self._deterministic:
                shared -= shared % CHUNK
        source = match.sequence if match is not None and shared else None
        sequence = Sequence(tokens)
        idle = source is not None and self.cache.is_idle(source) and not self._deterministic
        if source is not None and idle and shared == source.computed:
            sequence.kv = self._take_over(source)  # the conversation continues where its last reply ended
        else:
            sequence.kv = self._find_room(self._first_capacity(job), besides=source)
            if sequence.kv is not None and source is not None:
                assert source.kv is not None
                sequence.kv.copy_prefix(source.kv, shared)
                self.cache.touch(source)
            elif source is not None and idle:
                sequence.kv = self._take_over(source)  # no room for a copy
            elif source is not None and self.cache.is_idle(source):
                self._drop(source)  # deterministic mode wants storage of full length
                shared = 0
                sequence.kv = self._find_room(self._first_capacity(job), besides=None)
        if sequence.kv is None:
            return False
        sequence.computed = shared
        if self._deterministic:
            sequence.reusable = len(tokens) - len(tokens) % CHUNK
        # an equal prompt needs the last token's logits, so its states are of use before that token
        keep_at = len(job.draw_state.prompt) - 1 if sequence.reusable is None else sequence.reusable
        sequence.kv.go_on_from(shared, keep_at)
        job.sequence = sequence
        if not job.draw_state.drawn:
            job.cached_tokens = shared
        self.running.append(job)
        self.cache.register(sequence)
        return True

    def _take_over(self, source: Sequence) -> KV | None:
        kv, source.kv = source.kv, None
        self.cache.forget(source)
        return kv

    # ------------------------------------------------------------ memory

    def _first_capacity(self, job: Job) -> int:
        left = job.stop_rule.max_tokens - len(job.draw_state.drawn)
        return len(job.sequence.tokens) + (left if self._deterministic else min(left, LOOKAHEAD))

    def _ensure_room(self, job: Job) -> None:
        """Make room for all tokens of a running job, which may itself have to give up its slot for it."""
        sequence = job.sequence
        assert sequence.kv is not None
        needed = len(sequence.tokens)
        if sequence.kv.capacity >= needed:
            return
        while (larger := self.pool.grown(sequence.kv, needed, sequence.computed, self.max_model_len)) is None:
            oldest = self.cache.oldest()
            if oldest is not None:
                self._drop(oldest)
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is job:
                return
        sequence.kv = larger

    def _find_room(self, tokens: int, besides: Sequence | None) -> KV | None:
        while (kv := self.pool.allocate(tokens, self.max_model_len)) is None:
            oldest = self.cache.oldest(besides)
            if oldest is None:
                return None
            self._drop(oldest)
        return kv

    def _preempt(self, job: Job) -> None:
        """Take a running job's storage away; it starts over, with its drawn tokens as part of its context."""
        self.running.remove(job)
        sequence = job.sequence
        job.sequence = Sequence(sequence.tokens)
        job.waits_for = None
        self._drop(sequence)
        self.waiting.appendleft(job)
        self.preemptions += 1

    def _drop(self, sequence: Sequence) -> None:
        self.cache.forget(sequence)
        if sequence.kv is not None:
            self.pool.release(sequence.kv)
            sequence.kv = None
        sequence.computed = 0
