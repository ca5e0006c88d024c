"""The embedded engine in a process of its own: the same replies, weights in shared memory, a process that is killed."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from ajet.engine.base import Engine
from ajet.engine.torch import child, process_engine
from ajet.engine.torch.engine import TorchEngine, TorchEngineSettings
from ajet.engine.torch.process_engine import TorchProcessEngine
from ajet.engine.torch.process_messages import Said, read_frame
from ajet.engine.torch.worker import Outbox
from ajet.schema.errors import ConfigError, ContextOverflowError, EngineError, GenerationTimeoutError, ModelCallError
from ajet.schema.generation import GenerateRequest, Sampling, TokenChunk
from support.torch_helpers import ask, ask_all, forward_logprobs, random_prompt, request

pytestmark = pytest.mark.slow

MODEL = "tiny:qwen2"
SETTINGS = TorchEngineSettings(max_model_len=256, max_num_seqs=8)
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchProcessEngine]:
    engine = TorchProcessEngine(MODEL, SETTINGS)
    asyncio.run(engine.ready())
    yield engine
    pid = engine.pid
    assert pid is not None
    asyncio.run(engine.aclose())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate(request(PROMPT)))


@pytest.fixture(scope="module")
def embedded() -> Iterator[TorchEngine]:
    engine = TorchEngine(MODEL, SETTINGS)
    asyncio.run(engine.ready())
    yield engine
    asyncio.run(engine.aclose())


def test_it_is_an_engine_outside_of_this_process(engine: TorchProcessEngine) -> None:
    assert isinstance(engine, Engine)
    assert engine.capabilities.exact_tokens and engine.capabilities.max_model_len == 256
    assert engine.pid not in (None, os.getpid())


def test_replies_are_those_of_the_engine_in_this_process(engine: TorchProcessEngine, embedded: TorchEngine) -> None:
    """Ragged lengths, more requests than fit, shared prefixes, stops, penalties, greedy ones; tokens and logprobs."""
    rng = random.Random(3)
    shared = random_prompt(rng, 90)
    requests = [request(random_prompt(rng, rng.randrange(1, 120)), max_tokens=20, seed=n) for n in range(12)]
    requests += [request(shared + random_prompt(rng, n), max_tokens=12, seed=n, ignore_eos=True) for n in range(6)]
    requests += [
        request(PROMPT, max_tokens=40, seed=1, stop=("e", "\n"), top_p=0.9),
        request(PROMPT, max_tokens=40, seed=2, top_k=20, min_p=0.01, repetition_penalty=1.2),
        request(PROMPT, top_logprobs=3, max_tokens=5, temperature=0),
        request(PROMPT, max_tokens=30, seed=4, stop_token_ids=tuple(range(100, 200)), presence_penalty=0.5),
    ]
    here, there = ask_all(embedded, requests), ask_all(engine, requests)
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.token_ids == ours.token_ids
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
        assert (theirs.finish_reason, theirs.stopped_by) == (ours.finish_reason, ours.stopped_by)
    assert there[-2].top_logprobs is not None and len(there[-2].top_logprobs) == len(there[-2].token_ids)


def test_deterministic_replies_are_the_same_to_the_last_bit() -> None:
    settings = TorchEngineSettings(max_model_len=128, max_num_seqs=4, deterministic=True)
    requests = [request(list(range(40, 50 + n)), max_tokens=10, seed=n) for n in range(5)]
    drawn = []
    for made in (TorchEngine, TorchProcessEngine):
        engine = made(MODEL, settings)
        drawn.append([(reply.token_ids, reply.logprobs) for reply in ask_all(engine, requests)])
        asyncio.run(engine.aclose())
    assert drawn[0] == drawn[1]


def test_agents_whose_turns_interleave_get_the_same_conversations(
    engine: TorchProcessEngine, embedded: TorchEngine
) -> None:
    async def agent(which: Engine, number: int) -> list[list[int]]:
        context, replies = [number, *PROMPT], []
        for turn in range(3):
            reply = await which.generate(request(context, max_tokens=4 + number, seed=10 * number + turn))
            replies.append(reply.token_ids)
            context = [*context, *reply.token_ids, 65 + turn]
        return replies

    async def all_agents(which: Engine) -> list[list[list[int]]]:
        return list(await asyncio.gather(*(agent(which, number) for number in range(6))))

    assert asyncio.run(all_agents(engine)) == asyncio.run(all_agents(embedded))


def test_streams_and_cancels(engine: TorchProcessEngine) -> None:
    async def work() -> tuple[list[int], list[int]]:
        begun, seen = asyncio.Event(), list[int]()

        def on_tokens(chunk: TokenChunk) -> None:
            begun.set()

        long = asyncio.create_task(engine.generate(request(PROMPT, max_tokens=200, ignore_eos=True, seed=1), on_tokens))
        await begun.wait()
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        reply = await engine.generate(request(PROMPT, max_tokens=9, seed=1), lambda chunk: seen.extend(chunk.token_ids))
        while (await engine.stats())["running"]:
            await asyncio.sleep(0.01)  # the process learns of it between two steps
        return seen, reply.token_ids

    seen, drawn = asyncio.run(work())
    assert seen == drawn


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (request(list(range(300))), ContextOverflowError),
        (request([99_999_999]), ModelCallError),
        (request([]), ModelCallError),
        (GenerateRequest(PROMPT, Sampling(stop_token_ids=("no",))), ModelCallError),  # type: ignore[arg-type]
        (request(PROMPT, seed=10**40), ModelCallError),
        (request(PROMPT, deadline_s=1e-6), GenerationTimeoutError),
    ],
)
def test_a_wrong_request_fails_alone(
    engine: TorchProcessEngine, wrong: GenerateRequest, error: type[ModelCallError]
) -> None:
    pid = engine.pid
    with pytest.raises(error):
        ask_all(engine, [wrong])
    assert ask(engine, PROMPT, max_tokens=3, seed=1).token_ids and engine.pid == pid


def test_weights_changed_in_place_are_served_without_a_copy(engine: TorchProcessEngine) -> None:
    async def update(version: int) -> None:
        await engine.pause()
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.03)
        await engine.load_weights(None, version)
        await engine.resume()

    before = ask(engine, PROMPT, max_tokens=12, seed=5, ignore_eos=True)
    asyncio.run(update(7))
    after = ask(engine, PROMPT, max_tokens=12, seed=5, ignore_eos=True)
    assert after.versions == [(0, 7)] != before.versions
    assert after.logprobs == pytest.approx(forward_logprobs(engine.model, PROMPT, after.token_ids), abs=2e-4)
    assert after.cached_prompt_tokens == 0


def test_a_paused_engine_sends_nothing_and_a_cancelled_request_is_forgotten(engine: TorchProcessEngine) -> None:
    async def work() -> list[int]:
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(request(PROMPT, max_tokens=3, seed=1)))
        given_up = asyncio.create_task(engine.generate(request(PROMPT, max_tokens=3, seed=2)))
        await asyncio.sleep(0)
        assert (await engine.stats())["running"] == 0
        given_up.cancel()
        assert not waiting.done()
        await engine.resume()
        return (await waiting).token_ids

    assert asyncio.run(work()) == ask(engine, PROMPT, max_tokens=3, seed=1).token_ids


def test_a_replaced_parameter_is_an_error(engine: TorchProcessEngine) -> None:
    parameter = next(engine.model.parameters())
    shared = parameter.data
    parameter.data = shared.clone()
    try:
        with pytest.raises(EngineError, match="replaced instead of changed in place"):
            asyncio.run(engine.load_weights(None, 8))
    finally:
        parameter.data = shared


def test_a_killed_process_is_named_and_comes_back_with_the_newest_weights(
    engine: TorchProcessEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        begun = asyncio.Event()
        long = asyncio.create_task(
            engine.generate(request(PROMPT, max_tokens=200, ignore_eos=True), lambda chunk: begun.set())
        )
        await begun.wait()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="was killed by SIGKILL"):
            await long
        # while it is away: paused, updated, resumed; what is asked meanwhile waits
        waiting = asyncio.create_task(engine.generate(request(PROMPT, max_tokens=6, seed=3)))
        await engine.pause()
        with torch.no_grad():
            engine.model.get_input_embeddings().weight.mul_(0.98)
        await engine.load_weights(None, 9)
        await engine.resume()
        reply = await waiting
        assert reply.versions == [(0, 9)]
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, PROMPT, reply.token_ids), abs=2e-4)

    asyncio.run(work())
    assert "killed by SIGKILL: starting it again" in caplog.text


OWNER = """
import asyncio, os, sys, threading
from ajet.engine.torch.engine import TorchEngineSettings
from ajet.engine.torch.process_engine import TorchProcessEngine

