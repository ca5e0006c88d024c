"""Converts our configuration to Trinity's.

`trinity_settings` and `check_honoured` are pure and need neither Trinity nor torch: Trinity's keys (dotted) and their
values, and which of our keys Trinity can't honour. `compose_trinity_config` puts them over Trinity's own defaults.
Episodes, groups and credit stay ours: what runs, reads, weighs and samples is named by its import path, which Trinity
looks up in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ajet.backbone.plan import installed, serving_engine, validation_repeats
from ajet.backbone.ray.facts import (
    Machine,
    Remark,
    RunFacts,
    Settings,
    check_refused,
    micro_tokens,
    plain,
    shared_notes,
)
from ajet.backbone.training_settings import learning_rate, warmup_steps
from ajet.observe.metrics import flatten
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import AjetConfig, Config

HERE = "ajet.backbone.ray.trinity"
WORKFLOW = f"{HERE}.host.GroupWorkflow"
READER = f"{HERE}.host.TrinityTaskReader"
CREDIT = f"{HERE}.algorithm.AjetCredit"
SAMPLING = f"{HERE}.algorithm.WholeBatches"
LOSS = f"{HERE}.algorithm.AjetPolicyLossWithReference"
LOSS_WITHOUT_REFERENCE = f"{HERE}.algorithm.AjetPolicyLoss"
ENTROPY = f"{HERE}.algorithm.AjetEntropy"
ALGORITHM = f"{HERE}.algorithm.AjetAlgorithm"
ALGORITHM_WITHOUT_REFERENCE = f"{HERE}.algorithm.AjetAlgorithmWithoutReference"
MONITOR = f"{HERE}.host.FileMonitor"
NAMESPACE = "ajet"
RUN_NAME = "run"
"""Trinity's name of the run: its folder, below the project's, among the checkpoints."""
CPU_GPUS = 2
"""What a machine without a GPU announces to Ray: one for an engine, one for the trainer."""
CPU_RUNNERS = 1
GPU_RUNNERS = 4
"""Processes per engine that run episodes: each runs one task's episodes at a time."""
GROUP_SLACK = 4
"""Times the episode timeout that a group may take: failed attempts are run again, and groups refilled."""
NO_TIMEOUT_S = 30 * 24 * 3600
"""Trinity must be given one."""
OURS = (
    "algorithm.advantage_fn",
    "algorithm.algorithm_type",
    "algorithm.entropy_loss_fn",
    "algorithm.kl_",
    "algorithm.loss_agg_mode",
    "algorithm.policy_loss_fn",
    "algorithm.sample_strategy",
    "buffer.total_",
    "checkpoint_root_dir",
    "continue_from_checkpoint",
    "model.model_path",
    "model.temperature",
    "model.top_k",
    "model.top_p",
    "monitor.monitor_",
    "name",
    "project",
    "trainer.total_steps",
)
"""Keys of Trinity for what our own decide. The trainer would take the temperature for that of the replies, and a run
that goes on would look for its checkpoints elsewhere."""
STALENESS = "algorithm.sample_strategy_args.max_staleness"
OPTIMISER = "algorithm.optimizer."
TRAIN_TIMEOUT_S = 3600.0
DEFAULT_STALENESS = 1
"""Steps by which the policy that samples may lag behind, in Trinity's fully asynchronous style."""
MODES = ("both", "explore", "train")


def trinity_settings(config: Config, run: RunFacts, machine: Machine) -> Settings:
    """All keys of Trinity's configuration that a run sets, the user's own last."""
    check_refused(check_honoured(config, machine), "trinity")
    settings: Settings = {}
    for part in (_run, _algorithm, _model, _buffer, _explorer, _trainer):
        settings |= part(config, run, machine)
    return settings | pass_through(config)


def pass_through(config: Config) -> Settings:
    """Trinity's own keys as the user wrote them: `trinity.…` and `ajet.trinity.…`. An empty group sets nothing."""
    given = dict(flatten(config.trinity)) | dict(flatten(config.ajet.trinity))
    return {key: plain(value) for key, value in given.items() if not isinstance(value, Mapping)}


