"""`OpenEnvEnvironment`: an environment behind an OpenEnv server, through the package openenv-core's own client.

The server describes its actions by a JSON schema; the agent is shown it, and its reply is read by it. A reply that
doesn't fit never reaches the server: the agent is told why. The server ends the session when its connection closes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import time
from collections.abc import Mapping
from typing import Any

from ajet.environment.environment import (
    NOTHING_OBSERVED,
    Action,
    Environment,
    EnvironmentSettings,
    EnvironmentSource,
    StepResult,
    action_text,
    checked_reward,
    checked_step,
)
from ajet.environment.gymnasium_environment import MAX_REPLY, SpaceError, marked_action, task_seed
from ajet.environment.service_environment import GONE_S, PAUSE_S
from ajet.schema.errors import (
    EnvironmentFault,
    EnvironmentUnavailableError,
    MissingDependencyError,
    UserError,
)
from ajet.schema.install import install_command
from ajet.schema.task import Task
from ajet.system.http_client import HttpClient, HttpFailure
from ajet.system.json_schemas import SchemaRefused, breach, on_loop

ANY_KIND = "a JSON value"
OURS_TO_FILL = ("metadata",)
"""Fields that a server adds to every action, and an agent has nothing to say about."""


def action_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an action, with their schemas."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: field for name, field in properties.items() if name not in OURS_TO_FILL}


def describe_action(schema: Mapping[str, Any]) -> str:
    """Describe an action in words. If it has one field, its value alone is an answer."""
    fields = action_fields(schema)
    if len(fields) == 1:
        ((name, field),) = fields.items()
        about = field.get("description") if isinstance(field, dict) else None
        return f"{_kind(field)} for {name}" + (f" ({about})" if about else "")
    shape = {"type": "object", "properties": fields, "required": _required(schema)}
    if "$defs" in schema:
        shape["$defs"] = schema["$defs"]
    return f"a JSON object of this JSON schema: {json.dumps(shape, ensure_ascii=False)}"


def read_action(schema: Mapping[str, Any], reply: str) -> dict[str, Any]:
    """The action in a reply. Raises SpaceError, whose message is for the agent."""
    text = marked_action(reply)
    if not text:
        raise SpaceError("the reply is empty")
    fields = action_fields(schema)
    value = _object(text)
    if len(fields) == 1:
        ((name, field),) = fields.items()
        value = _only_field(name, _kind(field), text, value)
    if value is None:
        raise SpaceError(f"{text[:60]!r} is not a JSON object")
    try:
        found = breach(schema, value)
    except SchemaRefused as error:
        raise SpaceError(f"the environment's schema of actions can't be applied: {error}") from None
    if found is not None:
        raise SpaceError(found.message[:200])
    return value


def _only_field(name: str, kind: str, text: str, value: dict[str, Any] | None) -> dict[str, Any]:
    """The action of one field: `value`, or what stands for the field's value, which may have an object in it."""
    if value is not None and (name in value or not value):
        return value
    if kind == "text":
        return {name: text} if value is None or not (text.startswith("{") and text.endswith("}")) else value
    if value is None:
        return {name: _parsed(text)}
    return {name: value} if kind == ANY_KIND else value


def _object(text: str) -> dict[str, Any] | None:
    start, end = text.find("{"), text.rfind("}")
    value = _parsed(text[start : end + 1]) if 0 <= start < end else None
    return value if isinstance(value, dict) else None


def _parsed(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text[:MAX_REPLY])
    except (ValueError, RecursionError):
        return text


def _required(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in schema.get("required", []) if name not in OURS_TO_FILL]


