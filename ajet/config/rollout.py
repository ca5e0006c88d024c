"""`ajet.rollout`: how episodes are run, and how replies are drawn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ajet.config.section import Section
from ajet.config.types import AboveZero, Count, NotBool, OneOrMore, Positive, Real, Temperature, TopK, TopP

EngineName = Literal["torch", "vllm", "sglang", "remote", "scripted"]
OutputCheck = Literal["nonsense", "non_ascii", "format_type_1", "wrong_toolcall"]


class RemoteConfig(Section):
    """`ajet.rollout.remote`: the server that `rollout.engine: remote` talks to."""

    base_url: str | list[str] | None = None
    """Its address, up to and including `/v1`, or several equal ones. null: the environment's `OPENAI_BASE_URL`."""
    api_key: str | list[str] | None = None
    """Its key, or several that take turns. null: the environment's `OPENAI_API_KEY`."""
    model: str | None = None
    """The name that the server knows the model by. null: `model.path`."""
    max_parallel: Positive = 32
    """Requests under way at the same time."""
    requests_per_minute: AboveZero | None = None
    """Requests begun in a minute, for each address and key. null: no limit."""
    max_attempts: Positive = 6
    """How often a request is tried that fails for a passing reason."""
    timeout: AboveZero = 600.0
    """Seconds for one attempt."""


class VllmConfig(Section):
    """`ajet.rollout.vllm`: how `rollout.engine: vllm` runs."""

    mode: Literal["server", "in_process"] = "server"
    """`server`: servers started, watched and stopped by us, one a replica; `in_process`: inside this process."""
    python: str | None = None
    """The Python interpreter that has vLLM, where it lives in an environment of its own."""
    gpu_memory_utilization: Annotated[float, NotBool, Field(gt=0, le=1)] = 0.6
    """Share of the GPU's memory for weights and cache; the local trainer needs the rest."""
    start_timeout: AboveZero = 600.0
    """Seconds that a server may take to come up."""
    max_restarts: Count = 3
    """How often a server that died is started again before the run fails."""
    sleep: bool = False
    """Leave the GPU's memory to the trainer during updates, where one GPU serves both."""
    devices: list[Count] = []
    """GPUs for the engines (`tensor_model_parallel_size` for each), so that the trainer has others. []: all it sees."""
    extra_args: list[str] = []
    """Further arguments for vLLM's server, as on its command line."""


class MultiTurnConfig(Section):
    """`ajet.rollout.multi_turn`: how long an episode may become."""

    max_sample_per_task: Positive = 30
    """Rows that one episode may give to a backbone that trains linear rows; more are dropped and counted."""
    max_steps: Positive = 30
    """Model calls that one agent may make in an episode; a further one gets an error the workflow can catch."""
    expected_steps: Positive = 1
    """Model calls that an episode usually needs; used for estimates and batch sizes only."""


class ValKwargsConfig(Section):
    """`ajet.rollout.val_kwargs`: how replies are drawn in validation."""

    temperature: Temperature = 0.0
    """Temperature in validation; 0 is greedy."""
    top_k: TopK = -1
    """Draw from the k likeliest tokens only; -1: from all."""
    top_p: TopP = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    do_sample: bool = False
    """False: validation is greedy, whatever the temperature."""
    num_repeat: Positive = 1
    """Episodes a validation task; `trainer_common.val_pass_n` raises it where pass@k needs more."""


