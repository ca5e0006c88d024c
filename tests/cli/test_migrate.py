"""`ajet migrate`: other systems' files, key by key, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from ajet.cli.main import main
from ajet.cli.migrate import migrate, read
from ajet.cli.migrate.rules import Migration
from ajet.config import load_config
from ajet.config.keys import known_keys
from ajet.observe.tracing import nested

VERL = """
defaults:
  - actor@actor_rollout_ref.actor: dp_actor
data:
  train_files: tasks.parquet
  train_batch_size: 64
  max_prompt_length: 1024
  filter_overlong_prompts: true
actor_rollout_ref:
  model: {_target_: verl.Model, path: Qwen/Qwen2.5-7B-Instruct, lora_rank: 8, lora_alpha: 16}
  actor:
    ppo_mini_batch_size: 16
    ppo_micro_batch_size_per_gpu: 2
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    loss_agg_mode: seq-mean-token-sum
    data_loader_seed: 3
    optim: {lr: 1e-6, lr_warmup_steps: -1, lr_scheduler_type: cosine}
    fsdp_config: {fsdp_size: 4, seed: "${actor_rollout_ref.actor.data_loader_seed}"}
  rollout:
    name: vllm
    n: 5
    engine_kwargs: {vllm: {swap_space: 8}}
    response_length: ${data.max_prompt_length}
    seed: ${actor_rollout_ref.actor.data_loader_seed}
    max_model_len: ${no.such}
algorithm: {adv_estimator: gae, norm_adv_by_std_in_grpo: false, use_kl_in_reward: false}
trainer: {total_epochs: 15, save_freq: 10, logger: [console, wandb, clearml], resume_from_path: null}
custom_reward_function: {path: reward.py}
critic: {optim: {lr: 1e-5}}
"""
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: openai/gsm8k
dataset_config: main
learning_rate: 1.0e-5
adam_beta2: 0.95
lr_scheduler_type: cosine_with_restarts
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 16
max_completion_length: 2048
beta: 0.0
epsilon_high: 0.28
loss_type: dapo
scale_rewards: none
use_peft: true
lora_r: 32
use_vllm: true
save_strategy: "no"
save_steps: 500
report_to: [wandb, comet_ml]
reward_funcs: [accuracy_reward]
eval_strategy: "no"
max_steps: -1
wibble: 3
"""
PRIME = """
max_steps = 20
seq_len = 2048
wobble = true
[deployment]
num_train_gpus = 1
[model]
name = "org/model"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "reverse-text"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[orchestrator.train.source.env.agent.harness]
id = "null"
[trainer.optim]
lr = 3e-6
[trainer.model.lora]
rank = 8
[ckpt]
[inference]
"""


def migrated(folder: Path, text: str, name: str = "other.yaml") -> tuple[Migration, dict[str, tuple[str, str]]]:
    """The migration, and by key: what became of it, and how or why."""
    file = folder / name
    file.write_text(dedent(text))
    done = migrate(read(file), file)
    return done, {line.key: (line.what, line.now or line.why) for line in done.lines}


def loads(migration: Migration, folder: Path) -> Any:
    """Our file, read as any other; files and models that it names aren't here."""
    keys = {key: value for key, value in migration.keys.items() if not key.startswith("verl.")}
    known = {".".join(path[1:]) for path in known_keys() if path[0] == "ajet"}
    blocks = ("task_reader.options",)
    assert {key for key in keys if key not in known and not key.startswith(blocks)} == set()
    keys |= {"model.path": "tiny:qwen2", "task_reader.type": "random_dummy"}
    keys.pop("task_reader.huggingface_dat_repo.dataset_path", None)
    file = folder / "ours.yaml"
    file.write_text(json.dumps({"ajet": nested({**keys, "rollout.user_workflow": None})}))
    return load_config(file, complete=False)


