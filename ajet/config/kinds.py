"""Every name that a YAML may say for a part, once, with the class or function that it stands for.

To add a kind, write its file and one line here. What a YAML accepts, the JSON schema, errors with the nearest name,
shell completion and `docs/config/` derive from these tables. The part is imported when it is used, so a table
may name rooms that are built on this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Kinds = Mapping[str, str]
"""Name → `module->Class`."""

BACKBONES: Kinds = {
    "local": "ajet.backbone.local->run",
    "debug": "ajet.backbone.debug->run",
    "verl": "ajet.backbone.ray.verl->run",
    "trinity": "ajet.backbone.ray.trinity->run",
    "prompt": "ajet.backbone.prompt->run",
}
"""`--backbone`, `backbone`: a function `run(config, experiment, options) -> exit code`."""

ENGINES: Kinds = {
    "torch": "ajet.engine.torch.engine->TorchEngine",
    "vllm": "ajet.engine.vllm.server_engine->VllmServerEngine",
    "sglang": "ajet.engine.sglang->SglangEngine",
    "remote": "ajet.engine.remote->RemoteEngine",
    "scripted": "ajet.engine.scripted->ScriptedEngine",
}
"""`rollout.engine`: an `Engine` with a class method `from_config(config, hardware)`."""

READERS: Kinds = {
    "jsonl_dataset_file": "ajet.task_reader.jsonl->JsonlReader",
    "dataset_file": "ajet.task_reader.jsonl->JsonlReader",
    "huggingface_dat_repo": "ajet.task_reader.huggingface->HuggingFaceReader",
    "random_dummy": "ajet.task_reader.random_dummy->RandomDummyReader",
    "env_service": "ajet.task_reader.env_service->EnvServiceReader",
    "data_generation": "ajet.task_reader.data_generation->DataGenerationReader",
    "tracing": "ajet.task_reader.tracing->TracingReader",
    "harbor": "ajet.task_reader.harbor->HarborReader",
}
"""`task_reader.type`: a `BaseTaskReader`."""

JUDGES: Kinds = {
    "llm_judge": "ajet.task_judge.llm_judge->LlmJudge",
    "rubrics_auto_grader": "ajet.task_judge.rubrics->RubricsJudge",
    "openjudge": "ajet.task_judge.openjudge->OpenJudge",
    "tests": "ajet.task_judge.tests_judge->TestsJudge",
    "harbor": "ajet.task_judge.tests_judge->HarborJudge",
    "composite": "ajet.task_judge.composite->CompositeJudge",
}
"""`task_judge.judge_type`, and `judge` of a composite's part: a `BaseJudge`."""

ENVIRONMENTS: Kinds = {
    "gymnasium": "ajet.environment.gymnasium_environment->GymnasiumSource",
}
"""`rollout.environment: NAME:…`: an `EnvironmentSource(what follows the colon, options, key)`."""

ENVIRONMENT_PROTOCOLS: Kinds = {
    "env_service": "ajet.environment.service_environment->ServiceSource",
    "openenv": "ajet.environment.openenv_environment->OpenEnvSource",
}
"""`rollout.environment.protocol`: an `EnvironmentSource` over a server."""

SANDBOXES: Kinds = {
    "bubblewrap": "ajet.environment.sandboxes.bubblewrap->BubblewrapSandbox",
    "docker": "ajet.environment.sandboxes.container->ContainerSandbox",
    "podman": "ajet.environment.sandboxes.container->ContainerSandbox",
    "kubernetes": "ajet.environment.sandboxes.kubernetes->KubernetesSandbox",
    "none": "ajet.environment.sandboxes.unconfined->UnconfinedSandbox",
}
"""`rollout.sandbox.kind`: a `Sandbox` with a static method `check(settings)`."""

AGENTS: Kinds = {
    "react": "ajet.agents.ready->ReActAgent",
    "tool": "ajet.agents.ready->ToolAgent",
    "coding": "ajet.agents.ready->CodingAgent",
}
"""`rollout.agent.type`, besides `cli`: an `Agent`."""

CLI_PROGRAMS: Kinds = {
    "claude-code": "ajet.agents.cli_agent->CLAUDE_CODE",
    "codex": "ajet.agents.cli_agent->CODEX",
    "opencode": "ajet.agents.cli_agent->OPENCODE",
    "mini-swe-agent": "ajet.agents.cli_agent->MINI_SWE_AGENT",
}
"""`rollout.agent.program`: a `CliProgram`."""

TOOLS: Kinds = {
    "calculator": "ajet.agents.tools.calculator->Calculator",
    "finish": "ajet.agents.tools.finish->Finish",
    "submit": "ajet.agents.tools.finish->Submit",
    "bash": "ajet.agents.tools.bash->Bash",
    "python": "ajet.agents.tools.bash->Python",
    "file_editor": "ajet.agents.tools.file_editor->FileEditor",
    "search": "ajet.agents.tools.search->SearchFiles",
    "web_fetch": "ajet.agents.tools.web_fetch->WebFetch",
    "mcp": "ajet.agents.tools.mcp->McpServer",
}
"""An entry of `rollout.agent.tools`: a `Tool`, or a source of tools."""

