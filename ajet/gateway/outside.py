"""`POST /v1/episodes` and `POST /v1/episodes/{id}/end`: episodes that a program elsewhere begins and ends.

To begin one needs the service's key; to end it, the control key that comes with it. The episode's own key does neither.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Protocol

from ajet.gateway import fields
from ajet.gateway.caller import Caller, KeyScopeError
from ajet.gateway.endpoints import MethodError, error_answer
from ajet.gateway.fields import BadField, json_body
from ajet.schema.errors import ModelCallError, RewardError
from ajet.schema.task import finite_reward
from ajet.system.access import InvalidKeyError
from ajet.system.http_messages import Answer, json_answer

PATH = "/v1/episodes"
MAX_BYTES = 1024 * 1024
"""Of a task, or of an episode's metadata."""


class OutsideEpisodes(Protocol):
    """Who begins and ends them."""

    service_key: str

    async def begin(self, task: dict[str, Any]) -> dict[str, Any]:
        """A new episode's `episode_id`, `base_url`, `api_key`, `control_key`, `deadline`. Raises a ModelCallError."""
        ...

    def end(self, episode_id: str, outcome: dict[str, Any]) -> None:
        """The episode is over: `reward`, `is_success`, `metadata`, `failure`. Raises a ModelCallError."""
        ...


def is_outside(path: str) -> bool:
    """Whether a path is one of these."""
    return path == PATH or (path.startswith(f"{PATH}/") and path.endswith("/end") and path.count("/") == 4)


def check_service_key(episodes: OutsideEpisodes, key: str) -> None:
    """Raises InvalidKeyError."""
    if not hmac.compare_digest(key.encode(), episodes.service_key.encode()):
        raise InvalidKeyError("wrong key: to begin an episode needs the service's key (AJET_SERVICE_KEY)")


def check_control_key(path: str, caller: Caller) -> None:
    """Raises KeyScopeError."""
    if not caller.control or caller.session.episode_id != path.split("/")[3]:
        raise KeyScopeError("to end an episode needs its control key")


async def answer_outside(method: str, path: str, body: bytes, episodes: OutsideEpisodes, base_url: str) -> Answer:
    """Answer a request whose key was checked. `base_url`: where its sender finds the gateway."""
    try:
        if method != "POST":
            raise MethodError(f"{method:.20} is not allowed for {path}")
        given = json_body(body) if body else {}
        if path == PATH:
            _only(given, ("task",))
            return json_answer({**await episodes.begin(fields.mapping(given, "task")), "base_url": base_url})
        episode_id = path.split("/")[3]
        episodes.end(episode_id, _outcome(given))
        return json_answer({"episode_id": episode_id, "ended": True})
    except ModelCallError as error:
        return error_answer(error, path)


def _only(given: dict[str, Any], known: Sequence[str]) -> None:
    """Raise for a field of another name: left out, it would cost the episode its task or its reward."""
    unknown = given.keys() - set(known)
    if unknown:
        raise BadField(min(unknown), f"no such field: {min(unknown):.80}; fields: {', '.join(known)}")


def _outcome(given: dict[str, Any]) -> dict[str, Any]:
    _only(given, ("reward", "is_success", "metadata", "failure"))
    reward = given.get("reward")
    try:
        value = None if reward is None else finite_reward(reward, "reward")
    except RewardError as error:
        raise BadField("reward", str(error)) from None
    success = given.get("is_success")
    return {
        "reward": value,
        "is_success": None if success is None else fields.flag(given, "is_success"),
        "metadata": fields.mapping(given, "metadata"),
        "failure": fields.text(given, "failure"),
    }
