"""Who computes what in the next step. Knows tokens and memory, nothing of models or threads.

Requests wait in order of arrival. An admitted one takes over or copies the longest cached prefix; a request whose
prefix is being computed by another right now waits for it, so a group of equal prompts is computed once. Every step
takes one token of each reply in flight and fills the rest of its budget with pieces of prompts. When memory runs out,
idle prefixes go first, then the youngest reply gives up its storage and computes it again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ajet.engine.sampling_rules import Stop, StopRule
from ajet.engine.torch.attention import Part
from ajet.engine.torch.kv_cache import KV, KVPool, PrefixCache, Trail
from ajet.engine.torch.runner import Work
from ajet.engine.torch.sampler import Draw, Drawer

CHUNK = 64
"""Tokens of a chunk in deterministic mode: prompts are cut at multiples of it, whatever is cached."""
LOOKAHEAD = 128
"""Tokens of reply that storage is reserved for at first: most replies are short, and storage can grow."""
WORTH_WAITING = 8
"""Wait for a prefix that another request is computing if it saves at least so many tokens: it is there a step later."""
SMALLEST_STEP = 64


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way to a completion."""

    drawer: Drawer
    stop_rule: StopRule
    ticket: Any
    """The engine's own: whom to tell. Not looked at here."""
    trail: Trail
    waits_for: Trail | None = None
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next one can be drawn."""
        return len(self.trail.tokens) - self.trail.computed

    def take(self, draw: Draw, version: int) -> None:
        """Add a drawn token."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.drawer.drawn), version))
        self.drawer.drawn.append(draw.token)
        self.logprobs.append(draw.logprob)
        if draw.top is not None:
            self.tops.append(draw.top)
        self.trail.tokens.append(draw.token)


