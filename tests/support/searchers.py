"""A project whose reward depends on the words of its template, and proposers that know them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from ajet import Workflow, WorkflowOutput
from ajet.prompt_tuning import Kind, Request

HERE = Path(__file__).resolve()
WORDS = ("check", "capacity", "equipment", "calendar")


class Talker(Workflow):
    """One model call with the filled template; the reward is whether the task's word is in it."""

    async def execute(self, workflow_task: Any, tuner: Any) -> WorkflowOutput:
        text = tuner.prompt("solver").format(question=workflow_task.task.main_query)
        if "kill" in text and workflow_task.task.metadata["n"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}], max_tokens=4)
        word = WORDS[workflow_task.task.metadata["n"] % 4]
        missing = f"missing: {word}" if word not in text else ""
        return WorkflowOutput(reward=float(not missing), metadata={"feedback": missing})


class Learner(Workflow):
    """Half of the reward is for the task's word in the template, half for what the model samples."""

    async def execute(self, workflow_task: Any, tuner: Any) -> WorkflowOutput:
        text = tuner.prompt("solver").format(question=workflow_task.task.main_query)
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": text}]
        completion = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
        word = WORDS[workflow_task.task.metadata["n"] % 4]
        missing = f"missing: {word}" if word not in text else ""
        said = (completion.choices[0].message.content or "").encode()
        reward = 0.5 * (not missing) + 0.5 * (sum(said) % 2)
        return WorkflowOutput(reward=reward, metadata={"feedback": missing})


class Deaf(Workflow):
    """Never asks for its template."""

    async def execute(self, workflow_task: Any, tuner: Any) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        return WorkflowOutput(reward=0.5)


class Broken(Workflow):
    """Raises."""

    async def execute(self, workflow_task: Any, tuner: Any) -> WorkflowOutput:
        raise KeyError(tuner.prompt("solver").template)


def propose(request: Request) -> str:
    """Adds a word that the feedback names."""
    missing = sorted({trial.feedback for trial in request.trials if trial.feedback})
    if request.kind is Kind.CRITIQUE:
        return "; ".join(missing) or "nothing"
    said = request.feedback.split("; ") if request.kind is Kind.EDIT else missing
    words = [text.removeprefix("missing: ") for text in said if text.startswith("missing")]
    if request.kind is Kind.REWRITE:
        words = [WORDS[request.draw % 4]]
    return f"{request.candidate.texts['solver']} {' '.join(words[:1])}"


def nonsense(request: Request) -> str:
    """Loses the placeholder, always."""
    return "Let me think about this."


def dead(request: Request) -> str:
    """Fails, always."""
    raise ConnectionError("nobody listens")


def project(folder: Path, *, algorithm: str = "best_of", tasks: int = 16, **keys: Any) -> Path:
    """Write a project; returns its YAML. `keys`: of `ajet`, with `__` for dots."""
    lines = [{"main_query": f"Task {n}", "task_id": f"t{n}", "metadata": {"n": n}} for n in range(tasks)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config: dict[str, Any] = {
        "model": {"path": "tiny:qwen2-0.3m"},
        "task_reader": {
            "type": "jsonl_dataset_file",
            "jsonl_dataset_file": {"training": {"file_path": str(folder / "tasks.jsonl")}},
        },
        "rollout": {
            "user_workflow": f"{HERE}->Talker",
            "max_response_length_in_one_turn": 8,
            "max_model_len": 512,
            "compute_madness_checklist": [],
            "episode_retries": 0,
        },
        "data": {"max_prompt_length": 256, "max_response_length": 256},
        "prompt_tuning": {
            "templates": {"solver": "Solve: {question}"},
            "algorithm": algorithm,
            "proposer": f"{HERE}->propose",
            "rounds": 2,
            "apo": {"beam_width": 2, "branch_factor": 2, "critique_batch": 3, "score_batch": 4},
        },
    }
    for key, value in keys.items():
        place, parts = config, key.split("__")
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    yaml = folder / "x.yaml"
    yaml.write_text(json.dumps({"ajet": config}, ensure_ascii=False))  # JSON is YAML
    return yaml
