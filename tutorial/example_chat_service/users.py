"""Users of the chat service, for trying it out: they ask one thing, and like replies that are shorter than most so far.

python users.py http://127.0.0.1:8400 --chats 64
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import httpx

QUESTIONS = ("When do you open?", "May I bring my dog?", "Where are the atlases?", "How long may I keep a book?")
lengths: list[int] = []


async def user(client: httpx.AsyncClient, number: int) -> bool:
    """One chat. False: the service couldn't serve it."""
    begun = await client.post("/chats")
    if begun.is_error:
        return False
    chat = begun.json()["chat"]
    replied = await client.post(f"/chats/{chat}/messages", json={"text": QUESTIONS[number % len(QUESTIONS)]})
    if replied.is_error:
        return False
    length = len(replied.json()["reply"])
    up = bool(lengths) and length < statistics.median(lengths)
    lengths.append(length)
    return not (await client.post(f"/chats/{chat}/thumb", json={"up": up})).is_error


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service", help="its address")
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8)
    arguments = parser.parse_args()
    slots = asyncio.Semaphore(arguments.at_once)

    async with httpx.AsyncClient(base_url=arguments.service, timeout=120, trust_env=False) as client:

        async def one(number: int) -> bool:
            async with slots:
                try:
                    return await user(client, number)
                except httpx.HTTPError:
                    return False

        served = await asyncio.gather(*(one(number) for number in range(arguments.chats)))
    mean = statistics.mean(lengths or [0])
    print(f"{sum(served)} of {len(served)} chats were served; replies had {mean:.0f} characters")


if __name__ == "__main__":
    asyncio.run(main())
