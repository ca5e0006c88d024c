"""`rollout.engine_process` on the local backbone: it trains in shared memory, and survives kills of the engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_own_engine import assert_versions_are_exact, train

from ajet.engine.torch.process_engine import TorchProcessEngine
from ajet.observe.metrics import read_metrics
from ajet.trainer.trainer import Trainer


@pytest.mark.slow
def test_it_trains_in_shared_memory_and_a_killed_process_loses_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real SIGKILLs: with a reply of step 2 in flight, and in the middle of the update of step 2."""
    engines: list[TorchProcessEngine] = []
    asked: list[int] = []
    generate, update = TorchProcessEngine.generate, Trainer.update

    def kill() -> int:
        pid = engines[-1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    async def noted(self: TorchProcessEngine, *arguments: Any) -> Any:
        engines.append(self)
        asked.append(kill() if len(asked) == 16 else 0)  # a step asks for 2 x 3 x 2 replies
        return await generate(self, *arguments)

    def kill_then_update(self: Trainer, *arguments: Any) -> dict[str, float]:
        if self.updates == 1:
            asked.append(kill())
        return update(self, *arguments)

    monkeypatch.setattr(TorchProcessEngine, "generate", noted)
    monkeypatch.setattr(Trainer, "update", kill_then_update)
    code, experiment = train(tmp_path, "Talker", "rollout.engine_process=true", engine="torch")
    assert code == 0
    assert len(set(asked) - {0}) == 2, "two processes were killed"
    assert assert_versions_are_exact(experiment, 3) == {0, 1, 2}
    for step in read_metrics(experiment / "metrics.jsonl"):
        assert (step["episode/usable"], step["train/incomplete_groups"]) == (6, 0)
        assert step["loss/sampler_gap_max"] < 1e-3, "the trainer sees what the engine saw"
    for pid in set(asked) - {0}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
