"""Short names that programs written in Python use for the commonest keys: the one table behind `Trainer` and
`AgentJetJob`."""

from __future__ import annotations

SHORT_NAMES = {
    "model": "model.path",
    "backbone": "backbone",
    "n_gpu": "trainer_common.n_gpus_per_node",
    "num_repeat": "rollout.num_repeat",
    "batch_size": "data.train_batch_size",
    "lr": "trainer_common.optim.lr",
    "algorithm": "trainer_common.algorithm.adv_estimator",
}
TRAINER_NAMES = SHORT_NAMES | {
    "name": "experiment_name",
    "project": "project_name",
    "n_runners": "rollout.max_env_worker",
    "steps": "trainer_common.total_training_steps",
    "epochs": "trainer_common.total_epochs",
    "engine": "rollout.engine",
    "temperature": "rollout.temperature",
    "judge": "task_judge.judge_protocol",
    "seed": "rollout.seed",
    "logger": "trainer_common.logger",
}
"""Keyword arguments of `Trainer`, and the keys that they set."""
JOB_NAMES = SHORT_NAMES | {
    "project_name": "project_name",
    "experiment_name": "experiment_name",
    "experiment_dir": "experiment_dir",
    "logging": "trainer_common.logger",
    "grpo_n": "rollout.num_repeat",
    "max_env_worker": "rollout.max_env_worker",
}
"""Arguments of `AgentJetJob`, and the keys that they set."""
