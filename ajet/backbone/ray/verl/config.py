"""Converts our configuration to verl's.

`verl_settings` and `check_honoured` are pure and need neither verl nor torch: verl's keys (dotted) with their values,
and which of our keys verl can't honour. `compose_verl_config` puts them over verl's own defaults. Episodes, groups and
credit stay ours, so verl's counterparts are set to pass them through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.backbone.plan import installed, serving_engine, validation_repeats
from ajet.backbone.ray.facts import (
    KEY,
    ONE_ROW,
    Machine,
    Remark,
    RunFacts,
    Settings,
    check_refused,
    checkpoint_step,
    micro_tokens,
    plain,
    shared_notes,
)
from ajet.gateway.chat import validation_temperature
from ajet.observe.metrics import flatten
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ajet.config import Config

VERL_PLATFORM = "VERL_PLATFORM"
"""verl's own environment variable: which platform its processes use."""
ADVANTAGE_ESTIMATOR = "ajet_credit"
"""Name under which the plugin registers the estimator that passes our credit through."""
LOSS = "ajet"
"""A loss that verl doesn't know: with another engine than ours, it ends instead of training something else."""
ENGINE = "fsdp2"
OURS = (
    "actor_rollout_ref.actor.optim.betas",
    "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.min_lr_ratio",
    "actor_rollout_ref.actor.optim.num_cycles",
    "actor_rollout_ref.actor.optim.total_training_steps",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.actor.optim.zero_indexed_step",
    "actor_rollout_ref.actor.policy_loss.",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.kl_loss",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.shuffle",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.model.path.",
    "actor_rollout_ref.rollout.n.",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_k",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.val_kwargs.",
    "algorithm.",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.resume_",
    "trainer.total_training_steps",
    "trainer.val_only",
)
"""Keys of verl for what our own decide. The trainer would take the temperature for that of the replies, and a run that
goes on would keep the records of steps that verl runs again."""
CPU_ROLLOUT = "ajet_torch"
"""Name under which the plugin registers the embedded engine as a rollout server (CPU only)."""
VERSIONS = "ajet_versions"
"""In the `extra_fields` of what a server or its client returns: [(index of first token, version), …]."""
LEAST_KEPT = 2
"""Checkpoints: asked for one, verl removes the old one before its file names the new one, and a kill between leaves
none to go on from."""
TRAINER_MODE = "trainer.v1.trainer_mode"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
PASSED_THROUGH = ("actor_rollout_ref", "ray_kwargs", "transfer_queue", "global_profiler")
"""Top-level blocks of a YAML or dotted overrides that are taken for verl's own."""
ADDABLE = (
    f"data.{KEY}",
    "actor_rollout_ref.model.override_config.",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "actor_rollout_ref.actor.optim.override_optimizer_config.",
    "actor_rollout_ref.rollout.engine_kwargs.",
    "ray_kwargs.",
)
"""Keys that verl reads but does not list among its defaults."""


def verl_settings(config: Config, run: RunFacts, machine: Machine) -> Settings:
    """All keys of verl's configuration that a run sets, the user's own last."""
    check_refused(check_honoured(config, machine), "verl")
    settings: Settings = {}
    for part in (_data, _model, _actor, _reference, _rollout, _algorithm, _trainer):
        settings |= part(config, run, machine)
    return settings | pass_through(config)


def pass_through(config: Config) -> Settings:
    """verl's own keys as the user wrote them: `ajet.verl.…`, `verl.…`, `trainer.…` and plain verl blocks."""
    mine = config.user_blocks()
    settings: Settings = {}
    for name in PASSED_THROUGH:
        if isinstance(mine.get(name), Mapping):
            settings |= dict(flatten(mine[name], name))
    settings |= dict(flatten(config.trainer, "trainer"))
    settings |= dict(flatten(config.verl))
    settings |= dict(flatten(config.ajet.verl))  # what is still a group is empty
    return {key: plain(value) for key, value in settings.items()}