class RolloutConfig(Section):
    """`ajet.rollout`: how episodes are run, and how replies are drawn."""

    user_workflow: str | None = None
    """Your workflow: `module.path->Class` or `path/file.py->Class`."""
    engine: EngineName = "torch"
    """Where tokens come from: `torch` (embedded), `vllm`, `sglang`, `remote` (an OpenAI-compatible server; debug only)
    or `scripted` (replies from a file, no model)."""
    name: Literal["vllm", "sglang", "torch", "remote", "scripted"] | None = None
    """Former name of `engine`, used where `engine` is not given."""
    mode: str | None = None
    """Accepted for existing files. Model calls are always asynchronous here."""
    num_repeat: Positive = 4
    """Episodes a task (the size of its group). Group-relative advantages need at least 2."""
    min_group_size: Positive | None = None
    """Usable episodes that a group needs to be trained; a smaller one is refilled, then dropped. null: `num_repeat`."""
    temperature: Temperature = 0.9
    """Temperature while training. Overrides what the client asks for."""
    top_p: TopP = 1.0
    """Draw from the likeliest tokens that together have this probability. Below 1 the recorded probability ratio is
    approximate."""
    top_k: TopK = -1
    """Draw from the k likeliest tokens only; -1: from all. Otherwise the recorded probability ratio is approximate."""
    max_model_len: Positive = 18000
    """Tokens of prompt and reply that the engine takes together."""
    max_response_length_in_one_turn: Positive = 4096
    """Tokens of one reply. The smallest of this, the client's `max_tokens` and the room left applies."""
    max_env_worker: Positive = 64
    """Episodes that run at the same time."""
    max_num_seqs: Positive = 64
    """Replies that one engine draws at the same time."""
    episode_timeout: AboveZero = 1200.0
    """Seconds that an episode may take, judge included."""
    episode_retries: Count = 1
    """How often an episode is run again after a fault (engine, judge, infrastructure)."""
    gamma: Annotated[float, Field(gt=0, le=1), NotBool] = 1.0
    """Discount over the calls of an agent: a call k calls before the last gets gamma**k of the reward."""
    reasoning_history: Literal["template", "keep"] = "template"
    """Whether earlier thinking stays in the prompt: as the chat template has it, or always."""
    abandoned_calls: Literal["mask", "train"] = "mask"
    """Replies that nothing later built upon (retries, losers of best-of-n): context without loss, or trained."""
    force_disable_toolcalls: bool = False
    """Take tools out of every request, so that replies are text only."""
    compute_madness_checklist: Annotated[list[OutputCheck], OneOrMore] = ["nonsense"]
    """Checks of each reply for abnormal output: `nonsense`, `non_ascii`, `format_type_1`, `wrong_toolcall`."""
    agent_madness_termination: bool = True
    """End an episode's model calls at the first abnormal reply."""
    agent_madness_reward: Real = -1.0
    """Former place of `failure_reward.abnormal`, used where that is not given."""
    enable_oversample: bool = False
    """Start more episodes of a group than needed, and stop it as soon as it has enough and their rewards differ."""
    submit_oversample_multiplier: Annotated[float, Field(ge=1, le=100), NotBool] = 1.5
    """With `enable_oversample`: episodes of a group started at first, as a multiple of `num_repeat`."""
    tensor_model_parallel_size: Positive = 1
    """GPUs that one inference engine is spread over."""
    n_vllm_engine: Positive = 1
    """Inference engines side by side; an episode stays on one of them."""
    seed: Annotated[int, Field(ge=0), NotBool] = 0
    """Seed of everything that is drawn while episodes run."""
    deterministic: bool = False
    """Run in lockstep with fixed shapes and keyed random numbers, so that a run repeats bit for bit. Slower."""
    kv_cache_gb: AboveZero | None = None
    """Memory of the embedded engine for keys and values, cached prefixes included. null: a share of what is free."""
    scripted_replies: str | None = None
    """For `engine: scripted`: a YAML or JSON list of replies (texts, or messages with content and tool_calls)."""
    remote: RemoteConfig = RemoteConfig()
    """For `engine: remote`: which server."""
    vllm: VllmConfig = VllmConfig()
    """For `engine: vllm`: how it runs."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """How long an episode may become."""
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    """How replies are drawn in validation."""

    @model_validator(mode="after")
    def _name_means_engine(self) -> RolloutConfig:
        if self.name is not None and "engine" not in self.model_fields_set:
            self.__dict__["engine"] = self.name
        return self

    @property
    def group_size_needed(self) -> int:
        """`min_group_size`, or `num_repeat` where it is not given."""
        return self.min_group_size or self.num_repeat
