"""On-policy distillation: where the teacher's log-probabilities of the student's tokens come from.

`algorithm.distillation.teacher` names a model, which is loaded into this process, or the address of a vLLM server.
Either must have the student's vocabulary, which is checked before the run begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ajet.engine.model_source import ModelSource
from ajet.engine.remote_client import Endpoint, RemoteClient, RemoteSettings
from ajet.schema.call_tree import CallTree
from ajet.schema.errors import ConfigError, EngineError, InvalidRequestError
from ajet.trainer.credit.weights import EpisodeCredit
from ajet.trainer.teacher import Logprobs, ModelTeacher

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.task_runner.runtime import Runtime

KEY = "ajet.trainer_common.algorithm.distillation.teacher"
SAMPLES = (
    "Hello, world!\n",
    "def f(x):\n    return x**2  # 3.14",
    "数学 и языки: ñ, ü, 🙂",
    "<|im_start|>user</think>",
)
"""Texts that two tokenizers with different vocabularies hardly cut alike."""

Batch = Sequence[tuple[CallTree, EpisodeCredit]]


class Teacher(Protocol):
    """Scores the student's tokens."""

    def logprobs(self, batch: Batch) -> Logprobs:
        """Of all trained tokens, by (episode of the batch, call)."""


def teacher_of(config: Config, runtime: Runtime, tokenizer: Any, budget: int) -> Teacher | None:
    """The configured teacher, checked; None without one."""
    name = config.ajet.trainer_common.algorithm.distillation.teacher
    if name is None:
        return None
    if name.startswith(("http://", "https://")):
        server = ServerTeacher(name, runtime)
        server.check_vocabulary(tokenizer)
        return server
    source = ModelSource.resolve(name)
    if source.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{KEY}: {name} has another vocabulary than the model that is trained")
    model: Any = source.model(config.ajet.model.dtype, config.ajet.model.attn)
    return ModelTeacher(model.requires_grad_(False), budget)


class ServerTeacher:
    """A model that a vLLM server holds. It gives log-probabilities of temperature 1."""

    def __init__(self, address: str, runtime: Runtime) -> None:
        root = address.rstrip("/").removesuffix("/v1")
        self._address = address
        self._runtime = runtime
        self._settings = RemoteSettings((Endpoint(root),), model="")
        self._client: RemoteClient | None = None

    def check_vocabulary(self, tokenizer: Any) -> None:
        """Refuse a server whose tokenizer cuts any of the sample texts in another way."""
        for text in SAMPLES:
            try:
                answer = self._runtime.run(self._post("/tokenize", {"prompt": text, "add_special_tokens": False}))
            except (EngineError, InvalidRequestError) as error:
                raise ConfigError(f"{KEY}: {self._address} is no vLLM server that can be asked ({error})") from error
            if answer.get("tokens") != tokenizer(text, add_special_tokens=False)["input_ids"]:
                raise ConfigError(f"{KEY}: {self._address} has another vocabulary than the model that is trained")

    def logprobs(self, batch: Batch) -> Logprobs:
        """One request per call, many at a time."""
        return self._runtime.run(self._all(batch))

    async def _all(self, batch: Batch) -> Logprobs:
        keys = [
            (episode, call)
            for episode, (tree, credit) in enumerate(batch)
            for call in range(len(tree.calls))
            if credit.calls[call].entries and tree.calls[call].mask.any()
        ]
        found = await asyncio.gather(*(self._call(batch[episode][0], call) for episode, call in keys))
        return dict(zip(keys, found, strict=True))

    async def _call(self, tree: CallTree, index: int) -> Any:
        call = tree.calls[index]
        prompt, reply = tree.prompt_ids(index).tolist(), tree.runs[call.run].ids.tolist()
        body = {"prompt": prompt + reply, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await self._post("/v1/completions", body)
        try:
            given = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
            values = [entry[str(token)]["logprob"] for entry, token in zip(given, reply, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{self._address} gives no log-probabilities of a prompt's tokens ({error!r})") from error
        return np.array(values, np.float64)[call.mask]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            self._client = RemoteClient(self._settings)
        return await self._client.post(path, body)