def compose_verl_config(settings: Settings, given: Settings | None = None) -> DictConfig:
    """verl's own defaults with these settings. `given`: what the user wrote for verl; must name keys verl has.

    A key that begins with `+` is added without being checked, as on verl's own command line. Needs verl.
    """
    from omegaconf import OmegaConf, open_dict

    config = _defaults()
    for wrong in _unknown(given or {}, config).values():
        raise ConfigError(wrong)
    OmegaConf.set_struct(config, False)
    with open_dict(config):
        for key, value in settings.items():
            name = key.removeprefix("+")
            if value != {} or not OmegaConf.select(config, name):  # an empty group sets nothing
                OmegaConf.update(config, name, value, merge=False, force_add=True)
    OmegaConf.set_struct(config, True)
    return config


def unknown_keys(config: Config) -> Iterator[Remark]:
    """The user's keys for verl that it doesn't have. Reads verl's files, if it is installed, without importing it."""
    if (given := pass_through(config)) and installed("verl") is not None:
        for key, wrong in _unknown(given, _defaults()).items():
            yield Remark.refusal(f"ajet.verl.{key}", wrong)


def _defaults() -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    verl = find_spec("verl")
    assert verl is not None and verl.submodule_search_locations
    of_program = GlobalHydra.instance().hydra  # verl's own programs have one, by `@hydra.main`
    GlobalHydra.instance().clear()
    try:
        folder = Path(verl.submodule_search_locations[0], "trainer", "config").absolute()
        with initialize_config_dir(str(folder), version_base=None):
            config: DictConfig = compose("ppo_trainer")
    finally:
        GlobalHydra.instance().hydra = of_program
    return config


def _unknown(given: Settings, defaults: DictConfig) -> dict[str, str]:
    """What is wrong with those of the keys that verl doesn't have, or that are groups there: verl switches some parts
    of its groups off by null, but no whole one."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(defaults, resolve=False)
    assert isinstance(plain, dict)
    known = {key for key, _ in flatten({str(key): value for key, value in plain.items()})}
    parents = {name.rsplit(".", count)[0] for name in known for count in range(1, name.count(".") + 1)}
    wrong = {}
    for key, value in given.items():
        group = isinstance(value, Mapping) or "${" in str(value) or (value is None and "." in key)
        if key in parents and not group:
            wrong[key] = f"verl's {key!r} is a group of keys, not {'empty' if value is None else repr(value)}"
        elif not key.startswith(("+", *ADDABLE)) and key not in known | parents:
            near = get_close_matches(key, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            wrong[key] = f"verl has no key {key!r}{hint} (`+{key}` adds it unchecked)"
    return wrong


def check_honoured(config: Config, machine: Machine) -> list[Remark]:
    """Our keys that verl can't honour: refused, or named once at start."""
    given = pass_through(config)
    return [*shared_notes(config, machine, "verl", given, OURS), *_notes(config, machine, given)]


def _notes(config: Config, machine: Machine, given: Settings) -> Iterator[Remark]:
    ajet = config.ajet
    common = ajet.trainer_common
    correction = common.algorithm.rollout_correction
    if correction.mode == "sequence_tis" or (correction.mode == "masked" and correction.level == "sequence"):
        yield Remark("ajet.trainer_common.algorithm.rollout_correction.mode", ONE_ROW.format("verl"))
    if common.algorithm.use_kl_in_reward:
        yield Remark.refusal(
            "ajet.trainer_common.algorithm.use_kl_in_reward",
            "verl would subtract the KL from advantages that are already computed; set use_kl_loss: true instead",
        )
    if common.keep_checkpoints < LEAST_KEPT:
        yield Remark("ajet.trainer_common.keep_checkpoints", f"with verl, the newest {LEAST_KEPT} are kept")
    if common.resume not in ("auto", "never") and checkpoint_step(common.resume) is None:
        yield Remark.refusal("ajet.trainer_common.resume", "verl's checkpoints are folders named global_step_N")
    if given.get(TRAINER_MODE) == "separate_async" and given.get(SYNC_STEP) != 1:
        yield Remark.refusal(
            f"ajet.verl.{SYNC_STEP}",
            "verl would cut a step into batches, and credit is computed over the whole step: set it to 1",
        )
    if machine.cpu and ajet.rollout.engine != "torch":
        yield Remark("ajet.rollout.engine", f"on the CPU the embedded engine serves verl, not {ajet.rollout.engine}")


