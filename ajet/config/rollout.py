"""`ajet.rollout`: how episodes are run and replies sampled, with its groups for agents, environments and sandboxes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ajet.config.kinds import CliProgramName, EngineName, ProtocolName, SandboxName
from ajet.config.section import (
    AboveZero,
    Block,
    Count,
    NotBool,
    Positive,
    Section,
    Temperature,
    TopK,
    TopP,
)


def _plain(value: Any) -> Any:
    """Nested mappings of a tool's options, as plain values."""
    return [dict(item) if isinstance(item, dict) else item for item in value] if isinstance(value, list) else value


class AgentConfig(Section):
    """`ajet.rollout.agent`: a ready agent in place of a workflow.

    Its reward comes from the judge; without one, from the agent itself (`coding`, `cli`: the tests), from comparing its
    answer with the task's `answer`, or from its tools."""

    type: str = "react"
    """`react` (thinks, calls tools, answers), `tool` (one call a step, ends by `finish`), `coding` (edits and tests in
    `rollout.sandbox`), `cli` (a program such as Codex there), or your `module->Class`."""
    system_prompt: str | None = None
    """The system message. null: the agent's own."""
    tools: Annotated[list[str | dict[str, Any]], BeforeValidator(_plain)] = []
    """What it may call: names (`ajet tools` lists them), `{name: {options}}`, `module->object`, or `{mcp: {…}}`."""
    format: Literal["auto", "native", "text"] = "auto"
    """How the model calls tools: `native`, or as `text` (Thought, Action, Action Input). `auto`: natively."""
    max_steps: Positive = 10
    """Most model calls in an episode. Summaries of a full context don't count."""
    max_tokens: Positive | None = None
    """Most tokens in all replies of an episode together. null: no limit."""
    max_seconds: AboveZero | None = None
    """Seconds after which the agent stops. null: `rollout.episode_timeout` fails the episode."""
    max_output_chars: Positive = 20000
    """Most characters of a tool's output that the model is shown."""
    when_full: Literal["drop", "summarise", "stop"] = "drop"
    """Near `rollout.max_model_len`: leave out old tool output, go on from a summary, or stop."""
    parallel_tool_calls: bool = True
    """Run the tool calls of one reply at the same time."""
    options: Block = Block()
    """Further arguments of the agent's class."""
    program: CliProgramName | None = None
    """cli: a program that ajet knows how to run: `claude-code`, `codex`, `opencode` or `mini-swe-agent`."""
    command: str | list[str] | None = None
    """cli: a program and its arguments, or a shell line, in place of `program`. `{prompt}` (else on standard input),
    `{base_url}`, `{anthropic_url}`, `{api_key}`, `{model}`, `{side_model}`, `{home}`, `{workspace}` and `{task_id}` are
    filled in."""
    setup: str | None = None
    """cli: a shell line that runs in the sandbox before the program."""
    env: dict[str, str] = {}
    """cli: further variables, filled in like `command`."""
    files: dict[str, str] = {}
    """cli: files written before the program starts, path to text, filled in like `command`. `~/` is its home, outside
    the workspace."""
    installed_in: str | None = None
    """cli: folder into which npm or pip installed the program, if the sandbox doesn't find it; with an image, a folder
    of the image."""
    model_name: str | None = None
    """cli: the name by which the program asks for the model (`{model}`). Any name reaches the trained model. null:
    `ajet-cli`."""


FOR_PROGRAMS = ("program", "command", "setup", "env", "files", "installed_in", "model_name")
NOT_FOR_PROGRAMS = (
    "tools", "format", "max_steps", "max_tokens", "max_output_chars", "when_full", "parallel_tool_calls"
)  # fmt: skip
FOR_BOTH = ("system_prompt", "max_seconds")
"""Keys of `rollout.agent`: what `type: cli` takes, what all others take, and what each of them does."""
OutputCheck = Literal["nonsense", "non_ascii", "format_type_1", "wrong_toolcall"]


def _checks(value: Any) -> Any:
    """One check in place of a list; null, and Python's `None`, which YAML reads as text, stand for none."""
    if value is None or value == "None":
        return []
    return [value] if isinstance(value, str) else value


class RemoteConfig(Section):
    """`ajet.rollout.remote`: the server used by `rollout.engine: remote` and `sglang`."""

    base_url: str | list[str] | None = None
    """Its address with `/v1`, or a list of equivalent ones. null: `OPENAI_BASE_URL`."""
    api_key: str | list[str] | None = None
    """Its key, or several used in turn. null: `OPENAI_API_KEY`."""
    model: str | None = None
    """The model's name on the server. null: `model.path`."""
    max_parallel: Positive = 32
    """Most requests at a time."""
    requests_per_minute: AboveZero | None = None
    """Most requests started per minute, for each address and key. null: no limit."""
    max_attempts: Positive = 6
    """How often to try a request that fails for a temporary reason."""
    timeout: AboveZero = 600.0
    """Seconds per attempt."""


