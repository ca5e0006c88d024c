"""Settings that are valid one by one, but contradict each other: one table of rules.

The rules about episodes and engines stand in `episode_contradictions`, those about training here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ajet.config.episode_contradictions import ENGINE_RULES, EPISODE_RULES
from ajet.config.judges import LlmJudgeConfig, OpenJudgeConfig, RubricsConfig
from ajet.config.kinds import BackboneName
from ajet.config.problems import Condition, Contradiction, ContradictionRule
from ajet.config.root import AjetConfig
from ajet.config.tuning import AlgorithmConfig
from ajet.schema.chat import GREEDY_BELOW

TRAINING = ("local", "verl", "trinity")
"""The backbones that train weights."""
TRAINABLE_ENGINES = ("torch", "vllm", "sglang")
"""The engines whose model they can train. On verl and Trinity, `torch` (the default) stands for vLLM."""
ALGORITHM = "trainer_common.algorithm"


def contradictions(ajet: AjetConfig, backbone: BackboneName) -> Iterator[Contradiction]:
    """Everything that contradicts itself when `backbone` runs it."""
    ajet = ajet.model_copy(update={"backbone": backbone})
    for rule in RULES:
        if (rule.on is None or backbone in rule.on) and rule.when(ajet):
            yield rule.found(ajet)
    yield from _scores(ajet)


def _replay(key: str, when: Condition, why: str) -> ContradictionRule:
    return ContradictionRule(
        (key, f"{ALGORITHM}.replay.groups"),
        lambda a: _algorithm(a).replay.groups and when(a),
        f"{ALGORITHM}.replay.groups trains replies of earlier policies, and {why}",
        f"set replay.groups: 0, or change {key.removeprefix(ALGORITHM + '.')}",
    )


def _early_stop(name: str, when: Condition) -> ContradictionRule:
    return ContradictionRule(
        ("trainer_common.test_freq", f"trainer_common.early_stop.{name}"),
        lambda a: when(a) and a.trainer_common.test_freq <= 0,
        f"early_stop.{name} looks at validations, and with test_freq = {{trainer_common.test_freq}} there are none",
        "set test_freq to 1 or more, or leave early_stop out",
    )


def _resampling(key: str, when: Condition, why: str) -> ContradictionRule:
    return ContradictionRule(
        (key, f"{ALGORITHM}.zero_variance_groups"),
        lambda a: _algorithm(a).zero_variance_groups == "resample" and when(a),
        f"zero_variance_groups: resample runs further tasks in place of groups that teach nothing, and {why}",
        "leave zero_variance_groups out",
    )


def _unused_by_pass_at_k(key: str, when: Condition) -> ContradictionRule:
    return ContradictionRule(
        (key, f"{ALGORITHM}.adv_estimator"),
        lambda a: _passes_at_k(a) and when(a),
        f"pass_at_k asks only whether an episode succeeded, so {key} would do nothing",
        f"leave {key} out, or choose another adv_estimator",
    )


def _algorithm(a: AjetConfig) -> AlgorithmConfig:
    return a.trainer_common.algorithm


def _imitates(a: AjetConfig) -> bool:
    return _algorithm(a).policy_loss == "sft"


def _has_teacher(a: AjetConfig) -> bool:
    return _algorithm(a).distillation.teacher is not None


def _compares_over_batch(a: AjetConfig) -> bool:
    return _algorithm(a).adv_estimator == "reinforce_plus_plus"


def _takes_kl_from_reward(a: AjetConfig) -> bool:
    return _algorithm(a).use_kl_in_reward


def _passes_at_k(a: AjetConfig) -> bool:
    return _algorithm(a).adv_estimator == "pass_at_k" and not _imitates(a)


def _longest(a: AjetConfig) -> int:
    return a.data.max_prompt_length + a.data.max_response_length


def _has_kl_term(a: AjetConfig) -> bool:
    trainer = a.trainer_common
    return bool(trainer.use_kl_loss and trainer.kl_loss_coef) and not _takes_kl_from_reward(a) and not _imitates(a)


def _asks_remote_teacher(a: AjetConfig) -> bool:
    return (_algorithm(a).distillation.teacher or "").startswith(("http://", "https://"))


def _taught_alone(a: AjetConfig) -> bool:
    return _has_teacher(a) and _algorithm(a).distillation.mode == "alone"


def _compares_episodes(a: AjetConfig) -> bool:
    return not (_compares_over_batch(a) or _imitates(a) or _taught_alone(a))


def _has_price(a: AjetConfig) -> bool:
    ours, helpers = a.prompt_tuning.budget.price_per_million, a.helper.price_per_million
    return any((ours.input, ours.output, helpers.input, helpers.output))


def _scores(ajet: AjetConfig) -> Iterator[Contradiction]:
    """The rule for every judge's range of scores: it stands outside the table, as parts have the user's names."""
    judge = ajet.task_judge
    for above, group in (("", judge), *((f"parts.{name}.", part) for name, part in judge.parts.items())):
        for kind in ("llm_judge", "rubrics_auto_grader", "openjudge"):
            block: LlmJudgeConfig | RubricsConfig | OpenJudgeConfig | None = group[kind]
            if block is not None and block.min_score >= block.max_score:
                yield Contradiction(
                    (f"task_judge.{above}{kind}.min_score", f"task_judge.{above}{kind}.max_score"),
                    f"min_score ({block.min_score:g}) is not below max_score ({block.max_score:g})",
                    "swap them" if block.min_score > block.max_score else "a score between them must be possible",
                )


DATA_RULES = (
    ContradictionRule(
        ("rollout.max_model_len", "data.max_response_length", "data.max_prompt_length"),
        lambda a: _longest(a) > a.rollout.max_model_len,
        lambda a: (
            f"data.max_prompt_length ({a.data.max_prompt_length}) + data.max_response_length "
            f"({a.data.max_response_length}) = {_longest(a)} is more than rollout.max_model_len "
            f"({a.rollout.max_model_len})"
        ),
        lambda a: f"raise rollout.max_model_len to {_longest(a)}, or lower one of the two lengths",
    ),
    ContradictionRule(
        ("rollout.min_group_size", "rollout.num_repeat"),
        lambda a: (a.rollout.min_group_size or 0) > a.rollout.num_repeat,
        "a group has num_repeat = {rollout.num_repeat} episodes and so never reaches min_group_size = "
        "{rollout.min_group_size}",
        "lower min_group_size to {rollout.num_repeat} or less, or leave it out",
    ),
    ContradictionRule(
        ("trainer_common.mini_batch_num", "data.train_batch_size"),
        lambda a: a.trainer_common.mini_batch_num > a.data.train_batch_size,
        "{data.train_batch_size} tasks per step (data.train_batch_size) can't be split into mini_batch_num = "
        "{trainer_common.mini_batch_num} mini-batches",
        "lower mini_batch_num to {data.train_batch_size} or less",
    ),
    ContradictionRule(
        ("task_reader.shuffle", "task_reader.curriculum.enabled"),
        lambda a: a.task_reader.curriculum.enabled and not a.task_reader.shuffle,
        "tasks can't be in file order and be chosen by their solve rates",
        "leave shuffle out, or set curriculum.enabled: false",
    ),
    ContradictionRule(
        ("task_reader.curriculum.enabled", f"{ALGORITHM}.sft.demonstrations"),
        lambda a: a.task_reader.curriculum.enabled and _imitates(a) and _algorithm(a).sft.demonstrations is not None,
        "recorded conversations are imitated, so no task is tried and there are no solve rates",
        "set curriculum.enabled: false",
    ),
    ContradictionRule(
        ("gateway.key_ttl", "rollout.episode_timeout"),
        lambda a: a.gateway.key_ttl is not None and a.gateway.key_ttl < a.rollout.episode_timeout,
        "an episode may take {rollout.episode_timeout:g} s (rollout.episode_timeout), but its key expires after "
        "{gateway.key_ttl:g} s (gateway.key_ttl): its later model calls would be refused",
        "leave gateway.key_ttl out, or raise it",
    ),
    ContradictionRule(
        ("helper.base_url", "helper.api_key"),
        lambda a: (
            a.helper.model is None
            and a.helper.embedding_model is None
            and (a.helper.base_url is not None or a.helper.api_key is not None)
        ),
        "helper has an endpoint but no model, so it would never be used",
        "set helper.model (or helper.embedding_model) to the model's name at that endpoint",
    ),
    ContradictionRule(
        ("helper.max_cost", "helper.price_per_million"),
        lambda a: (
            a.helper.max_cost is not None and a.helper.price_per_million.input == a.helper.price_per_million.output == 0
        ),
        "helper.max_cost needs prices: at a price of 0 every call is free",
        "set helper.price_per_million.input and .output to what a million tokens cost",
    ),
)

UPDATE_RULES = (
    ContradictionRule(
        ("trainer_common.optim.lr_warmup_ratio", "trainer_common.optim.lr_warmup_steps"),
        lambda a: a.trainer_common.optim.lr_warmup_steps and a.trainer_common.optim.lr_warmup_ratio,
        "the warm-up has two lengths: lr_warmup_steps = {trainer_common.optim.lr_warmup_steps} and "
        "lr_warmup_ratio = {trainer_common.optim.lr_warmup_ratio:g}",
        "set one of them",
    ),
    ContradictionRule(
        ("trainer_common.optim.state_bits", "trainer_common.fsdp_config.optimizer_offload"),
        lambda a: a.trainer_common.optim.state_bits == 8 and a.trainer_common.fsdp_config.optimizer_offload,
        "in main memory the optimiser's state has 32 bits, and optim.state_bits is 8",
        "set one of them: 8 bits are faster, main memory saves more",
        on=("local",),
    ),
    ContradictionRule(
        ("trainer_common.compile", "rollout.deterministic"),
        lambda a: a.trainer_common.compile and a.rollout.deterministic,
        "what the compiler makes depends on the first batch that it sees, so a resumed run doesn't repeat bit for bit",
        "leave one of them out",
        on=("local",),
    ),
    ContradictionRule(
        ("rollout.enable_oversample", "rollout.deterministic"),
        lambda a: a.rollout.enable_oversample and a.rollout.deterministic,
        "time decides which surplus episodes end before they are stopped, so a run doesn't repeat bit for bit",
        "leave one of them out",
        on=("local",),
    ),
    ContradictionRule(
        ("trainer_common.logits_kernel", f"{ALGORITHM}.entropy_coef"),
        lambda a: a.trainer_common.logits_kernel == "liger" and _algorithm(a).entropy_coef,
        "Liger's kernel gives no entropy, and entropy_coef is {trainer_common.algorithm.entropy_coef:g}",
        "set logits_kernel: chunks, or entropy_coef: 0",
        on=("local",),
    ),
    ContradictionRule(
        ("trainer_common.kl_reference_sync", "model.lora.enabled"),
        lambda a: a.trainer_common.kl_reference_sync and a.model.lora.enabled,
        "with LoRA the reference of the KL divergence is the base model, which the trained weights can't become",
        "set kl_reference_sync: 0, or train whole weights",
    ),
    ContradictionRule(
        ("trainer_common.kl_adaptive.target", "trainer_common.kl_loss_coef", "trainer_common.use_kl_loss"),
        lambda a: a.trainer_common.kl_adaptive.target is not None and not _has_kl_term(a),
        "kl_adaptive changes the weight of the KL term, and there is none",
        "set use_kl_loss: true, use_kl_in_reward: false and a kl_loss_coef above 0 to start from",
    ),
    _early_stop("target", lambda a: a.trainer_common.early_stop.target is not None),
    _early_stop(
        "patience",
        lambda a: a.trainer_common.early_stop.patience is not None and a.trainer_common.early_stop.target is None,
    ),
)

ALGORITHM_RULES = (
    ContradictionRule(
        (f"{ALGORITHM}.rollout_correction.low", f"{ALGORITHM}.rollout_correction.high"),
        lambda a: _algorithm(a).rollout_correction.low > _algorithm(a).rollout_correction.high,
        "no ratio lies between low ({trainer_common.algorithm.rollout_correction.low:g}) and high "
        "({trainer_common.algorithm.rollout_correction.high:g})",
        "swap them",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.recipe", f"{ALGORITHM}.distillation.teacher"),
        lambda a: _algorithm(a).recipe == "distill" and not _has_teacher(a),
        "recipe: distill learns from a teacher, and there is none",
        "set algorithm.distillation.teacher to a model, or to the address of a vLLM server",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.distillation.teacher", f"{ALGORITHM}.policy_loss"),
        lambda a: _has_teacher(a) and _imitates(a),
        "a teacher's opinion is an advantage, and policy_loss: sft uses none",
        "set policy_loss: ppo",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.distillation.teacher", "rollout.temperature"),
        lambda a: _asks_remote_teacher(a) and a.rollout.temperature != 1,
        "a server gives log-probabilities of temperature 1, and rollout.temperature is {rollout.temperature:g}",
        "set rollout.temperature: 1.0",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.rollout_correction.mode", f"{ALGORITHM}.policy_loss"),
        lambda a: (
            _algorithm(a).policy_loss in ("dppo_tv", "dppo_kl")
            and _algorithm(a).rollout_correction.mode in ("sequence_tis", "masked")
        ),
        "the ratio of {trainer_common.algorithm.policy_loss} is to the sampler, so there is nothing left to correct",
        "leave rollout_correction out, or choose another policy_loss",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.use_kl_in_reward", f"{ALGORITHM}.policy_loss", f"{ALGORITHM}.distillation.mode"),
        lambda a: _takes_kl_from_reward(a) and (_imitates(a) or _taught_alone(a)),
        "the KL divergence would be taken off rewards, and what is imitated or taught alone uses none",
        "set use_kl_in_reward: false, and use_kl_loss: true beside a teacher",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.sft.demonstrations", f"{ALGORITHM}.policy_loss"),
        lambda a: _algorithm(a).sft.demonstrations is not None and not _imitates(a),
        "nothing would be imitated: policy_loss {trainer_common.algorithm.policy_loss} learns from rewards",
        "set policy_loss: sft, or leave sft.demonstrations out",
        on=("local",),
    ),
    ContradictionRule(
        (f"{ALGORITHM}.sequence_mask", f"{ALGORITHM}.policy_loss"),
        lambda a: _algorithm(a).sequence_mask is not None and _imitates(a),
        "the sequence mask leaves out what has a negative advantage, and policy_loss: sft uses no advantages",
        "leave sequence_mask out",
    ),
    _replay(
        f"{ALGORITHM}.rollout_correction.mode",
        lambda a: _algorithm(a).rollout_correction.mode == "none",
        "without a correction, replayed tokens would count as if the present policy had sampled them",
    ),
    _replay(
        f"{ALGORITHM}.policy_loss",
        _imitates,
        "policy_loss: sft has no probability ratios",
    ),
    _replay(
        f"{ALGORITHM}.adv_estimator",
        _compares_over_batch,
        "reinforce_plus_plus compares over the batch, and would compare rewards of several policies",
    ),
    _replay(
        f"{ALGORITHM}.use_kl_in_reward",
        _takes_kl_from_reward,
        "the divergence of the present policy can't be read off replies of an earlier one",
    ),
    _replay(
        "rollout.top_p",
        lambda a: a.rollout.top_p < 1,
        "with top_p below 1, the recorded probabilities are not the sampler's",
    ),
    _replay(
        "rollout.top_k",
        lambda a: a.rollout.top_k > 0,
        "with top_k, the recorded probabilities are not the sampler's",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.baseline", "rollout.gamma"),
        lambda a: _algorithm(a).baseline == "episode" and a.rollout.gamma < 1,
        "the episode baseline compares undiscounted returns, and rollout.gamma is {rollout.gamma:g}",
        "set baseline: turn (which `auto` is here) or state, or rollout.gamma: 1",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.baseline", f"{ALGORITHM}.adv_estimator"),
        lambda a: _algorithm(a).baseline == "state" and _algorithm(a).adv_estimator.startswith("reinforce_plus_plus"),
        "states are compared within a group, and {trainer_common.algorithm.adv_estimator} compares over the batch",
        "set adv_estimator: grpo, drgrpo or rloo, or another baseline",
    ),
    _resampling(
        f"{ALGORITHM}.adv_estimator",
        _compares_over_batch,
        "reinforce_plus_plus trains groups whose rewards are all equal, too",
    ),
    _resampling(
        f"{ALGORITHM}.policy_loss",
        _imitates,
        "policy_loss: sft compares no rewards",
    ),
    _resampling(
        f"{ALGORITHM}.distillation.teacher",
        _has_teacher,
        "a teacher's opinion is trained whatever the rewards",
    ),
    ContradictionRule(
        (f"{ALGORITHM}.pass_k", "rollout.num_repeat"),
        lambda a: _passes_at_k(a) and _algorithm(a).pass_k >= a.rollout.num_repeat,
        "pass_k = {trainer_common.algorithm.pass_k} is not below rollout.num_repeat = {rollout.num_repeat}: "
        "where all episodes together are the group, nothing is compared",
        "set pass_k below num_repeat",
    ),
    _unused_by_pass_at_k(f"{ALGORITHM}.baseline", lambda a: _algorithm(a).baseline in ("turn", "state")),
    _unused_by_pass_at_k("rollout.gamma", lambda a: a.rollout.gamma < 1),
    _unused_by_pass_at_k(f"{ALGORITHM}.use_kl_in_reward", _takes_kl_from_reward),
    _unused_by_pass_at_k(f"{ALGORITHM}.overlong.buffer", lambda a: _algorithm(a).overlong.buffer > 0),
    ContradictionRule(
        ("rollout.num_repeat", f"{ALGORITHM}.adv_estimator"),
        lambda a: _compares_episodes(a) and a.rollout.num_repeat < 2,
        "{trainer_common.algorithm.adv_estimator} compares the episodes of one task, and rollout.num_repeat is "
        "1: nothing would be learnt",
        "set rollout.num_repeat to 2 or more, or adv_estimator: reinforce_plus_plus",
        on=TRAINING,
    ),
    ContradictionRule(
        ("rollout.engine", "backbone"),
        lambda a: a.rollout.engine not in TRAINABLE_ENGINES,
        "the {backbone} backbone can't train a model that is served by rollout.engine: {rollout.engine}",
        f"set rollout.engine: {' or '.join(TRAINABLE_ENGINES)}, or use --backbone=debug, which doesn't train",
        on=TRAINING,
    ),
    ContradictionRule(
        ("rollout.temperature",),
        lambda a: a.rollout.temperature < GREEDY_BELOW,
        "at rollout.temperature {rollout.temperature:g} all episodes of a task are the same, so nothing would "
        "be learnt",
        "set a temperature above 0",
        on=TRAINING,
    ),
)

PROMPT_RULES = (
    ContradictionRule(
        ("prompt_tuning.templates", "backbone"),
        lambda a: not a.prompt_tuning.templates,
        "the prompt backbone tunes prompt templates, and this config has none",
        'write, for example, prompt_tuning: {{templates: {{solver: "Solve: {{question}}"}}}}, and call '
        'tuner.prompt("solver").format(question=…) in the workflow',
        on=("prompt",),
    ),
    ContradictionRule(
        ("helper.model", "prompt_tuning.proposer"),
        lambda a: a.prompt_tuning.proposer == "helper" and a.helper.model is None,
        "the helper model writes the proposals, and none is named",
        "set ajet.helper.model and ajet.helper.base_url, or prompt_tuning.proposer: tuned",
        on=("prompt",),
    ),
    ContradictionRule(
        ("prompt_tuning.budget.money",),
        lambda a: a.prompt_tuning.budget.money is not None and not _has_price(a),
        "money is limited, and no price is known, so nothing would ever be counted",
        "set prompt_tuning.budget.price_per_million, or ajet.helper.price_per_million",
        on=("prompt",),
    ),
)

RULES: tuple[ContradictionRule, ...] = (
    *EPISODE_RULES,
    *ENGINE_RULES,
    *DATA_RULES,
    *UPDATE_RULES,
    *ALGORITHM_RULES,
    *PROMPT_RULES,
)