def test_verl_s_keys(tmp_path: Path) -> None:
    done, lines = migrated(tmp_path, VERL)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert lines["data.train_batch_size"] == ("kept", "data.train_batch_size: 64")
    assert lines[f"{actor}.ppo_mini_batch_size"] == ("renamed", "trainer_common.mini_batch_num: 4")
    assert lines[f"{actor}.clip_ratio"] == ("renamed", "trainer_common.algorithm.clip_low: 0.2")
    assert lines[f"{actor}.fsdp_config.fsdp_size"] == ("kept", f"verl.{actor}.fsdp_config.fsdp_size: 4")
    assert lines[f"{rollout}.seed"] == ("renamed", "rollout.seed: 3"), "a reference is resolved"
    assert lines[f"{rollout}.engine_kwargs.vllm.swap_space"][0] == "kept"
    assert lines["algorithm.norm_adv_by_std_in_grpo"] == ("renamed", "trainer_common.algorithm.adv_estimator: drgrpo")
    assert lines["trainer.logger"] == ("renamed", "trainer_common.logger: ['console', 'wandb']")
    for key, why in {
        "defaults": "verl's own defaults apply",
        "critic.optim.lr": "no critic",
        "custom_reward_function.path": "docs/judges.md",
        "algorithm.adv_estimator": "no critic",
        f"{actor}.loss_agg_mode": "token_mean, sequence_mean or dr_grpo",
        f"{actor}.ppo_micro_batch_size_per_gpu": "by tokens",
        "data.filter_overlong_prompts": "docs/tasks.md",
    }.items():
        assert lines[key][0] == "dropped" and why in lines[key][1], key
    assert lines[f"{rollout}.max_model_len"][0] == "unknown"
    assert done.unset == 1 and not any("_target_" in key for key in lines)
    config = loads(done, tmp_path).ajet
    assert (config.backbone, config.rollout.num_repeat, config.model.lora.rank) == ("verl", 5, 8)


def test_what_is_passed_through_to_verl_is_accepted_there(tmp_path: Path) -> None:
    from ajet.backbone.ray.verl.config import OURS

    done, _ = migrated(tmp_path, VERL)
    passed = [key.removeprefix("verl.") for key in done.keys if key.startswith("verl.")]
    assert len(passed) == 2 and not any(key.startswith(OURS) for key in passed)


def test_trl_s_keys(tmp_path: Path) -> None:
    done, lines = migrated(tmp_path, TRL)
    assert lines["per_device_train_batch_size"] == ("renamed", "data.train_batch_size: 2")
    assert lines["max_completion_length"][1].endswith("rollout.max_response_length_in_one_turn: 2048"), "of a reply"
    assert lines["beta"] == ("renamed", "trainer_common.use_kl_loss: false")
    assert lines["adam_beta2"] == ("renamed", "trainer_common.optim.betas: [0.9, 0.95]")
    assert lines["save_steps"] == ("renamed", "trainer_common.save_freq: -1")
    assert lines["report_to"] == ("renamed", "trainer_common.logger: ['wandb']")
    assert lines["lr_scheduler_type"][0] == lines["reward_funcs"][0] == lines["max_steps"][0] == "dropped"
    assert lines["wibble"][0] == "unknown"
    config = loads(done, tmp_path).ajet
    assert (config.rollout.engine, config.trainer_common.algorithm.loss_norm) == ("vllm", "token_mean")
    assert config.trainer_common.algorithm.adv_estimator == "drgrpo"


def said_of(folder: Path, keys: str) -> dict[str, Any]:
    """What keys of TRL become, without what any of its files stands for."""
    done, _ = migrated(folder, f"model_name_or_path: m\nnum_generations: 8\n{keys}")
    usual = {"model.path", "rollout.num_repeat", "rollout.temperature", "trainer_common.use_kl_loss"}
    return {key.split(".")[-1]: value for key, value in done.keys.items() if key not in usual}


@pytest.mark.parametrize(
    ("keys", "ours"),
    [
        ("gradient_accumulation_steps: 16", {"train_batch_size": 16}),  # 8 replies to a device, unless it is said
        ("per_device_train_batch_size: 4\ngradient_accumulation_steps: 4", {"train_batch_size": 2}),
        ("per_device_train_batch_size: 8\ngeneration_batch_size: 256", {"train_batch_size": 32}),
        (
            "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nsteps_per_generation: 8\nmax_steps: 40",
            {"train_batch_size": 8, "mini_batch_num": 4, "total_training_steps": 10},
        ),
        ("ref_model_sync_steps: 64", {}),
        ("ref_model_sync_steps: 64\nsync_ref_model: false", {}),
        ("sync_ref_model: true", {"kl_reference_sync": 512}),
        ("sync_ref_model: true\nref_model_sync_steps: 64\nnum_iterations: 4",
         {"kl_reference_sync": 16, "ppo_epochs": 4}),
        ("warmup_steps: 0.1", {"lr_warmup_ratio": 0.1}),
        ("warmup_steps: 20\nwarmup_ratio: 0.1", {"lr_warmup_steps": 20}),
        ("warmup_steps: 20\nnum_iterations: 2", {"lr_warmup_steps": 10, "ppo_epochs": 2}),
        ("vllm_importance_sampling_clip_max: 3.0", {"cap": 3.0}),
        ("max_completion_length: 256", {"max_response_length": 256, "max_response_length_in_one_turn": 256}),
    ],
)  # fmt: skip
def test_trl_s_numbers_that_depend_on_each_other(tmp_path: Path, keys: str, ours: dict[str, Any]) -> None:
    assert said_of(tmp_path, keys) == ours


