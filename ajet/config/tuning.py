"""What is tuned, and how: weights (`ajet.trainer_common`) and prompt templates (`ajet.prompt_tuning`).

Every workflow is given its templates by name, whether they are tuned or not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ajet.config.kinds import EstimatorName, LossName, OptimiserName, ProposerName, RecipeName, TrackerName
from ajet.config.section import (
    OWN,
    AboveZero,
    Count,
    Decay,
    NonNegative,
    NotBool,
    Positive,
    Real,
    Section,
    Share,
    Temperature,
    as_list,
)


class RolloutCorrectionConfig(Section):
    """`ajet.trainer_common.algorithm.rollout_correction`: correct for a sampler that differs from the trainer."""

    mode: Literal["token_tis", "sequence_tis", "masked", "none"] = "token_tis"
    """What the ratio of the trainer's probability to the sampler's does. `token_tis`: weigh each token by min(its
    ratio, cap). `sequence_tis`: by min(product over the trajectory, cap). `masked`: by the ratio, and by 0 outside
    [low, high]."""
    cap: AboveZero = 2.0
    """Upper bound of the factor of `token_tis` and `sequence_tis`."""
    level: Literal["token", "sequence"] = "token"
    """`masked`: look at each token's ratio, or at the product over its trajectory."""
    low: NonNegative = 0.5
    """`masked`: ratios below are not trained."""
    high: AboveZero = 5.0
    """`masked`: ratios above are not trained."""


class SftConfig(Section):
    """`ajet.trainer_common.algorithm.sft`: what `policy_loss: sft` imitates."""

    demonstrations: str | None = None
    """A JSONL file of conversations (`messages`, perhaps `tools` and `chat_template_kwargs`), or a run's
    folder. null: the run's own episodes (rejection sampling)."""
    min_reward: Real = 1.0
    """Reward from which a sampled or recorded episode is imitated."""


class OverlongConfig(Section):
    """`ajet.trainer_common.algorithm.overlong`: a soft penalty on long episodes, and what is cut by its length."""

    buffer: Count = 0
    """From `data.max_response_length` minus this many trained tokens on, the reward falls linearly. 0: off."""
    penalty: NonNegative = 1.0
    """By how much it has fallen at `data.max_response_length`."""
    mask: bool = False
    """Don't train episodes whose last reply was cut by its length; they still count in the baseline."""


class DistillationConfig(Section):
    """`ajet.trainer_common.algorithm.distillation`: learn from a teacher's opinion of the tokens that were sampled."""

    teacher: str | None = None
    """A model with the vocabulary of `model.path`, loaded into this process, or the address of a vLLM server
    (`http://host:8000/v1`) that has it."""
    coef: AboveZero = 1.0
    """Weight of a token's advantage from the teacher: its log-probability there minus that under the policy."""
    mode: Literal["alone", "add"] = "alone"
    """`alone`: train by the teacher only. `add`: add its advantage to the reward's."""


class ReplayConfig(Section):
    """`ajet.trainer_common.algorithm.replay`: train groups of the last steps once more, beside the new ones."""

    groups: Count = 0
    """Most past groups per step. 0: none."""
    max_age: Positive = 4
    """How many steps ago they may have been sampled. `rollout_correction` weighs their tokens."""


