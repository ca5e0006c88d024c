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
from ray_runs import DEADLINE_S, environment, installed, left_behind, wait_until

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
        "_target_": "host_parts.Recorded",
        "reward": "ajet",
        "ajet": {
            "rollout": {
                "agent": {"type": "host_parts->CalculatesFirst", "tools": ["calculator"], "max_steps": 2},
                "max_response_length_in_one_turn": 12,
            },
            "task_judge": {"judge_protocol": "host_parts->Vowels"},
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


def test_verls_own_trainer_trains_our_agent(tmp_path: Path) -> None:
    lines, log = tmp_path / "episodes.jsonl", tmp_path / "metrics.jsonl"
    variables = {**environment(), "HOST_RUN_FILE": str(lines), "VERL_FILE_LOGGER_PATH": str(log)}
    variables["PYTHONPATH"] += f":{HERE}"
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "1"}
    with tempfile.TemporaryDirectory(prefix="aj", ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(tmp_path, scratch)],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        wait_until(lambda: left_behind() == {}, 60)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    episodes = [json.loads(line) for line in lines.read_text().splitlines()]
    steps: list[dict[str, Any]] = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    assert len(episodes) >= PROMPTS * REPEATS * STEPS and {each["status"] for each in episodes} == {"ok"}
    for each in episodes:
        spoken, between = sum(each["mask"]), each["mask"].count(0)
        assert 2 <= spoken <= 24 and between > 0 and each["mask"][0] == each["mask"][-1] == 1
        assert len(each["response"]) == len(each["mask"]) == len(each["logprobs"])
        assert all(value == 0.0 for value, mine in zip(each["logprobs"], each["mask"], strict=True) if not mine)
    for number, step in enumerate(steps, 1):
        trained = [each for each in episodes if each["step"] == number]
        assert len(trained) == PROMPTS * REPEATS
        lengths = [len(each["response"]) for each in trained]
        assert step["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        rewards = [each["reward"] for each in trained]
        assert step["critic/score/mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
        # the trainer finds the same probabilities for the same tokens under the same mask, with weights just synced
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["actor/grad_norm"] > 0
    assert len(steps) == STEPS