TRACKERS: Kinds = {
    "tensorboard": "ajet.observe.metrics->TensorBoardSink",
    "wandb": "ajet.observe.metrics->WandbSink",
    "swanlab": "ajet.observe.metrics->SwanLabSink",
    "mlflow": "ajet.observe.metrics->MlflowSink",
}
"""An entry of `trainer_common.logger`, besides `console` and `file`: a `MetricsSink` that names its package."""

ESTIMATORS: Kinds = {
    "grpo": "ajet.trainer.credit.estimators->GRPO",
    "drgrpo": "ajet.trainer.credit.estimators->DR_GRPO",
    "rloo": "ajet.trainer.credit.estimators->RLOO",
    "reinforce_plus_plus": "ajet.trainer.credit.estimators->REINFORCE_PLUS_PLUS",
    "reinforce_plus_plus_baseline": "ajet.trainer.credit.estimators->REINFORCE_PLUS_PLUS_BASELINE",
    "pass_at_k": "ajet.trainer.credit.estimators->PASS_AT_K",
}
"""`trainer_common.algorithm.adv_estimator`: an `AdvantageEstimator`, or a function that is its `Formula`."""

LOSSES: Kinds = {
    "ppo": "ajet.trainer.loss->PPO",
    "gspo": "ajet.trainer.loss->GSPO",
    "cispo": "ajet.trainer.loss->CISPO",
    "dppo_tv": "ajet.trainer.loss->DPPO_TV",
    "dppo_kl": "ajet.trainer.loss->DPPO_KL",
    "sapo": "ajet.trainer.loss->SAPO",
    "sft": "ajet.trainer.loss->SFT",
}
"""`trainer_common.algorithm.policy_loss`: a `PolicyLoss`, or a `LossFunction`."""

PROMPT_OPTIMISERS: Kinds = {
    "apo": "ajet.prompt_tuning.apo->APO",
    "gepa": "ajet.prompt_tuning.gepa->GEPA",
    "best_of": "ajet.prompt_tuning.best_of->BestOf",
}
"""`prompt_tuning.algorithm`: an `Algorithm`."""

PROPOSERS: Kinds = {
    "helper": "ajet.backbone.prompt.settings->HelperProposer",
    "tuned": "ajet.backbone.prompt.settings->TunedProposer",
}
"""`prompt_tuning.proposer`: a `Proposer` with a class method `from_config(config, runtime)`."""


_ALGORITHM = "trainer_common.algorithm"
_NO_CLIPPING: Mapping[str, Any] = {f"{_ALGORITHM}.clip_low": 1.0, f"{_ALGORITHM}.clip_high": 100.0}
_NO_KL: Mapping[str, Any] = {"trainer_common.use_kl_loss": False}
_GRPO: Mapping[str, Any] = {
    f"{_ALGORITHM}.policy_loss": "ppo",
    f"{_ALGORITHM}.adv_estimator": "grpo",
    f"{_ALGORITHM}.baseline": "auto",
    f"{_ALGORITHM}.loss_norm": "sequence_mean",
    f"{_ALGORITHM}.clip_low": 0.2,
    f"{_ALGORITHM}.clip_high": 0.2,
    f"{_ALGORITHM}.clip_dual": None,
    f"{_ALGORITHM}.sequence_mask": None,
    f"{_ALGORITHM}.entropy_coef": 0.0,
    f"{_ALGORITHM}.zero_variance_groups": "keep",
    f"{_ALGORITHM}.overlong.buffer": 0,
    f"{_ALGORITHM}.overlong.mask": False,
    f"{_ALGORITHM}.use_kl_in_reward": False,
    "trainer_common.use_kl_loss": True,
    "trainer_common.kl_loss_coef": 0.04,
    "trainer_common.kl_loss_type": "k3",
}
"""DeepSeekMath (2402.03300). It gives no clip range; 0.2 is PPO's."""
_DAPO: Mapping[str, Any] = {
    **_GRPO,
    **_NO_KL,
    f"{_ALGORITHM}.loss_norm": "token_mean",
    f"{_ALGORITHM}.clip_high": 0.28,
    f"{_ALGORITHM}.zero_variance_groups": "resample",
    f"{_ALGORITHM}.overlong.buffer": lambda ajet: ajet.data.max_response_length // 5,
    f"{_ALGORITHM}.overlong.penalty": 1.0,
}
"""DAPO (2503.14476). Its buffer is 4,096 of 20,480 tokens."""

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": _GRPO,
    "dapo": _DAPO,
    # 2503.20783
    "drgrpo": {
        **_GRPO,
        **_NO_KL,
        f"{_ALGORITHM}.adv_estimator": "drgrpo",
        f"{_ALGORITHM}.loss_norm": "dr_grpo",
    },
    # 2507.18071; without a KL term, as its authors' scripts
    "gspo": {
        **_GRPO,
        **_NO_KL,
        f"{_ALGORITHM}.policy_loss": "gspo",
        f"{_ALGORITHM}.clip_low": 3e-4,
        f"{_ALGORITHM}.clip_high": 4e-4,
    },
    # MiniMax-M1 (2506.13585), with DAPO's dynamic sampling and length penalty, and no lower bound. It gives no
    # clip_high: 5 is that of a later study (Khatri et al. 2025, 2510.13786).
    "cispo": {
        **_DAPO,
        f"{_ALGORITHM}.policy_loss": "cispo",
        f"{_ALGORITHM}.clip_low": 1.0,
        f"{_ALGORITHM}.clip_high": 5.0,
    },
    # 2402.14740: no clipping, log-probabilities summed over a reply (up to a constant factor), KL in the reward (TL;DR)
    "rloo": {
        **_GRPO,
        **_NO_KL,
        **_NO_CLIPPING,
        f"{_ALGORITHM}.adv_estimator": "rloo",
        f"{_ALGORITHM}.loss_norm": "dr_grpo",
        f"{_ALGORITHM}.use_kl_in_reward": True,
        "trainer_common.kl_loss_coef": 0.03,
    },
    # 2501.03262: KL in the reward, with the coefficient of its runs on general tasks
    "reinforce_pp": {
        **_GRPO,
        **_NO_KL,
        f"{_ALGORITHM}.adv_estimator": "reinforce_plus_plus",
        f"{_ALGORITHM}.loss_norm": "token_mean",
        f"{_ALGORITHM}.use_kl_in_reward": True,
        "trainer_common.kl_loss_coef": 0.01,
    },
    # 2505.10978; tokens weigh alike, as in its published code
    "gigpo": {
        **_GRPO,
        f"{_ALGORITHM}.baseline": "state",
        f"{_ALGORITHM}.state_weight": 1.0,
        f"{_ALGORITHM}.loss_norm": "token_mean",
        "trainer_common.kl_loss_coef": 0.01,
        "rollout.gamma": 0.95,
    },
    "sft": {**_GRPO, **_NO_KL, f"{_ALGORITHM}.policy_loss": "sft", f"{_ALGORITHM}.loss_norm": "token_mean"},
    # on-policy distillation (Agarwal et al. 2024, 2306.13649; Lu 2025): reverse KL to the teacher as the only advantage
    "distill": {
        **_GRPO,
        **_NO_KL,
        **_NO_CLIPPING,
        f"{_ALGORITHM}.loss_norm": "token_mean",
        f"{_ALGORITHM}.distillation.mode": "alone",
        f"{_ALGORITHM}.distillation.coef": 1.0,
    },
}
"""`trainer_common.algorithm.recipe`: the keys below `ajet` that a recipe sets, where the user doesn't. A
function makes a value from the config."""


