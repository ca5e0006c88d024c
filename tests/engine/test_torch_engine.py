"""The embedded engine as its callers see it: drawing, stopping, streaming, cancelling, pausing, failing."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ajet.engine.base import Engine
from ajet.engine.model_source import LOADING, ModelSource
from ajet.engine.torch.commands import Outbox, Ticket, TorchEngineSettings
from ajet.engine.torch.engine import JOIN_SECONDS, TorchEngine
from ajet.engine.torch.worker import EngineThread
from ajet.schema.chat import GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    GenerationTimeoutError,
    InvalidRequestError,
    ModelCallError,
)
from support import ROOT, TESTS
from support.torch_helpers import ask, ask_all, forward_logits, forward_logprobs, random_prompt, request, stats

PROMPT = list(range(40, 60))
SOURCE = ModelSource.resolve("tiny:qwen2")


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchEngine]:
    engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=256, max_num_seqs=16))
    asyncio.run(engine.ready())
    yield engine
    asyncio.run(engine.aclose())


def test_it_is_an_engine(engine: TorchEngine) -> None:
    assert isinstance(engine, Engine)
    assert engine.capabilities.exact_tokens
    assert engine.capabilities.max_model_len == 256


def test_closing_does_not_wait_for_a_model_that_is_still_loading() -> None:
    async def close_at_once() -> None:
        with LOADING:
            engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=256, max_num_seqs=16))
            async with asyncio.timeout(JOIN_SECONDS / 2):
                await engine.aclose()

    asyncio.run(close_at_once())


def test_a_seed_gives_the_same_reply_alone_and_in_a_crowd(engine: TorchEngine) -> None:
    rng = random.Random(1)
    alone = ask(engine, PROMPT, seed=11, max_tokens=30, ignore_eos=True)
    crowd = [request(random_prompt(rng, 30), max_tokens=30) for _ in range(10)]
    crowd.insert(4, request(PROMPT, seed=11, max_tokens=30, ignore_eos=True))
    assert ask_all(engine, crowd)[4].token_ids == alone.token_ids
    assert ask(engine, PROMPT, seed=12, max_tokens=30, ignore_eos=True).token_ids != alone.token_ids


def test_without_a_seed_replies_differ(engine: TorchEngine) -> None:
    replies = ask_all(engine, [request(PROMPT, max_tokens=10, ignore_eos=True) for _ in range(4)])
    assert len({tuple(reply.token_ids) for reply in replies}) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"top_k": 8},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 20, "top_p": 0.7},
    ],
)
def test_draws_follow_the_distribution(engine: TorchEngine, sampling: dict[str, float]) -> None:
    """Chi-square over 2,000 seeds; cells with few expected draws are joined."""
    count = 2000
    replies = ask_all(engine, [request(PROMPT, max_tokens=1, seed=seed, **sampling) for seed in range(count)])
    drawn = Counter(reply.token_ids[0] for reply in replies)
    expected = reference_distribution(forward_logits(engine.model, PROMPT)[-1], sampling)
    assert all(expected[token] > 0 for token in drawn)
    cells: list[tuple[float, int]] = []
    rest_expected, rest_drawn = 0.0, 0
    for token, probability in enumerate(expected.tolist()):
        if probability * count >= 5:
            cells.append((probability * count, drawn[token]))
        else:
            rest_expected, rest_drawn = rest_expected + probability * count, rest_drawn + drawn[token]
    if rest_expected > 0:
        cells.append((rest_expected, rest_drawn))
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells)
    freedom = len(cells) - 1
    # mean f, variance 2f: five deviations, on fixed seeds
    assert statistic < freedom + 5 * (2 * max(freedom, 1)) ** 0.5


def reference_distribution(logits: torch.Tensor, sampling: dict[str, float]) -> torch.Tensor:
    """By transformers' own processors."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList()
    if "temperature" in sampling:
        warpers.append(TemperatureLogitsWarper(float(sampling["temperature"])))
    if "top_k" in sampling:
        warpers.append(TopKLogitsWarper(int(sampling["top_k"])))
    if "top_p" in sampling:
        warpers.append(TopPLogitsWarper(sampling["top_p"]))
    if "min_p" in sampling:
        warpers.append(MinPLogitsWarper(sampling["min_p"]))
    return torch.softmax(warpers(torch.tensor([PROMPT]), logits[None].double()), -1)[0]


