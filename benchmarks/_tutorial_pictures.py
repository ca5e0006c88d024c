"""Pictures of the tutorials for docs/tutorials.md: one episode each, as a conversation. `tutorials.py` writes them.

They show the form of an episode with tasks and tools from the tutorials' own data. The doctor's is recorded, word for
word, from the run whose curve stands beside it; the others are written out by hand.
"""

from __future__ import annotations

import textwrap
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, LINE, CHARS = 460, 17, 46
COLOURS = {True: ("#e3e6fb", "#4152d6"), False: ("#f0f0ee", "#555555")}
"""Fill and text of what the trained model writes, and of all else."""


class Said(NamedTuple):
    """A bubble. `trained`: the model that is trained wrote it."""

    who: str
    text: str
    trained: bool = False


EPISODES: dict[str, list[Said]] = {
    "quickstart": [
        Said("task", "What is 203-60?"),
        Said("agent", 'calculator(expression="203-60")', True),
        Said("calculator", "143"),
        Said("agent", "\\boxed{143}", True),
        Said("reward", "1"),
    ],
    "frozenlake": [
        Said("lake", "@FF\nFHF\nFFG\nYour move:"),
        Said("walker", "r", True),
        Said("lake", "S@F\nFHF\nFFG\nYour move:"),
        Said("walker", "r", True),
        Said("reward", "1 at the goal, or up to 0.5 for having come closer"),
    ],
    "countdown": [
        Said("task", "3 7 make 21"),
        Said("player", "3+7", True),
        Said("game", "no, 10"),
        Said("player", "7*3", True),
        Said("reward", "0.8: the second try"),
    ],
    "werewolves": [
        Said("Ben, by day", "I am the seer: Dora is a werewolf."),
        Said("night, to Anna", "Werewolves: Anna, Dora, Hana. Says to be the seer: Ben. Whom do you kill?"),
        Said("Anna, a werewolf", "B", True),
        Said("day, to Hana", "Whom do you vote out?"),
        Said("Hana, a werewolf", "E", True),
        Said("reward", "1 if the werewolves win"),
    ],
    "learning_to_ask": [
        Said("patient", "My ear is red. It is a pain."),
        Said("doctor", "A fever: yes or no?", True),
        Said("patient", "No fever."),
        Said("doctor", "Since when: today or longer?", True),
        Said("patient", "For a week."),
        Said("doctor", "<stop />", True),
        Said("reward", "4 for each of these, the most there is"),
    ],
    "deep_research": [
        Said("task", "Who built the old bridge in Irford?"),
        Said("planner", "- river of Irford\n- who built the bridge over it", True),
        Said("searcher", 'search(query="Irford")', True),
        Said("library", "[p8] Irford: Irford is a town on the river Holo. …"),
        Said("writer", "Answer: Greta Jensen [p36]", True),
        Said("reward", "1: right, and the page says so"),
    ],
    "appworld": [
        Said("supervisor", "Delete all my notes about recipes."),
        Said("assistant", "notes = apis.notes.show_notes(access_token=t)", True),
        Said("world", "[{'note_id': 2, 'subject': 'recipes', …"),
        Said("assistant", "apis.notes.delete_note(access_token=t, note_id=2)\napis.supervisor.complete_task()", True),
        Said("reward", "1.5: all tests of the world pass"),
    ],
    "rubrics_judge": [
        Said("rubric", "Name the customer's order; this matters most. Say sorry for the wait."),
        Said("task", "Where is order 47?"),
        Said("agent", "Order 47 is on its way. Sorry for the wait!", True),
        Said("judge", "score 1.0"),
    ],
    "feedback_tracing": [
        Said("trace", "user: Where is order 47?"),
        Said("trace", "agent: I look up order \\boxed{47}"),
        Said("helper", "good"),
        Said("task", "Where is order 47?  answer: 47"),
        Said("agent", "\\boxed{47}", True),
        Said("reward", "1"),
    ],
    "math_agent": [
        Said("task", "A crate holds 16 rows of 25 bottles. 7 bottles break on the way. How many bottles are left?"),
        Said("agent", 'calculator(expression="16 * 25 - 7")', True),
        Said("calculator", "393"),
        Said("agent", "\\boxed{393}", True),
        Said("reward", "1"),
    ],
    "multi_agent": [
        Said("task", "What is 40 + 2?"),
        Said("solver", "40 + 2 is 41.", True),
        Said("checker", "40 + 2 is not 41.", True),
        Said("solver", "Then 42.", True),
        Said("referee, not trained", "\\boxed{42}"),
        Said("reward", "1, for both"),
    ],
    "coding_agent": [
        Said("task", "test_calc.py fails. Repair calc.py."),
        Said("agent", 'bash(command="python test_calc.py")', True),
        Said("sandbox", "AssertionError"),
        Said("agent", 'file_editor(command="str_replace", path="calc.py", …)', True),
        Said("reward", "1: the tests pass"),
    ],
    "calc_x": [
        Said("task", "A crate holds 16 boxes of 75 nails. 53 nails are bent. How many are good?"),
        Said("agent", 'calculate(expression="16 * 75 - 53")', True),
        Said("MCP server", "1147"),
        Said("agent", "### ANSWER: 1147", True),
        Said("reward", "1"),
    ],
    "spider": [
        Said("task", "How many singers are there?"),
        Said("writer", "SELECT count(*) FROM singers", True),
        Said("database", "no such table: singers"),
        Said("checker, not trained", "There is no table of that name."),
        Said("rewriter", "SELECT count(*) FROM singer", True),
        Said("reward", "1: it returns what it should"),
    ],
    "chat_service": [
        Said("service", "POST /v1/episodes\n→ base_url, api_key, control_key"),
        Said("user", "May I bring my dog?"),
        Said("help desk", "Yes, on a lead.", True),
        Said("user", "thumb up"),
        Said("service", 'POST /v1/episodes/{id}/end  {"reward": 1.0}'),
    ],
    "other_clients": [
        Said("workflow", "OPENAI_BASE_URL=… OPENAI_API_KEY=… node agent.mjs"),
        Said("program", "POST /v1/chat/completions"),
        Said("model", "add(numbers=[40, 2])", True),
        Said("program", "42"),
        Said("model", "It is \\boxed{42}.", True),
        Said("reward", "1"),
    ],
}


def picture(said: list[Said]) -> str:
    """The conversation as SVG: the trained model on the right, all else on the left."""
    parts, top = [], 8
    for bubble in said:
        lines = [line for row in bubble.text.split("\n") for line in (textwrap.wrap(row, CHARS) or [""])]
        width = max(60, 22 + round(7.3 * max(len(line) for line in [*lines, bubble.who])))
        height = LINE * (len(lines) + 1) + 10
        left = WIDTH - 8 - width if bubble.trained else 8
        fill, ink = COLOURS[bubble.trained]
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" fill="{fill}"/>')
        parts.append(f'<text x="{left + 11}" y="{top + 17}" fill="{ink}" font-weight="600">{escape(bubble.who)}</text>')
        for number, line in enumerate(lines, start=1):
            y = top + 17 + LINE * number
            parts.append(f'<text x="{left + 11}" y="{y}" fill="#222" xml:space="preserve">{escape(line)}</text>')
        top += height + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    style = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12"'
    return f'{head} {style}>\n<rect width="{WIDTH}" height="{top}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"


def write_pictures(folder: Path) -> None:
    """All of them, as `NAME_episode.svg`."""
    for name, said in EPISODES.items():
        (folder / f"{name}_episode.svg").write_text(picture(said), encoding="utf-8")
