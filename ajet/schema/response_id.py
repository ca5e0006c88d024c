"""`bare_call_id`: the ids that clients see, and the calls that they stand for."""

from __future__ import annotations

PREFIXES = ("chatcmpl-", "msg_", "cmpl-", "resp_")
"""What each protocol puts before a call's id."""


def bare_call_id(response_id: str | None) -> str | None:
    """The call that a response's id stands for, in any protocol."""
    if not response_id:
        return None
    return next((response_id.removeprefix(one) for one in PREFIXES if response_id.startswith(one)), response_id)
