"""Three agents answer a question from a library: a planner asks smaller questions, a searcher looks each up with tools,
and a writer answers from the notes, naming the pages. All three are the model that is trained; each has a conversation
of its own.

The reward is 0 for a wrong answer, 0.5 for a right one, and 1 if it also cites a page that says so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Corpus, load, tools

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.agents import ReActAgent

PLANNER = (
    "You plan research in a library. Write what has to be looked up to answer the question, one short search per line, "
    "at most {searches}. Write nothing else."
)
SEARCHER = (
    "You look something up in a library. Search, read what fits, and then write one or two sentences with what you "
    "found, each with the page it is from, like this: [p12]. If the library doesn't tell, say so."
)
WRITER = (
    "You answer a question from a colleague's notes. Write your answer in the last line, with the page that says so: "
    "Answer: … [p12]"
)
NOTHING = "Nothing was found."
CITED = re.compile(r"\[(p\d+)\]")
MORE_WORDS = 5
"""How many an answer may have beside the right ones."""


class DeepResearchWorkflow(Workflow):
    name: str = "deep_research"
    trainable_targets: list[str] | None = ["planner", "searcher", "writer"]  # noqa: RUF012 - a pydantic field

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        settings = tuner.config.deep_research
        corpus = load(str(settings.corpus))
        task = workflow_task.task

        def model(name: str) -> Any:
            return tuner.as_model_function(agent_name=name, target_tag=name)

        plan = await say(model("planner"), PLANNER.format(searches=settings.searches), task.main_query)
        searches = [line.strip(" -*\t") for line in plan.splitlines() if line.strip(" -*\t")][: settings.searches]
        searcher = ReActAgent(system_prompt=SEARCHER, tools=tools(corpus), max_steps=settings.steps)
        notes = []
        for search in searches:
            found = await searcher.run_trajectory(search, model("searcher"))
            notes.append(f"{search}\n{found.final_response if found.is_completed else NOTHING}")
        told = "\n\n".join(notes) or "There are no notes."
        report = await say(model("writer"), WRITER, f"Question: {task.main_query}\n\nNotes:\n{told}")
        reward, parts = grade(report, str(task.metadata["answer"]), corpus)
        return WorkflowOutput(
            reward=reward,
            is_success=reward == 1.0,
            metadata={"report": report, "notes": notes},
            log_metrics={**parts, "searches": len(searches)},
        )


async def say(model: Any, system: str, text: str) -> str:
    """One question and its answer."""
    reply = await model([{"role": "system", "content": system}, {"role": "user", "content": text}])
    return reply.get("content") or ""


def grade(report: str, answer: str, corpus: Corpus) -> tuple[float, dict[str, float]]:
    """The reward, and what it is made of. Only what follows the last `Answer:` counts: a few words, and one page. A
    list of all names and pages would hold the right ones."""
    said = report.rpartition("Answer:")[2] if "Answer:" in report else ""
    words = CITED.sub("", said)
    right = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", words, re.IGNORECASE) is not None
    right = right and len(words.split()) <= len(answer.split()) + MORE_WORDS
    cited = [corpus.pages[name] for name in CITED.findall(said)[:1] if name in corpus.pages]
    backed = right and any(answer.lower() in f"{page.title} {page.text}".lower() for page in cited)
    return 0.5 * right + 0.5 * backed, {"right": float(right), "cited": float(backed)}