def test_of_two_keys_that_are_one_here_the_report_says_which_counts(tmp_path: Path) -> None:
    _, lines = migrated(tmp_path, "seq_len = 2048\n[orchestrator]\nseq_len = 4096\n", "rl.toml")
    assert lines["seq_len"][0] == "dropped" and lines["orchestrator.seq_len"][0] == "renamed"
    done, lines = migrated(tmp_path, "model_name_or_path: m\nbf16: true\ndtype: float32\n")
    assert done.keys["model.dtype"] == "float32" and lines["bf16"][0] == "dropped"


def test_prime_rl_s_lora_and_groups(tmp_path: Path) -> None:
    text = '[orchestrator]\nbatch_size = 128\n[trainer.model.lora]\ntarget_modules = ["q_proj"]\n'
    done, lines = migrated(tmp_path, text, "rl.toml")
    assert (done.keys["model.lora.enabled"], done.keys["model.lora.target_modules"]) == (True, ["q_proj"])
    assert lines["orchestrator.batch_size"][0] == "dropped" and "group_size" in lines["orchestrator.batch_size"][1]
    done, _ = migrated(tmp_path, "[orchestrator]\n[trainer.model.lora]\n[trainer.model.ac]\n", "bare.toml")
    assert done.keys["model.lora.enabled"] is True


