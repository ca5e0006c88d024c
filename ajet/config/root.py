"""`Config`: a whole YAML file. `config.ajet` is ours and typed, group by group; every other top-level block is the
user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, PrivateAttr, model_validator

from ajet.config.kinds import BackboneName
from ajet.config.old_keys import Translated
from ajet.config.rollout import RolloutSection
from ajet.config.section import (
    AboveZero,
    Block,
    Count,
    Name,
    Port,
    Positive,
    Real,
    Section,
    Share,
    blocks_within,
)
from ajet.config.tasks import TaskJudgeConfig, TaskReaderConfig
from ajet.config.tuning import PromptTuningConfig, TokenPriceConfig, TrainerCommonConfig


class LoraConfig(Section):
    """`ajet.model.lora`: train small adapters instead of all weights."""

    enabled: bool = False
    """Train LoRA adapters; the base weights stay unchanged."""
    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Positive = 32
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: Share = 0.0
    """Dropout on the adapters' input in training; above 0, the trained policy differs from the sampled one."""
    target_modules: list[str] | str = "all-linear"
    """Names of the layers that get an adapter, or `all-linear`."""
    base_bits: Literal[4] | None = None
    """4: store the base model's linear layers in 4 bits a weight (QLoRA; needs bitsandbytes, embedded engine only).
    null: as `model.dtype` says."""


class ModelConfig(Section):
    """`ajet.model`: the model to train."""

    path: str = "tiny:qwen2-0.3m"
    """A folder, a Hugging Face id such as `Qwen/Qwen2.5-7B-Instruct`, or `tiny:NAME`, a small model built offline."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and computation. `auto`: float32 on a CPU, bfloat16 on a GPU."""
    attn: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """Attention implementation. `auto`: SDPA, or eager for models without it."""
    lora: LoraConfig = LoraConfig()


class HelperConfig(Section):
    """`ajet.helper`: the model for agents whose target isn't trained, at any OpenAI-compatible endpoint. Readers and
    judges reach it through `ajet.task_judge.helper.HelperModel`; the limits apply to their calls, per process.
    """

    model: str | None = None
    """Name of the helper model at `base_url`. null: agents whose target isn't trained use the trained model, without
    being trained."""
    base_url: str | None = None
    """Address of the endpoint, ending in `/v1`. null: OPENAI_BASE_URL, else OpenAI's own."""
    api_key: str | None = None
    """Key for the endpoint, preferably as `${oc.env:NAME}`. null: OPENAI_API_KEY."""
    embedding_model: str | None = None
    """Embedding model at that endpoint, for `/v1/embeddings` and to find near duplicates among tasks. null: status 501,
    and texts are compared by their words."""
    timeout: AboveZero = 120
    """Seconds for one answer. After twice that, retries included, the call fails."""
    max_calls: Positive | None = None
    """Most calls that `HelperModel` may make; a further one is an error. null: no limit."""
    max_tokens: Positive | None = None
    """Most tokens that these calls may use, prompts and replies together. null: no limit."""
    max_cost: AboveZero | None = None
    """Most that these calls may cost, by `price_per_million`. null: no limit."""
    price_per_million: TokenPriceConfig = TokenPriceConfig()


class ServiceConfig(Section):
    """One of `ajet.services`: a program that runs beside the run."""

    command: str = ""
    """What bash runs, in the foreground."""
    folder: str = "."
    """Where it runs. Relative to the working directory."""
    address: str | None = None
    """`host:port` or a URL at which it answers once it is ready; the run waits for that. null: the run doesn't wait."""
    start_timeout: AboveZero = 600.0
    """Seconds it may take until it answers."""
    env: dict[str, str] = {}
    """Environment variables for it, besides the run's own."""
    restarts: Count = 3
    """How often it is started again if it ends during the run, after pauses that double. The count begins anew after
    five minutes without an end. 0: never."""


class DataConfig(Section):
    """`ajet.data`: lengths and batch size."""

    max_prompt_length: Positive = 3000
    """Longest prompt of a training sample, in tokens: all before the first reply."""
    max_response_length: Positive = 15000
    """Most tokens after the prompt in a training sample, tool results and later messages included."""
    train_batch_size: Positive = 32
    """Tasks per training step. Each is run `rollout.num_repeat` times."""


class RemoteRunnersConfig(Section):
    """`ajet.task_runner.remote`: with `wrapper_type: remote`, where remote runners find this run."""

    host: str = "127.0.0.1"
    """Address on which runners claim episodes. For other machines, set `gateway.host`, too: model calls go there."""
    port: Port = 4747
    """Its port. 0: any free one."""
    lease: AboveZero = 30.0
    """Seconds of silence after which a runner counts as dead and its episode is run again."""
    tls_cert: str | None = None
    """PEM file with the certificate, for HTTPS."""
    tls_key: str | None = None
    """PEM file with the certificate's private key."""