def load(kinds: Kinds, name: str) -> Any:
    """What `name` stands for, imported now. Raises KeyError."""
    return getattr(load_module(kinds, name), kinds[name].partition("->")[2])


def load_module(kinds: Kinds, name: str) -> ModuleType:
    """The module that defines it."""
    return import_module(kinds[name].partition("->")[0])


def nearest_name(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'codex'?`, or nothing, for an error that goes on with the names that there are."""
    near = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def no_option(of: str, option: object, known: Iterable[str]) -> str:
    """The words for an option that a kind does not have."""
    known = list(known)
    hint = nearest_name(str(option), known) or f"; options: {', '.join(known) or 'none'}"
    return f"{of} has no option {option!r}{hint}"


class _OneOf:
    """Makes a text one of these names. `own`: how a class or function of the user's is written instead."""

    def __init__(self, names: Iterable[str], *more: str, own: str = "") -> None:
        self.names, self.own = [*names, *more], own

    def check(self, value: str) -> str:
        if value in self.names or (self.own and "->" in value):
            return value
        expected = ", ".join(map(repr, self.names)) + (f" or `{self.own}`" if self.own else "")
        raise PydanticCustomError("literal_error", "should be {expected}", {"expected": expected})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        named = {"enum": self.names, "type": "string"}
        return {"anyOf": [named, {"type": "string", "pattern": "->", "description": self.own}]} if self.own else named


BackboneName = Annotated[str, _OneOf(BACKBONES)]
EngineName = Annotated[str, _OneOf(ENGINES)]
ReaderName = Annotated[str, _OneOf(READERS, own="path/file.py->YourReader")]
JudgeName = Annotated[str, _OneOf(JUDGES, "customized_protocol")]
ProtocolName = Annotated[str, _OneOf(ENVIRONMENT_PROTOCOLS)]
SandboxName = Annotated[str, _OneOf(SANDBOXES)]
CliProgramName = Annotated[str, _OneOf(CLI_PROGRAMS)]
TrackerName = Annotated[str, _OneOf(TRACKERS, "console", "file", own="path/file.py->YourSink")]
EstimatorName = Annotated[str, _OneOf(ESTIMATORS, own="path/file.py->your_estimator")]
LossName = Annotated[str, _OneOf(LOSSES, own="path/file.py->your_loss")]
OptimiserName = Annotated[str, _OneOf(PROMPT_OPTIMISERS, own="path/file.py->YourAlgorithm")]
ProposerName = Annotated[str, _OneOf(PROPOSERS, own="path/file.py->your_function")]
RecipeName = Annotated[str, _OneOf(RECIPES)]