def _kind(field: Any) -> str:
    kinds = {"string": "text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
    return kinds.get(str(field.get("type")), ANY_KIND) if isinstance(field, dict) else ANY_KIND


CONNECT_S = 10.0
SCHEMA_S = 10.0


async def action_schema(url: str) -> Mapping[str, Any]:
    """The JSON schema of a server's actions. A server that can't be reached may be restarting: it is tried again."""
    until = time.monotonic() + GONE_S
    while True:
        try:
            answer = HttpClient(url).request("GET", "/schema", timeout_s=SCHEMA_S)
            if answer.status < 500:
                break
            why = f"it answers with HTTP status {answer.status}"  # or what stands before it, as on Hugging Face
        except HttpFailure as error:
            why = str(error)
        if time.monotonic() >= until:
            raise EnvironmentUnavailableError(f"OpenEnv server {url}: {why}")
        await asyncio.sleep(random.uniform(*PAUSE_S))
    try:
        schema = json.loads(answer.body)["action"]
    except (ValueError, KeyError, TypeError):
        why = f"{url}/schema does not describe actions: is it an OpenEnv server?"
        raise EnvironmentUnavailableError(why) from None
    if not isinstance(schema, dict):
        raise EnvironmentUnavailableError(f"{url}/schema describes actions by {type(schema).__name__}, not an object")
    return schema


class OpenEnvSource(EnvironmentSource):
    """Environments of one OpenEnv server."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.name = str(settings.url)
        self._settings = settings
        if importlib.util.find_spec("openenv") is None:
            raise MissingDependencyError(
                f"{settings.key}.protocol: openenv needs the package openenv-core\n    {install_command('openenv')}"
            )
        if settings.api_key is not None:
            raise UserError(f"{settings.key}.api_key: OpenEnv's protocol has no keys")

    def make(self, episode_id: str) -> OpenEnvEnvironment:
        return OpenEnvEnvironment(self._settings, episode_id)


class OpenEnvEnvironment(Environment):
    """One session. `reset` gives the server the task's seed, the episode's id and `options`."""

    def __init__(self, settings: EnvironmentSettings, episode_id: str) -> None:
        from openenv.core.generic_client import GenericEnvClient

        assert settings.url is not None
        self._url = settings.url.rstrip("/")
        self._options = dict(settings.options)
        self._episode_id = episode_id
        self._timeout_s = settings.timeout_s
        self._client = GenericEnvClient(self._url, CONNECT_S, settings.timeout_s)
        self._schema: Mapping[str, Any] = {}

    async def reset(self, task: Task) -> str:
        self._schema = await action_schema(self._url)
        more = {"seed": task_seed(task), "episode_id": self._episode_id, **self._options}
        result = await self._asked("reset", self._client.reset(**more))
        query = f"{task.main_query}\n\n" if task.main_query else ""
        return f"{query}Answer with your action: {describe_action(self._schema)}.\n\n{_seen(result.observation)}"

    async def step(self, action: Action) -> StepResult:
        try:
            value = await on_loop(read_action, self._schema, action_text(action))
        except SpaceError as error:
            told = f"That is no action here: {error}. Nothing happened. Answer with {describe_action(self._schema)}."
            return StepResult(told, info={"invalid_action": True})
        result = await self._asked("step", self._client.step(value))
        reward = 0.0 if result.reward is None else checked_reward(result.reward, f"{self._url}: step")
        return checked_step(StepResult(_seen(result.observation), reward, result.done), f"{self._url}: step")

    async def get_info(self) -> Any:
        return await self._asked("state", self._client.state())

    async def close(self) -> None:
        async with asyncio.timeout(CONNECT_S):
            await self._client.close()

    async def _asked(self, what: str, answer: Any) -> Any:
        """The server's answer, with failures in our terms."""
        from websockets.exceptions import ConnectionClosed

        try:
            return await answer
        except TimeoutError:
            why = f"{self._url}: no answer to {what} within {self._timeout_s:g} s (ajet.rollout.environment.timeout)"
            raise (EnvironmentFault(why) if what == "step" else EnvironmentUnavailableError(why)) from None
        except (OSError, ConnectionClosed) as error:
            raise EnvironmentUnavailableError(f"OpenEnv server {self._url}: {error}") from None
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # an error message, or no OpenEnv answer
            why = f"{self._url}: {what}: {error}"
            raise (EnvironmentUnavailableError(why) if what == "reset" else EnvironmentFault(why)) from None


def _seen(observation: Any) -> str:
    """An observation as text: its only field, or all of them as JSON."""
    if isinstance(observation, dict):
        fields = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
        if len(fields) == 1 and isinstance(value := next(iter(fields.values())), str):
            return value or NOTHING_OBSERVED
        observation = fields
    return json.dumps(observation, ensure_ascii=False, default=str) if observation else NOTHING_OBSERVED