class OutsideConfig(Section):
    """`ajet.task_runner.outside`: with `wrapper_type: outside`, episodes that other programs begin and end."""

    max_staleness: Count = 4
    """Updates that an episode may be behind when its group is complete. Older ones are recorded, and not trained."""


class TaskRunnerConfig(Section):
    """`ajet.task_runner`: where a workflow's code runs."""

    wrapper_type: Literal["asyncio-with-gc", "asyncio", "multi-processing", "remote", "outside"] = "asyncio-with-gc"
    """`asyncio-with-gc`, `asyncio`: in a thread with an event loop. `multi-processing`: in a separate process, which
    may crash or hang. `remote`: in `ajet runner` processes. `outside`: other programs begin and end episodes over
    HTTP."""
    outside: OutsideConfig = OutsideConfig()
    remote: RemoteRunnersConfig = RemoteRunnersConfig()
    wrapper_multiprocessing_timeout: AboveZero = 3600.0
    """Seconds after which a workflow's process is ended; `rollout.episode_timeout` applies as well."""
    process_lifetime: Literal["episode", "run"] = "episode"
    """With `multi-processing`: a fresh process for each `episode`, or one that stays for the `run`: faster, but globals
    and the working folder stay changed."""


Treatment = Real | Literal["judge", "mask", "drop"]


class FailureRewardConfig(Section):
    """`ajet.failure_reward`: what to do with episodes that did not end well: a number (its only reward), `judge`
    (train with the workflow's or the judge's reward), `mask` (as `judge`, but without loss: the episode counts in its
    group's baseline and in the metrics only) or `drop` (leave it out of its group). None of them is replaced by another
    attempt.
    """

    otherwise: Real | None = None
    """The reward where `judge` or `mask` apply to an episode without one. null: it is dropped, and its failure names
    this key."""
    workflow_error: Real | Literal["mask", "drop"] = "drop"
    """The workflow raised, or did not return a WorkflowOutput."""
    timeout: Real | Literal["mask", "drop"] = "drop"
    """`rollout.episode_timeout` ran out."""
    truncated: Treatment = "judge"
    """The last reply was cut by its length limit, or `multi_turn.max_steps` was used up."""
    overflow: Treatment = "judge"
    """A prompt left no room in `rollout.max_model_len`."""
    abnormal: Treatment = -1.0
    """A check of `rollout.compute_madness_checklist` failed."""


class ContextTrackerConfig(Section):
    """`ajet.context_tracker`: how model calls are recorded and become training tokens."""

    shared_token_loss: Literal["once", "multiplicity"] = "once"
    """Train a sampled token that several conversations share once, or once for each."""
    log_tool_format_check: bool = False
    """Log a warning for each reply with a malformed tool call."""
    log_tool_format_error_detail: bool = False
    """With `log_tool_format_check`: also log what was wrong with it."""
    detect_timeline_snap: bool = True
    """Explain each fork of a conversation: the message or template rule that caused it, and its cost in tokens."""


class DebugConfig(Section):
    """`ajet.debug`: what `--backbone=debug` runs."""

    debug_max_parallel: Positive = 4
    """Most episodes at a time."""
    debug_first_n_tasks: Positive = 2
    """How many tasks to run, from the first on."""
    debug_vllm_seed: Count | None = None
    """Seed of a debug run, in place of `rollout.seed`."""
    debug_tensor_parallel_size: Positive | None = None
    """GPUs per engine in a debug run, in place of `rollout.tensor_model_parallel_size`."""


class GatewayConfig(Section):
    """`ajet.gateway`: the HTTP server through which agents of any kind reach the model."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback lets other machines in (with an episode's key)."""
    port: Port = 0
    """Port; 0: any free one."""
    key_ttl: AboveZero | None = None
    """Seconds for which an episode's key is valid. null: an hour, or `rollout.episode_timeout` if longer."""
    tls_cert: str | None = None
    """PEM file with the certificate, for HTTPS, valid for the name that clients use."""
    tls_key: str | None = None
    """PEM file with the certificate's private key."""
    max_body_mb: AboveZero = 16.0
    """Largest request body in MB, decompressed."""
    max_concurrent_per_episode: Positive = 64
    """Most concurrent requests per episode; further ones wait for their turn."""
    allowed_origins: list[str] = []
    """Web pages that may call the gateway from a browser, by origin (`http://localhost:3000`), or `*`."""


class RecorderConfig(Section):
    """`ajet.recorder`: which episodes are kept for the viewer."""

    keep: Literal["all", "every_n", "failures"] = "all"
    """All episodes, those of every n-th step, or only those that failed or were cut short."""
    every_n: Positive = 10
    """With `keep: every_n`: the n."""
    max_gb: AboveZero = 10.0
    """Size at which the oldest episodes are deleted to make room."""


