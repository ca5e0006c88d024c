"""Trajectories of an agent that ran alone: shown without steps, tokens and notes, which they don't have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from ajet.agents import ReActAgent
from ajet.cli.runs import shown_folder
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.viewer.episode_view import episode_view
from ajet.observe.viewer.serve import Viewer
from support.tracker_helpers import Drive, said, user


async def replies(messages: list[dict[str, Any]], tools: Any = None) -> dict[str, Any]:
    usage = {"prompt_tokens": 30, "completion_tokens": 4}
    if messages[-1]["role"] == "tool":
        return {"content": "It is 132.", "usage": usage}
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "12 * 11"}'}}
    return {"content": "", "tool_calls": [call], "usage": usage}


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    folder = tmp_path / "trajectories"
    agent = ReActAgent(tools=["calculator"])
    work = agent.run_trajectory("What is 12 * 11?", replies, save_to=folder)
    thread = threading.Thread(target=asyncio.run, args=(work,))  # Playwright has this thread's event loop
    thread.start()
    thread.join()
    return folder


def test_prompts_of_equal_length_are_not_taken_for_the_same(trajectories: Path) -> None:
    with shown_folder(trajectories) as root:
        store = EpisodeStore(root / "episodes.sqlite")
        (recorded,) = store.all()
        calls = episode_view(recorded, store)["calls"]
        store.close()
    assert [call["prompt_tokens"] for call in calls] == [30, 30]
    assert [call["alternative_to"] for call in calls] == [-1, -1]


def test_only_replies_of_one_agent_are_alternatives(trajectories: Path) -> None:
    drive = Drive()
    for agent in ("solver", "critic", "solver"):
        drive.ask([user("Go.")], said("Gone."), agent=agent)
    with shown_folder(trajectories) as root:
        store = EpisodeStore(root / "episodes.sqlite")
        (recorded,) = store.all()
        recorded.episode.tree = drive.tracker.tree
        calls = episode_view(recorded, store)["calls"]
        store.close()
    assert [call["alternative_to"] for call in calls] == [-1, -1, 0]


@pytest.mark.slow
def test_they_are_shown_with_what_they_have(trajectories: Path, open_page: Callable[..., Page]) -> None:
    with shown_folder(trajectories) as root:
        viewer = Viewer(root, port=0, trajectories=trajectories)
        threading.Thread(target=viewer.serve, daemon=True).start()
        assert "/x/trajectories/episodes?" in viewer.url
        page = open_page(viewer, "/x/trajectories/episodes")
        expect(page.locator("#count")).to_have_text("1–1 of 1 episode")
        expect(page.locator(".tabs a")).to_have_text(["Tasks", "Episodes"])
        expect(page.get_by_role("columnheader", name="Step")).to_be_hidden()
        page.locator("#episodes tbody .name").click()
        expect(page.locator("#facts")).to_contain_text("Output tokens8")
        expect(page.locator("#view-chat .toolcall")).to_contain_text("expression: 12 * 11")
        expect(page.locator("#view-chat")).not_to_contain_text("not trainable")
        expect(page.get_by_role("tab", name="Tokens")).to_be_hidden()
        expect(page.locator("#note")).to_be_hidden()
        page.get_by_role("tab", name="Details").click()
        expect(page.locator("#view-details")).not_to_contain_text("Sampling of this call")
