"""verl's own trainer, started as its users start it, with our agents as its agent loop: whole PPO steps on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from support.ray_runs import DEADLINE_S, environment, installed, left_behind, wait_until

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("verl"), reason="needs verl: run `make test-verl`"),
    pytest.mark.skipif(not os.environ.get("AJET_LONG_TESTS"), reason="takes minutes: run `make test-verl`"),
]
PROMPTS, REPEATS, STEPS = 4, 4, 3


def overrides(folder: Path, scratch: str) -> list[str]:
    """A user's command line; what is ours are the three keys of the agent loop, and what the CPU needs."""
    import pandas

    from ajet.engine.model_source import ModelSource

    model = ModelSource.resolve("tiny:qwen2-0.3m").path
    rows = [
        {
            "data_source": "numbers",
            "prompt": [{"role": "user", "content": f"What is {number}*7?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number * 7)},
            "extra_info": {"index": number},
        }
        for number in range(16)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "rows.parquet")
    loop = {
        "name": "ajet_agent",
        "_target_": "support.host_parts.Recorded",
        "reward": "ajet",
        "ajet": {
            "rollout": {
                "agent": {
                    "type": "support.host_parts->CalculatesFirst",
                    "tools": ["calculator"],
                    "max_steps": 2,
                    # a random model doesn't end its replies itself
                    "options": {"sampling": {"stop": list("aeiostnrl ")}},
                },
                "max_response_length_in_one_turn": 24,
                "compute_madness_checklist": [],
            },
            "task_judge": {"judge_protocol": "support.host_parts->Vowels"},
        },
    }
    (folder / "agent_loops.yaml").write_text(json.dumps([loop]))
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=9",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/rows.parquet",
        f"data.val_files={folder}/rows.parquet",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=512",
        "data.max_response_length=256",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{actor}.use_kl_loss=False",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{rollout}.name=ajet_torch",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n={REPEATS}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.dtype=float32",
        f"{rollout}.max_model_len=768",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.agent.agent_loop_config_path={folder}/agent_loops.yaml",
        f"{rollout}.agent.default_agent_loop=ajet_agent",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.address=local",
        f"+ray_kwargs.ray_init._temp_dir={scratch}",
        "+ray_kwargs.ray_init.object_store_memory=300000000",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def main_ppo(folder: Path) -> None:
    """Run verl's trainer to its end."""
    variables = {
        **environment(),
        "HOST_RUN_FILE": str(folder / "episodes.jsonl"),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",
        "RAY_worker_register_timeout_seconds": "300",
    }
    variables["PYTHONPATH"] += f":{TESTS}"
    output = folder / "output.log"
    with tempfile.TemporaryDirectory(prefix="aj", ignore_cleanup_errors=True) as scratch, output.open("wb") as file:
        line = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(folder, scratch)]
        done = subprocess.run(
            line, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=DEADLINE_S, check=False
        )
        wait_until(lambda: left_behind() == {}, 60)
    assert done.returncode == 0, output.read_text(errors="replace")[-6000:]


def test_verls_own_trainer_trains_our_agent(tmp_path: Path) -> None:
    main_ppo(tmp_path)
    check(tmp_path)


def check(folder: Path) -> None:
    """What verl trained on is what its servers said, under the masks of our agent."""
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    steps: list[dict[str, Any]] = [
        json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(steps) == STEPS
    for row in rows:
        assert len(row["response"]) == len(row["mask"]) == len(row["logprobs"])
        assert all(value == 0.0 for value, mine in zip(row["logprobs"], row["mask"], strict=True) if not mine)
    with_tool = [row for row in rows if 0 in row["mask"]]
    assert len(with_tool) > len(rows) / 2  # the tool's result stands between two replies, and isn't trained
    for number, step in enumerate(steps, 1):
        trained = [row for row in rows if row["step"] == number]
        assert len(trained) >= PROMPTS * REPEATS
        assert {row["version"] for row in trained} == {number - 1}  # sampled with the weights of the step before
        lengths = [len(row["response"]) for row in trained]
        assert step["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        # the trainer finds the same probabilities for the same tokens under the same masks
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_max"] < 1e-6
        assert step["actor/grad_norm"] > 0