class Step(NamedTuple):
    """The work of one forward pass, with the job of each piece."""

    rows: list[tuple[Job, Work]]
    chunks: list[tuple[Job, Work]]

    @property
    def drawing(self) -> list[Job]:
        """The jobs that draw a token, in the order of the logits."""
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
        prefix_cache: bool = True,
        deterministic: bool = False,
        version: int = 0,
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self.max_running = max_running
        self.tokens_per_step = tokens_per_step
        self.cache = PrefixCache(version)
        self.version = version
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._use_cache = prefix_cache
        self._deterministic = deterministic
        self.preemptions = 0
        self.computed_prompt_tokens = 0
        """Prompt tokens that went through the model, recomputations included."""

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def plan(self, *, admit: bool = True) -> Step:
        """Admit what fits, and share out the next step. Empty if there is nothing to do."""
        if admit:
            self._admit()
        for job in list(self.running):
            if job in self.running:  # not given up for an older one just now
                self._ensure_room(job)
        rows = [(job, self._work(job, 1)) for job in self.running if job.pending == 1]
        chunks: list[tuple[Job, Work]] = []
        if self._deterministic:
            first = next((job for job in self.running if job.pending > 1), None)
            if first is None:
                return Step(rows, [])
            return Step([], [(first, self._work(first, CHUNK - first.trail.computed % CHUNK))])
        budget = max(self.tokens_per_step - len(rows), 1)
        for job in self.running:
            if job.pending > 1 and budget > 0:
                work = self._work(job, budget)
                budget -= work.part.count
                chunks.append((job, work))
        return Step(rows, chunks)

    def _work(self, job: Job, budget: int) -> Work:
        trail = job.trail
        assert trail.kv is not None
        count = min(job.pending, budget)
        tokens = trail.tokens[trail.computed : trail.computed + count]
        return Work(Part(trail.kv, trail.computed, count), tokens, draws=count == job.pending)

    def computed(self, step: Step) -> None:
        """The step has gone through the model."""
        for job, work in [*step.rows, *step.chunks]:
            job.trail.computed += work.part.count
            self.computed_prompt_tokens += max(0, min(work.part.end, len(job.drawer.prompt)) - work.part.context)

    def drawn(self, job: Job, draw: Draw, decode: Any) -> Stop | None:
        """Add a drawn token to its job; says whether the reply is over, and then lets the job go."""
        job.take(draw, self.version)
        if self._use_cache:
            self.cache.register(job.trail)
        stop = job.stop_rule.check(job.drawer.drawn, decode)
        if stop is not None:
            self.release(job)
        return stop

    def release(self, job: Job) -> None:
        """The job is over, finished or not. What it computed stays cached."""
        if job in self.running:
            self.running.remove(job)
            trail = job.trail
            if self._use_cache and trail.lendable:
                self.cache.retire(trail)
            else:
                self._drop(trail)
        elif job in self.waiting:
            self.waiting.remove(job)

    def start_version(self, version: int) -> None:
        """New weights: nothing computed before counts. Replies in flight go on, their context computed anew."""
        for trail in self.cache.start_version(version):
            self._drop(trail)
        self.version = version
        for job in self.running:
            job.trail.computed = 0
            if self._use_cache:
                self.cache.register(job.trail)

    def shrink(self) -> bool:
        """Memory is short: drop what is idle, halve the step and the batch. False if nothing is left to give up."""
        could = bool(self.cache) or self.tokens_per_step > SMALLEST_STEP or len(self.running) > 1
        while (oldest := self.cache.oldest()) is not None:
            self._drop(oldest)
        self.tokens_per_step = max(SMALLEST_STEP, self.tokens_per_step // 2)
        self.max_running = max(1, len(self.running) // 2)
        while len(self.running) > self.max_running:
            self._preempt(self.running[-1])
        return could

    # ------------------------------------------------------------ admission

    def _admit(self) -> None:
        held: list[Job] = []
        while self.waiting and len(self.running) < self.max_running:
            job = self.waiting.popleft()
            if self._is_held(job):
                held.append(job)
            elif not self._start(job):
                self.waiting.appendleft(job)
                if not self.running:
                    self.waiting.remove(job)
                    self.waiting.extendleft(reversed(held))
                    raise DoesNotFitError(job)
                break
        self.waiting.extendleft(reversed(held))

    def _is_held(self, job: Job) -> bool:
        """Whether another job is computing a prefix that this one needs."""
        return job.waits_for is not None and any(
            other.trail is job.waits_for and other.pending > 1 for other in self.running
        )

    def _start(self, job: Job) -> bool:
        """Give a job storage, with as much of its prompt as is computed already. True unless memory is short."""
        tokens = job.trail.tokens
        match = self.cache.find(tokens) if self._use_cache else None
        shared = 0
        if match is not None:
            wanted = min(match.length, len(tokens) - 1)
            shared = min(wanted, match.trail.lendable)
            busy = any(other.trail is match.trail and other.pending > 1 for other in self.running)
            if (
                busy
                and job.waits_for is not match.trail
                and wanted - shared >= WORTH_WAITING
                and not self._deterministic
            ):
                job.waits_for = match.trail
                self.waiting.append(job)
                return True
            if self._deterministic:
                shared -= shared % CHUNK
        source = match.trail if match is not None and shared else None
        trail = Trail(tokens)
        idle = source is not None and self.cache.is_idle(source) and not self._deterministic
        if source is not None and idle and shared == source.computed:
            trail.kv = self._take_over(source)  # the conversation goes on where its last reply ended
        else:
            trail.kv = self._find_room(self._first_capacity(job), besides=source)
            if trail.kv is not None and source is not None:
                assert source.kv is not None
                trail.kv.copy_prefix(source.kv, shared)
                self.cache.touch(source)
            elif source is not None and idle:
                trail.kv = self._take_over(source)  # no room for a copy
        if trail.kv is None:
            return False
        trail.computed = shared
        if self._deterministic:
            trail.reusable = len(tokens) - len(tokens) % CHUNK
        job.trail = trail
        if not job.drawer.drawn:
            job.cached_tokens = shared
        self.running.append(job)
        if self._use_cache:
            self.cache.register(trail)
        return True

    def _take_over(self, source: Trail) -> KV | None:
        kv, source.kv = source.kv, None
        self.cache.forget(source)
        return kv

    # ------------------------------------------------------------ memory

    def _first_capacity(self, job: Job) -> int:
        left = job.stop_rule.max_tokens - len(job.drawer.drawn)
        return len(job.trail.tokens) + (left if self._deterministic else min(left, LOOKAHEAD))

    def _ensure_room(self, job: Job) -> None:
        """See to it that all tokens of a running job find a place; it may have to give up its place instead."""
        trail = job.trail
        assert trail.kv is not None
        needed = len(trail.tokens)
        if trail.kv.capacity >= needed:
            return
        while (larger := self.pool.grown(trail.kv, needed, trail.computed, self.max_model_len)) is None:
            oldest = self.cache.oldest()
            if oldest is not None:
                self._drop(oldest)
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is job:
                return
        trail.kv = larger

    def _find_room(self, tokens: int, besides: Trail | None) -> KV | None:
        while (kv := self.pool.allocate(tokens, self.max_model_len)) is None:
            oldest = self.cache.oldest(besides)
            if oldest is None:
                return None
            self._drop(oldest)
        return kv

    def _preempt(self, job: Job) -> None:
        """Take a running job's storage away; it starts again, its drawn tokens now part of what it computes."""
        self.running.remove(job)
        trail = job.trail
        job.trail = Trail(trail.tokens)
        job.waits_for = None
        self._drop(trail)
        self.waiting.appendleft(job)
        self.preemptions += 1

    def _drop(self, trail: Trail) -> None:
        self.cache.forget(trail)
        if trail.kv is not None:
            self.pool.release(trail.kv)
            trail.kv = None
        trail.computed = 0
