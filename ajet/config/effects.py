"""Which keys have an effect, and where: the one list of those that don't.

A key of the schema is read on every backbone, with every engine and whatever the other keys say, unless it is listed
here. `notes` names the keys that a YAML sets in vain; `ajet validate` prints them and a run logs them.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ajet.config.contradictions import TRAINING
from ajet.config.kinds import RECIPES, BackboneName, EngineName
from ajet.config.old_keys import Translated
from ajet.config.root import AjetConfig, Config
from ajet.config.section import Section

IGNORED_BLOCKS = ("hydra", "defaults")
"""Top-level blocks that old files carry; a config is complete without them."""

_ALL: tuple[BackboneName, ...] = ("debug", "local", "verl", "trinity", "prompt")
_RAY: tuple[BackboneName, ...] = ("verl", "trinity")
_OWN: tuple[BackboneName, ...] = ("debug", "local", "prompt")

ONLY_ON: Mapping[str, tuple[BackboneName, ...]] = {
    "data.train_batch_size": TRAINING,
    "debug": ("debug",),
    "model.attn": (*_OWN, "verl"),
    "model.lora": TRAINING,
    "prompt_tuning": ("prompt",),
    "prompt_tuning.templates": _ALL,
    "rollout.deterministic": _OWN,
    "rollout.gamma": TRAINING,
    "rollout.kv_cache_gb": _OWN,
    "rollout.max_num_seqs": (*_OWN, "verl"),
    "rollout.max_staleness": ("local",),
    "rollout.weights_folder": ("local",),
    "rollout.n_vllm_engine": (*_OWN, "trinity"),
    "rollout.remote": _OWN,
    "rollout.routing_replay": _OWN,
    "rollout.scripted_replies": _OWN,
    "rollout.vllm": _OWN,
    "task_judge.max_error_share": (*TRAINING, "prompt"),
    "task_reader.shuffle": TRAINING,
    "trainer_common": TRAINING,
    "trainer_common.algorithm.rollout_correction": ("local", "verl"),
    "trainer_common.algorithm.rollout_correction.mode": TRAINING,
    "task_reader.curriculum": ("local",),
    "task_reader.curriculum.enabled": TRAINING,
    "trainer_common.algorithm.replay": ("local",),
    "trainer_common.algorithm.replay.groups": TRAINING,
    "trainer_common.algorithm.distillation": ("local",),
    "trainer_common.algorithm.distillation.teacher": TRAINING,
    "trainer_common.compile": ("local",),
    "trainer_common.early_stop": ("local",),
    "trainer_common.early_stop.patience": TRAINING,
    "trainer_common.early_stop.target": TRAINING,
    "trainer_common.fsdp_config": _RAY,
    "trainer_common.fsdp_config.optimizer_offload": TRAINING,
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


_ALGORITHM = "trainer_common.algorithm"
_OPTIM = "trainer_common.optim"
UNUSED_WHILE: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "model.lora": ("model.lora.enabled", operator.not_),
    "rollout.oversample_keep": ("rollout.enable_oversample", operator.not_),
    "rollout.submit_oversample_multiplier": ("rollout.enable_oversample", operator.not_),
    "task_reader.curriculum": ("task_reader.curriculum.enabled", operator.not_),
    f"{_ALGORITHM}.distillation": (f"{_ALGORITHM}.distillation.teacher", operator.not_),
    f"{_ALGORITHM}.overlong.penalty": (f"{_ALGORITHM}.overlong.buffer", operator.not_),
    f"{_ALGORITHM}.pass_k": (f"{_ALGORITHM}.adv_estimator", lambda name: name != "pass_at_k"),
    f"{_ALGORITHM}.replay": (f"{_ALGORITHM}.replay.groups", operator.not_),
    f"{_ALGORITHM}.sft": (f"{_ALGORITHM}.policy_loss", lambda name: name != "sft"),
    f"{_ALGORITHM}.state_weight": (f"{_ALGORITHM}.baseline", lambda name: name != "state"),
    "trainer_common.kl_adaptive": ("trainer_common.kl_adaptive.target", operator.not_),
    f"{_OPTIM}.min_lr_ratio": (f"{_OPTIM}.lr_scheduler_type", lambda name: name == "constant"),
}
"""Keys, or every key of a group, that nothing uses while another one has such a value."""


def value_at(ajet: AjetConfig, path: Sequence[str]) -> Any:
    """The value of a key below `ajet`, or the group there; None below a group that isn't given."""
    value: Any = ajet
    for name in path:
        value = None if value is None else value[name]
    return value


