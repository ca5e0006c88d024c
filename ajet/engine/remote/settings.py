"""Which servers, which keys, how patiently."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ajet.schema.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address with one key."""

    base_url: str
    """Up to and including `/v1`."""
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How a remote model is reached."""

    endpoints: tuple[Endpoint, ...]
    model: str
    """The name that the server knows it by."""
    max_model_len: int = 18000
    max_parallel: int = 32
    """Requests under way at the same time, over all endpoints."""
    requests_per_minute: float | None = None
    """Requests begun per minute and endpoint."""
    max_attempts: int = 6
    """How often one request is tried before it fails."""
    timeout_s: float = 600.0
    """Seconds for one attempt, where the request has no deadline of its own."""
    first_pause_s: float = 0.5
    """Pause before the second attempt; it doubles from one attempt to the next."""

    @classmethod
    def from_config(cls, config: Any) -> RemoteSettings:
        """Read `ajet.rollout.remote`; the model's name is `model.path` where none is given."""
        remote = config.ajet.rollout.remote
        return cls(
            endpoints=pair_endpoints(remote.base_url, remote.api_key),
            model=remote.model or config.ajet.model.path,
            max_model_len=config.ajet.rollout.max_model_len,
            max_parallel=remote.max_parallel,
            requests_per_minute=remote.requests_per_minute,
            max_attempts=remote.max_attempts,
            timeout_s=remote.timeout,
        )


def pair_endpoints(base_url: str | list[str] | None, api_key: str | list[str] | None) -> tuple[Endpoint, ...]:
    """Several addresses and several keys: one of either goes with all of the other, equally many go in pairs."""
    given = [base_url] if isinstance(base_url, str) else list(base_url or [])
    urls = given or [url for url in [os.environ.get("OPENAI_BASE_URL", "")] if url]
    keys = [api_key] if isinstance(api_key, str) else list(api_key or [])
    keys = keys or [os.environ.get("OPENAI_API_KEY", "")]
    if not urls:
        raise ConfigError("rollout.engine: remote needs rollout.remote.base_url (or OPENAI_BASE_URL)")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.remote.base_url {url!r} is no http:// or https:// address")
    if len(urls) > 1 and len(keys) > 1 and len(urls) != len(keys):
        raise ConfigError(f"rollout.remote: {len(urls)} base_url and {len(keys)} api_key can't be paired")
    count = max(len(urls), len(keys))
    urls = urls * count if len(urls) == 1 else urls
    keys = keys * count if len(keys) == 1 else keys
    return tuple(Endpoint(url.rstrip("/"), key) for url, key in zip(urls, keys, strict=True))
