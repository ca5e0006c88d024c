"""From our configuration to verl's: a pure function that needs neither verl nor torch.

`verl_settings` gives verl's keys (dotted) and their values; `check_honoured` says which of our keys verl can't honour.
Episodes, groups and credit stay ours, so verl's own counterparts are set to hand them through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ajet.backbone.ray.machine import Machine, Note
from ajet.backbone.ray.settings import flatten, micro_tokens, resolved_dtype, training_steps
from ajet.backbone.validation import validation_repeats
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config

ADVANTAGE_ESTIMATOR = "ajet_credit"
"""Name under which the plugin registers the estimator that hands our credit through."""
POLICY_LOSS_PREFIX = "ajet_"
"""Our losses are registered with verl under this prefix and our own names."""
CPU_ROLLOUT = "ajet_torch"
"""Name under which the plugin registers the embedded engine as a rollout server (CPU only)."""
PASSED_THROUGH = ("actor_rollout_ref", "ray_kwargs", "transfer_queue", "global_profiler")
"""Top-level blocks of a YAML or dotted overrides that are taken for verl's own."""

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the mapping must know of the run."""

    model_path: str
    """A folder with the model and its tokenizer."""
    checkpoint_dir: Path
    training_tasks: int
    resume: Literal["auto", "never"] | str = "auto"
    validates: bool = True
    """Whether there are validation tasks."""


def verl_settings(config: Config, run: RunFacts, machine: Machine) -> Settings:
    """All keys of verl's configuration that a run sets, the user's own pass-through last."""
    refused = [note for note in check_honoured(config, machine) if note.refused]
    if refused:
        raise ConfigError("the verl backbone can't honour:\n" + "\n".join(f"  {note}" for note in refused))
    settings: Settings = {}
    for part in (_data, _model, _actor, _optimiser, _reference, _rollout, _algorithm, _trainer, _services):
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
    return settings | dict(flatten(config.ajet.verl))


def check_honoured(config: Config, machine: Machine) -> list[Note]:
    """Our keys that verl can't honour: refused, or named once at start."""
    notes = [*_refusals(config), *_approximations(config, machine)]
    return notes


def _refusals(config: Config) -> Iterator[Note]:
    ajet = config.ajet
    common, algorithm = ajet.trainer_common, ajet.trainer_common.algorithm
    place = "ajet.trainer_common"
    if algorithm.use_kl_in_reward:
        yield Note(
            f"{place}.algorithm.use_kl_in_reward",
            "verl would subtract the KL from advantages that are already computed; set use_kl_loss: true instead",
            refused=True,
        )
    uses_terms = (common.use_kl_loss and common.kl_loss_coef) or algorithm.entropy_coef
    if uses_terms and algorithm.loss_norm != "token_mean":
        yield Note(
            f"{place}.algorithm.loss_norm",
            f"verl weighs the KL and entropy terms of all tokens alike, so {algorithm.loss_norm} needs "
            "use_kl_loss: false and entropy_coef: 0, or loss_norm: token_mean",
            refused=True,
        )
    if algorithm.policy_loss == "sft" and algorithm.sft.demonstrations is not None:
        yield Note(f"{place}.algorithm.sft.demonstrations", "recorded conversations train with `local`", refused=True)
    if common.optim.lr_scheduler_type == "linear":
        yield Note(f"{place}.optim.lr_scheduler_type", "verl knows `constant` and `cosine`", refused=True)
    if ajet.rollout.engine in ("remote", "scripted"):
        yield Note("ajet.rollout.engine", f"`{ajet.rollout.engine}` has no weights to train", refused=True)
    if ajet.rollout.temperature == 0:
        yield Note("ajet.rollout.temperature", "training at temperature 0 explores nothing, and verl divides by it",
                   refused=True)  # fmt: skip
    if ajet.model.lora.enabled and ajet.model.lora.dropout:
        yield Note("ajet.model.lora.dropout", "verl's adapters have no dropout: set it to 0", refused=True)


