"""`ServerEngine`: token ids in and out of verl's servers. The servers' answers are played by a stand-in; no verl."""

from __future__ import annotations

import asyncio
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from ajet.backbone.ray.engine import ServerEngine
from ajet.backbone.ray.verl.config import CPU_ROLLOUT, VERSIONS
from ajet.engine.base import Engine
from ajet.schema.chat import GenerateRequest, Sampling
from ajet.schema.errors import EngineError, GenerationTimeoutError

END = 2


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


@pytest.fixture(autouse=True)
def ray_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two exceptions of Ray that the engine tells apart."""
    module = types.ModuleType("ray.exceptions")
    module.RayError, module.RayActorError = RayError, RayActorError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.exceptions", module)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))


@dataclass
class Output:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=lambda: {"global_steps": 5, "min_global_steps": 4})


class Client:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked = {"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params}
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.sleep(60)
        return self.answer


def letters(ids: list[int]) -> str:
    """4 is a, 5 is b, …"""
    return "".join("abcdefgh"[i - 4] for i in ids if i != END)


def ask(
    answer: Any,
    sampling: Sampling | None = None,
    deadline_s: float | None = None,
    servers: str = "vllm",
    **options: Any,
) -> Any:
    client = Client(answer)
    engine = ServerEngine(client, end_ids={END}, max_model_len=100, servers=servers, decode=letters, **options)
    assert isinstance(engine, Engine)
    request = GenerateRequest([7, 8], sampling or Sampling(max_tokens=3), session_id="s", deadline_s=deadline_s)
    return asyncio.run(engine.generate(request)), client.asked


def test_ids_go_in_and_come_out_as_they_are() -> None:
    completion, asked = ask(Output([5, END], [-1.0, -0.5]), Sampling(temperature=0.7, top_k=9, max_tokens=3, seed=1))
    assert asked["prompt_ids"] == [7, 8]
    assert asked["request_id"] == "s"  # an episode stays on one server
    assert (asked["temperature"], asked["top_k"], asked["max_tokens"]) == (0.7, 9, 3)
    assert asked["stop_token_ids"] == [END]
    assert asked["seed"] == 1
    assert (completion.token_ids, completion.logprobs) == ([5, END], [-1.0, -0.5])
    assert (completion.finish_reason, completion.stopped_by) == ("stop", END)
    assert completion.versions == [(0, 4)]


def test_each_token_has_the_version_that_sampled_it() -> None:
    fields = {"global_steps": 5, "min_global_steps": 4, VERSIONS: [(0, 4), (2, 5)]}
    assert ask(Output([5, 6, 7], [-1.0] * 3, extra_fields=fields))[0].versions == [(0, 4), (2, 5)]
    until_stop = ask(Output([5, 6, 7], [-1.0] * 3, extra_fields=fields), Sampling(stop=("bc",)))[0]
    assert (until_stop.token_ids, until_stop.versions) == ([5, 6], [(0, 4)])


def test_why_a_reply_ended() -> None:
    assert ask(Output([5, 6, 7], [-1.0] * 3))[0].finish_reason == "length"
    assert ask(Output([], None, "aborted"))[0].finish_reason == "abort"


@pytest.mark.parametrize("servers", [CPU_ROLLOUT, "vllm", "sglang", "trtllm"])
def test_a_stop_string_ends_the_reply_whatever_the_server_knows(servers: str) -> None:
    """A server that goes on past it, to its end token, changes nothing."""
    sampling = Sampling(stop=("ef", "cd"), seed=5)
    for drawn in ([5, 6, 7], [5, 6, 7, 8, 9, 6, 7, END]):
        completion, asked = ask(Output(drawn, [-1.0] * len(drawn)), sampling, servers=servers)
        assert (completion.finish_reason, completion.stopped_by) == ("stop", "cd")
        assert (completion.token_ids, completion.logprobs) == ([5, 6, 7], [-1.0] * 3)
    knows = servers in (CPU_ROLLOUT, "vllm")
    assert asked.get("stop") == (["ef", "cd"] if knows else None)
    assert asked.get("seed") == (5 if knows else None)
    assert asked.get("sampling_seed") == (5 if servers == "sglang" else None)


def test_stop_token_ids_end_the_reply_and_stay_in_it() -> None:
    completion, asked = ask(Output([5, 9], [-1.0] * 2), Sampling(stop_token_ids=(9,)))
    assert asked["stop_token_ids"] == [END, 9]
    assert (completion.token_ids, completion.stopped_by) == ([5, 9], 9)


def test_a_dead_server_is_told_at_once() -> None:
    deaths: list[BaseException] = []
    with pytest.raises(EngineError, match="died: it was killed"):
        ask(RayActorError("it was killed\nmore"), on_death=deaths.append)
    assert len(deaths) == 1
    with pytest.raises(EngineError, match="failed: out of memory"):
        ask(RayError("out of memory"), on_death=deaths.append)
    assert len(deaths) == 1


def test_a_late_reply_is_a_timeout() -> None:
    with pytest.raises(GenerationTimeoutError):
        ask(None, deadline_s=0.05)


def test_logprobs_that_are_missing_are_an_error() -> None:
    with pytest.raises(EngineError, match="2 tokens with 1 logprobs"):
        ask(Output([5, 6], [-1.0]))