def test_what_verl_reads_under_conditions(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {actor: {optim: {warmup_style: cosine, lr_warmup_steps: 5, lr_warmup_steps_ratio: 0.1}}}"
    text += "\nalgorithm: {gamma: 0.9}\n"
    text += "data: {max_response_length: 8192}\n"
    done, lines = migrated(tmp_path, text + "trainer: {resume_mode: auto, resume_from_path: /c/global_step_3}")
    assert done.keys["trainer_common.resume"] == "auto" and lines["trainer.resume_from_path"][0] == "dropped"
    assert done.keys["trainer_common.optim.lr_scheduler_type"] == "cosine"
    assert "trainer_common.optim.lr_warmup_ratio" not in done.keys, "the steps count, and only one may be set"
    assert done.keys["rollout.max_response_length_in_one_turn"] == 8192, "one reply may be that long"
    assert "rollout.gamma" not in done.keys and "tokens" in lines["algorithm.gamma"][1]


def test_prime_rl_s_keys(tmp_path: Path) -> None:
    done, lines = migrated(tmp_path, PRIME, "rl.toml")
    assert lines["orchestrator.batch_size"] == ("renamed", "data.train_batch_size: 8")
    assert lines["deployment.num_train_gpus"][0] == "dropped" and lines["wobble"][0] == "unknown"
    assert done.keys["task_reader.options.env"]["agent"] == {"harness": {"id": "null"}}
    config = loads(done, tmp_path).ajet
    assert (config.rollout.temperature, config.trainer_common.use_kl_loss) == (1.0, False)
    assert (config.model.lora.rank, config.rollout.max_model_len) == (8, 2048)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 1024)
    assert lines["data.max_prompt_length"][0] == "added"
    several = PRIME + '[[orchestrator.train.source]]\nname = "second"\n'
    _, lines = migrated(tmp_path, several, "two.toml")
    assert lines["orchestrator.train.source"] == (
        "dropped",
        "2 environments (reverse-text, second): a run has one; make a file for each",
    )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text(TRL)
    assert main(["migrate", "grpo.yaml", "--out", "ours.yaml"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "1 key NOT CARRIED OVER: unknown to ajet migrate:\n  wibble: 3" in said.err
    assert (
        "learning_rate: 1e-05 -> trainer_common.optim.lr: 1e-05" in said.err
        and "next: ajet validate ours.yaml" in said.err
    )
    text = Path("ours.yaml").read_text()
    assert text.startswith("# made by `ajet migrate` from grpo.yaml (TRL)\n# not carried over: wibble: 3")
    rollout = {"temperature": 1.0, "num_repeat": 16, "engine": "vllm", "max_response_length_in_one_turn": 2048}
    assert yaml.safe_load(text)["ajet"]["rollout"] == rollout
    assert main(["migrate", "grpo.yaml", "--out", "ours.yaml"]) == 2
    assert "there is such a file already" in capsys.readouterr().err
    Path("old.yaml").write_text("ajet: {rollout: {name: vllm, mode: async}}\nmine: {x: 1}\n")
    assert main(["migrate", "old.yaml"]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out) == {"ajet": {"rollout": {"engine": "vllm"}}, "mine": {"x": 1}}
    assert (
        "rollout.name -> rollout.engine" in said.err
        and "rollout.mode  (model calls are always asynchronous)" in said.err
    )


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        ("trl.yaml", "model_name_or_path: m\nper_device_train_batch_size: abc\nbeta: '0.1'\nnum_train_epochs: [1]",
         {"per_device_train_batch_size", "beta", "num_train_epochs"}),
        ("verl.yaml", "actor_rollout_ref: {actor: {ppo_mini_batch_size: 0}}\ndata: {train_batch_size: 8, train_files: 3}",  # noqa: E501
         {"actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_files"}),
        ("rl.toml", '[orchestrator]\nbatch_size = "x"\n[orchestrator.train]\nsource = 3\n',
         {"orchestrator.batch_size", "orchestrator.train.source"}),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_not_carried_over(tmp_path: Path, name: str, text: str, keys: set[str]) -> None:
    _, lines = migrated(tmp_path, text, name)
    assert {key for key, (what, why) in lines.items() if what == "unknown" and "not a value that" in why} == keys


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grpo.yaml").write_text(TRL)
    assert main(["migrate", str(tmp_path / "grpo.yaml"), "--out", str(tmp_path / "no/such/o.yaml")]) == 2
    assert "No such file or directory: name a file in a folder that is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.yaml", "a: 1", "whose configuration this is can't be told: AgentJet, verl, prime-rl, TRL are known"),
        ("x.yaml", "[1, 2]", "keys are expected at the top level"),
        ("x.toml", "a = [", "x.toml: not TOML: "),
        ("x.yaml", "a: [", "x.yaml"),
        ("x.yaml", "ajet: {model: {path: {{MODEL}}}}", "x.yaml: ajet.model.path: not a plain value: fill in"),
        ("nosuch.toml", None, "No such file"),
        ("nosuch.yaml", None, "nosuch.yaml"),
    ],
)
def test_files_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        (
            "a.toml",
            "[orchestrator]\nbatch_size = 512\nrollouts_per_example = 16",
            {"data.train_batch_size": 32, "rollout.num_repeat": 16},
        ),
        (
            "trl.yaml",
            "model_name_or_path: m\nper_device_train_batch_size: 64",
            {"data.train_batch_size": 8, "rollout.num_repeat": 8, "trainer_common.use_kl_loss": False},
        ),
        (
            "trl.yaml",
            "model_name_or_path: m\nmax_steps: 100\nnum_iterations: 4\neval_steps: 10\nbeta: 0.1",
            {
                "trainer_common.total_training_steps": 25,
                "trainer_common.test_freq": 2,
                "trainer_common.use_kl_loss": True,
                "rollout.temperature": 1.0,
            },
        ),
        (
            "verl.yaml",
            "algorithm: {norm_adv_by_std_in_grpo: false, adv_estimator: grpo, use_kl_in_reward: true}\n"
            "actor_rollout_ref: {actor: {use_kl_loss: false}}",
            {"trainer_common.algorithm.adv_estimator": "drgrpo", "trainer_common.use_kl_loss": True},
        ),
        (
            "verl.yaml",
            "algorithm: {adv_estimator: rloo, norm_adv_by_std_in_grpo: false}\nactor_rollout_ref: {}",
            {
                "trainer_common.algorithm.adv_estimator": "rloo",
                "trainer_common.use_kl_loss": False,
                "rollout.temperature": 1.0,
            },
        ),
    ],
)
def test_keys_that_mean_something_together(tmp_path: Path, name: str, text: str, keys: dict[str, Any]) -> None:
    """Whatever their order."""
    file = tmp_path / name
    file.write_text(text)
    found = migrate(read(file), file).keys
    assert {key: found[key] for key in keys} == keys
