"""How one agent reaches the model: by a function call in the process that runs the episode, by HTTP from any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ajet.tuner.crossing import Crossing
from ajet.tuner.transport import API_KEY, BASE_URL, async_transport, blocking_transport


@dataclass(frozen=True, slots=True)
class Connection:
    """What a client is built with. Without `crossing` it is a plain HTTP client."""

    base_url: str
    api_key: str
    model: str
    crossing: Crossing | None = None

    @classmethod
    def in_process(cls, crossing: Crossing, model: str) -> Connection:
        return cls(BASE_URL, API_KEY, model, crossing)

    def async_client(self, client_class: Any) -> Any:
        """An SDK's own asynchronous HTTP client, over the crossing; None: let the SDK make its own."""
        if self.crossing is None:
            return None
        return client_class(transport=async_transport(self.crossing, client_class), timeout=None)

    def blocking_client(self, client_class: Any) -> Any:
        if self.crossing is None:
            return None
        return client_class(transport=blocking_transport(self.crossing, client_class), timeout=None)
