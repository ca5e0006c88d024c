"""Every call that begins is committed once, whole, or aborted, whatever the engine, the client or the clock does."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from ajet.context_tracker import TrackerSettings
from ajet.engine.base import StopRule
from ajet.gateway.chat import EpisodeSession, SessionSettings
from ajet.gateway.chat.reply import SeedKey
from ajet.gateway.gateway import answer
from ajet.gateway.protocol import Caller
from ajet.schema.chat import ChatReply, ChatRequest, Completion, EngineCapabilities, Sampling, TokenChunk
from ajet.schema.errors import (
    EngineError,
    GenerationTimeoutError,
    InvalidRequestError,
    RewardError,
    SessionClosedError,
    TooManyStepsError,
)
from support.session_parts import CALL, TOOLS, USER, LineEngine, aborted, new_session, renderer, replied, tokenizer
from support.waiting import until


def test_a_reply_is_parsed_and_recorded() -> None:
    async def run() -> None:
        session = new_session(LineEngine(f"<think>\nhm\n</think>\n\nLook: {CALL}"))
        (reply,) = await session.complete(ChatRequest(USER, tools=TOOLS))
        assert reply.finish_reason == "tool_calls"
        assert reply.message["content"] == "Look:"
        assert reply.message["reasoning_content"] == "hm"
        assert reply.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        (call,) = replied(session)
        assert call.name == reply.call_id and call.reply == reply.message
        assert call.logprobs.tolist() == reply.completion.logprobs

    asyncio.run(run())


def test_choices_run_at_once_and_each_is_recorded() -> None:
    async def run() -> None:
        session = new_session(LineEngine("a", "b", "c"))
        replies = await session.complete(ChatRequest(USER, n=3))
        assert sorted(reply.text for reply in replies) == ["a", "b", "c"]
        assert {call.name for call in replied(session)} == {reply.call_id for reply in replies}

    asyncio.run(run())


def test_one_failing_choice_ends_the_others() -> None:
    async def run() -> None:
        session = new_session(LineEngine("a", EngineError("broken"), "c"))
        with pytest.raises(EngineError, match="broken"):
            await session.complete(ChatRequest(USER, n=3))
        assert len(replied(session)) + len(aborted(session)) == 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (TimeoutError(), GenerationTimeoutError),
        (ConnectionResetError("gone"), EngineError),
        (KeyError("x"), EngineError),
    ],
)
def test_engine_faults_are_typed_and_aborted(fault: Exception, error: type[EngineError]) -> None:
    async def run() -> None:
        session = new_session(LineEngine(fault))
        with pytest.raises(error):
            await session.complete(ChatRequest(USER))
        assert len(aborted(session)) == 1 and not replied(session)

    asyncio.run(run())


@pytest.mark.parametrize(
    "completion",
    [
        Completion([1, 2], [-0.1], "stop"),
        Completion([1], [float("nan")], "stop"),
        Completion([1], [0.5], "stop"),
        Completion([1], [-0.1], "abort"),
        Completion([1], [-0.1], "stop", versions=[]),
        Completion([], [], "stop"),
        Completion([1] * 99, [-0.1] * 99, "length"),
    ],
)
def test_a_malformed_completion_is_not_a_reply(completion: Completion) -> None:
    class Bad(LineEngine):
        async def generate(self, request: Any, on_tokens: Any = None) -> Completion:
            return completion

    async def run() -> None:
        session = new_session(Bad("x"))
        with pytest.raises(EngineError):
            await session.complete(ChatRequest(USER, sampling=Sampling(max_tokens=10)))
        assert len(aborted(session)) == 1 and session.engine_failure is not None

    asyncio.run(run())


def test_cancelling_the_caller_cancels_the_generation() -> None:
    async def run() -> None:
        engine = LineEngine("x", gate=asyncio.Event())
        session = new_session(engine)
        task = asyncio.create_task(session.complete(ChatRequest(USER, n=2)))
        await until(lambda: len(engine.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.cancelled == 2 and len(aborted(session)) == 2

    asyncio.run(run())


def test_revoking_ends_calls_in_flight_and_refuses_later_ones() -> None:
    async def run() -> None:
        engine = LineEngine("x", gate=asyncio.Event())
        session = new_session(engine)
        closed = []
        session.on_close(lambda: closed.append(True))
        task = asyncio.create_task(session.complete(ChatRequest(USER)))
        await until(lambda: engine.requests)
        session.revoke()
        assert aborted(session) and closed == [True]
        with pytest.raises(SessionClosedError):
            await task
        with pytest.raises(SessionClosedError):
            await session.complete(ChatRequest(USER))
        assert engine.cancelled == 1 and len(session.tracker.calls) == 1

    asyncio.run(run())


def test_a_session_that_is_over_keeps_nothing_of_the_requests_that_it_refuses() -> None:
    async def run() -> None:
        session = new_session(LineEngine("x"))
        session.revoke()
        frames = []
        for _ in range(3):
            with pytest.raises(SessionClosedError) as refused:
                await session.complete(ChatRequest(USER))
            frames.append(len(refused.traceback))
        assert frames == frames[:1] * 3

    asyncio.run(run())


def test_half_of_a_surrogate_pair_is_refused_by_its_place() -> None:
    async def run() -> None:
        session = new_session(LineEngine("x"))
        with pytest.raises(InvalidRequestError, match=r"half of a surrogate pair \(\\ud83d, after 'a smile: '\)"):
            await session.complete(ChatRequest([{"role": "user", "content": "a smile: \ud83d"}]))

    asyncio.run(run())


def test_past_the_deadline_nothing_is_asked() -> None:
    async def run() -> None:
        engine = LineEngine("x")
        session = new_session(engine, deadline_s=0.0)
        with pytest.raises(GenerationTimeoutError):
            await session.complete(ChatRequest(USER))
        assert not engine.requests

    asyncio.run(run())


def test_while_training_the_yaml_decides_the_sampling_of_trained_calls() -> None:
    settings = SessionSettings(
        temperature=0.7,
        top_p=0.9,
        trainable_targets=("policy",),
        seed_key=SeedKey(1, 2, "t", 3),
    )
    asked = Sampling(temperature=0.1, presence_penalty=1.0, max_tokens=20, stop=("END",), seed=5)
    trained = settings.sampling(asked, trained=True, seed=77)
    assert (trained.temperature, trained.top_p, trained.presence_penalty, trained.seed) == (0.7, 0.9, 0.0, 77)
    assert (trained.max_tokens, trained.stop) == (20, ("END",))
    frozen = settings.sampling(asked, trained=False, seed=77)
    assert (frozen.temperature, frozen.presence_penalty, frozen.seed) == (0.1, 1.0, 5)


def test_seeds_depend_on_the_place_of_a_call_alone() -> None:
    key = SeedKey(0, 1, "task", 2)
    assert key.of_call("a", 0) == SeedKey(0, 1, "task", 2).of_call("a", 0)
    others = {key.of_call("a", 1), key.of_call("b", 0), SeedKey(0, 1, "task", 3).of_call("a", 0), key.of_call("a", 0)}
    assert len(others) == 4


def test_deltas_add_up_to_the_reply() -> None:
    async def run() -> None:
        session = new_session(LineEngine(f"héllo wörld STOP {CALL} tail"))
        deltas = []
        request = ChatRequest(USER, tools=TOOLS, n=2)
        replies = await session.complete(request, deltas.append)
        for index, reply in enumerate(replies):
            mine = [event.delta for event in deltas if event.choice == index]
            assert "".join(delta.content for delta in mine) == reply.message["content"]
            pieces = [delta.call for delta in mine if delta.call]
            (call,) = reply.message["tool_calls"]
            assert {piece.id for piece in pieces} == {call["id"]} and len(pieces) > 2
            assert pieces[0].name == call["function"]["name"] and pieces[-1].ends
            assert "".join(piece.arguments for piece in pieces) == call["function"]["arguments"]
            assert len(mine) > 5

    asyncio.run(run())


class StoppingEngine(LineEngine):
    """Samples a line up to what stops it, as engines do: the token that stops it is streamed and recorded."""

    async def generate(self, request: Any, on_tokens: Any = None) -> Completion:
        rule = StopRule.of(request.sampling, renderer().end_ids, 1000)
        drawn: list[int] = []
        stop = None
        for token in tokenizer().encode(self.lines[0], add_special_tokens=False):
            drawn.append(token)
            on_tokens(TokenChunk([token], [-0.5]))
            if (stop := rule.check(drawn, renderer().encoder.decode)) is not None:
                break
        assert stop is not None
        return Completion(drawn, [-0.5] * len(drawn), stop.reason, stop.by)


@pytest.mark.parametrize(
    ("line", "sampling", "said"),
    [
        ("Look it up\nObservation: 3", Sampling(stop=("Observation:", "Question:")), "Look it up\n"),
        ("Look it up. Then go on", Sampling(stop=(".",)), "Look it up"),
        ("hello world, hello", Sampling(stop_token_ids=tuple(tokenizer().encode(" world"))), "hello"),
    ],
)
def test_what_stops_a_reply_is_not_streamed(line: str, sampling: Sampling, said: str) -> None:
    async def run() -> None:
        deltas = []
        (reply,) = await new_session(StoppingEngine(line)).complete(ChatRequest(USER, sampling=sampling), deltas.append)
        assert "".join(event.delta.content for event in deltas) == reply.text == said

    asyncio.run(run())


def test_a_reply_is_cut_before_the_first_of_several_stop_strings_in_its_last_token() -> None:
    ids = tokenizer().encode("one\n\n", add_special_tokens=False)
    assert renderer().decode(ids, stopped_by="\n") == "one"


def test_disabled_tool_calls_are_never_offered() -> None:
    async def run() -> None:
        session = new_session(LineEngine(CALL), SessionSettings(force_disable_toolcalls=True))
        (reply,) = await session.complete(ChatRequest(USER, tools=TOOLS))
        assert session.tracker.tree.toolsets == []
        assert reply.message == {"role": "assistant", "content": CALL}

    asyncio.run(run())


class ChatOnlyEngine(LineEngine):
    """Like a remote server that reports no token ids."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("chat only", exact_tokens=False)

    async def ready(self) -> None:
        pass

    async def reply(self, request: ChatRequest) -> ChatReply:
        if isinstance(self.lines[0], Exception):
            raise self.lines.pop(0)
        message = {"role": "assistant", "content": f"{len(request.messages)} heard"}
        ended = Completion([], [], "stop")
        return ChatReply("r", message, "stop", message["content"], [], ended, counted=(9, 2))


