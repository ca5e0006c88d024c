"""`ajet.rollout`: how episodes are run and replies sampled, with its groups for agents, environments and sandboxes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ajet.config.kinds import CliProgramName, EngineName, ProtocolName, SandboxName
from ajet.config.section import (
    AboveZero,
    Block,
    Count,
    NoneIsEmpty,
    NotBool,
    OneOrMore,
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
    """`react` (thinks, calls tools, answers), `tool` (one tool call a step, ends by `finish`), `coding` (edits files
    and runs tests in `rollout.sandbox`), `cli` (a program such as Codex, in `rollout.sandbox`), or `module->Class`: an
    agent of your own."""
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
    """Seconds after which the agent stops. null: only `rollout.episode_timeout` applies, which fails the episode."""
    max_output_chars: Positive = 20000
    """Most characters of a tool's output that the model is shown."""
    when_full: Literal["drop", "summarise", "stop"] = "drop"
    """When the conversation nears `rollout.max_model_len`: leave out old tool output, go on from a summary, or stop."""
    parallel_tool_calls: bool = True
    """Run the tool calls of one reply at the same time."""
    options: Block = Block()
    """Further arguments of the agent's class."""
    program: CliProgramName | None = None
    """cli: a program that ajet knows how to run: `claude-code`, `codex`, `opencode` or `mini-swe-agent`."""
    command: str | list[str] | None = None
    """cli: what is run instead, a program and its arguments, or a shell line. `{prompt}`, `{base_url}`,
    `{anthropic_url}`, `{api_key}`, `{model}`, `{side_model}`, `{home}`, `{workspace}` and `{task_id}` are filled in;
    without `{prompt}`, the prompt is its standard input."""
    setup: str | None = None
    """cli: a shell line that is run in the sandbox before the program."""
    env: dict[str, str] = {}
    """cli: further variables of the program, filled in like `command`."""
    files: dict[str, str] = {}
    """cli: files that are written before the program starts, path to text, filled in like `command`. `~/` is the
    program's home, which is not in the workspace."""
    installed_in: str | None = None
    """cli: the folder into which npm or pip installed the program, if the sandbox doesn't find it by itself. With
    bubblewrap, it is shown inside, read-only; with an image, it is one of the image's."""
    model_name: str | None = None
    """cli: the model's name as the program asks for it (`{model}`), for a program that treats names differently. Any
    name is answered by the trained model. null: `ajet-cli`."""


OutputCheck = Literal["nonsense", "non_ascii", "format_type_1", "wrong_toolcall"]


class RemoteConfig(Section):
    """`ajet.rollout.remote`: the server used by `rollout.engine: remote` and `sglang`."""

    base_url: str | list[str] | None = None
    """Its address, up to and including `/v1`, or a list of equivalent ones. null: the environment's
    `OPENAI_BASE_URL`."""
    api_key: str | list[str] | None = None
    """Its key, or several that are used in turn. null: the environment's `OPENAI_API_KEY`."""
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
    gpu_memory_utilization: Annotated[float, NotBool, Field(gt=0, le=1)] = 0.6
    """Share of the GPU's memory for weights and cache."""
    start_timeout: AboveZero = 600.0
    """Seconds a server may take to start."""
    max_restarts: Count = 3
    """How often to restart a server that died before the run fails."""
    sleep: bool = False
    """Free the GPU's memory during updates, if one GPU serves both vLLM and the trainer. The optimiser's state then
    rests in host memory while vLLM is awake."""
    devices: list[Count] = []
    """GPUs for the engines (`tensor_model_parallel_size` for each), counted among the visible ones. []: all that are
    visible; on `local`, those that the trainer leaves free if they are enough."""
    extra_args: list[str] = []
    """Further command-line arguments for vLLM's server."""


class MultiTurnConfig(Section):
    """`ajet.rollout.multi_turn`: how long an episode may become."""

    max_sample_per_task: Positive = 30
    """Most rows per episode for a backbone that trains linear rows; further ones are dropped and counted."""
    max_steps: Positive = 30
    """Most model calls per agent in an episode; a further one raises an error that the workflow can catch."""


