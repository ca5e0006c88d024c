"""`ServiceEnvironment`: an environment behind the environment-service protocol. One instance there is one episode.

`ServiceClient` speaks the protocol: each call is one POST with a JSON body. A call is repeated only where that is safe:
if it can't have reached the server, if the server refused it for being busy, or if it changes nothing
(`get_env_profile`, `evaluate`, `get_info`, `release`). What the server answers is checked. Any thread may call.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ajet.environment.environment import (
    Action,
    Environment,
    EnvironmentSettings,
    EnvironmentSource,
    Observation,
    StepResult,
    action_message,
    checked_reward,
    checked_step,
    observation_text,
    observed,
)
from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError
from ajet.schema.printable import encodable_values
from ajet.schema.task import Task
from ajet.system.http_client import HttpAnswer, HttpClient, HttpFailure

log = logging.getLogger(__name__)

REPEATABLE = frozenset({"/get_env_profile", "/evaluate", "/get_info", "/release"})
GONE_S = 10.0
"""How long a server that refuses connections is tried again: it may be restarting."""
RELEASE_S = 5.0
"""How long a release may take, and how long it is tried on a server that refuses connections: it must not hold up the
end of an episode. An instance that isn't released expires."""
RELEASE_GONE_S = 1.0
PAUSE_S = (0.1, 0.5)
"""Bounds of the random pause before a repetition."""
LAST_TRY_S = 1.0
"""A try with less time than this, after the server was busy, tells nothing if it gets no answer: it is busy still."""
BUSY = (429, 503)
"""Refused without being tried: the server is at its limit."""
GONE = 410
"""The instance has ended, by an action of the model if the answer says so."""
DETAIL_CHARS = 2000
FRAME = re.compile(r'^  File "[^"\n]*", line .*\n(?:    .*\n|  \[Previous line .*\n)*', re.MULTILINE)
"""A frame of a traceback, with the lines of code below it, and how often it is repeated."""


class Instance(NamedTuple):
    """What `/create` led to."""

    state: Any
    """The first observation: messages, or text."""
    info: dict[str, Any]


