"""`VllmServerEngine`: starts, watches and stops one or several vLLM servers, and generates with them. An episode stays
on one server.

A server that dies or fails its health checks is restarted, a limited number of times, and serves the newest weights
when it comes back. Requests in flight fail with a typed error, and the pool retries them; new requests wait for the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ajet.engine.base import EnginePlacement, OnTokens, RequestGate, check_request, reply_deadline, weights_folder
from ajet.engine.remote import CompletionReader, completion_body
from ajet.engine.remote_client import Endpoint, RemoteClient, RemoteSettings, stable_hash
from ajet.engine.vllm.server import (
    MODEL_NAME,
    RELOAD,
    CommandLine,
    VllmServer,
    VllmSettings,
    cpu_arguments,
    cpu_variables,
    error_in,
    is_cpu_build,
    reason_in,
    vllm_command,
)
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest
from ajet.schema.errors import (
    AjetError,
    ConfigError,
    EngineError,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Replica:
    """A server, our connections to it, and what it serves."""

    server: VllmServer
    client: RemoteClient | None = None
    """None while it is being restarted."""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it answers and has the newest weights, and after the engine has failed for good, so that nothing waits
    for it."""
    version: int = 0
    folder: Path | None = None
    """The weights it serves. None: those it was started with."""
    adapter: str = ""
    missed: int = 0
    answered: bool = False
    """Whether it has completed a reply since it was last started."""

    @property
    def model(self) -> str:
        return self.adapter or MODEL_NAME

    async def answers(self) -> bool:
        """Whether its process runs and answers a health check."""
        return self.server.alive and await self.server.healthy()


async def _control(replica: Replica, path: str, body: Mapping[str, Any] | None = None) -> None:
    if replica.client is None:
        raise EngineError("the vLLM server is being restarted")
    await replica.client.control(path, body or {})


def _check_noted(reply: Completion, version: int) -> None:
    """With `rollout.routing_replay` a reply comes in one piece, which must be of one version of the weights."""
    if reply.experts is None:
        raise EngineError("vLLM didn't say which experts it chose: leave rollout.routing_replay out")
    if reply.versions != [(0, version)]:
        raise EngineError("the weights changed during a reply whose experts are noted, and vLLM doesn't say where")