def test_an_engine_without_token_ids_is_recorded_by_messages_and_never_trained() -> None:
    async def run() -> None:
        session = new_session(ChatOnlyEngine("never"))
        (reply,) = await session.complete(ChatRequest(USER))
        assert reply.text == f"{len(USER)} heard"
        more = {"role": "user", "content": "and?"}
        await session.complete(ChatRequest([*USER, {**reply.message, "refusal": None}, more]))
        await session.complete(ChatRequest([*USER, reply.message, more], agent="other"))
        tree = session.tracker.tree
        assert [call.extends for call in tree.calls] == [-1, 0, -1]
        assert [call.new_messages for call in tree.calls] == [USER, [more], [*USER, reply.message, more]]
        assert [call.turn for call in tree.calls] == [0, 1, 0] and not any(call.trainable for call in tree.calls)
        assert tree.spent == (27, 6) and tree.sampled_tokens == 0
        assert session.tracker.last_reply == "3 heard"
        finished = session.tracker.finish(1.0)
        assert len(finished.tree.calls) == 3 and finished.ledger.captured == 0 and finished.reward == 1.0

    asyncio.run(run())


def test_a_chat_only_engine_s_reply_is_streamed_counted_and_rewarded_like_any_other() -> None:
    arguments = '{"a": 1}'

    class Calling(ChatOnlyEngine):
        async def reply(self, request: ChatRequest) -> ChatReply:
            reply = await super().reply(request)
            function = {"name": "f", "arguments": arguments}
            reply.message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
            return reply

    async def ask(session: EpisodeSession, path: str, **fields: Any) -> str:
        reply = await answer("POST", path, json.dumps({**fields, "stream": True}).encode(), Caller(session))
        assert not isinstance(reply.body, bytes)
        return b"".join([chunk async for chunk in reply.body]).decode()

    async def run() -> None:
        nonlocal arguments
        session = new_session(Calling("never"))
        usage = {"stream_options": {"include_usage": True}}
        for said in (
            await ask(session, "/v1/chat/completions", messages=USER, **usage),
            await ask(session, "/v1/messages", messages=USER, max_tokens=9),
            await ask(session, "/v1/responses", input="hello"),
        ):
            assert "1 heard" in said and r"{\"a\": 1}" in said
            assert re.search(r'"(prompt|input)_tokens":9\b', said) and re.search(
                r'"(completion|output)_tokens":2\b', said
            )
        (reply,) = await session.complete(ChatRequest(USER))
        session.reward(0.5, call=reply.call_id)
        assert [call.reward for call in session.tracker.tree.calls] == [None, None, None, 0.5]
        arguments = '{"a": '  # cut short
        whole = await answer(
            "POST", "/v1/messages", json.dumps({"messages": USER, "max_tokens": 9}).encode(), Caller(session)
        )
        assert isinstance(whole.body, bytes) and json.loads(whole.body)["content"][1]["input"] == {}

    asyncio.run(run())


