"""A chat service whose users train its model: each chat is an episode, and the thumb is its reward.

    AJET_URL=http://127.0.0.1:8300/v1 AJET_SERVICE_KEY=… uvicorn service:app --port 8400

Nothing here belongs to AgentJet but three requests: begin an episode, call its model, end it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException
from openai import APIError, AsyncOpenAI
from pydantic import BaseModel

TRAINER = os.environ.get("AJET_URL", "http://127.0.0.1:8300/v1")
KEY = os.environ["AJET_SERVICE_KEY"]
SYSTEM = "You are the help desk of a small library. Answer in one short sentence."

app = FastAPI()


@dataclass
class Chat:
    """One conversation with one user."""

    episode: dict[str, Any]
    messages: list[Any] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])


chats: dict[str, Chat] = {}


class Said(BaseModel):
    text: str


class Thumb(BaseModel):
    up: bool


async def ask_trainer(path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.post(f"{TRAINER}/{path}", json=body, headers={"authorization": f"Bearer {key}"})
    if answer.is_error:
        raise HTTPException(503, f"the trainer: {answer.status_code} {answer.text}")
    return dict(answer.json())


@app.post("/chats")
async def begin() -> dict[str, str]:
    """A user opens a chat."""
    episode = await ask_trainer("episodes", KEY, {})
    chats[episode["episode_id"]] = Chat(episode)
    return {"chat": episode["episode_id"]}


@app.post("/chats/{chat_id}/messages")
async def say(chat_id: str, said: Said) -> dict[str, str]:
    """The user says something, the model replies."""
    chat = find(chat_id)
    chat.messages.append({"role": "user", "content": said.text})
    try:
        async with AsyncOpenAI(base_url=chat.episode["base_url"], api_key=chat.episode["api_key"]) as model:
            reply = await model.chat.completions.create(model=chat.episode["model"], messages=chat.messages)
    except APIError as error:  # too long, nonsense, out of time: the episode has failed
        await end(chat_id, {"failure": error.message})
        raise HTTPException(503, "the model can't answer any more: begin another chat") from error
    text = reply.choices[0].message.content or ""
    chat.messages.append({"role": "assistant", "content": text})
    return {"reply": text}


@app.post("/chats/{chat_id}/thumb")
async def judge(chat_id: str, thumb: Thumb) -> dict[str, bool]:
    """The user's verdict ends the chat."""
    await end(chat_id, {"reward": float(thumb.up)})
    return {"thanks": True}


async def end(chat_id: str, outcome: dict[str, Any]) -> None:
    chat = find(chat_id)
    del chats[chat_id]
    await ask_trainer(f"episodes/{chat_id}/end", chat.episode["control_key"], outcome)


def find(chat_id: str) -> Chat:
    if chat_id not in chats:
        raise HTTPException(404, "no such chat")
    return chats[chat_id]
