"""`HarborJudge` (`judge_type: harbor`): runs a Harbor task's tests on what the agent left in the episode's sandbox.

The tests lie on the disk until the agent has finished. Then its files and the tests are copied into a new sandbox,
`tests/test.sh` runs there, and the reward is what it writes to /logs/verifier. No reward is a fault, never 0.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ajet.agents.task_tests import NO_BYTECODE, packed_folder, said
from ajet.environment.sandboxes import ExecResult, Result, Sandbox, open_sandbox
from ajet.schema.errors import JudgeFault
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, Judgement

TESTS, LOGS = "/tests", "/logs"
REWARDS = f"{LOGS}/verifier"
_UNPACK = ["tar", "-C", TESTS, "-xf", "-"]
_RUN = f"mkdir -p {REWARDS} {LOGS}/agent {LOGS}/artifacts && chmod 755 {TESTS}/test.sh && {TESTS}/test.sh"


class HarborJudge(BaseJudge):
    """The reward of `/logs/verifier/reward.json`, or else `reward.txt`. The episode's `metadata["judge"]` has all."""

    reads_task = ("verifier",)

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        sandbox, verifier = workflow_task.sandbox, workflow_task.task.metadata.get("verifier")
        if sandbox is None:
            raise JudgeFault(
                "judge_type: harbor judges what is in the episode's sandbox, and there is none where the judge runs: "
                "set ajet.rollout.sandbox, and run episodes in a thread or process of this machine"
            )
        if not isinstance(verifier, Mapping) or not isinstance(verifier.get("folder"), str):
            raise JudgeFault(
                "judge_type: harbor needs the `verifier` that task_reader.type: harbor puts into a task's metadata, "
                f"not {verifier!r:.100}"
            )
        seconds = float(verifier.get("seconds") or sandbox.settings.exec_seconds)
        network = "none" if sandbox.settings.network == "gateway" else sandbox.settings.network
        apart = replace(
            sandbox.settings,
            network=network,
            folders=(TESTS, LOGS),
            exec_seconds=max(seconds, sandbox.settings.exec_seconds),
            lifetime_seconds=max(2 * seconds, sandbox.settings.lifetime_seconds),
        )
        result = await Result.of(sandbox)
        tests = await asyncio.to_thread(packed_folder, Path(verifier["folder"]))
        async with open_sandbox(apart) as place:
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
