"""`ajet.gateway`: the HTTP server through which agents of any kind reach the model."""

from __future__ import annotations

from ajet.config.section import Section
from ajet.config.types import AboveZero, Port, Positive


class GatewayConfig(Section):
    """`ajet.gateway`: the HTTP server through which agents of any kind reach the model."""

    host: str = "127.0.0.1"
    """Address to listen at. Anything but loopback lets other machines in (with an episode's key)."""
    port: Port = 0
    """Port; 0: any free one."""
    key_ttl: AboveZero = 3600.0
    """Seconds that an episode's key is valid."""
    header_deadline: AboveZero = 10.0
    """Seconds in which a request's headers must arrive."""
    body_deadline: AboveZero = 30.0
    """Seconds in which a request's body must arrive."""
    max_body_mb: AboveZero = 16.0
    """Largest request body, decompressed, in MB."""
    max_concurrent_per_episode: Positive = 64
    """Requests of one episode at the same time; more get 429."""