def test_penalties_change_what_is_drawn_but_not_the_logprobs(engine: TorchEngine) -> None:
    plain = ask(engine, PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True)
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 5.0}):
        reply = ask(engine, PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True, **penalty)
        assert len(set(reply.token_ids)) > len(set(plain.token_ids))
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, PROMPT, reply.token_ids), abs=1e-4)


def test_top_logprobs_are_the_largest(engine: TorchEngine) -> None:
    reply = ask_all(engine, [request(PROMPT, top_logprobs=3, max_tokens=2, temperature=0.0)])[0]
    assert reply.top_logprobs is not None
    rows = torch.log_softmax(forward_logits(engine.model, PROMPT), -1)[-1].topk(3)
    assert [token for token, _ in reply.top_logprobs[0]] == rows.indices.tolist()
    assert [value for _, value in reply.top_logprobs[0]] == pytest.approx(rows.values.tolist(), abs=1e-4)
    assert ask(engine, PROMPT, max_tokens=1).top_logprobs is None


def test_replies_end_at_end_tokens_stop_ids_and_stop_strings(engine: TorchEngine) -> None:
    free = ask(engine, PROMPT, seed=3, max_tokens=60, ignore_eos=True)
    cut = free.token_ids[10]
    at = free.token_ids.index(cut) + 1
    by_id = ask(engine, PROMPT, seed=3, max_tokens=60, ignore_eos=True, stop_token_ids=(cut,))
    assert (by_id.token_ids, by_id.finish_reason, by_id.stopped_by) == (free.token_ids[:at], "stop", cut)
    tokenizer = SOURCE.tokenizer()
    letters = tokenizer.encode("abc")
    text = tokenizer.decode(letters + free.token_ids)[-4:]
    by_text = ask(engine, PROMPT, seed=3, max_tokens=60, ignore_eos=True, stop=("\x00\x00", text))
    assert (by_text.finish_reason, by_text.stopped_by) == ("stop", text)
    assert text in tokenizer.decode(by_text.token_ids)
    assert text not in tokenizer.decode(by_text.token_ids[:-1])
    limited = ask(engine, PROMPT, max_tokens=4, ignore_eos=True)
    assert (len(limited.token_ids), limited.finish_reason, limited.stopped_by) == (4, "length", None)


def test_a_reply_never_outgrows_the_room(engine: TorchEngine) -> None:
    reply = ask(engine, PROMPT, ignore_eos=True)
    assert len(reply.token_ids) == 256 - len(PROMPT)
    assert reply.finish_reason == "length"


def test_tokens_stream_on_the_callers_loop(engine: TorchEngine) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        chunks: list[TokenChunk] = []

        def on_tokens(chunk: TokenChunk) -> None:
            assert asyncio.get_running_loop() is loop
            chunks.append(chunk)

        reply = await engine.generate(request(PROMPT, max_tokens=12, ignore_eos=True), on_tokens)
        assert [token for chunk in chunks for token in chunk.token_ids] == reply.token_ids
        assert [value for chunk in chunks for value in chunk.logprobs] == reply.logprobs
        assert len(chunks) > 1

    asyncio.run(scenario())


def test_cancelling_the_task_ends_the_generation(engine: TorchEngine) -> None:
    async def scenario() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(
            engine.generate(request(PROMPT, max_tokens=200, ignore_eos=True), lambda chunk: started.set())
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        facts = await engine.stats()
        assert (facts["running"], facts["waiting"]) == (0, 0)

    asyncio.run(scenario())


def test_a_deadline_is_kept(engine: TorchEngine) -> None:
    with pytest.raises(GenerationTimeoutError):
        ask_all(engine, [request(PROMPT, deadline_s=0.02, ignore_eos=True)])
    assert stats(engine)["running"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("max_tokens", 0)],
)
def test_senseless_parameters_are_refused_by_name(engine: TorchEngine, name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        ask(engine, PROMPT, **{name: value})


@pytest.mark.parametrize("prompt", [[], [-1], [100_000], ["a"], [1.5], [[1]]])
def test_senseless_prompts_are_refused(engine: TorchEngine, prompt: list[object]) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_ids"):
        ask(engine, prompt)  # type: ignore[arg-type]


def test_a_prompt_without_room_is_an_overflow(engine: TorchEngine) -> None:
    with pytest.raises(ContextOverflowError, match="max_model_len=256"):
        ask(engine, [1] * 256)


def test_absurd_but_lawful_parameters_work(engine: TorchEngine) -> None:
    for sampling in (
        {"temperature": 1e30},
        {"temperature": 1e-30},
        {"top_k": 10**9},
        {"top_p": 1e-12},
        {"min_p": 1.0},
        {"seed": -(10**30)},
        {"repetition_penalty": 1e4},
        {"max_tokens": 10**12, "stop_token_ids": tuple(range(512))},
    ):
        reply = ask(engine, PROMPT, **{"max_tokens": 3, **sampling})
        assert all(value <= 0 for value in reply.logprobs)


def test_pause_waits_for_what_is_in_flight_and_holds_what_comes(engine: TorchEngine) -> None:
    async def scenario() -> None:
        flying = asyncio.create_task(engine.generate(request(PROMPT, max_tokens=50, ignore_eos=True)))
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0)
        await engine.pause()
        assert flying.done() or (await asyncio.wait_for(flying, 1))
        held = asyncio.create_task(engine.generate(request(PROMPT, max_tokens=5)))
        await asyncio.sleep(0.05)
        assert not held.done()
        with torch.no_grad():
            next(engine.model.parameters()).mul_(1.0)
        await engine.load_weights(None, 3)
        await engine.resume()
        assert (await held).versions == [(0, 3)]

    asyncio.run(scenario())


