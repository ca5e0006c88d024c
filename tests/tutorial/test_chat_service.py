"""The chat service: the trainer, the service and its users, as three programs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.metrics import read_metrics
from support.waiting import wait_until

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
ROOT = Path(__file__).parents[2]
HERE = ROOT / "tutorial" / "example_chat_service"
# one group a step, of more chats than run at once: the users like about half of them, so its rewards differ
SMALL = [
    "model.path=tiny:qwen2-0.3m", "data.train_batch_size=1", "rollout.num_repeat=8", "rollout.max_env_worker=8",
    "trainer_common.total_training_steps=2", "trainer_common.optim.lr=1e-3", "rollout.max_num_seqs=8",
    "rollout.max_response_length_in_one_turn=16", "rollout.compute_madness_checklist=[]",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_users_train_the_model(tmp_path: Path) -> None:
    trainer_port, service_port = free_port(), free_port()
    environment = {
        **os.environ,
        "AJET_SERVICE_KEY": "sk-ajet-test-service-key",
        "AJET_URL": f"http://127.0.0.1:{trainer_port}/v1",
        "PYTHONPATH": str(ROOT),
    }
    conf = [str(HERE / "chat_service.yaml"), "--exp-dir", str(tmp_path), *SMALL, f"gateway.port={trainer_port}"]
    programs = [
        subprocess.Popen([sys.executable, "-m", "ajet", "--conf", *conf], env=environment, cwd=tmp_path),
        subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "service:app", "--port", str(service_port), "--log-level", "error"],
            env=environment,
            cwd=HERE,
        ),
    ]
    trainer = programs[0]
    try:
        wait_until(lambda: trainer.poll() is not None or answers(f"http://127.0.0.1:{trainer_port}/healthz"), 120)
        wait_until(lambda: answers(f"http://127.0.0.1:{service_port}/docs"), 120)
        users = [sys.executable, "users.py", f"http://127.0.0.1:{service_port}", "--chats", "16", "--at-once", "4"]
        for _ in range(20):
            subprocess.run(users, cwd=HERE, check=True, timeout=300)
            if trainer.poll() is not None:
                break
        assert trainer.wait(120) == 0
    finally:
        for program in programs:
            program.kill()
            program.wait()
    folder = tmp_path / "chat_service"
    assert [step["step"] for step in read_metrics(folder / "metrics.jsonl")] == [1, 2]
    store = EpisodeStore(folder / "episodes.sqlite")
    rows, total = store.page()
    trained = [row for row in rows if row["trained"]]
    assert total >= 16 and len(trained) == 16
    assert {row["reward"] for row in trained} == {0.0, 1.0}
    store.close()
