"""What a tuner in another process asks of the gateway besides model calls."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ajet.schema.errors import RewardError

TIMEOUT_S = 30.0
"""A reward is a line in a table: a gateway that needs longer is gone."""


def post_reward(base_url: str, api_key: str, reward: dict[str, Any]) -> None:
    """`POST /v1/rewards`. Raises RewardError with the gateway's own words."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    request = Request(f"{base_url.rstrip('/')}/rewards", json.dumps(reward).encode(), headers, method="POST")
    opener = build_opener(ProxyHandler({}))  # the gateway is near: a proxy of the environment doesn't lead there
    try:
        opener.open(request, timeout=TIMEOUT_S).close()
    except HTTPError as error:
        raise RewardError(
            f"the gateway refused the reward: {error.code} {error.read(2000).decode(errors='replace')}"
        ) from None