def left_to_recipe(ajet: AjetConfig) -> dict[str, Any]:
    """The keys that the recipe sets because the user doesn't, with their values."""
    recipe = ajet.trainer_common.algorithm.recipe
    found: dict[str, Any] = {}
    for key, value in RECIPES[recipe].items() if recipe else ():
        *groups, name = key.split(".")
        if name not in value_at(ajet, groups).model_fields_set:
            found[key] = value(ajet) if callable(value) else value
    return found


def recipe_line(ajet: AjetConfig, recipe: str) -> str:
    """What the recipe sets, and what it leaves to the user, in one line."""
    given = left_to_recipe(ajet)
    line = ", ".join(f"{_short(key)}: {_written(value)}" for key, value in given.items())
    yours = [_short(key) for key in RECIPES[recipe] if key not in given]
    return f"{recipe} sets {line}" + (f"; yours: {', '.join(yours)}" if yours else "")


def _short(key: str) -> str:
    return key.removeprefix("trainer_common.").removeprefix("algorithm.")


def _written(value: Any) -> str:
    """As in a YAML."""
    return json.dumps(value).strip('"')


def entry(table: Mapping[str, Any], key: str) -> Any:
    """What `table` says about a key, or else about the nearest group above it; None if it says nothing."""
    parts = key.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((table[prefix] for prefix in prefixes if prefix in table), None)


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


def without_effect(config: Config, also: Sequence[BackboneName] = ()) -> list[str]:
    """List keys that the user set without effect on this backbone, nor on those that the same command runs `also`."""
    backbones, engine = (config.ajet.backbone or "local", *also), config.ajet.rollout.engine
    return [
        key
        for key in given_keys(config.ajet)
        if key.partition(".")[0] not in OF_ONE_BACKBONE
        and not any(has_effect(key, backbone, engine) for backbone in backbones)
    ]


def _switched_off(ajet: AjetConfig, elsewhere: Sequence[str]) -> dict[str, list[str]]:
    """What the user set and another key has switched off, by that key."""
    found: dict[str, list[str]] = {}
    for key in given_keys(ajet):
        switch, unused = entry(UNUSED_WHILE, key) or (key, None)
        if unused is not None and key not in (switch, *elsewhere) and unused(value_at(ajet, switch.split("."))):
            found.setdefault(switch, []).append(key)
    return found


def _old_keys(old: Translated) -> Iterator[str]:
    if old.ignored_blocks:
        yield f"ignored: {', '.join(f'{name}:' for name in old.ignored_blocks)} (a config is complete without)"
    if old.dropped:
        reasons = "; ".join(dict.fromkeys(old.dropped.values()))
        yield f"old keys that nothing reads: {', '.join(old.dropped)} ({reasons})"
    if old.renamed:
        yield f"old keys: {', '.join(f'{key} is now {name}' for key, name in old.renamed.items())}"
    if old.outvoted:
        yield f"old keys whose present name is given, too, and counts: {', '.join(old.outvoted)}"


def notes(config: Config, also: Sequence[BackboneName] = ()) -> Iterator[str]:
    """What the user wrote in vain: at most one line of each kind. `also`: other backbones that the command runs."""
    ajet = config.ajet
    yield from _old_keys(config.old_keys)
    if elsewhere := without_effect(config, also):
        backbone = ajet.backbone or "local"
        where = f"{backbone} and the {ajet.rollout.engine} engine" if backbone in _OWN else backbone
        yield f"without effect on {where}: {', '.join(elsewhere)}"
    for switch, keys in _switched_off(ajet, elsewhere).items():
        value = _written(value_at(ajet, switch.split(".")))
        yield f"without effect while {switch} is {value}: {', '.join(keys)}"
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