def run_mode(config: Config) -> str:
    """`both`, or what `ajet.trinity.mode` says."""
    return str(pass_through(config).get("mode", "both"))


def sync_style(config: Config) -> str:
    """How explorer and trainer wait for each other."""
    return str(pass_through(config).get("synchronizer.sync_style", "fixed")).lower()


def validates(config: Config) -> bool:
    """Whether Trinity validates, if there are tasks for it: that needs an explorer that waits for the trainer."""
    common = config.ajet.trainer_common
    waits = run_mode(config) == "both" and sync_style(config) != "fully_async"
    return waits and (common.test_freq > 0 or common.val_before_train)


def max_staleness(config: Config) -> int | None:
    """Steps by which the sampling policy may lag behind; None: Trinity's own waiting bounds it."""
    given = pass_through(config).get(STALENESS)
    if given is not None:
        return int(given)
    return DEFAULT_STALENESS if sync_style(config) == "fully_async" else None


def compose_trinity_config(settings: Settings, *, resolve: bool = True) -> Any:
    """Trinity's configuration with these settings. Raises ConfigError. `resolve`: look up what they name by `${…}`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from trinity.common.config import Config

    schema = OmegaConf.structured(Config)
    plain = OmegaConf.to_container(schema, resolve=False)
    assert isinstance(plain, dict)
    known = {key for key, _ in flatten({str(key): value for key, value in plain.items()})}
    for key, value in settings.items():
        try:
            schema = OmegaConf.merge(schema, _nested(key, value))
        except OmegaConfBaseException as error:
            near = get_close_matches(key, known, n=1)
            hint = f": did you mean {near[0]}?" if near and near[0] != key else ""
            raise ConfigError(f"Trinity can't take {key} = {value!r} ({str(error).splitlines()[0]}){hint}") from error
    try:
        return OmegaConf.to_object(schema) if resolve else schema
    except OmegaConfBaseException as error:
        raise ConfigError(f"Trinity can't take its configuration: {' '.join(str(error).split())}") from error


def _nested(key: str, value: Any) -> dict[str, Any]:
    nested = value
    for name in reversed(key.split(".")):
        nested = {name: nested}
    assert isinstance(nested, dict)
    return nested


def unknown_keys(config: Config) -> Iterator[Remark]:
    """The user's keys for Trinity that it, if it is installed, doesn't have, or not with such a value."""
    if installed("trinity-rft") is not None:
        for key, value in pass_through(config).items():
            try:
                compose_trinity_config({key: value}, resolve=False)
            except ConfigError as error:
                yield Remark.refusal(f"ajet.trinity.{key}", str(error))


def check_honoured(config: Config, machine: Machine) -> list[Remark]:
    """Our keys that Trinity can't honour: refused, or named once at start."""
    given = {key: value for key, value in pass_through(config).items() if key != STALENESS}
    shared = shared_notes(config, machine, "Trinity", given, OURS)
    return [*shared, *_notes(config, machine)]