def test_a_trainer_finds_the_model_as_it_left_it(engine: TorchEngine) -> None:
    asyncio.run(engine.pause())
    engine.model.train()
    engine.model.set_attn_implementation("eager")
    asyncio.run(engine.resume())
    ask(engine, PROMPT, max_tokens=3)
    assert engine.model.training
    assert engine.model.config._attn_implementation == "eager"
    engine.model.eval()
    engine.model.set_attn_implementation("sdpa")


def test_weights_of_another_model_change_nothing(engine: TorchEngine, tmp_path: Path) -> None:
    before = ask(engine, PROMPT, temperature=0.0, max_tokens=5).logprobs
    for wrong in ({"x": torch.zeros(1)}, tmp_path, ModelSource.resolve("tiny:llama").path):
        with pytest.raises(EngineError):
            asyncio.run(engine.load_weights(wrong, 99))
    assert ask(engine, PROMPT, temperature=0.0, max_tokens=5).logprobs == pytest.approx(before, abs=1e-5)
    asyncio.run(engine.load_weights(SOURCE.path, 100))
    assert ask(engine, PROMPT, temperature=0.0, max_tokens=5).logprobs == pytest.approx(before, abs=1e-5)


def test_broken_weights_fail_the_request_not_the_engine() -> None:
    engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=64))
    asyncio.run(engine.ready())
    weight = engine.model.model.norm.weight
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="NaN"):
        ask(engine, PROMPT)
    with torch.no_grad():
        weight.fill_(1.0)
    asyncio.run(engine.load_weights(None, 1))
    assert ask(engine, PROMPT, max_tokens=2).token_ids
    asyncio.run(engine.aclose())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.model.norm.weight.fill_(float("nan")), "NaN: its weights are broken"),
        (lambda model: setattr(model.generation_config, "eos_token_id", ["</s>"]), "eos_token_id must be token ids"),
    ],
)
def test_a_broken_model_is_called_so_on_loading(change: Callable[[Any], object], said: str) -> None:
    model = SOURCE.model("float32")
    with torch.no_grad():
        change(model)
    with pytest.raises(EngineError, match=said):
        asyncio.run(TorchEngine(model, TorchEngineSettings(max_model_len=64)).ready())


@pytest.mark.slow
def test_memory_stays_within_its_bound_and_everything_is_answered() -> None:
    rng = random.Random(5)
    settings = TorchEngineSettings(max_model_len=512, max_num_seqs=32, kv_cache_gb=1200 * 1024 / 1e9)
    engine = TorchEngine(SOURCE, settings)
    prompts = [random_prompt(rng, rng.randrange(10, 250)) for _ in range(24)]
    replies = ask_all(
        engine,
        [request(prompt, max_tokens=200, seed=1, ignore_eos=True) for prompt in prompts],
    )
    facts = stats(engine)
    assert facts["kv_tokens_peak"] <= facts["kv_tokens_max"] == 1200
    assert facts["preemptions"] > 0
    assert all(len(reply.token_ids) == 200 for reply in replies)
    again = ask(engine, PROMPT, temperature=0.0, max_tokens=200, ignore_eos=True)
    assert again.logprobs == pytest.approx(forward_logprobs(engine.model, PROMPT, again.token_ids), abs=1e-4)
    asyncio.run(engine.aclose())


