"""Which keys have an effect, and where: the one list of those that don't.

A key of the schema is read on every backbone and with every engine unless it is listed here. `notes` names the keys
that a YAML sets in vain; `ajet validate` prints them and a run logs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ajet.config.kinds import BackboneName, EngineName
from ajet.config.root import AjetConfig, Config
from ajet.config.section import Section

IGNORED_BLOCKS = ("hydra", "defaults")
"""Top-level blocks that old files carry; a config is complete without them."""

FOR_OLD_FILES: Mapping[str, str] = {
    "context_tracker.alien_llm_model": "ajet.helper names the helper model",
    "context_tracker.alien_llm_response_length": "ajet.helper names the helper model",
    "context_tracker.fix_retokenization_drift": "sampled token ids are kept as sampled",
    "context_tracker.timeline_merging_policy": "conversations are always merged exactly, token by token",
    "debug.debug_vllm_port": "vLLM gets a free port",
    "enable_experimental_interchange_server": "the gateway is always available",
    "execute_test": "benchmarks/ measures what a run reaches",
    "execute_testing_lambda": "benchmarks/ measures what a run reaches",
    "interchange": "the gateway is always available",
    "interchange_server": "the gateway is always available",
    "judge": "the judge is set in task_judge",
    "rollout.ajet_action_when_overflow": "failure_reward.overflow says what becomes of overlong episodes",
    "rollout.log_prob_micro_batch_size": "batches are split by tokens",
    "rollout.log_prob_micro_batch_size_per_gpu": "batches are split by tokens",
    "rollout.mode": "model calls are always asynchronous",
    "rollout.multi_turn.expected_steps": "nothing depends on it",
    "rollout.step_skip_action": "what a step of an environment skips is the workflow's own choice",
    "task_reader.env_service.env_action_preference": "the environment says how the agent should act",
    "task_judge.alien_llm_model": "ajet.helper names the helper model",
    "task_judge.alien_llm_response_length": "ajet.helper names the helper model",
    "task_reader.data_generation.document_reader.languages": "text is read as it is stored",
    **{
        f"task_reader.data_generation.query_reader.{key}": "only the training tasks are examples"
        for key in (
            "jsonl_dataset_file.validation",
            "dataset_file.validation",
            "huggingface_dat_repo.validation_split",
        )
    },
    **{
        f"task_reader.data_generation.deduplication_filter.params.{key}": "texts are compared by their words"
        for key in ("db_path", "model", "api_key", "base_url")
    },
    "task_reader.tracing.alien_llm_response_length": "a filter's params.max_tokens says it",
    "task_reader.feedback_tracing.alien_llm_response_length": "a filter's params.max_tokens says it",
    "task_runner.llm_infer_submit_method": "model calls are always asynchronous",
    "trainer_common.algorithm.per_agent_groups": "agents are always compared with agents of the same name",
    "trainer_common.log_prob_micro_batch_size": "batches are split by tokens",
    "trainer_common.log_prob_micro_batch_size_per_gpu": "batches are split by tokens",
}
"""Keys (or groups, below `ajet`) that are accepted for old files, without effect, and why."""

FORMER_NAMES: Mapping[str, str] = {
    "rollout.agent_madness_reward": "failure_reward.abnormal",
    "rollout.name": "rollout.engine",
    "task_reader.dataset_file": "task_reader.jsonl_dataset_file",
    "task_reader.feedback_tracing": "task_reader.tracing",
}
"""Keys that the schema itself copies to their present names."""

FOR_USER_CODE = ("task_reader.options", "user")
"""Keys for the user's own classes to read."""

_ALL: tuple[BackboneName, ...] = ("debug", "local", "verl", "trinity", "prompt")
_TRAINING: tuple[BackboneName, ...] = ("local", "verl", "trinity")
_RAY: tuple[BackboneName, ...] = ("verl", "trinity")
_OWN: tuple[BackboneName, ...] = ("debug", "local", "prompt")

ONLY_ON: Mapping[str, tuple[BackboneName, ...]] = {
    "data.train_batch_size": _TRAINING,
    "debug": ("debug",),
    "model.attn": (*_OWN, "verl"),
    "model.lora": _TRAINING,
    "prompt_tuning": ("prompt",),
    "prompt_tuning.templates": _ALL,
    "rollout.deterministic": _OWN,
    "rollout.gamma": _TRAINING,
    "rollout.kv_cache_gb": _OWN,
    "rollout.max_num_seqs": (*_OWN, "verl"),
    "rollout.max_staleness": ("local",),
    "rollout.weights_folder": ("local",),
    "rollout.n_vllm_engine": (*_OWN, "trinity"),
    "rollout.remote": _OWN,
    "rollout.scripted_replies": _OWN,
    "rollout.vllm": _OWN,
    "task_judge.max_error_share": (*_TRAINING, "prompt"),
    "task_reader.shuffle": _TRAINING,
    "trainer_common": _TRAINING,
    "trainer_common.algorithm.rollout_correction": ("local", "verl"),
    "trainer_common.algorithm.rollout_correction.mode": _TRAINING,
    "task_reader.curriculum": ("local",),
    "task_reader.curriculum.enabled": _TRAINING,
    "trainer_common.algorithm.replay": ("local",),
    "trainer_common.algorithm.replay.groups": _TRAINING,
    "trainer_common.algorithm.distillation": ("local",),
    "trainer_common.algorithm.distillation.teacher": _TRAINING,
    "trainer_common.compile": ("local",),
    "trainer_common.early_stop": ("local",),
    "trainer_common.early_stop.patience": _TRAINING,
    "trainer_common.early_stop.target": _TRAINING,
    "trainer_common.fsdp_config": _RAY,
    "trainer_common.fsdp_config.optimizer_offload": _TRAINING,
    "trainer_common.gpu": ("local",),
    "trainer_common.gradient_checkpointing": ("local", "verl"),
    "trainer_common.kl_adaptive.horizon": ("local",),
    "trainer_common.keep_best": ("local",),
    "trainer_common.logger": _ALL,
    "trainer_common.logits_chunk": ("local",),
    "trainer_common.logits_kernel": ("local",),
    "trainer_common.max_tokens_per_step": ("local",),
    "trainer_common.n_gpus_per_node": _RAY,
    "trainer_common.nnodes": _RAY,
    "trainer_common.save_trajectory_as_json_file": _ALL,
    "trainer_common.val_pass_n": _ALL,
    "trainer_common.ulysses_sequence_parallel_size": _RAY,
    "trinity": ("trinity",),
    "verl": ("verl",),
}
"""The backbones on which a key (or every key of a group) has an effect; a key's own entry overrides its group's."""