def _approximations(config: Config, machine: Machine) -> Iterator[Note]:
    ajet = config.ajet
    common = ajet.trainer_common
    if common.algorithm.policy_loss == "gspo":
        yield Note(
            "ajet.trainer_common.algorithm.policy_loss",
            "verl sees one row at a time: where an episode's agent gives several rows, gspo's ratio is each row's own",
        )
    if common.algorithm.zero_variance_groups == "resample":
        yield Note("ajet.trainer_common.algorithm.zero_variance_groups", "verl gets `skip`: no other tasks instead")
    if common.max_tokens_per_step != "auto":
        yield Note("ajet.trainer_common.max_tokens_per_step", "verl trains the whole batch: ignored")
    if common.keep_best and "keep_best" in common.model_fields_set:
        yield Note("ajet.trainer_common.keep_best", "verl keeps the newest checkpoints only")
    if ajet.rollout.deterministic:
        yield Note("ajet.rollout.deterministic", "requests reach verl's servers in no fixed order: ignored")
    if machine.cpu and ajet.rollout.engine != "torch":
        yield Note("ajet.rollout.engine", f"on CPU verl is served by the embedded engine, not {ajet.rollout.engine}")
    if not machine.cpu and ajet.rollout.engine == "torch":
        yield Note("ajet.rollout.engine", "on GPUs verl is served by vllm (or sglang), not by the embedded engine")
    gpus = common.nnodes * common.n_gpus_per_node
    engines = gpus // ajet.rollout.tensor_model_parallel_size
    given = "n_vllm_engine" in ajet.rollout.model_fields_set
    if given and not machine.cpu and ajet.rollout.n_vllm_engine != engines:
        yield Note("ajet.rollout.n_vllm_engine", f"verl starts GPUs / tensor_model_parallel_size = {engines} engines")


def _data(config: Config, run: RunFacts, machine: Machine) -> Settings:
    data = config.ajet.data
    return {
        "data.custom_cls.path": "pkg://ajet.backbone.ray.verl.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_files": "training",
        "data.val_files": "validation",
        "data.train_batch_size": data.train_batch_size,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        # the dataset itself gives tasks in our order, so that its position is all there is to save
        "data.shuffle": False,
        "data.validation_shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.seed": config.ajet.trainer_common.seed,
    }


def _model(config: Config, run: RunFacts, machine: Machine) -> Settings:
    model = config.ajet.model
    attention = model.attn
    if attention == "auto":
        attention = "flash_attention_2" if machine.flash_attention and not machine.cpu else "sdpa"
    settings: Settings = {
        "actor_rollout_ref.model.path": run.model_path,
        "actor_rollout_ref.model.override_config.attn_implementation": attention,
        "actor_rollout_ref.model.use_remove_padding": attention == "flash_attention_2",
        "actor_rollout_ref.model.enable_gradient_checkpointing": not machine.cpu,
    }
    if model.lora.enabled:
        settings |= {
            "actor_rollout_ref.model.lora_rank": model.lora.rank,
            "actor_rollout_ref.model.lora_alpha": model.lora.alpha,
            "actor_rollout_ref.model.target_modules": _adapted_layers(model.lora.target_modules),
            # vLLM and SGLang swap adapters; the embedded engine is given merged weights
            "actor_rollout_ref.model.lora.merge": machine.cpu,
        }
    return settings


def _adapted_layers(modules: Any) -> Any:
    return modules if isinstance(modules, str) else list(modules)