class VllmServerEngine:
    """An `Engine` over vLLM servers of our own."""

    @classmethod
    def from_config(cls, config: Any, placement: EnginePlacement) -> VllmServerEngine:
        """Read `ajet.rollout.vllm`."""
        settings = VllmSettings.from_config(config)
        devices = placement.gpus or settings.devices
        return cls(replace(settings, devices=devices, lora_rank=placement.adapter_rank))

    def __init__(self, settings: VllmSettings, command: CommandLine = vllm_command) -> None:
        self._settings = settings
        self._replicas = [Replica(VllmServer(settings, index, command)) for index in range(settings.replicas)]
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        """Set when a server was seen to die, so that the health check runs at once."""
        self._gate = RequestGate()
        self._asleep = False
        self._version = 0
        self._newest: Path | None = None
        """The folder of the weights that a server serves when it comes back. None: those it is started with."""
        self._dead: EngineError | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("vllm", load_weights=True, max_model_len=self._settings.max_model_len)

    async def ready(self) -> None:
        """Start all servers, in parallel."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_all())
        await asyncio.shield(self._starting)

    async def _start_all(self) -> None:
        if is_cpu_build(self._settings.python):
            if self._settings.notes_experts:
                raise ConfigError(
                    "ajet.rollout.routing_replay: vLLM's CPU build doesn't say which experts it chose: leave the key "
                    "out, or set rollout.engine: torch"
                )
            variables = [f"{name}={value}" for name, value in cpu_variables().items()]
            log.info(
                "vLLM's CPU build is started with %s (rollout.vllm.extra_args and the environment override these)",
                " ".join(variables + cpu_arguments(self._settings)),
            )
        try:
            await asyncio.gather(*(self._start(replica) for replica in self._replicas))
        except AjetError:
            await self._stop_all()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def _start(self, replica: Replica) -> None:
        await replica.server.start()
        if replica.client is not None:
            await replica.client.aclose()
        endpoint = Endpoint(f"{replica.server.base_url}/v1", replica.server.key)
        # one attempt: if a server of ours fails, it is restarted and the pool retries
        limits = RemoteSettings(
            (endpoint,),
            MODEL_NAME,
            max_parallel=100_000,
            max_attempts=1,
            timeout_s=86_400.0,
            if_silent=f"it is restarted if it misses {self._settings.heartbeats_to_hang} health checks, and episodes "
            f"end at their deadlines (vLLM's log: {replica.server.log_file})",
        )
        replica.client = RemoteClient(limits)
        replica.missed, replica.answered = 0, False
        if self._newest is not None:
            await self._load(replica, self._newest, self._version)
        replica.up.set()

    # ------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        async with reply_deadline(request):
            await self.ready()
            async with self._gate.request():
                self._check_alive()
                room = check_request(request, max_model_len=self._settings.max_model_len)
                return await self._generate(request, room, on_tokens)

    async def _generate(self, request: GenerateRequest, room: int, on_tokens: OnTokens | None) -> Completion:
        replica = self._replica_of(request.session_id)
        await replica.up.wait()
        self._check_alive()
        client, model = replica.client, replica.model
        if client is None:
            raise EngineError("the vLLM server is being restarted")
        version = replica.version
        reader = CompletionReader(request, version, on_tokens)

        def on_event(event: dict[str, Any]) -> None:
            if model == MODEL_NAME:  # an adapter stays the same until the reply ends
                reader.note_version(replica.version)
            reader.read(event)

        body = completion_body(request, model, room)
        try:
            if self._settings.notes_experts:  # vLLM doesn't stream them
                on_event(await client.post("/completions", body))
            else:
                await client.stream("/completions", {**body, "stream_options": {"include_usage": True}}, on_event)
        except EngineError:
            if replica.client is client and not await replica.answers():
                self._mark_down(replica)  # before the pool retries: the next request waits for the server
            raise
        replica.answered = True
        reply = reader.completion()
        if self._settings.notes_experts:
            _check_noted(reply, version)
        return reply

    def _mark_down(self, replica: Replica) -> None:
        replica.up.clear()
        if not replica.server.alive:
            self._look.set()

    def _replica_of(self, session: str) -> Replica:
        return self._replicas[stable_hash(session) % len(self._replicas)]

    # ------------------------------------------------------------ weights

    async def load_weights(self, source: Any, version: int) -> None:
        """Weights from a Hugging Face folder, or a LoRA adapter (servers need `--enable-lora`).

        A server that dies meanwhile comes back with them.
        """
        await self.ready()
        await self._wake()
        folder = weights_folder(source)
        previous = self._version, self._newest
        self._version, self._newest = version, folder
        try:
            await asyncio.gather(*(self._bring(replica, folder, version) for replica in self._replicas))
        except EngineError:
            self._version, self._newest = previous
            raise

    async def _bring(self, replica: Replica, folder: Path, version: int) -> None:
        """Return when this server serves these weights, restarting it if necessary."""
        while True:
            await replica.up.wait()
            self._check_alive()
            if replica.folder == folder and replica.version == version:
                return
            client = replica.client
            try:
                await self._load(replica, folder, version)
            except EngineError:
                if replica.client is client and await replica.answers():
                    raise  # it refuses them
                self._mark_down(replica)

    async def _load(self, replica: Replica, folder: Path, version: int) -> None:
        """Replies in flight pause, then continue; prefixes computed under the old weights are dropped."""
        path = str(folder.resolve())
        previous = replica.adapter
        if (folder / "adapter_config.json").is_file():
            # a new name for each version: vLLM keys its prefix cache by the adapter's name
            adapter = f"{MODEL_NAME}-{version}"
            await _control(replica, "/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": path})
            replica.adapter, replica.version, replica.folder = adapter, version, folder
        else:
            await _control(replica, "/pause?mode=keep")
            try:
                reload = {"method": RELOAD, "kwargs": {"weights_path": path}}
                await _control(replica, "/collective_rpc", reload)
                await _control(replica, "/reset_prefix_cache")
                # before `resume`: no new token may carry the old version
                replica.adapter, replica.version, replica.folder = "", version, folder
            finally:
                await _control(replica, "/resume")
        if previous and previous != replica.adapter:
            await _control(replica, "/v1/unload_lora_adapter", {"lora_name": previous})

    # ------------------------------------------------------------ faults

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_s):  # `wait_for` may swallow a cancellation
                    await self._look.wait()
            self._look.clear()
            try:
                await asyncio.gather(*(self._check(replica) for replica in self._replicas))
            except Exception as error:  # whatever ends the watch, those who wait must learn of it
                self._dead = error if isinstance(error, EngineError) else EngineError(str(error) or repr(error))
                log.error("giving up on the vLLM engine: %s", error, exc_info=not isinstance(error, AjetError))
                for replica in self._replicas:
                    replica.up.set()  # nothing should wait any longer
                return

    async def _check(self, replica: Replica) -> None:
        """Restart the server if it died or hangs; raise if it did so too often, or if it died of an error of its own
        before its first reply, as it would again. No server is restarted while its memory is lent to the trainer."""
        server = replica.server
        if server.alive:
            healthy = await server.healthy()
            replica.missed = 0 if healthy else replica.missed + 1
            if healthy and replica.client is not None:
                replica.up.set()
            if replica.missed < self._settings.heartbeats_to_hang:
                return
        if self._asleep:
            return
        if not server.alive and not replica.answered and (error := error_in(server.log_tail())):
            raise EngineError(f"the vLLM server died before its first reply: {error} (log: {server.log_file})")
        why = "hangs" if server.alive else "died"
        self._check_starts(server, why)
        log.warning("a vLLM server %s: restarting it (log: %s)", why, server.log_file)
        client, replica.client, replica.adapter, replica.folder = replica.client, None, "", None
        replica.up.clear()
        await server.stop()
        if client is not None:
            await client.aclose()
        try:
            await self._start(replica)
        except EngineError as error:
            self._check_starts(server, f"did not start ({error})")
            log.warning("%s: trying again", error)

    def _check_starts(self, server: VllmServer, why: str) -> None:
        if server.starts > self._settings.max_restarts:
            said = reason_in(server.log_tail())
            raise EngineError(
                f"the vLLM server {why} after {server.starts} starts; it said last: {said} (log: {server.log_file})"
            )

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineError(f"the vLLM engine has ended: {self._dead}") from self._dead

    # ------------------------------------------------------------ pausing and closing

    async def pause(self) -> None:
        """With `sleep`, the GPU's memory is free from here until `load_weights` or `resume`."""
        await self._gate.close()
        if self._settings.sleep and not self._asleep:
            await self.ready()
            self._asleep = True
            await self._tell_all("/sleep?level=1")

    async def resume(self) -> None:
        await self._wake()
        self._gate.open()

    async def _wake(self) -> None:
        if self._asleep:
            await self._tell_all("/wake_up")
            self._asleep = False

    async def _tell_all(self, path: str) -> None:
        """Send a command to every running server. One that died is restarted awake, with the newest weights."""

        async def tell(replica: Replica) -> None:
            try:
                await _control(replica, path)
            except EngineError:
                if await replica.answers():
                    raise
                self._mark_down(replica)

        await asyncio.gather(*(tell(replica) for replica in self._replicas))

    async def aclose(self) -> None:
        self._dead = self._dead or EngineError("it is closed")
        for task in (self._watching, self._starting):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        await self._stop_all()

    async def _stop_all(self) -> None:
        await asyncio.gather(*(replica.server.stop() for replica in self._replicas))
        for replica in self._replicas:
            if replica.client is not None:
                await replica.client.aclose()
                replica.client = None
