"""Settings that are valid one by one, but contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ajet.config.episode_contradictions import ENGINE_CHECKS, EPISODE_CHECKS
from ajet.config.judges import LlmJudgeConfig, OpenJudgeConfig, RubricsConfig
from ajet.config.kinds import BackboneName, EngineName
from ajet.config.problems import Contradiction
from ajet.config.root import AjetConfig
from ajet.schema.chat import GREEDY_BELOW

TRAINABLE_ENGINES: Mapping[BackboneName, tuple[EngineName, ...]] = {
    "local": ("torch", "vllm", "sglang"),
    "verl": ("torch", "vllm", "sglang"),
    "trinity": ("torch", "vllm", "sglang"),
}
"""The engines whose model a backbone can train. On verl and Trinity, `torch` (the default) stands for vLLM."""


def contradictions(ajet: AjetConfig, backbone: BackboneName) -> Iterator[Contradiction]:
    """Everything that contradicts itself."""
    for check in CHECKS:
        yield from check(ajet)
    if backbone in TRAINABLE_ENGINES:
        yield from _training(ajet, backbone)
    if backbone == "prompt":
        yield from _prompt_tuning(ajet)


def _lengths(ajet: AjetConfig) -> Iterator[Contradiction]:
    data, rollout = ajet.data, ajet.rollout
    total = data.max_prompt_length + data.max_response_length
    if total > rollout.max_model_len:
        yield Contradiction(
            ("rollout.max_model_len", "data.max_response_length", "data.max_prompt_length"),
            f"data.max_prompt_length ({data.max_prompt_length}) + data.max_response_length "
            f"({data.max_response_length}) = {total} is more than rollout.max_model_len ({rollout.max_model_len})",
            f"raise rollout.max_model_len to {total}, or lower one of the two lengths",
        )


def _groups(ajet: AjetConfig) -> Iterator[Contradiction]:
    rollout = ajet.rollout
    if rollout.min_group_size is not None and rollout.min_group_size > rollout.num_repeat:
        yield Contradiction(
            ("rollout.min_group_size", "rollout.num_repeat"),
            f"a group has num_repeat = {rollout.num_repeat} episodes and so never reaches "
            f"min_group_size = {rollout.min_group_size}",
            f"lower min_group_size to {rollout.num_repeat} or less, or leave it out",
        )


def _batches(ajet: AjetConfig) -> Iterator[Contradiction]:
    trainer, batch = ajet.trainer_common, ajet.data.train_batch_size
    if trainer.mini_batch_num > batch:
        yield Contradiction(
            ("trainer_common.mini_batch_num", "data.train_batch_size"),
            f"{batch} tasks per step (data.train_batch_size) can't be split into mini_batch_num = "
            f"{trainer.mini_batch_num} mini-batches",
            f"lower mini_batch_num to {batch} or less",
        )


def _optimiser(ajet: AjetConfig) -> Iterator[Contradiction]:
    trainer, optim = ajet.trainer_common, ajet.trainer_common.optim
    if optim.lr_warmup_steps and optim.lr_warmup_ratio:
        yield Contradiction(
            ("trainer_common.optim.lr_warmup_ratio", "trainer_common.optim.lr_warmup_steps"),
            f"the warm-up has two lengths: lr_warmup_steps = {optim.lr_warmup_steps} and lr_warmup_ratio = "
            f"{optim.lr_warmup_ratio:g}",
            "set one of them",
        )
    if optim.state_bits == 8 and trainer.fsdp_config.optimizer_offload and (ajet.backbone or "local") == "local":
        yield Contradiction(
            ("trainer_common.optim.state_bits", "trainer_common.fsdp_config.optimizer_offload"),
            "in main memory the optimiser's state has 32 bits, and optim.state_bits is 8",
            "set one of them: 8 bits are faster, main memory saves more",
        )
    correction = trainer.algorithm.rollout_correction
    if correction.low > correction.high:
        place = "trainer_common.algorithm.rollout_correction"
        yield Contradiction(
            (f"{place}.low", f"{place}.high"),
            f"no ratio lies between low ({correction.low:g}) and high ({correction.high:g})",
            "swap them",
        )


def _kernels(ajet: AjetConfig) -> Iterator[Contradiction]:
    trainer = ajet.trainer_common
    if (ajet.backbone or "local") != "local":
        return
    if trainer.compile and ajet.rollout.deterministic:
        yield Contradiction(
            ("trainer_common.compile", "rollout.deterministic"),
            "what the compiler makes depends on the first batch that it sees, so a resumed run doesn't repeat bit for "
            "bit",
            "leave one of them out",
        )
    if trainer.logits_kernel == "liger" and trainer.algorithm.entropy_coef:
        yield Contradiction(
            ("trainer_common.logits_kernel", "trainer_common.algorithm.entropy_coef"),
            f"Liger's kernel gives no entropy, and entropy_coef is {trainer.algorithm.entropy_coef:g}",
            "set logits_kernel: chunks, or entropy_coef: 0",
        )


def _teacher(ajet: AjetConfig) -> Iterator[Contradiction]:
    algorithm = ajet.trainer_common.algorithm
    teacher, place = algorithm.distillation.teacher, "trainer_common.algorithm"
    if teacher is None:
        return
    if algorithm.policy_loss == "sft":
        yield Contradiction(
            (f"{place}.distillation.teacher", f"{place}.policy_loss"),
            "a teacher's opinion is an advantage, and policy_loss: sft uses none",
            "set policy_loss: ppo",
        )
    if teacher.startswith(("http://", "https://")) and ajet.rollout.temperature != 1:
        yield Contradiction(
            (f"{place}.distillation.teacher", "rollout.temperature"),
            f"a server gives log-probabilities of temperature 1, and rollout.temperature is "
            f"{ajet.rollout.temperature:g}",
            "set rollout.temperature: 1.0",
        )


def _replay(ajet: AjetConfig) -> Iterator[Contradiction]:
    algorithm, rollout = ajet.trainer_common.algorithm, ajet.rollout
    if not algorithm.replay.groups:
        return
    place = "trainer_common.algorithm"
    unfit = {
        f"{place}.rollout_correction.mode": (
            algorithm.rollout_correction.mode == "none",
            "without a correction, replayed tokens would count as if the present policy had sampled them",
        ),
        f"{place}.policy_loss": (algorithm.policy_loss == "sft", "policy_loss: sft has no probability ratios"),
        f"{place}.adv_estimator": (
            algorithm.adv_estimator == "reinforce_plus_plus",
            "reinforce_plus_plus compares over the batch, and would compare rewards of several policies",
        ),
        f"{place}.use_kl_in_reward": (
            algorithm.use_kl_in_reward,
            "the divergence of the present policy can't be read off replies of an earlier one",
        ),
        "rollout.top_p": (rollout.top_p < 1, "with top_p below 1, the recorded probabilities are not the sampler's"),
        "rollout.top_k": (rollout.top_k > 0, "with top_k, the recorded probabilities are not the sampler's"),
    }
    for key, (applies, why) in unfit.items():
        if applies:
            yield Contradiction(
                (key, f"{place}.replay.groups"),
                f"{place}.replay.groups trains replies of earlier policies, and {why}",
                f"set replay.groups: 0, or change {key.removeprefix(place + '.')}",
            )


def _early_stop(ajet: AjetConfig) -> Iterator[Contradiction]:
    trainer = ajet.trainer_common
    asked = [name for name in ("target", "patience") if trainer.early_stop[name] is not None]
    if asked and trainer.test_freq <= 0:
        yield Contradiction(
            ("trainer_common.test_freq", f"trainer_common.early_stop.{asked[0]}"),
            f"early_stop.{asked[0]} looks at validations, and with test_freq = {trainer.test_freq} there are none",
            "set test_freq to 1 or more, or leave early_stop out",
        )


def _curriculum(ajet: AjetConfig) -> Iterator[Contradiction]:
    reader, algorithm = ajet.task_reader, ajet.trainer_common.algorithm
    if not reader.curriculum.enabled:
        return
    if not reader.shuffle:
        yield Contradiction(
            ("task_reader.shuffle", "task_reader.curriculum.enabled"),
            "tasks can't be in file order and be chosen by their solve rates",
            "leave shuffle out, or set curriculum.enabled: false",
        )
    if algorithm.policy_loss == "sft" and algorithm.sft.demonstrations is not None:
        yield Contradiction(
            ("task_reader.curriculum.enabled", "trainer_common.algorithm.sft.demonstrations"),
            "recorded conversations are imitated, so no task is tried and there are no solve rates",
            "set curriculum.enabled: false",
        )


def _reference(ajet: AjetConfig) -> Iterator[Contradiction]:
    trainer = ajet.trainer_common
    if trainer.kl_reference_sync and ajet.model.lora.enabled:
        yield Contradiction(
            ("trainer_common.kl_reference_sync", "model.lora.enabled"),
            "with LoRA the reference of the KL divergence is the base model, which the trained weights can't become",
            "set kl_reference_sync: 0, or train whole weights",
        )
    has_term = trainer.use_kl_loss and trainer.kl_loss_coef and not trainer.algorithm.use_kl_in_reward
    if trainer.kl_adaptive.target is not None and not has_term:
        yield Contradiction(
            ("trainer_common.kl_adaptive.target", "trainer_common.kl_loss_coef", "trainer_common.use_kl_loss"),
            "kl_adaptive changes the weight of the KL term, and there is none",
            "set use_kl_loss: true, use_kl_in_reward: false and a kl_loss_coef above 0 to start from",
        )


def _scores(ajet: AjetConfig) -> Iterator[Contradiction]:
    judge = ajet.task_judge
    blocks: dict[str, LlmJudgeConfig | RubricsConfig | OpenJudgeConfig | None] = {
        "llm_judge": judge.llm_judge,
        "rubrics_auto_grader": judge.rubrics_auto_grader,
        "openjudge": judge.openjudge,
    }
    for name, part in judge.parts.items():
        blocks |= {
            f"parts.{name}.llm_judge": part.llm_judge,
            f"parts.{name}.rubrics_auto_grader": part.rubrics_auto_grader,
            f"parts.{name}.openjudge": part.openjudge,
        }
    for place, block in blocks.items():
        if block is not None and block.min_score >= block.max_score:
            yield Contradiction(
                (f"task_judge.{place}.min_score", f"task_judge.{place}.max_score"),
                f"min_score ({block.min_score:g}) is not below max_score ({block.max_score:g})",
                "swap them",
            )


def _keys(ajet: AjetConfig) -> Iterator[Contradiction]:
    ttl, timeout = ajet.gateway.key_ttl, ajet.rollout.episode_timeout
    if ttl is not None and ttl < timeout:
        yield Contradiction(
            ("gateway.key_ttl", "rollout.episode_timeout"),
            f"an episode may take {timeout:g} s (rollout.episode_timeout), but its key expires after {ttl:g} s "
            "(gateway.key_ttl): its later model calls would be refused",
            "leave gateway.key_ttl out, or raise it",
        )


def _helper(ajet: AjetConfig) -> Iterator[Contradiction]:
    helper = ajet.helper
    if helper.model is None and (helper.base_url is not None or helper.api_key is not None):
        yield Contradiction(
            ("helper.base_url", "helper.api_key"),
            "helper has an endpoint but no model, so it would never be used",
            "set helper.model to the model's name at that endpoint",
        )
    if helper.max_cost is not None and helper.price_per_million.input == helper.price_per_million.output == 0:
        yield Contradiction(
            ("helper.max_cost", "helper.price_per_million"),
            "helper.max_cost needs prices: at a price of 0 every call is free",
            "set helper.price_per_million.input and .output to what a million tokens cost",
        )


def _baselines(ajet: AjetConfig) -> Iterator[Contradiction]:
    algorithm, gamma = ajet.trainer_common.algorithm, ajet.rollout.gamma
    place = "trainer_common.algorithm"
    if algorithm.baseline == "episode" and gamma < 1:
        yield Contradiction(
            (f"{place}.baseline", "rollout.gamma"),
            f"the episode baseline compares undiscounted returns, and rollout.gamma is {gamma:g}",
            "set baseline: turn (which `auto` is here) or state, or rollout.gamma: 1",
        )
    if algorithm.baseline == "state" and algorithm.adv_estimator.startswith("reinforce_plus_plus"):
        yield Contradiction(
            (f"{place}.baseline", f"{place}.adv_estimator"),
            f"states are compared within a group, and {algorithm.adv_estimator} compares over the batch",
            "set adv_estimator: grpo, drgrpo or rloo, or another baseline",
        )


def _resampling(ajet: AjetConfig) -> Iterator[Contradiction]:
    algorithm = ajet.trainer_common.algorithm
    if algorithm.zero_variance_groups != "resample":
        return
    place = "trainer_common.algorithm"
    unfit = {
        f"{place}.adv_estimator": (
            algorithm.adv_estimator == "reinforce_plus_plus",
            "reinforce_plus_plus trains groups whose rewards are all equal, too",
        ),
        f"{place}.policy_loss": (algorithm.policy_loss == "sft", "policy_loss: sft compares no rewards"),
        f"{place}.distillation.teacher": (
            algorithm.distillation.teacher is not None,
            "a teacher's opinion is trained whatever the rewards",
        ),
    }
    for key, (applies, why) in unfit.items():
        if applies:
            yield Contradiction(
                (key, f"{place}.zero_variance_groups"),
                f"zero_variance_groups: resample runs further tasks in place of groups that teach nothing, and {why}",
                "leave zero_variance_groups out",
            )


def _pass_at_k(ajet: AjetConfig) -> Iterator[Contradiction]:
    algorithm, rollout = ajet.trainer_common.algorithm, ajet.rollout
    if algorithm.adv_estimator != "pass_at_k" or algorithm.policy_loss == "sft":
        return
    place = "trainer_common.algorithm"
    if algorithm.pass_k >= rollout.num_repeat:
        yield Contradiction(
            (f"{place}.pass_k", "rollout.num_repeat"),
            f"pass_k = {algorithm.pass_k} is not below rollout.num_repeat = {rollout.num_repeat}: where all episodes "
            "together are the group, nothing is compared",
            "set pass_k below num_repeat",
        )
    unused = {
        f"{place}.baseline": algorithm.baseline in ("turn", "state"),
        "rollout.gamma": rollout.gamma < 1,
        f"{place}.use_kl_in_reward": algorithm.use_kl_in_reward,
        f"{place}.overlong.buffer": algorithm.overlong.buffer > 0,
    }
    for key in (key for key, given in unused.items() if given):
        yield Contradiction(
            (key, f"{place}.adv_estimator"),
            f"pass_at_k asks only whether an episode succeeded, so {key} would do nothing",
            f"leave {key} out, or choose another adv_estimator",
        )


def _training(ajet: AjetConfig, backbone: BackboneName) -> Iterator[Contradiction]:
    rollout, algorithm = ajet.rollout, ajet.trainer_common.algorithm
    taught_alone = algorithm.distillation.teacher is not None and algorithm.distillation.mode == "alone"
    compares = algorithm.adv_estimator != "reinforce_plus_plus" and algorithm.policy_loss != "sft" and not taught_alone
    if compares and rollout.num_repeat < 2:
        yield Contradiction(
            ("rollout.num_repeat", "trainer_common.algorithm.adv_estimator"),
            f"{algorithm.adv_estimator} compares the episodes of one task, and rollout.num_repeat is 1: "
            "nothing would be learnt",
            "set rollout.num_repeat to 2 or more, or adv_estimator: reinforce_plus_plus",
        )
    trainable = TRAINABLE_ENGINES[backbone]
    if rollout.engine not in trainable:
        others = [name for name, engines in TRAINABLE_ENGINES.items() if rollout.engine in engines]
        elsewhere = f"--backbone={' or '.join(others)}" if others else "--backbone=debug, which doesn't train"
        yield Contradiction(
            ("rollout.engine", "rollout.name", "backbone"),
            f"the {backbone} backbone can't train a model that is served by rollout.engine: {rollout.engine}",
            f"set rollout.engine: {' or '.join(trainable)}, or use {elsewhere}",
        )
    if rollout.temperature < GREEDY_BELOW:
        yield Contradiction(
            ("rollout.temperature",),
            f"at rollout.temperature {rollout.temperature:g} all episodes of a task are the same, so nothing would be "
            "learnt",
            "set a temperature above 0",
        )


def _prompt_tuning(ajet: AjetConfig) -> Iterator[Contradiction]:
    tuning, place = ajet.prompt_tuning, "prompt_tuning"
    if not tuning.templates:
        yield Contradiction(
            (f"{place}.templates", "backbone"),
            "the prompt backbone tunes prompt templates, and this config has none",
            'write, for example, prompt_tuning: {templates: {solver: "Solve: {question}"}}, and call '
            'tuner.prompt("solver").format(question=…) in the workflow',
        )
    if tuning.proposer == "helper" and ajet.helper.model is None:
        yield Contradiction(
            ("helper.model", f"{place}.proposer"),
            "the helper model writes the proposals, and none is named",
            "set ajet.helper.model and ajet.helper.base_url, or prompt_tuning.proposer: tuned",
        )
    if tuning.budget.money is not None and not _has_price(ajet):
        yield Contradiction(
            (f"{place}.budget.money",),
            "money is limited, and no price is known, so nothing would ever be counted",
            "set prompt_tuning.budget.price_per_million, or ajet.helper.price_per_million",
        )


def _has_price(ajet: AjetConfig) -> bool:
    ours, helpers = ajet.prompt_tuning.budget.price_per_million, ajet.helper.price_per_million
    return any((ours.input, ours.output, helpers.input, helpers.output))


CHECKS: tuple[Callable[[AjetConfig], Iterator[Contradiction]], ...] = (
    *EPISODE_CHECKS,
    *ENGINE_CHECKS,
    _lengths,
    _groups,
    _batches,
    _optimiser,
    _kernels,
    _reference,
    _teacher,
    _replay,
    _early_stop,
    _curriculum,
    _scores,
    _keys,
    _helper,
    _baselines,
    _resampling,
    _pass_at_k,
)