class AlgorithmConfig(Section):
    """`ajet.trainer_common.algorithm`: from rewards to a loss."""

    recipe: RecipeName | None = None
    """A paper's settings of loss, advantage, norm, bounds, KL and groups, for all of these keys that you don't set.
    `ajet validate` lists them."""
    adv_estimator: EstimatorName = "grpo"
    """How a reward becomes an advantage. `path/file.py->your_estimator`: a function of your own, from a `Comparison` to
    the advantage."""
    baseline: Literal["auto", "episode", "turn", "state"] = "auto"
    """What a call is compared with in its group. `episode`: all calls of the agent, by the whole return. `turn`: the
    same turn, by return to go. `state`: both, with calls that answer the same observation (GiGPO). `auto`: `turn` if
    `rollout.gamma` is below 1, else `episode`."""
    state_weight: NonNegative = 1.0
    """`baseline: state`: weight of the advantage among calls that answer the same observation."""
    pass_k: Positive = 4
    """`adv_estimator: pass_at_k`: train for the success of the best of this many episodes."""
    policy_loss: LossName = "ppo"
    """Which loss; `sft` imitates. `path/file.py->your_loss`: a function of your own, from `LossTokens` to the loss of
    each token."""
    clip_low: Annotated[float, Field(ge=0, le=1), NotBool] | None = None
    """The probability ratio is clipped below 1 - clip_low. `dppo_tv` and `dppo_kl`: how far a token's probability may
    fall, as a difference or in nats. null: 0.2, with `gspo` 0.0003, `dppo_tv` 0.15, `dppo_kl` 0.05."""
    clip_high: Annotated[float, Field(ge=0, le=100), NotBool] | None = None
    """The probability ratio is clipped above 1 + clip_high. `dppo_tv` and `dppo_kl`: how far a token's probability may
    rise. null: 0.28, with `gspo` 0.0004, `dppo_tv` 0.15, `dppo_kl` 0.05."""
    clip_dual: Annotated[float, Field(gt=1, allow_inf_nan=False), NotBool] | None = 3.0
    """`ppo`, `gspo`: with a negative advantage, a ratio above this adds no gradient. null: no such bound."""
    tau_pos: AboveZero = 1.0
    """`sapo`: temperature of the gate where the advantage is above 0. Higher: the gradient fades sooner."""
    tau_neg: AboveZero = 1.05
    """`sapo`: temperature where it isn't."""
    sequence_mask: NonNegative | None = None
    """Don't train tokens with a negative advantage in trajectories that the sampler found likelier than the policy does
    by more than this, in nats per token. null: train them."""
    loss_norm: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """How tokens are weighted: all tokens alike, all episodes alike, or by a constant length."""
    entropy_coef: Real = 0.0
    """Weight of an entropy bonus."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the starting model from each call's reward, instead of adding it to the loss."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    replay: ReplayConfig = ReplayConfig()
    zero_variance_groups: Literal["skip", "keep", "resample"] = "skip"
    """Groups whose rewards are all equal: leave them out, keep them, or run other tasks instead."""
    distillation: DistillationConfig = DistillationConfig()
    sft: SftConfig = SftConfig()
    overlong: OverlongConfig = OverlongConfig()


class FsdpConfig(Section):
    """`ajet.trainer_common.fsdp_config`: what is moved to main memory while not needed."""

    param_offload: bool = False
    """Keep parameters in main memory while not training."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in main memory while not updating. On `local`, the CPU then computes the update."""


