"""One YAML runs unchanged on every backbone. verl and Trinity need their own environments and have their own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.metrics import read_metrics
from support import in_process

ROOT = Path(__file__).parents[2]
SHORT = [
    "trainer_common.total_training_steps=2",
    "trainer_common.val_before_train=false",
    "trainer_common.test_freq=-1",
]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["quickstart", "quickstart_agent"])
@pytest.mark.parametrize(
    ("backbone", "suffix", "steps", "episodes"), [("debug", "-debug", [], 2), ("local", "", [1, 2], 2 * 64)]
)
def test_the_quickstarts_yaml_runs_unchanged(
    tmp_path: Path, name: str, backbone: str, suffix: str, steps: list[int], episodes: int
) -> None:
    conf, folder = ROOT / "configs" / f"{name}.yaml", name + suffix
    arguments = ["--conf", str(conf), f"--backbone={backbone}", "--exp-dir", str(tmp_path), *SHORT]
    done = in_process.ajet(ROOT, *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [step["step"] for step in read_metrics(tmp_path / folder / "metrics.jsonl") if step["step"]] == steps
    store = EpisodeStore(tmp_path / folder / "episodes.sqlite")
    try:
        recorded = store.facets()
    finally:
        store.close()
    assert recorded.total == episodes
    assert recorded.failures == {}
