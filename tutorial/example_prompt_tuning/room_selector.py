"""The same agent as a function, tuned by a program that is written with Agent-lightning's names.

    python tutorial/example_prompt_tuning/room_selector.py
    OPENAI_BASE_URL=… OPENAI_API_KEY=… MODEL=… CRITIC=… python tutorial/example_prompt_tuning/room_selector.py

Without an endpoint, the tutorial's small model is the agent's, and rules stand in for the model that criticises.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from agent import MOST_CALLS, TOOL, search
from openai import AsyncOpenAI, OpenAI
from rooms import Request, judge

import ajet.compat.agentlightning as agl
from ajet import WorkflowOutput

HERE = Path(__file__).resolve().parent


@agl.rollout
def room_selector(task: dict[str, Any], prompt_template: agl.PromptTemplate, llm: agl.LLM) -> WorkflowOutput:
    """One request: search, name a room, and be told what was wrong with it."""
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: list[Any] = [{"role": "user", "content": prompt_template.format(request=task["question"])}]
    looked = False
    for _ in range(MOST_CALLS):
        reply = client.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL]).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            break
        looked = True
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": search(call.function.arguments)})
    named = re.search(r"[Rr]oom (\d)", reply.content or "")
    wish = Request(task["people"], task["device"], task["hour"])
    reward, feedback = judge(wish, int(named[1]) if named else None, looked=looked)
    return WorkflowOutput(reward=reward, is_success=reward == 1.0, metadata={"feedback": feedback})


def read(name: str) -> list[dict[str, Any]]:
    lines = (HERE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main(exp_dir: str = "saved_experiments", episodes: int = 600) -> Path:
    """Tune the template. Returns the experiment's folder, with the best one in it."""
    endpoint = "OPENAI_BASE_URL" in os.environ
    client = AsyncOpenAI() if endpoint else AsyncOpenAI(base_url="http://localhost:1/v1", api_key="none")
    critic = os.environ.get("CRITIC", "gpt-5-mini")
    keys: dict[str, Any] = {
        "model.path": os.environ.get("MODEL", str(HERE / "model")),
        "prompt_tuning.budget.episodes": episodes,
        "rollout.temperature": 0.3,
        "rollout.max_model_len": 768,
        "rollout.max_response_length_in_one_turn": 64,
        "rollout.compute_madness_checklist": [],
        "data.max_prompt_length": 512,
        "data.max_response_length": 64,
    }
    if not endpoint:
        keys["prompt_tuning.proposer"] = f"{HERE}/proposer.py->propose"
    trainer = agl.Trainer(
        algorithm=agl.APO(
            client,
            gradient_model=critic,
            val_batch_size=10,
            gradient_batch_size=4,
            beam_width=2,
            branch_factor=2,
            beam_rounds=2,
        ),
        n_runners=8,
        initial_resources={"booker": agl.PromptTemplate("You book rooms.\n{request}")},
        config=keys,
        exp_dir=exp_dir,
        fresh=True,
    )
    run = trainer.fit(room_selector, read("train"), val_dataset=read("validation"))
    return Path(run.path)


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
