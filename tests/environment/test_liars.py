"""Services that lie, drip, hang, refuse or break off: each costs its own request, in time, with a reason."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ajet.environment.service_environment import ServiceClient
from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError


@contextmanager
def liar(*answers: bytes | None, drip_s: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, one per connection; None hangs. Yields its address and what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []
    kept: list[socket.socket] = []

    def run() -> None:
        for answer in answers:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            seen.append(connection.recv(1_000_000))
            for byte in range(len(answer or b"")) if drip_s else ():
                assert answer is not None
                try:
                    connection.sendall(answer[byte : byte + 1])
                except OSError:
                    break
                time.sleep(drip_s)
            if answer is not None and not drip_s:
                connection.sendall(answer)
                connection.close()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.close()
        for connection in kept:
            connection.close()


def http(body: Any, status: str = "200 OK") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(text), text)


def stepped(**data: Any) -> bytes:
    state = [{"role": "user", "content": "x"}]
    return http({"success": True, "data": {"state": state, "reward": 0.0, "is_terminated": False, **data}})


LIES = [
    (http(b"<html>"), "something that is not JSON"),
    (http([1]), "answered list, not an object"),
    (http({"success": False, "detail": "no"}), "answered without success: no"),
    (http({"success": True, "data": None}), "not an object with `state`"),
    (http({"success": True, "data": {"state": []}}), "not an object with `state` and `is_terminated`"),
    (stepped(reward=float("nan")), "must be a finite number, not nan"),
    (stepped(reward="1"), "must be a finite number, not '1'"),
    (stepped(reward=1e999), "must be a finite number, not inf"),
    (stepped(is_terminated="no"), "done='no' of type str, not a bool"),
    (http({"detail": "Traceback\nZeroDivisionError: 1/0"}, "500 Internal Server Error"), "ZeroDivisionError"),
    (http({"detail": "bad action"}, "400 Bad Request"), "answered 400: bad action"),
]


@pytest.mark.parametrize(("answer", "complaint"), LIES)
def test_a_lie_is_a_fault_and_a_step_is_never_sent_again(answer: bytes, complaint: str) -> None:
    with liar(answer, stepped()) as (url, seen):
        with pytest.raises(EnvironmentFault, match=complaint) as caught:
            ServiceClient(url, timeout_s=10).step("e", {"role": "assistant", "content": "go"})
        assert not isinstance(caught.value, EnvironmentUnavailableError) and len(seen) == 1


def test_a_step_without_a_reward_or_an_observation_is_no_lie() -> None:
    with liar(stepped(reward=None), stepped(state=[]), stepped(state=[[{"role": "user", "content": "m"}]])) as (url, _):
        client = ServiceClient(url, timeout_s=10)
        assert client.step("e", {}).reward == 0.0
        assert client.step("e", {}).observation == "(The environment answered with nothing.)"
        assert client.step("e", {}).observation == [{"role": "user", "content": "m"}]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", b"nonsense\r\n\r\n"])
def test_an_answer_that_breaks_off_is_not_repeated_for_a_step(answer: bytes) -> None:
    with liar(answer, stepped()) as (url, seen):
        with pytest.raises(EnvironmentUnavailableError):
            ServiceClient(url, timeout_s=10).step("e", {})
        assert len(seen) == 1


def test_what_changes_nothing_is_repeated() -> None:
    with liar(b"", http({"success": True, "data": ["1", 2]})) as (url, seen):
        assert ServiceClient(url, timeout_s=10).profile("w", "train") == ["1", "2"]
        assert len(seen) == 2


def test_a_busy_service_is_asked_again() -> None:
    busy = http({"detail": "full"}, "503 Service Unavailable")
    with liar(busy, busy, stepped()) as (url, seen):
        assert ServiceClient(url, timeout_s=10).step("e", {}).observation == "x"
        assert len(seen) == 3


def test_a_service_that_is_always_busy_ends_at_the_deadline() -> None:
    busy = http({"detail": "all in use"}, "503 Service Unavailable")
    with liar(*[busy] * 50) as (url, _), pytest.raises(EnvironmentUnavailableError, match="is busy: all in use"):
        ServiceClient(url, timeout_s=0.8).step("e", {})


def test_a_step_that_hangs_is_no_busy_service() -> None:
    busy = http({"detail": "all in use"}, "503 Service Unavailable")
    with liar(busy) as (url, _), pytest.raises(EnvironmentFault, match="no answer within") as caught:
        ServiceClient(url, timeout_s=1.7).step("e", {})
    assert not isinstance(caught.value, EnvironmentUnavailableError), "its action may be the cause"


@pytest.mark.parametrize("drip_s", [0.0, 0.05])
def test_hanging_and_dripping_end_at_the_deadline(drip_s: float) -> None:
    with (
        liar(stepped() if drip_s else None, drip_s=drip_s) as (url, _),
        pytest.raises(EnvironmentFault, match=r"no answer within 0.5 s \(ajet.rollout.environment.timeout\)"),
    ):
        ServiceClient(url, timeout_s=0.5).step("e", {})


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet.system.http_client.MAX_ANSWER_BYTES", 1000)
    with liar(http(b"x" * 5000)) as (url, _), pytest.raises(EnvironmentFault, match="larger than 1000 bytes"):
        ServiceClient(url, timeout_s=10).step("e", {})


def test_a_creation_of_unknown_outcome_is_released() -> None:
    with liar(b"", http({"success": True, "data": None})) as (url, seen):
        with pytest.raises(EnvironmentUnavailableError):
            ServiceClient(url, timeout_s=5).create("w", "t", "e-1", {})
        assert seen[1].startswith(b"POST /release ") and b"e-1" in seen[1]


@pytest.mark.parametrize(
    "answer",
    [
        http({"detail": "Traceback\nRuntimeError: no disk"}, "500 Internal Server Error"),
        http({"success": False, "error": "no such task"}),
        http({"success": True, "data": "x"}),
        http(b"<html>"),
        http({}, "307 Temporary Redirect"),
    ],
)
def test_a_task_that_cannot_begin_is_no_fault_of_the_model(answer: bytes) -> None:
    with liar(answer, http({"success": True, "data": None})) as (url, seen):
        with pytest.raises(EnvironmentUnavailableError, match=r"/create answered"):
            ServiceClient(url, timeout_s=5).create("w", "t", "e-1", {})
        assert seen[1].startswith(b"POST /release ")


def test_a_service_that_names_tasks_need_not_speak_of_success() -> None:
    with liar(http({"task_ids": ["a", 2]}), http({"success": False, "task_ids": ["a"]})) as (url, _):
        client = ServiceClient(url, timeout_s=5)
        assert client.profile("w", "train") == ["a", "2"]
        with pytest.raises(EnvironmentFault, match="without success"):
            client.profile("w", "train")


UNJUDGED = [
    (http(b"<html>"), "something that is not JSON"),
    (http([1]), "answered list, not an object"),
    (http({"success": False, "detail": "no"}), "answered without success: no"),
    (http({"success": True, "data": None}), "must be a finite number, not None"),
    (http({"success": True, "data": "1.0"}), "must be a finite number, not '1.0'"),
    (http({"success": True, "data": float("nan")}), "must be a finite number, not nan"),
    (http({"detail": "Traceback\nZeroDivisionError: 1/0"}, "500 Internal Server Error"), "ZeroDivisionError"),
]


@pytest.mark.parametrize(("answer", "complaint"), UNJUDGED)
def test_an_invalid_evaluation_is_the_environments_own(answer: bytes, complaint: str) -> None:
    with liar(answer) as (url, _), pytest.raises(EnvironmentUnavailableError, match=complaint):
        ServiceClient(url, timeout_s=10).evaluate("e", {})


def test_what_an_action_has_ended_cannot_be_judged_because_of_the_action() -> None:
    ended = http({"detail": "its process exited during `step`", "cause": "action"}, "410 Gone")
    with liar(ended) as (url, _), pytest.raises(EnvironmentFault, match="exited during") as caught:
        ServiceClient(url, timeout_s=10).evaluate("e", {})
    assert not isinstance(caught.value, EnvironmentUnavailableError)


def test_an_unknown_instance_is_a_lost_one() -> None:
    with (
        liar(http({"detail": "Instance e not found"}, "400 Bad Request")) as (url, _),
        pytest.raises(EnvironmentUnavailableError, match="lost the instance"),
    ):
        ServiceClient(url, timeout_s=5).step("e", {})
