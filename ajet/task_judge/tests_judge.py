"""Judges that run the task's tests on what the agent left in the episode's sandbox. Without one, they fail.

`TestsJudge` (`judge_type: tests`): the task's metadata holds `test_command` and `test_files`; `ajet.agents.task_tests`
says how they are run. If the agent made its work untestable, the reward is 0.

`HarborJudge` (`judge_type: harbor`): a Harbor task's tests lie on the disk until the agent has finished. Then its files
and the tests are copied into a new sandbox, `tests/test.sh` runs there, and the reward is what it writes to
/logs/verifier. No reward is a fault, never 0.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path

from ajet.agents.task_tests import NO_BYTECODE, judge_by_tests, packed_folder, said
from ajet.environment.sandboxes import ExecResult, Result, Sandbox, fresh_sandbox
from ajet.schema.errors import JudgeFault
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, Judgement

TESTS, LOGS = "/tests", "/logs"
REWARDS = f"{LOGS}/verifier"
_UNPACK = ["tar", "-C", TESTS, "-xf", "-"]
_RUN = f"mkdir -p {REWARDS} {LOGS}/agent {LOGS}/artifacts && chmod 755 {TESTS}/test.sh && {TESTS}/test.sh"


class TestsJudge(BaseJudge):
    """1 if the tests pass, else 0. What they printed is in the episode's `metadata["judge"]`."""

    reads_task = ("test_command",)

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        sandbox, metadata = _sandbox(workflow_task, "tests"), workflow_task.task.metadata
        command = metadata.get("test_command")
        if not isinstance(command, str) or not command:
            raise JudgeFault(f"judge_type: tests needs a `test_command` in the task's metadata, not {command!r:.100}")
        verdict = await judge_by_tests(sandbox, metadata, command, base_dirs=self.config.base_dirs)
        return Judgement(float(verdict.passed), verdict.passed, notes={"tests": verdict.facts()})


class HarborJudge(BaseJudge):
    """The reward of `/logs/verifier/reward.json`, or else `reward.txt`. The episode's `metadata["judge"]` has all."""

    reads_task = ("verifier",)

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        sandbox, verifier = _sandbox(workflow_task, "harbor"), workflow_task.task.metadata.get("verifier")
        if not isinstance(verifier, Mapping) or not isinstance(verifier.get("folder"), str):
            raise JudgeFault(
                "judge_type: harbor needs the `verifier` that task_reader.type: harbor puts into a task's metadata, "
                f"not {verifier!r:.100}"
            )
        seconds = float(verifier.get("seconds") or sandbox.settings.exec_seconds)
        result = await Result.of(sandbox)
        tests = await asyncio.to_thread(packed_folder, Path(verifier["folder"]))
        async with fresh_sandbox(
            sandbox,
            folders=(TESTS, LOGS),
            exec_seconds=max(seconds, sandbox.settings.exec_seconds),
            lifetime_seconds=max(2 * seconds, sandbox.settings.lifetime_seconds),
        ) as place:
            await result.put(place)
            unpacked = await place.exec(_UNPACK, stdin=tests)
            if unpacked.exit_code:
                raise JudgeFault(f"the tests can't be copied into the sandbox: {said(unpacked)}")
            ran = await place.exec(_RUN, timeout=seconds, env={**NO_BYTECODE, **verifier.get("env", {})})
            if ran.timed_out:
                raise JudgeFault(f"tests/test.sh did not end within {seconds:g} s (verifier.timeout_sec): {said(ran)}")
            rewards = await _rewards(place, ran)
        notes = {"tests": {"exit_code": ran.exit_code, "output": said(ran), "rewards": rewards}}
        return Judgement(rewards["reward"], None, notes=notes)


async def _rewards(place: Sandbox, ran: ExecResult) -> dict[str, float]:
    """What the tests wrote, by name; `reward` is the one that counts. Raises JudgeFault."""
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await place.read(f"{REWARDS}/{name}")).decode(errors="replace").strip()
        except FileNotFoundError:
            continue
        where = f"tests/test.sh wrote {text!r:.200} to {REWARDS}/{name}"
        try:
            found = json.loads(text) if name == "reward.json" else float(text)
        except ValueError:
            raise JudgeFault(f"{where}: expected {'JSON' if name == 'reward.json' else 'a number'}") from None
        given = found if isinstance(found, dict) else {"reward": found}
        numbers = {key: float(value) for key, value in given.items() if isinstance(value, int | float)}
        if "reward" not in numbers and len(numbers) == 1:
            numbers["reward"] = next(iter(numbers.values()))
        if not math.isfinite(numbers.get("reward", math.nan)):
            raise JudgeFault(f"{where}: expected a finite number, or an object with one named `reward`")
        return numbers
    raise JudgeFault(f"tests/test.sh wrote neither {REWARDS}/reward.txt nor reward.json: {said(ran)}")


def _sandbox(workflow_task: WorkflowTask, judge_type: str) -> Sandbox:
    sandbox: Sandbox | None = workflow_task.sandbox
    if sandbox is None:
        raise JudgeFault(
            f"judge_type: {judge_type} judges what is in the episode's sandbox, and there is none where the judge "
            "runs: set ajet.rollout.sandbox, and run episodes in a thread or process of this machine"
        )
    return sandbox