def test_a_chat_only_engine_takes_no_prompt_of_tokens() -> None:
    async def run() -> None:
        session = new_session(ChatOnlyEngine("never"))
        reply = await answer("POST", "/v1/completions", b'{"prompt": "Once upon"}', Caller(session))
        assert reply.status == 400 and isinstance(reply.body, bytes) and b"send messages" in reply.body
        assert session.tracker.tree.calls == []

    asyncio.run(run())


def test_a_list_of_rewards_is_shared_out_among_the_calls_of_a_chat_only_engine() -> None:
    async def run() -> None:
        session = new_session(ChatOnlyEngine("never"))
        messages = [*USER]
        for _ in range(2):
            (reply,) = await session.complete(ChatRequest(messages))
            messages = [*messages, reply.message, *USER]
        with pytest.raises(RewardError, match="3 rewards for 2 model calls"):
            session.tracker.finish([1.0, 2.0, 3.0])
        finished = session.tracker.finish([0.25, 0.5])
        assert finished.reward == 0.75 and [call.reward for call in finished.tree.calls] == [0.25, 0.5]
        branched = new_session(ChatOnlyEngine("never"))
        for _ in range(2):
            await branched.complete(ChatRequest(USER))
        with pytest.raises(RewardError, match="call-1 does not continue call-0"):
            branched.tracker.finish([0.25, 0.5])

    asyncio.run(run())