def _notes(config: Config, machine: Machine) -> Iterator[Remark]:
    ajet = config.ajet
    common, algorithm = ajet.trainer_common, ajet.trainer_common.algorithm
    place = "ajet.trainer_common"
    if algorithm.rollout_correction.mode in ("sequence_tis", "masked"):
        yield Remark.refusal(
            f"{place}.algorithm.rollout_correction.mode",
            "with Trinity the ratio of the loss is to the sampler itself, so there is nothing to correct: leave it out",
        )
    if common.ppo_epochs > 1:
        yield Remark.refusal(f"{place}.ppo_epochs", "Trinity's trainer passes over a batch once")
    if common.optim.eps != type(common.optim)().eps:
        yield Remark.refusal(f"{place}.optim.eps", "Trinity does not pass it to the optimiser")
    if algorithm.use_kl_in_reward:
        yield Remark.refusal(
            f"{place}.algorithm.use_kl_in_reward",
            "advantages are computed before Trinity's trainer has the reference's logprobs; set use_kl_loss: true "
            "instead",
        )
    if common.resume not in ("auto", "never"):
        yield Remark.refusal(
            f"{place}.resume", "Trinity resumes from the newest checkpoint of the experiment alone: `auto` or `never`"
        )
    for key in pass_through(config):
        if machine.cpu and key.startswith(OPTIMISER):
            yield Remark.refusal(
                f"ajet.trinity.{key}",
                "on the CPU the optimiser is the embedded trainer's: see ajet.trainer_common.optim",
            )
    if common.optim.lr_scheduler_type == "linear" and not machine.cpu:
        yield Remark.refusal(f"{place}.optim.lr_scheduler_type", "Trinity knows `constant` and `cosine`")
    if ajet.model.lora.enabled and machine.cpu:
        yield Remark.refusal("ajet.model.lora", "the CPU trainer of this backbone trains whole weights")
    if common.val_only:
        yield Remark.refusal(f"{place}.val_only", "validate with `ajet eval`")
    late = pass_through(config).get(STALENESS) or 0
    if not isinstance(late, int) or late < 0:
        yield Remark.refusal(f"ajet.trinity.{STALENESS}", f"{late!r} is no whole number of steps")
    mode = run_mode(config)
    if mode not in MODES:
        yield Remark.refusal("ajet.trinity.mode", f"{mode!r} is not one of {', '.join(MODES)}")
    if sync_style(config) == "fully_async" and common.test_freq > 0 and "test_freq" in common.model_fields_set:
        yield Remark(f"{place}.test_freq", "Trinity does not validate in its fully asynchronous style")
    if (common.optim.lr_warmup_steps or common.optim.lr_warmup_ratio) and not machine.cpu:
        warmup = "lr_warmup_steps" if common.optim.lr_warmup_steps else "lr_warmup_ratio"
        yield Remark(
            f"{place}.optim.{warmup}",
            "Trinity's warm-up begins at a rate of 0: each step has the rate that the one before it has elsewhere",
        )
    if machine.cpu:
        yield Remark(
            "ajet.rollout.engine",
            "on the CPU the rollout model and the train engine are ours, the embedded ones; explorer, scheduler, "
            "buffer, trainer and synchronizer are Trinity's",
        )


def _run(config: Config, run: RunFacts, machine: Machine) -> Settings:
    common = config.ajet.trainer_common
    return {
        "mode": "both",
        "project": config.ajet.project_name,
        "name": RUN_NAME,
        "ray_namespace": f"{NAMESPACE}/{run.scratch.name}",  # other runs on the same cluster have another
        "checkpoint_root_dir": str(run.checkpoint_dir),
        "continue_from_checkpoint": common.resume != "never",
        "ignore_validator_suggestions": True,
        "cluster.node_num": 1 if machine.cpu else common.nnodes,
        "cluster.gpu_per_node": CPU_GPUS if machine.cpu else common.n_gpus_per_node,
        "monitor.monitor_type": MONITOR,
        "monitor.monitor_args": {"folder": str(run.scratch)},
    }


