"""Connections that user code leaves open on an event loop, such as those of an HTTP client that nobody closed.

Such a client is collected some time later, tries to close its connections on whichever loop is running then, and fails:
`Task exception was never retrieved … Event loop is closed`. So connections are closed while their loop is there. Loops
that user code closes itself can't be had in time; of what their clients say later, that one complaint is dropped.
"""

from __future__ import annotations

import asyncio
import logging

CLOSED = "Event loop is closed"


async def close_connections() -> None:
    """Close what is still connected on the running loop."""
    loop = asyncio.get_running_loop()
    transports = list(getattr(loop, "_transports", {}).values())  # asyncio's own list; other loops have none
    for transport in transports:
        transport.abort()
    if transports:
        await asyncio.sleep(0)  # their protocols are told in the loop's next round


class _Complaints(logging.Filter):
    """Drops what a client says about the loop that its connections belonged to."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not (
            isinstance(error, RuntimeError)
            and str(error) == CLOSED
            and record.getMessage().startswith("Task exception was never retrieved")
            and "aclose" in record.getMessage()
        )


def drop_complaints() -> None:
    """Drop the complaints of clients whose loop is closed, in this process."""
    log = logging.getLogger("asyncio")
    if not any(isinstance(one, _Complaints) for one in log.filters):
        log.addFilter(_Complaints())