def test_only_calls_with_a_reply_are_steps_however_many_choices_are_asked_for() -> None:
    async def run() -> None:
        limits = TrackerSettings(max_model_len=100_000, max_steps=1, checks=())
        session = new_session(LineEngine(*[EngineError("broken")] * 4, "fine"), tracking=limits)
        with pytest.raises(EngineError, match="broken"):
            await session.complete(ChatRequest(USER, n=4))
        await session.complete(ChatRequest(USER, n=4))
        with pytest.raises(TooManyStepsError):
            await session.complete(ChatRequest(USER))

    asyncio.run(run())


def test_calls_of_a_chat_only_engine_are_limited_too() -> None:
    async def run() -> None:
        session = new_session(ChatOnlyEngine(EngineError("busy"), "never"))
        limit = session.tracker.settings.max_steps
        with pytest.raises(EngineError, match="busy"):
            await session.complete(ChatRequest(USER))
        for _ in range(limit):
            await session.complete(ChatRequest(USER))
        with pytest.raises(TooManyStepsError, match=f"its {limit} model calls"):
            await session.complete(ChatRequest(USER))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("check", "detail", "said"),
    [
        (False, False, None),
        (True, False, "episode e: malformed tool call by default_agent"),
        (True, True, "episode e: malformed tool call by default_agent: tool call: "),
    ],
)
def test_malformed_tool_calls_are_logged_if_wanted(
    check: bool, detail: bool, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SessionSettings(log_tool_format_check=check, log_tool_format_error_detail=detail)

    async def run() -> None:
        session = new_session(LineEngine('<tool_call>{"name": "f"</tool_call>', CALL), settings)
        for _ in range(2):
            await session.complete(ChatRequest(USER, tools=TOOLS))

    asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records if "malformed" in record.getMessage()]
    assert len(messages) == (said is not None)
    assert said is None or messages[0].startswith(said)
