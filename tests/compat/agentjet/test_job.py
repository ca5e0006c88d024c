"""`AgentJetJob`: the YAML file that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet import AgentJetJob, Workflow
from ajet.config import load_config
from ajet.schema.errors import ConfigError


class Mine(Workflow):
    """A workflow in a file."""


def test_arguments_become_a_file_that_loads(tmp_path: Path) -> None:
    job = AgentJetJob(model="tiny:qwen2-0.3m", n_gpu=2, algorithm="rloo", batch_size=3, backbone="debug", lora_rank=4)
    job.set_workflow(Mine)
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n')
    job.set_data(type="jsonl", dataset_path=str(tmp_path / "tasks.jsonl"))
    job.config.ajet.rollout.temperature = 0.5
    ajet = load_config(job.dump_job_as_yaml(tmp_path / "deep" / "job.yaml")).ajet
    assert (ajet.model.path, ajet.trainer_common.n_gpus_per_node, ajet.data.train_batch_size) == (
        "tiny:qwen2-0.3m",
        2,
        3,
    )
    assert (ajet.trainer_common.algorithm.adv_estimator, ajet.model.lora.rank, ajet.rollout.temperature) == (
        "rloo",
        4,
        0.5,
    )
    assert ajet.rollout.user_workflow == f"{Path(__file__).resolve()}->Mine"


def test_a_base_file_keeps_what_is_not_given(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("ajet: {rollout: {num_repeat: 7, temperature: 0.3}}\nmine: {size: 4}\n")
    job = AgentJetJob(base_yaml_config=base, num_repeat=2)
    config = load_config(job.dump_job_as_yaml(tmp_path / "new.yaml"), complete=False)
    assert (config.ajet.rollout.num_repeat, config.ajet.rollout.temperature, config.mine.size) == (2, 0.3, 4)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no colour"):
        AgentJetJob(colour="red")
