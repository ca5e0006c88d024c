"""`EpisodeHost`: with `wrapper_type: remote`, the one process whose episodes runners elsewhere claim. A Ray actor.

Trinity runs its workflows in several processes; runners connect to one address. So each of those processes hands its
groups to the host, on the head node, and gets them back when they have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from ajet.backbone.ray.collector import GroupRunner
from ajet.backbone.ray.engine import RayEngine
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.trinity.plugin import on_cpu
from ajet.backbone.ray.watcher import first_line
from ajet.engine.base import OnTokens
from ajet.engine.remote import RemoteEngine
from ajet.engine.remote_client import Endpoint, RemoteSettings
from ajet.schema.chat import Completion, GenerateRequest, TokenChunk
from ajet.schema.episode import EpisodeGroup
from ajet.schema.task import Task

if TYPE_CHECKING:
    from ajet.config import Config


class TrinityEngine(RayEngine):
    """Asks one of Trinity's rollout models."""

    def __init__(
        self, model: Any, *, max_model_len: int, embedded: bool, on_death: Callable[[BaseException], None]
    ) -> None:
        """`model`: Trinity's `ModelWrapper`."""
        super().__init__("Trinity", max_model_len=max_model_len, on_death=on_death)
        self._actor = model.model
        self._server: RemoteEngine | None = None
        if not embedded:
            endpoint = Endpoint(f"{str(model.api_address).rstrip('/')}/v1", model.api_key)
            self._server = RemoteEngine(RemoteSettings((endpoint,), model.model_path, max_model_len=max_model_len))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Draw one reply."""
        if self._server is not None:
            version = int(await self.answer(self._actor.get_model_version.remote(), request.deadline_s))
            completion = await self._server.generate(request, on_tokens)
            completion.versions = [(0, version)]
            return completion
        asked = self._actor.draw.remote(replace(request, deadline_s=None))
        completion = await self.answer(asked, request.deadline_s)
        if on_tokens is not None:
            on_tokens(TokenChunk(completion.token_ids, completion.logprobs))
        return completion

    async def aclose(self) -> None:
        """Only our connection to the models ends."""
        if self._server is not None:
            await self._server.aclose()


HOST = "ajet_episode_host"
"""The actor's name in Ray."""


class ServedModel(NamedTuple):
    """What another process needs of Trinity's `ModelWrapper` to ask the same model."""

    model: Any
    """The model's actor."""
    api_address: str | None
    api_key: str
    model_path: str | None

    @classmethod
    def of(cls, wrapper: Any) -> ServedModel:
        return cls(wrapper.model, wrapper.api_address, wrapper.api_key, wrapper.model_path)


def group_runner(run: RunPayload, model: Any) -> GroupRunner:
    """What runs groups on a model of Trinity's, in this process. `model`: a `ModelWrapper` or a `ServedModel`."""

    def make_engine(config: Config) -> TrinityEngine:
        return TrinityEngine(
            model, max_model_len=config.ajet.rollout.max_model_len, embedded=on_cpu(), on_death=server_died
        )

    def server_died(error: BaseException) -> None:
        runner.collector.report_failure.remote(f"a rollout model died: {first_line(error)}")

    runner = GroupRunner(run, make_engine)
    return runner


class EpisodeHost:
    """Opens with the first group."""

    def __init__(self, payload: str) -> None:
        self._run = RunPayload.decode(payload)
        self._runner: GroupRunner | None = None

    async def watch(self) -> None:
        """Never returns: Ray raises in the caller if this process dies."""
        await asyncio.Event().wait()

    async def open(self, model: ServedModel) -> None:
        """Serve episodes to runners. Raises a UserError."""
        if self._runner is None:
            self._runner = group_runner(self._run, model)
        await self._runner.open()

    async def run_group(self, model: ServedModel, task: Task, options: dict[str, Any]) -> EpisodeGroup:
        """Run a group, and hand it to the collector."""
        await self.open(model)
        assert self._runner is not None
        return await self._runner.run_group(task, **options)


class HostedGroups(GroupRunner):
    """Hands its groups to the host."""

    def __init__(self, run: RunPayload, model: Any) -> None:
        super().__init__(run, _no_engine)
        self._model = ServedModel.of(model)
        self._host = ray.get_actor(HOST)

    async def open(self) -> None:
        await self._host.open.remote(self._model)

    async def run_group(self, task: Task, **options: Any) -> EpisodeGroup:
        group: EpisodeGroup = await self._host.run_group.remote(self._model, task, options)
        return group


def _no_engine(config: Config) -> TrinityEngine:
    raise AssertionError("groups run in the host's process")