class OptimConfig(Section):
    """`ajet.trainer_common.optim`: the optimiser. verl's and Trinity's further keys go into the `verl:` or `trinity:`
    block.
    """

    lr: NonNegative | None = None
    """Learning rate. null: 1e-6, with LoRA 1e-5. 0 trains nothing: a control run."""
    weight_decay: NonNegative = 0.01
    """Weight decay; on `local`, vectors (norms, biases) have none."""
    betas: Annotated[list[Decay], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay of the first and second moment."""
    eps: AboveZero = 1e-8
    """Added to the root of the second moment before dividing by it."""
    state_bits: Literal[32, 8] = 32
    """Bits of each number of the optimiser's state. 8 needs bitsandbytes and a quarter of the memory."""
    master: Literal["float32", "none"] = "float32"
    """What keeps the exact values of bfloat16 weights: a `float32` copy, or nothing: updates are then rounded at
    random, and save 4 bytes a weight."""
    clip_grad: AboveZero = 1.0
    """Norm at which the gradient is clipped."""
    lr_warmup_steps: Count = 0
    """Training steps over which the learning rate rises to `lr`."""
    lr_warmup_ratio: Share = 0.0
    """The same as a share of all training steps; one of the two may be set."""
    min_lr_ratio: Share = 0.0
    """`cosine` and `linear` end at this share of `lr`."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate continues after that."""


class KLAdaptiveConfig(Section):
    """`ajet.trainer_common.kl_adaptive`: let `kl_loss_coef` follow a target."""

    target: AboveZero | None = None
    """KL divergence per token, in nats, to be held. null: the coefficient stays as it is."""
    horizon: AboveZero = 10.0
    """Each step changes the coefficient by at most 0.2 / horizon of itself."""


class EarlyStopConfig(Section):
    """`ajet.trainer_common.early_stop`: end the run before its last step, by what its validations measure."""

    metric: Annotated[str, Field(pattern=r"^val/.")] = "val/return/mean"
    """A metric that begins with `val/`, of which higher is better."""
    target: Real | None = None
    """Stop as soon as the metric reaches this."""
    patience: Positive | None = None
    """Stop after this many validations in a row without a rise."""
    min_delta: NonNegative = 0.0
    """`patience`: what counts as a rise above the best value so far."""


class TrainerCommonConfig(Section):
    """`ajet.trainer_common`: how weights are updated, saved and validated."""

    total_epochs: Positive = 50
    """Passes over the training tasks."""
    total_training_steps: Positive | None = None
    """Steps in total; takes precedence over `total_epochs`."""
    save_freq: Annotated[int, Field(ge=-1), NotBool] = 20
    """Save a checkpoint every this many steps, and at the end. -1 or 0: only at the end."""
    test_freq: Annotated[int, Field(ge=-1), NotBool] = 20
    """Validate every this many steps, and at the end. -1 or 0: never."""
    val_before_train: bool = False
    """Validate before the first step."""
    val_pass_n: Positive | None = None
    """Episodes per validation task, for pass@k; above 1, validation samples. null: 4 if it samples, else
    `rollout.val_kwargs.num_repeat`."""
    early_stop: EarlyStopConfig = EarlyStopConfig()
    val_only: bool = False
    """Only validate; train nothing."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    mini_batch_num: Positive = 1
    """Parts of a step's batch, each of which gives one update."""
    ppo_epochs: Positive = 1
    """Passes over a step's batch. The old policy is that before the first of them."""
    use_kl_loss: bool = True
    """Add the KL divergence from the starting model to the loss."""
    kl_loss_coef: NonNegative = 0.002
    """Weight of the KL term in the loss."""
    kl_loss_type: Literal[
        "kl", "k1", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "low_var_kl+", "k3+", "k3_corrected"
    ] = "k3+"
    """Which estimate of the KL divergence. With `+`: the value of the name before it, and the gradient of the
    divergence itself. `k3_corrected`: times the ratio to the old policy, for several updates a step."""
    kl_adaptive: KLAdaptiveConfig = KLAdaptiveConfig()
    kl_reference_sync: Count = 0
    """After this many steps each, the current weights become the KL reference. 0: it stays the starting model."""
    max_tokens_per_step: Positive | Literal["auto"] = "auto"
    """Most unique tokens per forward and backward pass; larger batches are split. `auto`: depends on the device."""
    micro_tokens: Positive | Literal["auto"] = "auto"
    """Another name for `max_tokens_per_step`, used if that is `auto`."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Compute layers again in the backward pass: much less memory, up to a third more time. `auto`: on a GPU."""
    logits_chunk: Count | Literal["auto"] = "auto"
    """Most tokens whose logits exist at a time; others are computed again. `auto`: as many as take 256 MiB. 0: no
    limit."""
    logits_kernel: Literal["chunks", "liger"] = "chunks"
    """How log-probabilities are computed: in `chunks`, or by `liger`, liger-kernel's fused CUDA kernel, which gives no
    entropy."""
    compile: bool = False
    """Compile the layers with `torch.compile`: about a minute in the first step, faster later. Needs a C++ compiler or
    Triton."""
    keep_checkpoints: Positive = 3
    """How many of the newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best mean validation return."""
    resume: str = "auto"
    """`auto`: from the newest checkpoint of this experiment; `never`: start over, as with `--fresh`; or a checkpoint's
    folder."""
    seed: Count = 0
    """Seed of the trainer."""
    logger: Annotated[list[TrackerName], BeforeValidator(as_list, TrackerName | list[TrackerName])] = ["console"]
    """Where metrics go besides `metrics.jsonl`, as a name or a list; `path/file.py->Class` is your own sink."""
    checkpoint_base_dir: str | None = None
    """Folder for checkpoints instead of the experiment's own, which then has a link to them."""
    save_trajectory_as_json_file: bool = False
    """Also write each episode as a JSON file."""
    gpu: Count | None = None
    """The GPU that trains, counted among the visible ones. null: the first that `rollout.vllm.devices` doesn't name."""
    nnodes: Positive = 1
    """Machines."""
    n_gpus_per_node: Count = 8
    """GPUs per machine."""
    fsdp_config: FsdpConfig = FsdpConfig()
    ulysses_sequence_parallel_size: Positive = 1
    """GPUs that share one sequence."""


class TemplateConfig(Section):
    """One prompt template: its text, or a file that holds it."""

    text: str | None = None
    file: str | None = None
    engine: Literal["f-string", "jinja"] = "f-string"
    """How placeholders are written: `{name}`, or Jinja's `{{ name }}`."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TemplateConfig:
        if (self.text is None) == (self.file is None):
            raise PydanticCustomError(OWN, "should have either `text` or `file`")
        return self


class APOConfig(Section):
    """`ajet.prompt_tuning.apo`: criticism of episodes, edits that answer it, and a beam of the best."""

    beam_width: Positive = 4
    """Candidates that survive a round."""
    branch_factor: Positive = 4
    """Criticisms, and so edits, of each survivor in a round."""
    critique_batch: Positive = 4
    """Search tasks whose episodes one criticism reads."""
    score_batch: Positive = 16
    """Validation tasks on which the candidates of a round are compared."""


class GEPAConfig(Section):
    """`ajet.prompt_tuning.gepa`: reflective mutation on a Pareto front, by the `gepa` package."""

    minibatch: Positive = 3
    """Search tasks on which a mutation must beat its parent before validation."""
    merges: Count = 5
    """Most merges of two candidates of the front. 0: none."""
    perfect_score: Real = 1.0
    """A parent that earns this on the whole minibatch isn't mutated."""


class BestOfConfig(Section):
    """`ajet.prompt_tuning.best_of`: rewrites that look at no episode; the baseline."""

    proposals: Positive = 4
    """Rewrites in a round. Each is tried on all validation tasks."""


class TokenPriceConfig(Section):
    """What a million tokens cost, in any currency."""

    input: NonNegative = 0.0
    """Price of a million prompt tokens."""
    output: NonNegative = 0.0
    """Price of a million reply tokens."""


class SearchBudgetConfig(Section):
    """`ajet.prompt_tuning.budget`: what a search may spend. What has begun when a limit is reached still finishes."""

    episodes: Positive | None = None
    """Most episodes, the confirmation included. null: no limit."""
    tokens: Positive | None = None
    """Most tokens of episodes and proposer together. null: no limit."""
    money: AboveZero | None = None
    """Most that they may cost: the tuned model by `price_per_million`, the helper by its own. null: no limit."""
    price_per_million: TokenPriceConfig = TokenPriceConfig()
    """The price of a million tokens of the tuned model."""
    seconds: AboveZero | None = None
    """Longest time, over all resumes. null: no limit."""


class PromptTuningConfig(Section):
    """`ajet.prompt_tuning`: prompt templates, and how `--backbone=prompt` tunes them."""

    templates: dict[str, str | TemplateConfig] = {}
    """First texts by name, for `tuner.prompt("name")`: a text, or `{text: …}` or `{file: …}` with `engine: f-string |
    jinja`."""
    tune: Literal["together", "in_turn"] = "together"
    """Several templates: a proposal may change all, or one in each round."""
    algorithm: OptimiserName = "apo"
    """Which search: `apo`, `gepa`, `best_of`, or your own as `module->Class`."""
    proposer: ProposerName = "helper"
    """Who writes proposals: the `helper` model of `ajet.helper`, the `tuned` model itself, or `module->function`."""
    proposer_temperature: Temperature = 1.0
    """Temperature of the proposer."""
    proposer_timeout: AboveZero = 300.0
    """Seconds for one answer of the proposer, retries included. If all of a round fail, the search ends, and can be
    resumed."""
    rounds: Positive | None = None
    """Most rounds. null: the algorithm's own number (apo 3, gepa 30, best_of 3)."""
    repeats: Positive = 1
    """Episodes of each candidate on each task."""
    validation_tasks: Positive | None = None
    """Most tasks on which candidates are validated. null: all but the confirmation's."""
    confirmation_tasks: Count | None = None
    """Tasks kept until the end, to compare the best with the first template. 0: none. null: half of the validation
    split, or a quarter of the tasks."""
    proposal_retries: Count = 2
    """How often the proposer is asked again, after a proposal that is refused."""
    apo: APOConfig = APOConfig()
    gepa: GEPAConfig = GEPAConfig()
    best_of: BestOfConfig = BestOfConfig()
    budget: SearchBudgetConfig = SearchBudgetConfig()