def _data(config: Config, run: RunFacts, machine: Machine) -> Settings:
    data = config.ajet.data
    return {
        "data.custom_cls.path": "pkg://ajet.backbone.ray.verl.sampler",
        "data.custom_cls.name": "TaskDataset",
        f"data.{KEY}": run.payload,
        "data.train_files": "training",
        "data.val_files": "validation",
        "data.train_batch_size": data.train_batch_size,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        # the dataset itself gives tasks in our order, so its position is all that must be saved
        "data.shuffle": False,
        "data.validation_shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.seed": config.ajet.trainer_common.seed,
    }


def _model(config: Config, run: RunFacts, machine: Machine) -> Settings:
    model, checkpointing = config.ajet.model, config.ajet.trainer_common.gradient_checkpointing
    attention = model.attn
    if attention == "auto":
        attention = "flash_attention_2" if machine.flash_attention and not machine.cpu else "sdpa"
    settings: Settings = {
        "actor_rollout_ref.model.path": run.model_path,
        "actor_rollout_ref.model.override_config.attn_implementation": attention,
        "actor_rollout_ref.model.use_remove_padding": attention == "flash_attention_2",
        "actor_rollout_ref.model.enable_gradient_checkpointing": (
            not machine.cpu if checkpointing == "auto" else checkpointing
        ),
    }
    if model.lora.enabled:
        settings |= {
            "actor_rollout_ref.model.lora_rank": model.lora.rank,
            "actor_rollout_ref.model.lora_alpha": model.lora.alpha,
            "actor_rollout_ref.model.target_modules": model.lora.target_modules,
            # vLLM and SGLang swap adapters; the embedded engine is given merged weights
            "actor_rollout_ref.model.lora.merge": machine.cpu,
        }
    return settings