OF_ONE_BACKBONE = ("debug", "trinity", "verl")
"""Groups that carry the name of a backbone: a YAML for several backbones has them, and expects nothing elsewhere."""

ONLY_WITH_ENGINE: Mapping[str, tuple[EngineName, ...]] = {
    "rollout.kv_cache_gb": ("torch",),
    "rollout.n_vllm_engine": ("vllm",),
    "rollout.remote": ("remote", "sglang"),
    "rollout.scripted_replies": ("scripted",),
    "rollout.tensor_model_parallel_size": ("vllm",),
    "rollout.vllm": ("vllm",),
}
"""On `debug`, `local` and `prompt`, which run the engine themselves: the engines with which a key has an effect."""


def listed(table: Mapping[str, Any], key: str) -> str | None:
    """The key itself, or the nearest group above it, that is in `table`."""
    parts = key.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in table), None)


def entry(table: Mapping[str, Any], key: str) -> Any:
    """What `table` says about a key, or else about the nearest group above it; None if it says nothing."""
    found = listed(table, key)
    return None if found is None else table[found]


def has_effect(key: str, backbone: BackboneName, engine: EngineName) -> bool:
    """Whether a key (below `ajet`) has an effect on this backbone with this engine."""
    backbones = entry(ONLY_ON, key) or _ALL
    engines = entry(ONLY_WITH_ENGINE, key)
    return backbone in backbones and (engines is None or backbone not in _OWN or engine in engines)


def given_keys(section: Section, prefix: str = "") -> Iterator[str]:
    """The keys that the user set, in the file or on the command line."""
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from given_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def without_effect(ajet: AjetConfig, also: Sequence[BackboneName] = ()) -> tuple[list[str], list[str]]:
    """Of what the user set: keys or groups accepted for old files, and keys without effect on this backbone, nor on
    those that the same command runs `also`."""
    backbone: BackboneName = ajet.backbone or "local"
    old, elsewhere = [], []
    for key in given_keys(ajet):
        if found := listed(FOR_OLD_FILES, key):
            old.append(found)
        elif key.partition(".")[0] in OF_ONE_BACKBONE:
            continue
        elif not any(
            has_effect(entry(FORMER_NAMES, key) or key, each, ajet.rollout.engine) for each in (backbone, *also)
        ):
            elsewhere.append(key)
    return list(dict.fromkeys(old)), elsewhere


def notes(config: Config, also: Sequence[BackboneName] = ()) -> Iterator[str]:
    """What the user wrote in vain: at most one line of each kind. `also`: other backbones that the command runs."""
    ajet = config.ajet
    if config.ignored_blocks:
        yield f"ignored: {', '.join(f'{name}:' for name in config.ignored_blocks)} (a config is complete without)"
    old, elsewhere = without_effect(ajet, also)
    if old:
        reasons = "; ".join(dict.fromkeys(FOR_OLD_FILES[key] for key in old))
        yield f"accepted for old files, without effect: {grouped(old)} ({reasons})"
    if elsewhere:
        backbone = ajet.backbone or "local"
        where = f"{backbone} and the {ajet.rollout.engine} engine" if backbone in _OWN else backbone
        yield f"without effect on {where}: {grouped(elsewhere)}"
    val, wanted = ajet.rollout.val_kwargs, ajet.trainer_common.val_pass_n or 1
    sampled = wanted > 1 if val.do_sample is None else val.do_sample
    if val.temperature and not sampled:
        yield (
            f"rollout.val_kwargs.temperature {val.temperature:g} has no effect: validation is greedy unless "
            "val_kwargs.do_sample is true"
        )
    if wanted > 1 and (not sampled or val.temperature == 0):
        why = "do_sample is false" if val.do_sample is False else "temperature is 0"
        yield f"trainer_common.val_pass_n {wanted} has no effect: validation is greedy, because val_kwargs.{why}"


def grouped(keys: list[str]) -> str:
    """Keys in short: those of one group together, as in `trainer_common.{nnodes, optim.lr}`."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        group, _, rest = key.partition(".")
        groups.setdefault(group, []).append(rest)
    parts = []
    for group, members in groups.items():
        if members == [""]:
            parts.append(group)
        elif len(members) == 1:
            parts.append(f"{group}.{members[0]}")
        else:
            parts.append(f"{group}.{{{', '.join(members)}}}")
    return ", ".join(parts)
