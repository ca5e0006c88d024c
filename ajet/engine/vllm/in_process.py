"""`VllmInProcessEngine`: vLLM's asynchronous engine inside this process, its core in a child process.

If the core dies, the next request restarts it with the newest weights, a limited number of times. Requests that were in
flight fail with a typed error, and the pool retries them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
from pathlib import Path
from typing import Any

from ajet.engine.base import OnTokens, check_request
from ajet.engine.vllm.server import (
    RELOAD,
    WORKER_FOLDER,
    VllmSettings,
    WeightFolders,
    engine_arguments,
    worker_arguments,
)
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest, TokenChunk
from ajet.schema.errors import (
    ConfigError,
    EngineError,
    FeatureUnavailableError,
    GenerationTimeoutError,
    InvalidRequestError,
    MissingDependencyError,
)
from ajet.schema.install import install_command

log = logging.getLogger(__name__)


class VllmInProcessEngine:
    """An `Engine` over `AsyncLLM`. The main program must be importable, as vLLM starts its core by `spawn`."""

    def __init__(self, settings: VllmSettings) -> None:
        if settings.replicas > 1:
            raise FeatureUnavailableError("rollout.vllm.mode: in_process runs one replica; several need mode: server")
        if settings.devices:
            raise FeatureUnavailableError("rollout.vllm.devices needs rollout.vllm.mode: server")
        self._settings = settings
        self._llm: Any = None
        self._starts = 0
        self._folders = WeightFolders()
        self._starting: asyncio.Task[None] | None = None
        self._names = itertools.count()
        self._version = 0
        """Of the weights that sample now."""
        self._newest_version = 0
        """Of `folders.newest`."""
        self._adapter: Any = None
        """vLLM's request for the LoRA adapter that is served."""
        self._asleep = False
        self._running = asyncio.Event()
        self._running.set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("vllm", load_weights=True, max_model_len=self._settings.max_model_len)

    async def ready(self) -> None:
        if self._closed:
            raise EngineError("the vLLM engine is closed")
        if self._starting is None or self._died():
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    def _died(self) -> bool:
        done = self._starting is not None and self._starting.done()
        return done and self._llm is not None and bool(self._llm.errored)

    async def _start(self) -> None:
        if self._starts > self._settings.max_restarts:
            raise EngineError(f"vLLM died after {self._starts} starts: {self._llm.dead_error}")
        if self._llm is not None:
            log.warning("vLLM died: restarting it (%s)", self._llm.dead_error)
            await asyncio.to_thread(self._llm.shutdown)
        self._starts += 1
        self._adapter = None
        try:
            self._llm = await asyncio.to_thread(self._build)
        except ImportError as error:
            raise MissingDependencyError(f"vLLM can't be imported ({error}): {install_command('vllm')}") from error
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"vLLM could not start: {error}") from error
        if self._folders.newest is not None:
            await self._reload(self._folders.newest, self._newest_version)

    def _build(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._settings.sleep and not current_platform.is_sleep_mode_available():
            raise FeatureUnavailableError("rollout.vllm.sleep: vLLM can't release this device's memory")
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
        if str(WORKER_FOLDER) not in sys.path:
            sys.path.append(str(WORKER_FOLDER))  # the core's process gets a copy of it
        arguments = ["--disable-log-stats", *worker_arguments(), *engine_arguments(self._settings)]
        try:
            known, unknown = parser.parse_known_args(arguments)
        except (argparse.ArgumentError, SystemExit) as error:
            raise ConfigError(f"rollout.vllm.extra_args: {error}") from error
        if unknown:
            raise ConfigError(f"rollout.vllm.extra_args: vLLM has no argument {' '.join(unknown)}")
        return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(known))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        try:
            async with asyncio.timeout(request.deadline_s):
                await self.ready()
                await self._running.wait()
                self._in_flight += 1
                self._idle.clear()
                try:
                    return await self._generate(request, on_tokens)
                finally:
                    self._in_flight -= 1
                    if not self._in_flight:
                        self._idle.set()
        except TimeoutError as error:
            raise GenerationTimeoutError(f"no reply within its deadline of {request.deadline_s:.1f} s") from error

    async def _generate(self, request: GenerateRequest, on_tokens: OnTokens | None) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        room = check_request(request, max_model_len=self._settings.max_model_len)
        drawn = Completion([], [], "abort", None, [(0, self._version)])
        adapter = self._adapter  # it stays the same until the reply ends
        tops: list[list[tuple[int, float]]] = []
        prompt = {"prompt_token_ids": request.prompt_ids}
        try:
            parameters = _sampling_params(request, room)
            name = f"ajet-{next(self._names)}"
            async for output in self._llm.generate(prompt, parameters, name, lora_request=adapter):
                choice = output.outputs[0]
                ids = list(choice.token_ids)
                if adapter is None:
                    self._note_version(drawn)
                rows = choice.logprobs or []
                logprobs = [float(row[token].logprob) for token, row in zip(ids, rows, strict=True)]
                drawn.token_ids += ids
                drawn.logprobs += logprobs
                tops += [_top(row, request.top_logprobs) for row in rows]
                drawn.cached_prompt_tokens = output.num_cached_tokens or 0
                if choice.finish_reason is not None:
                    drawn.finish_reason = choice.finish_reason
                    drawn.stopped_by = choice.stop_reason
                if on_tokens is not None and ids:
                    on_tokens(TokenChunk(ids, logprobs))
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(f"vLLM failed: {error}") from error
        except _refusals() as error:
            raise InvalidRequestError(f"vLLM refused the request: {error}") from error
        if drawn.finish_reason == "stop" and drawn.stopped_by is None:
            drawn.stopped_by = drawn.token_ids[-1]  # an end token: vLLM names only stops that the request asked for
        drawn.top_logprobs = tops if request.top_logprobs else None
        return drawn

    def _note_version(self, drawn: Completion) -> None:
        """Tokens from now on were sampled under the current weights."""
        if drawn.versions[-1][1] != self._version:
            begun = drawn.versions if drawn.token_ids else []
            drawn.versions = [*begun, (len(drawn.token_ids), self._version)]

    async def load_weights(self, source: Any, version: int) -> None:
        """Weights from a Hugging Face folder or state dict, or a LoRA adapter's folder (which needs `--enable-lora`).

        If the core dies meanwhile, it comes back with them.
        """
        await self.ready()
        await self._wake()
        from vllm.v1.engine.exceptions import EngineDeadError

        folder = self._folders.folder_of(source, version)
        previous, self._newest_version = self._newest_version, version
        replaced = self._folders.announce(folder)
        try:
            try:
                await self._reload(folder, version)
            except EngineDeadError:
                await self.ready()
        except BaseException:
            self._newest_version = previous
            self._folders.announce(replaced)
            raise
        self._folders.remove(replaced)

    async def _reload(self, folder: Path, version: int) -> None:
        """Replies in flight pause, then continue; prefixes computed under the old weights are dropped."""
        if (folder / "adapter_config.json").is_file():
            await self._swap_adapter(folder, version)
            return
        await self._llm.pause_generation(mode="keep")
        try:
            await self._llm.collective_rpc(RELOAD, kwargs={"weights_path": str(folder.resolve())})
            await self._llm.reset_prefix_cache()
            self._version = version  # before resuming: no new token may carry the old version
        finally:
            await self._llm.resume_generation()

    async def _swap_adapter(self, folder: Path, version: int) -> None:
        """A new name for each version: vLLM keys its prefix cache by it."""
        from vllm.lora.request import LoRARequest

        previous = self._adapter
        adapter = LoRARequest(f"ajet-{version}", version + 1, str(folder.resolve()))  # ids begin at 1
        await self._llm.add_lora(adapter)
        self._adapter, self._version = adapter, version
        if previous is not None and previous.lora_int_id != adapter.lora_int_id:
            await self._llm.remove_lora(previous.lora_int_id)

    async def pause(self) -> None:
        """With `sleep`, the GPU's memory is free from here until `load_weights` or `resume`."""
        self._running.clear()
        await self._idle.wait()
        if self._settings.sleep and not self._asleep:
            await self.ready()
            await self._llm.sleep(level=1)
            self._asleep = True

    async def resume(self) -> None:
        await self._wake()
        self._running.set()

    async def _wake(self) -> None:
        if self._asleep:
            self._asleep = False  # a core that died meanwhile has started awake
            if not self._died():
                await self._llm.wake_up()

    async def aclose(self) -> None:
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
        self._folders.close()


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for an unknown token id or a parameter out of range; older versions raise `ValueError`."""
    from vllm import exceptions

    return (ValueError, getattr(exceptions, "VLLMClientError", ValueError))


def _sampling_params(request: GenerateRequest, room: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=room,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        logprobs=request.top_logprobs,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _top(row: Any, count: int) -> list[tuple[int, float]]:
    ranked = sorted(((int(token), float(entry.logprob)) for token, entry in row.items()), key=lambda pair: -pair[1])
    return ranked[:count]