def test_too_little_memory_for_one_conversation_is_said_at_once() -> None:
    engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=4096, kv_cache_gb=0.001))
    with pytest.raises(EngineError, match="kv_cache_gb"):
        asyncio.run(engine.ready())
    with pytest.raises(EngineError, match="kv_cache_gb"):
        ask(engine, PROMPT)


def test_running_out_of_memory_shrinks_the_batch_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from ajet.engine.torch.runner import Runner

    engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=256, max_num_seqs=16))
    asyncio.run(engine.ready())
    whole = Runner.logits

    def short_of_memory(self: Runner, tokens: list[int], *rest: object) -> torch.Tensor:
        if len(tokens) > 100:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "logits", short_of_memory)
    rng = random.Random(6)
    replies = ask_all(engine, [request(random_prompt(rng, 90), max_tokens=20, ignore_eos=True) for _ in range(12)])
    assert all(len(reply.token_ids) == 20 for reply in replies)
    scheduler = engine._worker().scheduler
    assert (scheduler.max_running, scheduler.tokens_per_step) < (16, 1024)

    async def new_weights() -> None:
        await engine.pause()
        await engine.load_weights(None, 1)
        await engine.resume()
        await engine.aclose()

    asyncio.run(new_weights())
    assert (scheduler.max_running, scheduler.tokens_per_step) == (16, 1024)


@pytest.mark.parametrize("where", ["draw_tokens", "storage"])
def test_a_step_that_ran_out_of_memory_half_way_loses_no_request(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    from ajet.engine.torch import kv_cache, worker

    engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=256, max_num_seqs=16))
    asyncio.run(engine.ready())
    module, name = (worker, "draw_tokens") if where == "draw_tokens" else (kv_cache, "Slab")
    whole, calls = getattr(module, name), [0]

    def short_of_memory(*given: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == 1:
            raise torch.OutOfMemoryError("out of memory")
        return whole(*given, **named)

    monkeypatch.setattr(module, name, short_of_memory)
    rng = random.Random(6)
    asked = [request(random_prompt(rng, 40), max_tokens=60, ignore_eos=True, deadline_s=60) for _ in range(4)]
    replies = ask_all(engine, asked)
    assert calls[0] > 1
    for prompt, reply in zip(asked, replies, strict=True):
        assert len(reply.token_ids) == 60
        own = forward_logprobs(engine.model, prompt.prompt_ids, reply.token_ids)
        assert reply.logprobs == pytest.approx(own, abs=1e-4)
    asyncio.run(engine.aclose())


def test_a_receiver_that_raises_fails_its_own_request_alone(engine: TorchEngine) -> None:
    def broken(chunk: TokenChunk) -> None:
        raise ValueError("half a tool call")

    async def scenario() -> list[object]:
        each = request(PROMPT, max_tokens=20, ignore_eos=True)
        calls = [engine.generate(each), engine.generate(each, broken), engine.generate(each)]
        async with asyncio.timeout(60):
            return await asyncio.gather(*calls, return_exceptions=True)

    first, failed, last = asyncio.run(scenario())
    assert isinstance(failed, ValueError)
    assert [len(reply.token_ids) for reply in (first, last)] == [20, 20]  # type: ignore[attr-defined]


def test_who_asks_and_goes_away_does_not_end_the_engine(engine: TorchEngine) -> None:
    """A pause and a command that are cancelled before the engine's thread comes to them."""
    held, reached = threading.Event(), threading.Event()

    def hold(worker: EngineThread) -> None:
        reached.set()
        held.wait(60)

    async def scenario() -> None:
        first = asyncio.create_task(engine._ask(hold))
        await asyncio.to_thread(reached.wait, 60)
        asked = [asyncio.create_task(call) for call in (engine.pause(), engine.stats())]
        while engine._inbox.qsize() < len(asked):
            await asyncio.sleep(0)
        for each in asked:
            each.cancel()
        gone = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in gone)
        held.set()
        await first

    asyncio.run(scenario())
    assert len(ask(engine, PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5


def test_a_loop_that_closes_just_before_its_reply_is_delivered_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox()
    outbox.fail(Ticket(request(PROMPT), loop, loop.create_future(), None), EngineError("lost"))
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)  # it was open a moment ago
    outbox.flush()
    assert not outbox._calls


def test_a_model_that_keeps_failing_ends_the_engine_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from ajet.engine.torch.runner import Runner

    engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=256))
    asyncio.run(engine.ready())

    def broken(self: Runner, *rest: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Runner, "logits", broken)
    for _ in range(3):
        with pytest.raises(EngineError, match="device lost"):
            ask(engine, PROMPT)
    with pytest.raises(EngineError, match="has ended"):
        ask(engine, PROMPT)
    with pytest.raises(EngineError, match="has ended"):
        stats(engine)