def _actor(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ajet = config.ajet
    common, algorithm = ajet.trainer_common, ajet.trainer_common.algorithm
    actor = "actor_rollout_ref.actor"
    return {
        f"{actor}.strategy": ENGINE,
        # a start: the sampler corrects it for each batch, because the number of rows varies
        f"{actor}.ppo_mini_batch_size": max(1, ajet.data.train_batch_size // common.mini_batch_num),
        f"{actor}.ppo_epochs": common.ppo_epochs,
        f"{actor}.shuffle": False,
        f"{actor}.data_loader_seed": common.seed,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": micro_tokens(config),
        f"{actor}.policy_loss.loss_mode": LOSS,
        f"{actor}.entropy_coeff": algorithm.entropy_coef,
        f"{actor}.use_kl_loss": common.use_kl_loss and common.kl_loss_coef > 0 and algorithm.policy_loss != "sft",
        f"{actor}.use_torch_compile": not machine.cpu,
        f"{actor}.ulysses_sequence_parallel_size": common.ulysses_sequence_parallel_size,
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        **_fsdp(config, machine, f"{actor}.fsdp_config"),
        f"{actor}.fsdp_config.param_offload": common.fsdp_config.param_offload,
        f"{actor}.fsdp_config.optimizer_offload": common.fsdp_config.optimizer_offload,
        # the rest of the optimiser, like the loss, our engine takes from the run's own configuration
        f"{actor}.grad_clip": common.optim.clip_grad,
        f"{actor}.optim.clip_grad": common.optim.clip_grad,
        f"{actor}.optim.override_optimizer_config": {KEY: run.payload},
    }


def _fsdp(config: Config, machine: Machine, place: str) -> Settings:
    number = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    dtype = config.ajet.model.dtype
    return {
        # weights and optimiser state stay in float32; computation is in the model's number format
        f"{place}.model_dtype": "fp32",
        f"{place}.mixed_precision.param_dtype": number[machine.dtype(dtype)],
        f"{place}.use_torch_compile": not machine.cpu,
        f"{place}.seed": config.ajet.trainer_common.seed,
    }


def _reference(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ref = "actor_rollout_ref.ref"
    return {
        f"{ref}.log_prob_use_dynamic_bsz": True,
        f"{ref}.log_prob_max_token_len_per_gpu": micro_tokens(config),
        f"{ref}.use_torch_compile": not machine.cpu,
        f"{ref}.fsdp_config.param_offload": config.ajet.trainer_common.fsdp_config.param_offload,
        **_fsdp(config, machine, f"{ref}.fsdp_config"),
    }


def _rollout(config: Config, run: RunFacts, machine: Machine) -> Settings:
    rollout, data = config.ajet.rollout, config.ajet.data
    place = "actor_rollout_ref.rollout"
    name = CPU_ROLLOUT if machine.cpu else serving_engine(config, "verl")
    return {
        f"{place}.name": name,
        f"{place}.mode": "async",
        f"{place}.n": rollout.num_repeat,
        f"{place}.temperature": rollout.temperature,
        f"{place}.top_p": rollout.top_p,
        f"{place}.top_k": rollout.top_k,
        f"{place}.seed": rollout.seed,
        f"{place}.prompt_length": data.max_prompt_length,
        f"{place}.response_length": data.max_response_length,
        f"{place}.max_model_len": rollout.max_model_len,
        f"{place}.max_num_seqs": rollout.max_num_seqs,
        f"{place}.max_num_batched_tokens": max(8192, rollout.max_model_len),
        f"{place}.tensor_model_parallel_size": 1 if machine.cpu else rollout.tensor_model_parallel_size,
        f"{place}.dtype": machine.dtype(config.ajet.model.dtype),
        f"{place}.calculate_log_probs": True,
        f"{place}.logprobs_mode": "processed_logprobs",
        f"{place}.log_prob_use_dynamic_bsz": True,
        f"{place}.log_prob_max_token_len_per_gpu": micro_tokens(config),
        f"{place}.val_kwargs.temperature": validation_temperature(config),
        f"{place}.val_kwargs.top_p": rollout.val_kwargs.top_p,
        f"{place}.val_kwargs.top_k": rollout.val_kwargs.top_k,
        f"{place}.val_kwargs.do_sample": validation_temperature(config) > 0,
        f"{place}.val_kwargs.n": validation_repeats(config),
        # remote runners connect to one process
        f"{place}.agent.num_workers": 1
        if config.ajet.task_runner.wrapper_type == "remote"
        else config.ajet.trainer_common.nnodes,
        f"{place}.agent.agent_loop_manager_class": "ajet.backbone.ray.verl.worker.EpisodeManager",
    }


def _algorithm(config: Config, run: RunFacts, machine: Machine) -> Settings:
    return {
        "algorithm.adv_estimator": ADVANTAGE_ESTIMATOR,
        "algorithm.use_kl_in_reward": False,
        # discounting is part of our credit
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        # our loss corrects for the sampler; verl computes the old policy's logprobs
        "algorithm.rollout_correction.rollout_is": None,
        "algorithm.rollout_correction.bypass_mode": False,
    }


def _trainer(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ajet = config.ajet
    common = ajet.trainer_common
    steps = run.total_steps
    sampler = "EpisodeSampler" if pass_through(config).get(TRAINER_MODE, "sync") == "sync" else "AsyncEpisodeSampler"
    first = common.val_before_train if run.resumed_step is None else run.lacks_validation
    settings: Settings = {
        "trainer.project_name": ajet.project_name,
        "trainer.experiment_name": ajet.experiment_name,
        # `trainer_common.logger` is served by our own sinks, under the names that every backbone shares
        "trainer.logger": ["console", "file"],
        "trainer.nnodes": common.nnodes,
        "trainer.n_gpus_per_node": 1 if machine.cpu else common.n_gpus_per_node,
        "trainer.device": machine.platform,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": common.save_freq if common.save_freq > 0 else steps,
        "trainer.test_freq": common.test_freq if common.test_freq > 0 and run.validates else -1,
        "trainer.val_before_train": run.validates and (first or common.val_only),
        "trainer.val_only": common.val_only or (run.resumed_step or 0) >= steps,
        "trainer.default_local_dir": str(run.checkpoint_dir),
        "trainer.max_actor_ckpt_to_keep": max(common.keep_checkpoints, LEAST_KEPT),
        "trainer.critic_warmup": 0,
        "trainer.use_v1": True,
        TRAINER_MODE: "sync",
        "trainer.v1.sampler.custom_sampler.path": "pkg://ajet.backbone.ray.verl.sampler",
        "trainer.v1.sampler.custom_sampler.name": sampler,
        "trainer.resume_mode": {"auto": "auto", "never": "disable"}.get(common.resume, "resume_path"),
        "reward.num_workers": 1,
        "transfer_queue.enable": True,
    }
    if machine.cpu:
        settings["transfer_queue.backend.SimpleStorage.num_data_storage_units"] = 1
    if settings["trainer.resume_mode"] == "resume_path":
        settings["trainer.resume_from_path"] = str(Path(common.resume).absolute())
    return settings