def _algorithm(config: Config, run: RunFacts, machine: Machine) -> Settings:
    common = config.ajet.trainer_common
    algorithm, optim = common.algorithm, common.optim
    imitates = algorithm.policy_loss == "sft"
    uses_kl = common.use_kl_loss and common.kl_loss_coef > 0 and not imitates
    uses_entropy = algorithm.entropy_coef != 0 and not imitates
    replicas = trainer_replicas(config, machine)
    return {
        "algorithm.algorithm_type": ALGORITHM if uses_kl else ALGORITHM_WITHOUT_REFERENCE,
        "algorithm.repeat_times": config.ajet.rollout.num_repeat,
        "algorithm.advantage_fn": CREDIT,
        "algorithm.advantage_fn_args": {"payload": run.payload},
        "algorithm.sample_strategy": SAMPLING,
        "algorithm.sample_strategy_args": {
            "ranks": replicas,
            # on the CPU the embedded trainer makes the mini-batches
            "updates": 1 if machine.cpu else common.mini_batch_num,
            "norm": algorithm.loss_norm,
            "seed": common.seed,
            "max_staleness": max_staleness(config),
        },
        "algorithm.policy_loss_fn": LOSS if uses_kl else LOSS_WITHOUT_REFERENCE,
        "algorithm.policy_loss_fn_args": {"payload": run.payload, "scale": replicas},
        # part of our loss
        "algorithm.kl_loss_fn": "none",
        "algorithm.kl_loss_fn_args": {},
        "algorithm.kl_penalty_fn": "none",
        "algorithm.entropy_loss_fn": ENTROPY if uses_entropy else "none",
        "algorithm.entropy_loss_fn_args": {
            "entropy_coef": algorithm.entropy_coef if uses_entropy else 0.0,
            **({"scale": replicas} if uses_entropy else {}),
        },
        "algorithm.loss_agg_mode": "token-mean",
        # the ratio is to the policy that sampled, whose logprobs are exact
        "algorithm.bypass_old_logprobs": True,
        "algorithm.optimizer.lr": learning_rate(config),
        "algorithm.optimizer.betas": list(optim.betas),
        "algorithm.optimizer.weight_decay": optim.weight_decay,
        "algorithm.optimizer.clip_grad": optim.clip_grad,
        "algorithm.optimizer.lr_warmup_steps": warmup_steps(config, run.total_steps),
        "algorithm.optimizer.min_lr_ratio": optim.min_lr_ratio,
        "algorithm.optimizer.lr_scheduler_type": "constant" if machine.cpu else optim.lr_scheduler_type,
    }


def trainer_replicas(config: Config, machine: Machine) -> int:
    """Data-parallel ranks of Trinity's trainer: the GPUs that the engines leave, divided by sequence parallelism."""
    if machine.cpu:
        return 1
    common, rollout = config.ajet.trainer_common, config.ajet.rollout
    gpus = common.nnodes * common.n_gpus_per_node
    if gpus == 1:  # Trinity then puts both on it
        return 1
    left = gpus - rollout.n_vllm_engine * rollout.tensor_model_parallel_size
    if left <= 0:
        raise ConfigError(
            f"ajet.rollout.n_vllm_engine x tensor_model_parallel_size takes all {gpus} GPUs (nnodes x gpus): "
            "Trinity's trainer needs GPUs of its own"
        )
    if left % common.ulysses_sequence_parallel_size:
        raise ConfigError(
            f"ajet.trainer_common.ulysses_sequence_parallel_size does not divide the {left} GPUs left to the trainer"
        )
    return left // common.ulysses_sequence_parallel_size