def test_a_missing_model_is_a_users_error() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        asyncio.run(TorchEngine("./nowhere", TorchEngineSettings()).ready())


def test_a_closed_engine_answers_nobody_and_its_thread_is_gone() -> None:
    async def scenario() -> None:
        engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=256))
        task = asyncio.create_task(engine.generate(request(PROMPT, ignore_eos=True)))
        await engine.ready()
        await asyncio.sleep(0)
        await engine.aclose()
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.generate(request(PROMPT))
        assert not engine._thread.is_alive()

    asyncio.run(scenario())


def test_an_engine_that_is_dropped_ends_its_thread() -> None:
    engine = TorchEngine(SOURCE, TorchEngineSettings(max_model_len=256))
    asyncio.run(engine.ready())
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_thousand_random_requests_leave_nothing_behind() -> None:
    rng = random.Random(7)
    settings = TorchEngineSettings(max_model_len=128, max_num_seqs=24, kv_cache_gb=3000 * 1024 / 1e9)
    engine = TorchEngine(SOURCE, settings)
    shared = random_prompt(rng, 60)

    def random_request() -> GenerateRequest:
        length = rng.choice([0, 1, 5, 20, 60, 100, 127, 128, 500])
        prompt = shared[: rng.choice([0, rng.randrange(60)])] + random_prompt(rng, length)
        if rng.random() < 0.03:
            prompt = [*prompt, rng.choice([-1, 512, 10**9])]
        return GenerateRequest(
            prompt,
            Sampling(
                temperature=rng.choice([0.0, 0.5, 1.0, 1e9, -1.0, float("nan")] + [1.0] * 6),
                top_p=rng.choice([0.5, 1.0, 1.0, 1.0]),
                top_k=rng.choice([-1, -1, 1, 50, 10**6]),
                min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
                frequency_penalty=rng.choice([0.0, 0.0, 0.0, 1.5]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
                max_tokens=rng.choice([None, 1, 3, 10, 10**6]),
                stop=rng.choice([(), (), ("a",)]),
                seed=rng.choice([None, 1]),
                ignore_eos=rng.random() < 0.3,
            ),
            top_logprobs=rng.choice([0, 0, 2]),
            deadline_s=rng.choice([None, None, None, 0.001, 30.0]),
        )

    outcomes: Counter[str] = Counter()

    async def one(each: GenerateRequest) -> None:
        task = asyncio.create_task(engine.generate(each))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
        try:
            reply = await task
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
        except ModelCallError as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes[reply.finish_reason] += 1
            assert len(reply.token_ids) == len(reply.logprobs) > 0

    async def scenario() -> None:
        await engine.ready()
        pending = [random_request() for _ in range(1000)]
        while pending:
            batch, pending = pending[:100], pending[100:]
            await asyncio.gather(*(one(each) for each in batch))
        facts = await engine.stats()
        assert (facts["running"], facts["waiting"]) == (0, 0)
        assert facts["kv_tokens"] <= facts["kv_tokens_max"]
        await engine.load_weights(None, 1)
        assert (await engine.stats())["kv_tokens"] == 0  # nothing is held by anything
        worker = engine._worker()
        assert not worker.jobs and not len(worker.scheduler.cache)
        await engine.aclose()

    asyncio.run(scenario())
    assert sum(outcomes.values()) == 1000
    assert {"stop", "length", "cancelled", "InvalidRequestError", "ContextOverflowError"} <= outcomes.keys()


THREADS = """
import asyncio, os
from ajet.engine.torch.engine import TorchEngine
from ajet.engine.torch.commands import TorchEngineSettings
from support.torch_helpers import ask, request

def threads():
    return len(os.listdir("/proc/self/task"))

async def main():
    before = threads()
    engine = TorchEngine("tiny:qwen2-0.3m", TorchEngineSettings(max_model_len=64))
    await engine.ready()
    await engine.generate(request([5, 6, 7], max_tokens=4))
    print(engine.cpu_threads, threads() - before)
    await engine.aclose()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's way")
def test_the_engine_of_a_small_model_computes_in_its_own_thread_alone() -> None:
    here = [str(TESTS), str(ROOT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(here)}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["2", "1"], "both cores are the trainer's: no helper is in its way"