class ObserveConfig(Section):
    """`ajet.observe`: what a run tells other programs about itself."""

    otlp_endpoint: str | None = None
    """Collector of OpenTelemetry, such as `http://127.0.0.1:4318`, that gets each episode as a trace. Headers come from
    `OTEL_EXPORTER_OTLP_HEADERS`."""


READ_YAML_NAME = "read_yaml_name"
"""Value of `experiment_name` that stands for the YAML's file name."""


class AjetConfig(Section):
    """`ajet`: everything that AgentJet itself reads."""

    project_name: Name = "ajet"
    """Name under which trackers group experiments."""
    experiment_name: Name = READ_YAML_NAME
    """Name of the run and its folder. `read_yaml_name`: the YAML's file name."""
    experiment_dir: str = "auto"
    """Folder of the run. `auto`: `saved_experiments/<experiment_name>`."""
    backbone: BackboneName | None = None
    """What runs the training loop: `debug`, `local`, `verl` or `trinity`; or `prompt`, which tunes prompts instead of
    weights. null: `local`. `--backbone` takes precedence."""
    model: ModelConfig = ModelConfig()
    helper: HelperConfig = HelperConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutSection = RolloutSection()
    task_reader: TaskReaderConfig = TaskReaderConfig()
    task_judge: TaskJudgeConfig = TaskJudgeConfig()
    task_runner: TaskRunnerConfig = TaskRunnerConfig()
    failure_reward: FailureRewardConfig = FailureRewardConfig()
    """What to do with episodes that did not end well."""
    context_tracker: ContextTrackerConfig = ContextTrackerConfig()
    trainer_common: TrainerCommonConfig = TrainerCommonConfig()
    prompt_tuning: PromptTuningConfig = PromptTuningConfig()
    debug: DebugConfig = DebugConfig()
    gateway: GatewayConfig = GatewayConfig()
    observe: ObserveConfig = ObserveConfig()
    recorder: RecorderConfig = RecorderConfig()
    services: dict[str, ServiceConfig] = {}
    """Programs that run beside the run, by name: `{command, folder, address, start_timeout, env, restarts}`. The run
    waits until each `address` answers."""
    judge: Block = Block()
    """For a judge of yours to read."""
    presentation_quality_weight: Real = 0.25
    """For the judge of AgentJet's example `deep_finance`, or one of yours."""
    grounding_weight: Real = 0.25
    """Likewise."""
    rm_weight: Real = 1.0
    """Likewise."""
    verl: Block = Block()
    """Keys of verl's config, passed on unchanged."""
    trinity: Block = Block()
    """Keys of Trinity's config, passed on unchanged."""
    user: Block = Block()
    """Any keys of yours: `tuner.config.ajet.user.…`."""


class Config(Section):
    """A whole YAML file: `ajet` is ours and typed, every other top-level block is the user's own."""

    model_config = ConfigDict(extra="allow")

    ajet: AjetConfig = AjetConfig()
    verl: Block = Block()
    """Passed through to the verl backbone."""
    trinity: Block = Block()
    """Passed through to the trinity backbone."""
    trainer: Block = Block()
    """Passed through to the verl backbone."""

    @model_validator(mode="after")
    def _own_blocks(self) -> Config:
        extra: dict[str, Any] = self.__pydantic_extra__ or {}
        for key, value in extra.items():
            extra[key] = blocks_within(value)
        return self

    _yaml_path: Path | None = PrivateAttr(default=None)
    _folder: Path | None = PrivateAttr(default=None)
    _old_keys: Translated = PrivateAttr(default_factory=Translated)

    def remember_source(self, path: Path | None, old_keys: Translated | None = None) -> None:
        """Record the file that this config was loaded from, and what became of its old keys."""
        self._yaml_path = path
        self._old_keys = old_keys or Translated()

    @property
    def old_keys(self) -> Translated:
        """What became of the old keys of its source."""
        return self._old_keys

    @property
    def yaml_path(self) -> Path | None:
        """The file that this config was loaded from."""
        return self._yaml_path

    @property
    def base_dirs(self) -> list[Path]:
        """Folders in which relative names in the file are looked up, after the working directory."""
        return [] if self._yaml_path is None else [self._yaml_path.parent]

    @property
    def experiment_path(self) -> Path:
        """The run's folder (not created)."""
        if self.ajet.experiment_dir != "auto":
            return Path(os.path.expanduser(self.ajet.experiment_dir))
        return Path("saved_experiments") / self.ajet.experiment_name

    @property
    def cache_path(self) -> Path:
        """The folder, in the run's, of what was asked of a helper model: kept by `--fresh`, shared with debug runs."""
        return (self._folder or self.experiment_path) / "cache"

    def remember_folder(self, folder: Path) -> None:
        """Record the run's folder, where the command line chose it."""
        self._folder = folder

    def user_blocks(self) -> dict[str, Any]:
        """The user's own top-level blocks."""
        return dict(self.__pydantic_extra__ or {})
