"""A thousand calls over an engine that fails in every way: no turn twice, no log-probability missing, typed errors."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from ajet.context_tracker import TrackerSettings
from ajet.schema.chat import Completion
from ajet.schema.errors import EngineOverloadedError
from support.gateway_parts import place
from support.raw_http import read_reply, request_bytes
from support.session_parts import LineEngine, count, replied
from support.waiting import until

CHAT = "/v1/chat/completions"
EXPECTED = {"good": 200, "reset": 502, "timeout": 504, "bug": 502, "nan": 502, "short": 502, "abort": 502, "busy": 429}


class FaultyEngine(LineEngine):
    """Does what the last word of the prompt says."""

    async def generate(self, request: Any, on_tokens: Any = None) -> Completion:
        from support.session_parts import tokenizer

        text = tokenizer().decode(request.prompt_ids)
        fault = next(
            word for word in [*EXPECTED, "leave"] if f"please {word} " in text.rpartition("<|im_start|>user")[2]
        )
        good = await super().generate(request, on_tokens)
        if fault == "reset":
            raise ConnectionResetError("peer")
        if fault == "timeout":
            raise TimeoutError
        if fault == "bug":
            raise ZeroDivisionError
        if fault == "busy":
            raise EngineOverloadedError("busy")
        if fault == "leave":
            await asyncio.sleep(3)
        if fault == "nan":
            good.logprobs[-1] = float("nan")
        if fault == "short":
            del good.logprobs[0]
        if fault == "abort":
            good.finish_reason = "abort"
        return good


def test_a_thousand_calls_over_a_faulty_engine() -> None:
    async def run() -> None:
        engine = FaultyEngine("fine")
        async with place(engine, tracking=TrackerSettings(max_model_len=100_000, max_steps=10_000, checks=())) as here:
            seen: Counter[tuple[str, int]] = Counter()
            good_ids: list[str] = []

            async def client(number: int) -> None:
                draw = random.Random(number)
                reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
                history: list[dict[str, Any]] = []
                for turn in range(20):
                    fault = draw.choice(["good", "good", *EXPECTED, "leave"])
                    asked = [*history, {"role": "user", "content": f"{number}.{turn} please {fault} now"}]
                    body = {"model": f"ajet/{number}", "messages": asked, "logprobs": True}
                    writer.write(request_bytes("POST", CHAT, here.key.api_key, body))
                    if fault == "leave":
                        await asyncio.sleep(0.01)
                        writer.close()
                        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
                        continue
                    reply = await read_reply(reader)
                    seen[fault, reply.status] += 1
                    if reply.status == 200:
                        answer = reply.json()
                        good_ids.append(answer["choices"][0]["call_id"])
                        assert len(answer["choices"][0]["logprobs"]["content"]) == count("fine")
                        history = [*asked, answer["choices"][0]["message"]]
                    else:
                        assert reply.json()["error"]["code"] in ("engine_error", "timeout", "overloaded")
                writer.close()

            await asyncio.gather(*map(client, range(50)))
            await until(lambda: not here.session.tracker.in_flight)
            assert {fault: status for fault, status in seen} == EXPECTED
            calls = replied(here.session)
            assert sorted(call.name for call in calls) == sorted(good_ids) and len(set(good_ids)) == len(good_ids)
            assert not here.session.tracker.in_flight
            episode = here.session.tracker.finish(1.0)
            episode.ledger.balance()
            for call in episode.tree.calls:
                sampled = 0 if call.run < 0 else len(episode.tree.runs[call.run].ids)
                assert len(call.logprobs) == sampled == (count("fine") if call.name in set(good_ids) else 0)

    asyncio.run(run())