class ValKwargsConfig(Section):
    """`ajet.rollout.val_kwargs`: how replies are sampled in validation."""

    temperature: Temperature | None = None
    """Temperature in validation, if it samples; 0 is greedy. null: `rollout.temperature`."""
    top_k: TopK = -1
    """Sample from the k most likely tokens only; -1: from all."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens that together have this probability."""
    do_sample: bool | None = None
    """Whether validation samples. False: it is greedy, whatever the temperature. null: only if
    `trainer_common.val_pass_n` is above 1."""
    num_repeat: Positive = 1
    """Episodes per validation task. If replies are sampled, `trainer_common.val_pass_n` raises it to what pass@k
    needs."""


class EnvironmentConfig(Section):
    """`ajet.rollout.environment`: the world that an agent acts in. Text alone stands for `source`."""

    source: str | None = None
    """A class of yours (`module.path->Class` or `path/file.py->Class`), or `gymnasium:ID`. May also be written
    `class`."""
    url: str | None = None
    """Where a server of environments answers, in place of `source`. With neither, it is the service that the tasks come
    from, if they come from one (`task_reader.type: env_service`)."""
    protocol: ProtocolName = "env_service"
    """What the server at `url` speaks: AgentJet's own protocol, or OpenEnv's (needs the package openenv-core)."""
    env_type: str = "default"
    """Which of the service's environments."""
    api_key: str | None = None
    """The service's key, if it asks for one: `${oc.env:NAME}` takes it from the environment variable NAME."""
    options: Block = Block()
    """What your class, `gymnasium.make` or the service gets besides the task."""
    timeout: AboveZero = 300.0
    """Seconds in which a service must answer a request."""