def _actor(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ajet = config.ajet
    common, algorithm = ajet.trainer_common, ajet.trainer_common.algorithm
    actor = "actor_rollout_ref.actor"
    return {
        f"{actor}.strategy": "fsdp2",
        # what the sampler corrects for each batch: rows vary, tasks don't
        f"{actor}.ppo_mini_batch_size": max(1, ajet.data.train_batch_size // common.mini_batch_num),
        f"{actor}.ppo_epochs": 1,
        f"{actor}.shuffle": False,
        f"{actor}.data_loader_seed": common.seed,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": micro_tokens(config),
        f"{actor}.policy_loss.loss_mode": POLICY_LOSS_PREFIX + algorithm.policy_loss,
        # our loss is a sum of weight x token loss and ignores this; KL and entropy, as terms and as metrics, are means
        f"{actor}.loss_agg_mode": "token-mean",
        f"{actor}.clip_ratio": algorithm.clip_low,
        f"{actor}.clip_ratio_low": algorithm.clip_low,
        f"{actor}.clip_ratio_high": algorithm.clip_high,
        f"{actor}.entropy_coeff": algorithm.entropy_coef,
        f"{actor}.use_kl_loss": common.use_kl_loss and common.kl_loss_coef > 0,
        f"{actor}.kl_loss_coef": common.kl_loss_coef,
        f"{actor}.kl_loss_type": common.kl_loss_type,
        f"{actor}.use_torch_compile": not machine.cpu,
        f"{actor}.ulysses_sequence_parallel_size": common.ulysses_sequence_parallel_size,
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        **_fsdp(config, machine, f"{actor}.fsdp_config"),
        f"{actor}.fsdp_config.param_offload": common.fsdp_config.param_offload,
        f"{actor}.fsdp_config.optimizer_offload": common.fsdp_config.optimizer_offload,
    }


def _fsdp(config: Config, machine: Machine, place: str) -> Settings:
    number = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    dtype = config.ajet.model.dtype
    return {
        # weights and optimiser state stay in float32; computation is in the model's number format
        f"{place}.model_dtype": "fp32",
        f"{place}.mixed_precision.param_dtype": number[resolved_dtype(dtype, machine)],
        f"{place}.use_torch_compile": not machine.cpu,
        f"{place}.seed": config.ajet.trainer_common.seed,
    }


def _optimiser(config: Config, run: RunFacts, machine: Machine) -> Settings:
    optim = config.ajet.trainer_common.optim
    settings = {f"actor_rollout_ref.actor.optim.{key}": value for key, value in optim.model_dump().items()}
    return settings | {"actor_rollout_ref.actor.grad_clip": optim.clip_grad}


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
    name = CPU_ROLLOUT if machine.cpu else ("vllm" if rollout.engine == "torch" else rollout.engine)
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
        f"{place}.dtype": resolved_dtype(config.ajet.model.dtype, machine),
        f"{place}.calculate_log_probs": True,
        f"{place}.logprobs_mode": "processed_logprobs",
        f"{place}.log_prob_use_dynamic_bsz": True,
        f"{place}.log_prob_max_token_len_per_gpu": micro_tokens(config),
        f"{place}.val_kwargs.temperature": rollout.val_kwargs.temperature if rollout.val_kwargs.do_sample else 0.0,
        f"{place}.val_kwargs.top_p": rollout.val_kwargs.top_p,
        f"{place}.val_kwargs.top_k": rollout.val_kwargs.top_k,
        f"{place}.val_kwargs.do_sample": rollout.val_kwargs.do_sample,
        f"{place}.val_kwargs.n": validation_repeats(config),
        f"{place}.agent.num_workers": config.ajet.trainer_common.nnodes,
        f"{place}.agent.agent_loop_manager_class": "ajet.backbone.ray.verl.manager.EpisodeManager",
    }


def _algorithm(config: Config, run: RunFacts, machine: Machine) -> Settings:
    correction = config.ajet.trainer_common.algorithm.rollout_correction
    corrects = correction.mode == "token_tis" and config.ajet.trainer_common.algorithm.policy_loss != "sft"
    return {
        "algorithm.adv_estimator": ADVANTAGE_ESTIMATOR,
        "algorithm.use_kl_in_reward": False,
        # discounting is part of our credit
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "algorithm.rollout_correction.rollout_is": "token" if corrects else None,
        "algorithm.rollout_correction.rollout_is_threshold": correction.cap,
        "algorithm.rollout_correction.bypass_mode": False,
    }


def _trainer(config: Config, run: RunFacts, machine: Machine) -> Settings:
    ajet = config.ajet
    common = ajet.trainer_common
    steps = training_steps(config, run.training_tasks)
    settings: Settings = {
        "trainer.project_name": ajet.project_name,
        "trainer.experiment_name": ajet.experiment_name,
        # `trainer_common.logger` is served by our own sinks, with the same names as with every backbone
        "trainer.logger": ["console", "file"],
        "trainer.nnodes": common.nnodes,
        "trainer.n_gpus_per_node": 1 if machine.cpu else common.n_gpus_per_node,
        "trainer.device": machine.platform,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": common.save_freq if common.save_freq > 0 else steps,
        "trainer.test_freq": common.test_freq if common.test_freq > 0 and run.validates else -1,
        "trainer.val_before_train": run.validates and (common.val_before_train or common.val_only),
        "trainer.val_only": common.val_only,
        "trainer.default_local_dir": str(run.checkpoint_dir),
        "trainer.max_actor_ckpt_to_keep": common.keep_checkpoints,
        "trainer.critic_warmup": 0,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.custom_sampler.path": "pkg://ajet.backbone.ray.verl.sampler",
        "trainer.v1.sampler.custom_sampler.name": _sampler(config),
        "trainer.resume_mode": {"auto": "auto", "never": "disable"}.get(run.resume, "resume_path"),
    }
    if settings["trainer.resume_mode"] == "resume_path":
        settings["trainer.resume_from_path"] = run.resume
    return settings


def _sampler(config: Config) -> str:
    mode = pass_through(config).get("trainer.v1.trainer_mode", "sync")
    return "EpisodeSampler" if mode == "sync" else "AsyncEpisodeSampler"


def _services(config: Config, run: RunFacts, machine: Machine) -> Settings:
    settings: Settings = {"reward.num_workers": 1, "transfer_queue.enable": True}
    if machine.cpu:
        settings["transfer_queue.backend.SimpleStorage.num_data_storage_units"] = 1
    return settings
