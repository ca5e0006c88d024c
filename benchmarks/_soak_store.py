"""The soak's rollout store: served by `ajet store` on the small disk, killed with the rest, and asked at the end for
everything that it acknowledged."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ajet.store.client import StoreClient
from ajet.store.records import AttemptedRollout, Span
from ajet.store.requests import KeyRefusedError, NewRollout, StoreError

PATIENCE_S = 120.0
PAUSE_S = 0.2
PAGE = 1000
SPANS = 2


class SoakStore:
    """`start()`, `kill()` as often as you like, `end()`; then what is wrong."""

    def __init__(self, folder: Path, port: int, output: Path, environment: dict[str, str]) -> None:
        self._path, self._port, self._output, self._environment = folder / "store.sqlite", port, output, environment
        self._server: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)
        self.counts: Counter[str] = Counter()
        self._enqueued: dict[str, int] = {}
        """The number that each acknowledged rollout was given as its input."""
        self._succeeded: set[str] = set()
        """Acknowledged successes."""
        self._spans: set[tuple[str, str]] = set()
        """Attempts whose spans were acknowledged."""
        self._known = False
        """Whether the server knows the client's key."""
        self.failure: Exception | None = None

    def start(self) -> None:
        self._serve()
        until = time.monotonic() + PATIENCE_S
        while socket.socket().connect_ex(("127.0.0.1", self._port)):
            if time.monotonic() > until:
                raise TimeoutError("the store did not start")
            time.sleep(0.2)
        command = [sys.executable, "-m", "ajet", "store", "keys", "make", "soak", "--path", str(self._path)]
        for role in ("writer", "reader", "runner"):
            command += ["--role", role]
        made = subprocess.run(command, capture_output=True, text=True, check=True, env=self._environment)
        self._key = made.stdout.strip()
        self._thread.start()

    def _serve(self) -> None:
        command = [sys.executable, "-m", "ajet", "store", "--path", str(self._path), "--port", str(self._port)]
        with self._output.open("ab") as out:
            self._server = subprocess.Popen(command, stdout=out, stderr=out, env=self._environment)

    def kill(self) -> None:
        """Kill the server, and start another on the same file."""
        assert self._server is not None
        self._server.kill()
        self._server.wait()
        self._serve()

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def end(self) -> tuple[int, list[str]]:
        """The server's exit code on SIGTERM, and what is wrong."""
        if self._server is None or not self._thread.is_alive():
            self.close()
            return -1, [f"the store's client ended with {self.failure!r}"]
        self._stop.set()
        self._thread.join(2 * PATIENCE_S)
        wrong = asyncio.run(self._look())
        self._server.terminate()
        try:
            return self._server.wait(60), wrong
        finally:
            self.close()

    def close(self) -> None:
        """End the server, however."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    # ------------------------------------------------------------ its client

    async def _work(self) -> None:
        """Enqueue, claim, add spans and report, all the time."""
        try:
            async with self._client() as store:
                while not self._stop.is_set():
                    try:
                        await (self._round(store) if self._known else self._wait_for_key(store))
                    except StoreError:  # its disk is full, say: nothing was acknowledged
                        self.counts["refused"] += 1
                    await asyncio.sleep(PAUSE_S)
        except Exception as error:  # noqa: BLE001 - told at the end
            self.failure = error

    async def _wait_for_key(self, store: StoreClient) -> None:
        """A server reads new keys every few seconds."""
        with suppress(KeyRefusedError):
            await store.info()
            self._known = True

    async def _round(self, store: StoreClient) -> None:
        first = self.counts["sent"]
        self.counts["sent"] += 2
        made = await store.enqueue([NewRollout(input=number) for number in (first, first + 1)])
        self._enqueued |= {one.rollout_id: first + index for index, one in enumerate(made)}
        for one in await store.claim("soak", limit=2):
            ids = {"rollout_id": one.rollout.rollout_id, "attempt_id": one.attempt.attempt_id}
            await store.add_spans([Span(**ids, span_id=f"{n:016x}", name="n") for n in range(SPANS)])
            self._spans.add((ids["rollout_id"], ids["attempt_id"]))
            if (await store.report(**ids, status="succeeded")).status == "succeeded":
                self._succeeded.add(ids["rollout_id"])

    def _client(self) -> StoreClient:
        return StoreClient(f"http://127.0.0.1:{self._port}", self._key, patience_seconds=PATIENCE_S)

    # ------------------------------------------------------------ at the end

    async def _look(self) -> list[str]:
        wrong = [f"the store's client ended with {self.failure!r}"] if self.failure else []
        async with self._client() as store:
            kept: list[AttemptedRollout] = []
            while len(page := (await store.query_rollouts(limit=PAGE, offset=len(kept))).items):
                kept += page
            numbers = Counter(one.rollout.input for one in kept)
            status = {one.rollout.rollout_id: one.rollout.status for one in kept}
            wrong += [
                f"store: rollout {number} is there {count} times" for number, count in numbers.items() if count > 1
            ]
            wrong += [f"store: {one} was acknowledged, and is gone" for one in self._enqueued if one not in status]
            wrong += [
                f"store: the success of {one} was acknowledged, and it is {status.get(one)}"
                for one in self._succeeded
                if status.get(one) != "succeeded"
            ]
            for rollout, attempt in self._spans:
                found = 0
                with suppress(StoreError):
                    found = (await store.query_spans(rollout, attempt)).total
                if found != SPANS:
                    wrong.append(f"store: {found} spans of {rollout} {attempt}, not {SPANS}")
        self.counts |= Counter(
            acknowledged=len(self._enqueued), kept=len(kept), succeeded=len(self._succeeded),
            attempts_with_spans=len(self._spans),
        )  # fmt: skip
        return wrong