class VllmConfig(Section):
    """`ajet.rollout.vllm`: how `rollout.engine: vllm` runs."""

    python: str | None = None
    """The Python interpreter that has vLLM, if it is installed in a separate environment."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), NotBool] = 0.6
    """Share of the GPU's memory for weights and cache."""
    start_timeout: AboveZero = 600.0
    """Seconds a server may take to start."""
    sleep: bool = False
    """Free the GPU's memory during updates, if one GPU serves vLLM and trainer; the optimiser's state then rests in
    host memory."""
    devices: list[Count] = []
    """GPUs for the engines, counted among the visible ones. []: all; on `local`, those that the trainer leaves free, if
    enough."""
    extra_args: list[str] = []
    """Further command-line arguments for vLLM's server."""


class MultiTurnConfig(Section):
    """`ajet.rollout.multi_turn`: how long an episode may become."""

    max_sample_per_task: Positive = 30
    """Most rows per episode for a backbone that trains rows; further ones are dropped and counted."""
    max_steps: Positive = 30
    """Most model calls per agent in an episode; a further one raises an error."""


class ValKwargsConfig(Section):
    """`ajet.rollout.val_kwargs`: how replies are sampled in validation."""

    temperature: Temperature | None = None
    """Temperature in validation, if it samples; 0 is greedy. null: `rollout.temperature`."""
    top_k: TopK = -1
    """Sample from the k most likely tokens only; -1: from all."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens that together have this probability."""
    do_sample: bool | None = None
    """Whether validation samples; false is greedy. null: only if `trainer_common.val_pass_n` is above 1."""
    num_repeat: Positive = 1
    """Episodes per validation task; `trainer_common.val_pass_n` raises it to what pass@k needs."""


class EnvironmentConfig(Section):
    """`ajet.rollout.environment`: the world that an agent acts in. Text alone stands for `source`."""

    source: str | None = None
    """A class of yours (`module.path->Class` or `path/file.py->Class`), or `gymnasium:ID`. Also written `class`."""
    url: str | None = None
    """Where a server of environments answers, in place of `source`. With neither: the service that the tasks come
    from."""
    protocol: ProtocolName = "env_service"
    """The server's protocol: AgentJet's own, or OpenEnv's (needs openenv-core)."""
    env_type: str = "default"
    """Which of the service's environments."""
    api_key: str | None = None
    """The service's key, preferably as `${oc.env:NAME}`."""
    options: Block = Block()
    """What your class, `gymnasium.make` or the service gets besides the task."""
    timeout: AboveZero = 300.0
    """Seconds in which a service must answer a request."""


class SandboxConfig(Section):
    """`ajet.rollout.sandbox`: how what an episode runs is confined. Text alone stands for `kind`."""

    kind: SandboxName = "bubblewrap"
    """`bubblewrap`: namespaces of this machine; `docker`, `podman`: a container; `kubernetes`: a pod; `none`: not
    confined."""
    network: Literal["none", "gateway", "host"] | None = None
    """`gateway`: only the run's gateway; `host`: not limited. null: `none`; `gateway` with `agent.type: cli`; `host`
    with kind `none`."""
    cpus: AboveZero = 1.0
    """CPUs, all commands together."""
    memory_mb: Annotated[int, Field(ge=16), NotBool] = 1024
    """Memory of all processes together."""
    processes: Annotated[int, Field(ge=4), NotBool] = 128
    """Processes and threads."""
    disk_mb: Positive = 512
    """What files may take in the workspace, and again in /tmp."""
    exec_seconds: AboveZero | None = None
    """Longest that one command may run. null: 60; as long as the episode with `agent.type: cli`."""
    lifetime_seconds: AboveZero | None = None
    """When the sandbox ends. null: a little after `rollout.episode_timeout`."""
    image: str | None = None
    """docker, podman, kubernetes: the image of the root file system."""
    read_only: list[str] = []
    """Folders of this machine that can also be seen, but not changed."""
    environment: dict[str, str] = {}
    """Variables that commands see besides PATH, HOME and LANG; nothing is inherited."""
    options: Block = Block()
    """Options of one kind: see the page on sandboxes."""


def _sandbox(value: Any) -> Any:
    """Text is the kind."""
    return {"kind": value} if isinstance(value, str) else value


def _environment(value: Any) -> Any:
    """Text is the source; `class` is its other name."""
    if isinstance(value, str):
        return {"source": value}
    if isinstance(value, dict) and "class" in value and "source" not in value:
        return {"source" if key == "class" else key: item for key, item in value.items()}
    return value