class SandboxConfig(Section):
    """`ajet.rollout.sandbox`: how what an episode runs is confined. Text alone stands for `kind`."""

    kind: SandboxName = "bubblewrap"
    """`bubblewrap`: namespaces of this machine; `docker`, `podman`: a container; `kubernetes`: a pod; `none`: not
    confined, commands may do whatever you may."""
    network: Literal["none", "gateway", "host"] | None = None
    """`gateway`: the run's gateway can be reached, and nothing else; `host`: not limited. null: `none`; with
    `agent.type: cli`, `gateway`; with kind `none`, which can't close the network, `host`."""
    cpus: AboveZero = 1.0
    """CPUs, all commands together."""
    memory_mb: Annotated[int, Field(ge=16), NotBool] = 1024
    """Memory of all processes together."""
    processes: Annotated[int, Field(ge=4), NotBool] = 128
    """Processes and threads."""
    disk_mb: Positive = 512
    """What files may take in the workspace, and again in /tmp."""
    exec_seconds: AboveZero | None = None
    """The longest that one command may run. null: 60; with `agent.type: cli`, whose program is one command, as long as
    the episode."""
    lifetime_seconds: AboveZero | None = None
    """After that, the sandbox ends. null: a little more than `rollout.episode_timeout`."""
    output_bytes: Positive = 1_000_000
    """What is kept of each output stream of a command: the beginning and the end."""
    image: str | None = None
    """docker, podman, kubernetes: the image of the root file system."""
    read_only: list[str] = []
    """Folders of this machine that can also be seen, but not changed."""
    environment: dict[str, str] = {}
    """All variables that commands see, besides PATH, HOME and LANG: nothing is inherited."""
    options: Block = Block()
    """What one kind alone understands: see the page on sandboxes."""


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
    environment: Annotated[EnvironmentConfig | None, BeforeValidator(_environment)] = None
    """The world that the agent acts in: `module->Class`, `gymnasium:ID`, or a group of keys. Workflows see it as
    `workflow_task.gym_env`. null: none, unless `task_reader.type` is `env_service`."""
    sandbox: Annotated[SandboxConfig | None, BeforeValidator(_sandbox)] = None
    """A confined place for each episode, in which tools run commands and keep files: `bubblewrap`, another kind, or a
    group of keys. Workflows see it as `tuner.sandbox`. null: none."""
    engine: EngineName = "torch"
    """Where tokens come from: `torch` (embedded), `vllm`, `sglang`, `remote` (an OpenAI-compatible server; debug only)
    or `scripted` (replies from a file, no model)."""
    num_repeat: Positive = 4
    """Episodes per task (the size of its group). Group-relative advantages need at least 2."""
    min_group_size: Positive | None = None
    """Usable episodes that a group needs to be trained. null: all that `failure_reward` doesn't drop, and at least 2.
    Only episodes that failed by a fault (of engine, isolation or infrastructure) are replaced."""
    temperature: Temperature = 0.9
    """Temperature during training. Overrides what the client asks for."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens that together have this probability. Below 1, the recorded probability ratio
    is approximate."""
    top_k: TopK = -1
    """Sample from the k most likely tokens only; -1: from all. With any other value, the recorded probability ratio is
    approximate."""
    max_model_len: Positive = 18000
    """Most tokens of prompt and reply together."""
    max_response_length_in_one_turn: Positive = 4096
    """Most tokens per reply. The smallest of this, the client's `max_tokens` and the room left applies."""
    max_env_worker: Positive = 64
    """Most episodes at a time."""
    max_num_seqs: Positive = 64
    """Most replies that one engine samples at a time."""
    episode_timeout: AboveZero = 1200.0
    """Seconds an episode may take, judge included."""
    episode_retries: Count = 1
    """How often an episode is run again after a fault (engine, judge, infrastructure)."""
    gamma: Annotated[float, Field(gt=0, le=1), NotBool] = 1.0
    """Discount over an agent's calls: the call that is k calls before the last gets gamma**k of the reward."""
    reasoning_history: Literal["template", "keep"] = "template"
    """Whether earlier thinking stays in the prompt: as the chat template decides, or always."""
    abandoned_calls: Literal["mask", "train"] = "mask"
    """Replies that nothing later built upon (retries, losers of best-of-n): context without loss, or trained."""
    untrained_models: list[str] = []
    """Patterns (`*` for any text) of model names: calls that ask for such a model aren't trained. For an agent's side
    calls, such as titles from a small model."""
    force_disable_toolcalls: bool = False
    """Remove tools from every request, so that replies are text only."""
    compute_madness_checklist: Annotated[list[OutputCheck], OneOrMore, NoneIsEmpty] = ["nonsense"]
    """Checks of each reply for abnormal output: `nonsense`, `non_ascii`, `format_type_1`, `wrong_toolcall`. [] or
    null: none."""
    agent_madness_termination: bool = True
    """Refuse further model calls of an episode after the first abnormal reply."""
    enable_oversample: bool = False
    """Start more episodes per group than needed, and stop the others as soon as the group is decided."""
    submit_oversample_multiplier: Annotated[float, Field(ge=1, le=100), NotBool] = 1.5
    """With `enable_oversample`: episodes started per group at first, as a multiple of `num_repeat`."""
    oversample_keep: Literal["first_started", "first_ended"] = "first_started"
    """With `enable_oversample`: which episodes make the group. `first_started`: those that were started first, so the
    others only stand in for faults. `first_ended`: those that ended first, and one whose reward differs: faster, but
    the group is a biased sample of the policy's episodes."""
    tensor_model_parallel_size: Positive = 1
    """GPUs per inference engine."""
    n_vllm_engine: Positive = 1
    """Inference engines side by side; an episode stays on one of them."""
    max_staleness: Count = 0
    """Most updates that a trained token may be behind. 0: rollout and update alternate. Above 0, with an engine that
    has weights of its own, episodes of the next steps are drawn while a step is trained."""
    weights_folder: str | None = None
    """Where new weights are written for an engine that has weights of its own. SGLang's servers must be able to read
    it. null: this machine's memory (`/dev/shm`), or its folder for temporary files if they don't fit."""
    seed: Annotated[int, Field(ge=0), NotBool] = 0
    """Seed of everything that is drawn at random while episodes run."""
    deterministic: bool = False
    """Run in lockstep with fixed shapes and keyed random numbers, so that a run repeats bit for bit. Slower."""
    kv_cache_gb: AboveZero | None = None
    """Memory of the embedded engine for keys and values, cached prefixes included. null: a share of what is free."""
    scripted_replies: str | None = None
    """For `engine: scripted`: a YAML or JSON list of replies (texts, or messages with content and tool_calls)."""
    remote: RemoteConfig = RemoteConfig()
    """For `engine: remote` and `sglang`: which server."""
    vllm: VllmConfig = VllmConfig()
    """For `engine: vllm`: how it runs."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """How long an episode may become."""
    agent: AgentConfig | None = None
    """A ready agent in place of a workflow: its type, tools and limits."""
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    """How replies are sampled in validation."""