def _model(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ajet = config.ajet
    settings: Settings = {
        "model.model_path": run.model_path,
        "model.max_model_len": ajet.rollout.max_model_len,
        "model.max_prompt_tokens": min(ajet.data.max_prompt_length, ajet.rollout.max_model_len - 1),
        "model.max_response_tokens": ajet.rollout.max_response_length_in_one_turn,
        "model.temperature": ajet.rollout.temperature,
        "model.top_p": ajet.rollout.top_p,
        "model.top_k": ajet.rollout.top_k,
        "model.enable_prompt_truncation": False,
    }
    if ajet.model.lora.enabled:
        lora = ajet.model.lora
        targets = lora.target_modules if isinstance(lora.target_modules, str) else ",".join(lora.target_modules)
        settings["model.lora_configs"] = [
            {"name": "lora", "lora_rank": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets}
        ]
    return settings


def _buffer(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ajet = config.ajet
    common = ajet.trainer_common
    taskset = {
        "name": "training",
        "storage_type": READER,
        "path": "training",
        "default_workflow_type": WORKFLOW,
        "workflow_args": {"payload": run.payload},
    }
    mode = run_mode(config)
    validation = taskset | {"name": "validation", "path": "validation", "repeat_times": validation_repeats(config)}
    buffer: Settings = {"name": "experiences", "storage_type": "queue", "max_read_timeout": TRAIN_TIMEOUT_S}
    if mode != "both":  # they meet on disk, perhaps on different days
        path = f"sqlite:///{run.checkpoint_dir / 'experiences.db'}"
        buffer |= {"storage_type": "sql", "path": path, "max_read_timeout": 60.0}
    return {
        "buffer.batch_size": ajet.data.train_batch_size,
        # what Trinity's own sampling would read; ours reads whole batches, however many rows they have
        "buffer.train_batch_size": ajet.data.train_batch_size * ajet.rollout.num_repeat,
        "buffer.total_epochs": common.total_epochs,
        "buffer.total_steps": run.total_steps,
        "buffer.explorer_input.tasksets": [taskset],
        "buffer.explorer_input.eval_tasksets": [validation] if run.validates and validates(config) else [],
        "buffer.trainer_input.experience_buffer": buffer,
        "data_processor.experience_pipeline.save_input": False,
    }


def _explorer(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ajet = config.ajet
    rollout, common = ajet.rollout, ajet.trainer_common
    runners = min(rollout.max_env_worker, CPU_RUNNERS if machine.cpu else GPU_RUNNERS)
    model = "explorer.rollout_model"
    return {
        "explorer.runner_per_model": runners,
        "explorer.max_timeout": _group_timeout(ajet),
        "explorer.max_retry_times": 0,  # our pool retries episodes and refills groups
        "explorer.eval_interval": min(common.test_freq, run.total_steps)
        if common.test_freq > 0
        else run.total_steps + 1,
        "explorer.eval_on_startup": common.val_before_train,
        f"{model}.engine_type": serving_engine(config, "trinity"),
        f"{model}.engine_num": 1 if machine.cpu else rollout.n_vllm_engine,
        f"{model}.tensor_parallel_size": 1 if machine.cpu else rollout.tensor_model_parallel_size,
        f"{model}.enable_openai_api": not machine.cpu,
        f"{model}.enable_history": False,
        f"{model}.dtype": machine.dtype(ajet.model.dtype),
        f"{model}.seed": rollout.seed,
    }


def _group_timeout(ajet: AjetConfig) -> int:
    """Seconds until Trinity gives a group up. Our pool ends episodes long before, but it waits for runners."""
    if ajet.task_runner.wrapper_type == "remote":
        return NO_TIMEOUT_S
    return int(ajet.rollout.episode_timeout * GROUP_SLACK * (1 + ajet.rollout.episode_retries)) + 60


def _trainer(config: Config, run: RunFacts, machine: Machine) -> Settings:
    common = config.ajet.trainer_common
    method = "memory" if machine.cpu else "nccl"
    return {
        "synchronizer.sync_method": method if run_mode(config) == "both" else "checkpoint",
        "synchronizer.sync_style": "fixed",
        "synchronizer.sync_interval": 1,
        "synchronizer.sync_offset": 0,
        "synchronizer.sync_timeout": int(TRAIN_TIMEOUT_S),
        "trainer.total_steps": run.total_steps,
        "trainer.save_interval": max(common.save_freq, 0),
        "trainer.save_hf_checkpoint": "always",
        "trainer.trainer_strategy": "fsdp2",
        "trainer.grad_clip": common.optim.clip_grad,
        "trainer.use_dynamic_bsz": True,
        # sorting rows by length would move them between a step's updates
        "trainer.balance_batch": common.mini_batch_num == 1,
        "trainer.use_remove_padding": machine.flash_attention and not machine.cpu,
        "trainer.max_token_len_per_gpu": micro_tokens(config),
        "trainer.ulysses_sequence_parallel_size": common.ulysses_sequence_parallel_size,
        "trainer.param_offload": common.fsdp_config.param_offload,
        "trainer.optimizer_offload": common.fsdp_config.optimizer_offload,
        "trainer.max_checkpoints_to_keep": common.keep_checkpoints,
    }
