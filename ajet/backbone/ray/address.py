"""The address of a Ray that is there already. Without an answer it is refused here: Ray would try for minutes."""

from __future__ import annotations

import os
import socket

from ajet.schema.errors import UserError

FLAG = "--ray-address"
VARIABLE = "RAY_ADDRESS"
ELSEWHERE = ("auto", "local")
"""Not addresses: Ray finds one of this machine, or starts one."""
CLIENT = "ray://"
ANSWER_S = 10.0


class RayAddressError(UserError):
    """There is no Ray under the address."""


def checked_address(given: str | None) -> str:
    """The address for `ray.init`: the given one, or RAY_ADDRESS, or else `auto`. Raises RayAddressError."""
    address = given or os.environ.get(VARIABLE) or "auto"
    if address in ELSEWHERE:
        return address
    name = FLAG if given else VARIABLE
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RayAddressError(f"{name}: {address!r} is no address of a Ray cluster: it looks like head:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise RayAddressError(
            f"{name}: no Ray answers at {address} ({error.strerror or error})\n"
            "    `ray status` on the cluster's head shows whether it runs; this machine must reach its port"
        ) from None
    return address