class ServiceClient:
    """Speaks to one service."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        ends = f"a call to this environment service ends after {timeout_s:g} s (ajet.rollout.environment.timeout)"
        self._http = HttpClient(self.url, headers, if_silent=ends)

    def profile(self, env_type: str, split: str) -> list[str]:
        """The ids of the tasks in a split."""
        answer = self._call("/get_env_profile", env_type=env_type, params={"split": split})
        data = answer.get("data")
        if data is None:
            data = answer.get("task_ids", [])
        if not isinstance(data, list) or not all(isinstance(item, str | int) for item in data):
            raise EnvironmentFault(f"{self.url}/get_env_profile answered {data!r:.80}, not a list of task ids")
        return [str(item) for item in data]

    def create(self, env_type: str, task_id: str, instance_id: str, params: Mapping[str, Any]) -> Instance:
        """Begin a task in an instance of this id. Whatever goes wrong, no action of the model is its cause."""
        try:
            answer = self._call("/create", env_type=env_type, task_id=task_id, instance_id=instance_id, params=params)
            data = answer.get("data")
            if not isinstance(data, dict) or "state" not in data:
                raise EnvironmentFault(f"{self.url}/create answered {data!r:.80}, not an object with `state`")
        except EnvironmentFault as error:
            self.release(instance_id)  # it may have been created all the same
            raise EnvironmentUnavailableError(str(error)) from None
        info = data.get("info")
        return Instance(_unnested(data["state"]), info if isinstance(info, dict) else {})

    def step(self, instance_id: str, action: Mapping[str, Any]) -> StepResult:
        """Act."""
        data = self._call("/step", instance_id=instance_id, messages=action).get("data")
        where = f"{self.url}/step"
        if not isinstance(data, dict) or not {"state", "is_terminated"} <= data.keys():
            raise EnvironmentFault(f"{where} answered {data!r:.80}, not an object with `state` and `is_terminated`")
        state, info, done = data["state"], data.get("info"), data["is_terminated"]
        if isinstance(state, list) and state and isinstance(state[0], list):
            observation: Any = observed(state[0])  # a nested state is meant to be seen as messages
        else:
            observation = observed(observation_text(observed(state)))
        reward = data.get("reward")  # may be null: then the step has none, and `/evaluate` has the last word
        reward = 0.0 if reward is None else reward
        return checked_step(StepResult(observation, reward, done, info if isinstance(info, dict) else {}), where)

    def evaluate(self, instance_id: str, params: Mapping[str, Any]) -> float:
        """The reward of the instance's episode. No action of the model explains an invalid answer."""
        answer = self._call("/evaluate", instance_id=instance_id, params=params)
        return checked_reward(answer.get("data"), f"{self.url}/evaluate", EnvironmentUnavailableError)

    def info(self, instance_id: str) -> Any:
        """What the instance tells about its tools."""
        return self._call("/get_info", instance_id=instance_id).get("data")

    def release(self, instance_id: str) -> str:
        """End an instance. Never raises: returns why it failed, or an empty text."""
        try:
            self._call("/release", timeout_s=RELEASE_S, instance_id=instance_id)
        except EnvironmentFault as error:
            return str(error)
        return ""

    # ------------------------------------------------------------ one call

    def _call(self, endpoint: str, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        body = {"env_type": "default", "task_id": None, "instance_id": None, "messages": {}, "params": {}, **fields}
        encoded = json.dumps(encodable_values(body), default=str).encode()
        began = time.monotonic()
        until = began + (timeout_s or self._timeout_s)
        busy: EnvironmentFault | None = None
        while True:
            again_until, left = until, max(0.001, until - time.monotonic())
            try:
                answer = self._http.request("POST", endpoint, encoded, left)
                if answer.status not in BUSY:
                    return self._read(endpoint, answer)
                busy = self._unavailable(endpoint, f"is busy: {_detail(answer)}")
                failure: EnvironmentFault = busy
            except HttpFailure as error:
                if busy is not None and error.timed_out and left < LAST_TRY_S:
                    raise busy from None
                failure = self._failure(endpoint, error, timeout_s or self._timeout_s)
                again_until = min(until, began + (RELEASE_GONE_S if endpoint == "/release" else GONE_S))
                if error.sent and endpoint not in REPEATABLE:
                    raise failure from None
            pause = random.uniform(*PAUSE_S)
            if time.monotonic() + pause >= again_until:
                raise failure from None
            time.sleep(pause)

    def _failure(self, endpoint: str, error: HttpFailure, timeout_s: float) -> EnvironmentFault:
        if error.timed_out and error.sent and endpoint == "/step":
            return EnvironmentFault(
                f"{self.url}{endpoint} gave no answer within {timeout_s:g} s (ajet.rollout.environment.timeout)"
            )
        return self._unavailable(endpoint, str(error))

    def _unavailable(self, endpoint: str, why: str) -> EnvironmentUnavailableError:
        return EnvironmentUnavailableError(f"environment service {self.url}{endpoint}: {why}")

    def _read(self, endpoint: str, answer: HttpAnswer) -> dict[str, Any]:
        where = f"{self.url}{endpoint}"
        judged = endpoint == "/evaluate" and answer.status != GONE
        invalid = EnvironmentUnavailableError if judged else EnvironmentFault
        if answer.status in (401, 403):
            raise self._unavailable(endpoint, "refuses the key: set ajet.rollout.environment.api_key")
        if answer.status != 200:
            detail = _detail(answer)
            if _lost(answer, detail):
                raise self._unavailable(endpoint, f"lost the instance: {detail}")
            raise invalid(f"{where} answered {answer.status}: {detail}")
        try:
            record = json.loads(answer.body)
        except (ValueError, RecursionError):
            raise invalid(f"{where} answered something that is not JSON: {answer.body[:80]!r}") from None
        if not isinstance(record, dict):
            raise invalid(f"{where} answered {type(record).__name__}, not an object")
        if record.get("success", bool({"data", "task_ids"} & record.keys())) is not True:
            raise invalid(f"{where} answered without success: {_detail(answer)}")
        return record


def _lost(answer: HttpAnswer, detail: str) -> bool:
    """Whether the instance is gone, through no action of the model. Our server tells the cause if it was one."""
    if answer.status == GONE:
        return b'"cause":"action"' not in answer.body.replace(b" ", b"")
    return answer.status in (400, 404) and "instance" in detail.lower()


def _unnested(state: Any) -> Any:
    return state[0] if isinstance(state, list) and len(state) == 1 and isinstance(state[0], list) else state


def _detail(answer: HttpAnswer) -> str:
    """What an error says. Of a traceback, first the exception: a list of failures shows no more than one line."""
    text = answer.body.decode("utf-8", "replace")
    try:
        record = json.loads(text)
        if isinstance(record, dict):
            found = record.get("detail") or record.get("error") or record.get("message") or record
            text = found if isinstance(found, str) else json.dumps(found)
    except (ValueError, RecursionError):
        pass
    text = text.strip()
    exception = FRAME.split(text)[-1].partition("\n")[0] if FRAME.search(text) else ""
    return f"{exception}\n{text[-DETAIL_CHARS:]}".strip() or "nothing more"


class ServiceSource(EnvironmentSource):
    """Environments of one service."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self.name = str(settings.url)

    def make(self, episode_id: str) -> ServiceEnvironment:
        settings = self._settings
        return ServiceEnvironment(self._client(), episode_id, settings.env_type, dict(settings.options))

    def abandon(self, episode_id: str) -> None:
        if why := self._client().release(episode_id):
            log.debug("releasing %s: %s", episode_id, why)

    def task_ids(self, split: str) -> list[str]:
        return self._client().profile(self._settings.env_type, split)

    def _client(self) -> ServiceClient:
        return ServiceClient(self.name, self._settings.api_key, self._settings.timeout_s)


class ServiceEnvironment(Environment):
    """One instance of a service, under the episode's id."""

    def __init__(self, client: ServiceClient, instance_id: str, env_type: str, options: dict[str, Any]) -> None:
        self._client = client
        self._instance_id = instance_id
        self._env_type = env_type
        self._options = options
        self._created = False
        self.evaluation_params: dict[str, Any] = {"sparse": False}

    def reset(self, task: Task) -> Observation:
        if self._created:
            self._client.release(self._instance_id)
        self._created = True  # from here on it may exist, whatever the answer
        params = dict(self._options)
        if task.main_query:
            params.setdefault("main_query", task.main_query)
        if task.metadata:
            params.setdefault("metadata", task.metadata)
        env_type = task.env_type or self._env_type
        instance = self._client.create(env_type, task.task_id, self._instance_id, params)
        self.tools = described_tools(instance.info.get("tools"))
        return observed(instance.state)

    def step(self, action: Action) -> StepResult:
        return self._client.step(self._instance_id, action_message(action))

    def evaluate(self) -> float:
        return self._client.evaluate(self._instance_id, self.evaluation_params)

    def get_info(self) -> Any:
        return self._client.info(self._instance_id)

    def ask_for_tools(self) -> Sequence[Mapping[str, Any]]:
        """Ask `/get_info`, whose answer may be anything: only schemas count. A service without it offers none."""
        try:
            told = self._client.info(self._instance_id)
        except EnvironmentUnavailableError:
            raise
        except EnvironmentFault as error:
            log.info("%s names no tools: %s", self._client.url, error)
            return ()
        return described_tools(told)

    def close(self) -> None:
        """This may be another thread than the one that waits for a step."""
        if self._created and (why := self._client.release(self._instance_id)):
            log.info("instance %s was not released (it will expire): %s", self._instance_id, why)


def described_tools(told: Any) -> Sequence[Mapping[str, Any]]:
    """The tools in a service's answer: a list of schemas in OpenAI's form, or an object with such a list as `tools`.
    Documentation in words is not a tool."""
    listed = told.get("tools") if isinstance(told, Mapping) else told
    if not isinstance(listed, list):
        return ()
    return tuple(each for each in listed if isinstance(each, Mapping) and ("function" in each or "name" in each))