class RolloutSection(Section):
    """`ajet.rollout`: how episodes are run, and how replies are sampled."""

    user_workflow: str | None = None
    """Your workflow: `module.path->Class` or `path/file.py->Class`."""
    environment: Annotated[EnvironmentConfig | None, BeforeValidator(_environment, EnvironmentConfig | str | None)] = (
        None
    )
    """The world that the agent acts in: `module->Class`, `gymnasium:ID`, or a group of keys. Workflows see it as
    `workflow_task.gym_env`. null: none, unless `task_reader.type` is `env_service`."""
    sandbox: Annotated[SandboxConfig | None, BeforeValidator(_sandbox, SandboxName | SandboxConfig | None)] = None
    """A confined place for each episode's commands and files: `bubblewrap`, another kind, or a group of keys. Workflows
    see it as `tuner.sandbox`. null: none."""
    engine: EngineName = "torch"
    """Where tokens come from: `torch` (embedded), `vllm`, `sglang`, `remote` (an OpenAI-compatible server; debug only)
    or `scripted` (replies from a file)."""
    num_repeat: Positive = 4
    """Episodes per task (the size of its group). Group-relative advantages need at least 2."""
    min_group_size: Positive | None = None
    """Usable episodes that a group needs to be trained. null: all that `failure_reward` doesn't drop, and at least
    2."""
    temperature: Temperature = 0.9
    """Temperature during training. Overrides what the client asks for."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens that together have this probability. Below 1, the probability ratio is
    approximate."""
    top_k: TopK = -1
    """Sample from the k most likely tokens only; -1: from all. Otherwise the probability ratio is approximate."""
    max_model_len: Positive = 18000
    """Most tokens of prompt and reply together."""
    max_response_length_in_one_turn: Positive = 4096
    """Most tokens per reply; the client's `max_tokens` or the room left may be less."""
    max_env_worker: Positive = 64
    """Most episodes at a time."""
    max_num_seqs: Positive = 64
    """Most replies that one engine samples at a time."""
    episode_timeout: AboveZero = 1200.0
    """Seconds an episode may take, judge included."""
    episode_retries: Count = 1
    """How often an episode is run again after a fault (engine, judge, infrastructure)."""
    gamma: Annotated[float, Field(gt=0, le=1), NotBool] = 1.0
    """Discount of earlier calls: the call that is k calls before an agent's last gets gamma**k of the reward."""
    reasoning_history: Literal["template", "keep"] = "template"
    """Whether earlier thinking stays in the prompt: as the chat template decides, or always."""
    abandoned_calls: Literal["mask", "train"] = "mask"
    """Replies that nothing later built upon (retries, losers of best-of-n): context without loss, or trained."""
    untrained_models: list[str] = []
    """Names of models (`*` for any text) whose calls aren't trained, for an agent's side calls."""
    force_disable_toolcalls: bool = False
    """Remove tools from every request, so that replies are text only."""
    compute_madness_checklist: Annotated[
        list[OutputCheck], BeforeValidator(_checks, OutputCheck | list[OutputCheck] | None)
    ] = ["nonsense"]
    """Checks of each reply for abnormal output: `nonsense`, `non_ascii`, `format_type_1`, `wrong_toolcall`. [] or null:
    none."""
    agent_madness_termination: bool = True
    """Refuse further model calls of an episode after the first abnormal reply."""
    enable_oversample: bool = False
    """Start more episodes per group than needed, and stop the others once the group is decided."""
    submit_oversample_multiplier: Annotated[float, Field(ge=1, le=100), NotBool] = 1.5
    """With `enable_oversample`: episodes started per group, as a multiple of `num_repeat`."""
    oversample_keep: Literal["first_started", "first_ended"] = "first_started"
    """With `enable_oversample`, which episodes make the group. `first_started`: those started first; the others stand
    in for faults. `first_ended`: those that ended first, and one whose reward differs; faster, but biased."""
    tensor_model_parallel_size: Positive = 1
    """GPUs per inference engine."""
    n_vllm_engine: Positive = 1
    """Inference engines side by side; an episode stays on one of them."""
    max_staleness: Count = 0
    """Most updates that a trained token may be behind. Above 0, an engine with weights of its own draws later steps'
    episodes while a step is trained."""
    weights_folder: str | None = None
    """Where new weights are written for vLLM or SGLang, which must be able to read it. null: `/dev/shm`, or the folder
    for temporary files."""
    seed: Count = 0
    """Seed of everything that is drawn at random while episodes run."""
    deterministic: bool = False
    """Run in lockstep with fixed shapes and keyed random numbers: a run repeats bit for bit, but slower."""
    routing_replay: bool = False
    """For a mixture of experts: note which experts the engine sends each token to, and have the trainer follow them."""
    kv_cache_gb: AboveZero | None = None
    """Memory of the embedded engine for keys and values. null: a share of what is free."""
    scripted_replies: str | None = None
    """For `engine: scripted`: a YAML or JSON list of replies (texts, or messages with content and tool_calls)."""
    remote: RemoteConfig = RemoteConfig()
    vllm: VllmConfig = VllmConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    agent: AgentConfig | None = None
    """A ready agent in place of a workflow: its type, tools and limits."""
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