engine = TorchProcessEngine("tiny:qwen2", TorchEngineSettings(max_model_len=256))
if sys.argv[1] == "serving":
    asyncio.run(engine.ready())
else:
    while engine.pid is None:
        threading.Event().wait(0.01)
print(engine.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("when", "how"), [("serving", signal.SIGKILL), ("serving", signal.SIGINT), ("loading", signal.SIGKILL)]
)
def test_nothing_is_left_of_an_owner_that_is_killed(when: str, how: signal.Signals) -> None:
    """By kill -9, and by Ctrl-C: neither a process, nor shared memory with a name, nor a traceback of ours."""
    command = [sys.executable, "-c", OWNER, when]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert owner.stdin is not None and owner.stdout is not None and owner.stderr is not None
    with owner.stdin, owner.stdout, owner.stderr:
        ended = os.pidfd_open(int(owner.stdout.readline()))
        assert not any("ajet-weights" in name for name in os.listdir("/dev/shm"))
        owner.send_signal(how)
        owner.wait(60)
        ready, _, _ = select.select([ended], [], [], 60)
        os.close(ended)
        assert ready, "the engine's process outlives its owner"
        assert "ajet/engine/torch/process.py" not in owner.stderr.read()


def test_its_warnings_reach_our_log(engine: TorchProcessEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine._state.carry([Said(30, "out of memory")], Outbox())
    assert "the embedded engine's process: out of memory" in caplog.text


def test_a_message_that_is_too_long_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff" * 8)
        with pytest.raises(EngineError, match="none may have more than"):
            read_frame(ours)


def test_whatever_kills_it_again_and_again_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PROGRAM", "ajet.no_such_module")
    monkeypatch.setattr(process_engine, "MAX_RESTARTS", 1)
    engine = TorchProcessEngine(MODEL, SETTINGS)
    with pytest.raises(EngineError, match="ended with code 1 after 2 starts"):
        asyncio.run(engine.ready())
    asyncio.run(engine.aclose())


def test_a_model_that_does_not_exist_is_refused_as_ever() -> None:
    engine = TorchProcessEngine("/no/such/folder", SETTINGS)
    with pytest.raises(ConfigError, match="does not exist"):
        asyncio.run(engine.ready())
    asyncio.run(engine.aclose())


def test_what_the_process_refuses_is_raised_here() -> None:
    engine = TorchProcessEngine(MODEL, TorchEngineSettings(max_model_len=100_000, kv_cache_gb=1e-4))
    with pytest.raises(EngineError, match=r"raise rollout\.kv_cache_gb"):
        asyncio.run(engine.ready())
    asyncio.run(engine.aclose())


def test_a_gpu_is_refused_before_anything_is_loaded() -> None:
    engine = TorchProcessEngine(MODEL, TorchEngineSettings(device="cuda:0"))
    with pytest.raises(EngineError, match="the model would be on cuda:0: leave engine_process out"):
        asyncio.run(engine.ready())
    asyncio.run(engine.aclose())
