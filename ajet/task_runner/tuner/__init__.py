"""What a workflow gets besides its task: the model being tuned, as a client of the workflow's framework.

Each `as_…` method of `AjetTuner` returns a client of one framework for one agent and target.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.gateway.chat import EpisodeSession
from ajet.gateway.protocol import MODEL_PREFIX, Caller, agent_key
from ajet.observe.export import SpanSender  # here, not where it is used: episodes in forks would each load it
from ajet.schema.chat import DEFAULT_AGENT, DEFAULT_TARGET, Message, bare_call_id
from ajet.schema.errors import ConfigError, FeatureUnavailableError
from ajet.schema.install import lazily
from ajet.schema.resources import PromptSet, PromptTemplate, read_prompts
from ajet.schema.span import Span
from ajet.schema.task import finite_reward
from ajet.task_judge.helper import BaseUrlAndKey, HelperModel
from ajet.task_runner.tuner.connection import Connection, LoopBridge, post_reward

if TYPE_CHECKING:
    from ajet.agents.model_function import ModelFunction
    from ajet.context_tracker import ContextTracker
    from ajet.environment.sandboxes import Sandbox
    from ajet.gateway.gateway import Gateway
    from ajet.task_runner.tuner.clients import agentscope_model as agentscope_model
    from ajet.task_runner.tuner.clients import rehearse as rehearse

__all__ = ["AjetTuner", "BaseUrlAndKey", "Connection", "HelperModel"]

__getattr__ = lazily(__name__, {"agentscope_model": "clients", "rehearse": "clients"})


class SpanSink(NamedTuple):
    """Takes finished spans, from any thread."""

    add: Callable[[Span], None]
    flush: Callable[[], object]
    """Wait, with a time limit, until all added spans have arrived."""

    @classmethod
    def to_session(cls, session: EpisodeSession, loop: asyncio.AbstractEventLoop) -> SpanSink:
        """Connect within the process that runs the episode. `loop`: the session's event loop."""

        def add(span: Span) -> None:
            with suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(lambda: session.add_spans([span], rewards_count=True))

        return cls(add, lambda: None)  # the loop keeps their order: they arrive before the workflow's result

    @classmethod
    def to_gateway(cls, base_url: str, key: str) -> SpanSink:
        """Connect from any other process."""
        sender = SpanSender(
            base_url.removesuffix("/v1"), {"authorization": f"Bearer {key}"}, what=f"the gateway at {base_url}"
        )
        return cls(sender.add, sender.flush)


class AjetTuner:
    """The model being tuned, for one episode.

    `config` is the loaded configuration: `tuner.config.ajet.rollout.num_repeat`, and the user's own blocks as
    `tuner.config.<block>`.
    """

    sandbox: Sandbox | None = None
    """The episode's sandbox (`ajet.rollout.sandbox`)."""
    _session: EpisodeSession | None = None
    _gateway: Gateway | None = None
    _endpoint: BaseUrlAndKey | None = None
    _control_key = ""
    _prompts: PromptSet | None = None

    def __init__(
        self, session: EpisodeSession, config: Any, loop: asyncio.AbstractEventLoop, gateway: Gateway | None = None
    ) -> None:
        """For the process that runs the episode. `loop` is the service loop, on which `session` lives."""
        self.config = config
        self._session = session
        self._loop, self._process = loop, os.getpid()
        self._gateway = gateway
        self.prompts_used: list[str] = []
        self._trainable_targets: Sequence[str] = session.settings.trainable_targets

    @classmethod
    def remote(
        cls,
        base_url: str,
        api_key: str,
        config: Any,
        *,
        control_key: str = "",
        trainable_targets: Sequence[str] | None = None,
    ) -> AjetTuner:
        """A tuner for any other process: everything goes through the gateway. `api_key` is the episode's key; rewards
        need its `control_key`."""
        tuner = cls.__new__(cls)
        tuner.config = config
        tuner._endpoint = BaseUrlAndKey(base_url, api_key, MODEL_PREFIX + DEFAULT_AGENT)
        tuner._control_key = control_key
        tuner.prompts_used = []
        tuner._trainable_targets = tuple(trainable_targets or ())
        return tuner

    # ------------------------------------------------------------ clients

    def as_raw_openai_sdk_client(
        self, agent_name: str = DEFAULT_AGENT, target_tag: str = DEFAULT_TARGET, debug_model: Any = None
    ) -> Any:
        """An `openai.AsyncOpenAI` (`client.chat.completions.create(messages=…)`)."""
        from ajet.task_runner.tuner.clients import openai_client

        return self._client(openai_client, agent_name, target_tag, debug_model)

    def as_agentscope_model(
        self,
        agent_name: str = DEFAULT_AGENT,
        target_tag: str = DEFAULT_TARGET,
        debug_model: Any = None,
        *,
        stream: bool = False,
    ) -> Any:
        """A chat model for AgentScope's agents, for the installed version (1.0.x or 2.x)."""
        from ajet.task_runner.tuner.clients import agentscope_model

        def build(connection: Connection) -> Any:
            return agentscope_model(connection, context_size=self.config.ajet.rollout.max_model_len, stream=stream)

        return self._client(build, agent_name, target_tag, debug_model)

    def as_langchain_model(
        self,
        agent_name: str = DEFAULT_AGENT,
        target_tag: str = DEFAULT_TARGET,
        debug_model: Any = None,
        **options: Any,
    ) -> Any:
        """A `langchain_openai.ChatOpenAI`, for LangChain and LangGraph; `options` go to its constructor."""
        from ajet.task_runner.tuner.clients import langchain_model

        return self._client(
            lambda connection: langchain_model(connection, options), agent_name, target_tag, debug_model
        )

    def as_anthropic_client(
        self, agent_name: str = DEFAULT_AGENT, target_tag: str = DEFAULT_TARGET, debug_model: Any = None
    ) -> Any:
        """An `anthropic.AsyncAnthropic` (`client.messages.create(model=…, max_tokens=…, messages=…)`)."""
        if not self._trains(target_tag, debug_model) and debug_model is not None:
            return debug_model  # a helper model speaks OpenAI's protocol, so this must be a client already
        from ajet.task_runner.tuner.clients import anthropic_client

        return anthropic_client(self._own_connection(agent_name, target_tag))

    def as_model_function(
        self, agent_name: str = DEFAULT_AGENT, target_tag: str = DEFAULT_TARGET, debug_model: Any = None
    ) -> ModelFunction:
        """`await model(messages, tools=…, temperature=…)` returns the assistant's message, as plain dicts.

        It may be called from any thread and event loop. A `debug_model` that is neither a name nor a `HelperModel` is
        a model function itself."""
        from ajet.agents.model_function import as_model_function
        from ajet.task_runner.tuner.clients import model_function

        return as_model_function(self._client(model_function, agent_name, target_tag, debug_model))

    def as_oai_baseurl_apikey(
        self,
        agent_name: str = DEFAULT_AGENT,
        target_tag: str = DEFAULT_TARGET,
        debug_model: str | HelperModel | None = None,
    ) -> BaseUrlAndKey:
        """The settings for any client of OpenAI's protocol, in any language: `.base_url`, `.api_key`, `.model`.
        Anthropic's protocol is served at the same address, without `/v1`."""
        helper = self._helper(target_tag, debug_model)
        if helper is not None:
            return _endpoint(helper)
        return self._own_endpoint(agent_name, target_tag)

    def _own_endpoint(self, agent_name: str, target_tag: str) -> BaseUrlAndKey:
        whole = self._registered()
        own_key = agent_key(whole.api_key, agent_name, target_tag)
        return BaseUrlAndKey(whole.base_url, own_key, MODEL_PREFIX + agent_name)

    def _registered(self) -> BaseUrlAndKey:
        """The episode's endpoint, with the key that is valid for all agents."""
        if self._endpoint is None:
            assert self._session is not None
            if self._gateway is None:
                raise FeatureUnavailableError("as_oai_baseurl_apikey needs a gateway, but this run has none")
            gateway, session = self._gateway, self._session
            key = self._bridge(DEFAULT_AGENT, DEFAULT_TARGET).call(lambda: gateway.register(session))
            self._control_key = key.control_key
            self._endpoint = BaseUrlAndKey(key.base_url, key.api_key, key.model)
        return self._endpoint

    # ------------------------------------------------------------ prompt templates

    def prompt(self, name: str | None = None) -> PromptTemplate:
        """The template of this name in `ajet.prompt_tuning.templates`; without a name, the only one there is.

        While prompts are tuned, it is that of the candidate which the episode tries.
        """
        if self._prompts is None:
            self._prompts = read_prompts(self.config.ajet.prompt_tuning.templates)
        wanted = self._prompts.name(name)
        if wanted not in self.prompts_used:
            self.prompts_used.append(wanted)
        return self._prompts.get(wanted)

    def use_prompts(self, prompts: PromptSet, used: list[str]) -> None:
        """Called before the workflow runs. Sets the episode's templates, and where to record which of them it uses."""
        self._prompts, self.prompts_used = prompts, used

    # ------------------------------------------------------------ rewards and the tracker

    def reward(self, value: float, *, call: str | None = None, agent: str | None = None, replace: bool = False) -> None:
        """A reward for one call (`call`: a response's id), one agent, or the whole episode.

        A call's reward adds to the outcome (the agent's reward, or the episode's). `replace=True`: it stands in for
        the outcome, for this call and the calls that led to it.
        """
        value = finite_reward(value, "tuner.reward")
        if self._session is None:
            assert self._endpoint is not None
            given = {"reward": value, "call": call, "agent": agent, "replace": replace}
            post_reward(self._endpoint.base_url, self.control_key(), given)
            return
        session = self._session
        call_id = bare_call_id(call)
        bridge = LoopBridge(Caller(session), self._loop, self._process)
        bridge.call(lambda: session.reward(value, call_id, agent, replace=replace))

    def control_key(self) -> str:
        """The key that rewards over HTTP need (`POST /v1/rewards` at the address of `as_oai_baseurl_apikey`).

        For a program of yours that judges the episode. Never give it to the agent: its holder decides what is
        trained."""
        self._registered()
        if not self._control_key:
            raise FeatureUnavailableError("this tuner was made without a control key: AjetTuner.remote(control_key=…)")
        return self._control_key

    def span_sink(self) -> SpanSink:
        """The destination of spans that the episode's code emits."""
        if self._session is None:
            assert self._endpoint is not None
            return SpanSink.to_gateway(self._endpoint.base_url, self._control_key or self._endpoint.api_key)
        return SpanSink.to_session(self._session, self._loop)

    def otlp_environment(
        self, agent_name: str = DEFAULT_AGENT, target_tag: str = DEFAULT_TARGET, *, rewards: bool = False
    ) -> dict[str, str]:
        """Environment variables with which any program's OpenTelemetry SDK sends its spans to this episode's record.

        `rewards`: with the control key, so that rewards in its spans count. Not for programs that run the model's
        code."""
        base_url, key, _ = self._own_endpoint(agent_name, target_tag)
        key = self.control_key() if rewards else key
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": base_url.removesuffix("/v1"),
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{key}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
        }

    def get_context_tracker(self) -> ContextTracker:
        """The episode's tracker: read-only, and from the service loop only."""
        if self._session is None:
            raise FeatureUnavailableError("the context tracker lives in the process that runs the episode")
        return self._session.tracker

    # ------------------------------------------------------------ names that old files use

    @property
    def trainable_targets(self) -> list[str]:
        """The workflow's `trainable_targets`; []: all are trained."""
        return list(self._trainable_targets)

    @property
    def context_tracker(self) -> ContextTracker:
        """`get_context_tracker()`."""
        return self.get_context_tracker()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the tuned model, in the process that runs the episode."""
        if self._session is None:
            raise FeatureUnavailableError(
                "the tokenizer lives in the process that runs the episode: use task_runner.wrapper_type: asyncio"
            )
        return self._session.tokenizer

    async def llm_inference_fn(
        self,
        messages: Sequence[Message],
        custom_sampling_params: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        request_id: str = "",
    ) -> dict[str, Any]:
        """The tuned model's reply to `messages`, as a message."""
        client = self.as_raw_openai_sdk_client()
        options: dict[str, Any] = {**(custom_sampling_params or {}), **({"tools": list(tools)} if tools else {})}
        reply = await client.chat.completions.create(messages=list(messages), **options)
        message: dict[str, Any] = reply.choices[0].message.model_dump(exclude_none=True)
        return message

    # ------------------------------------------------------------ which model answers

    def _trains(self, target: str, debug_model: Any) -> bool:
        if debug_model is not None and not self._trainable_targets:
            raise ConfigError(
                f"debug_model is given for target {target!r}, but the workflow has no trainable_targets, so this "
                "target is trained: name those to train on the workflow, as in trainable_targets: list[str] = "
                "['solver'], and the target of each agent (target_tag=…); or leave debug_model out"
            )
        return not self._trainable_targets or target in self._trainable_targets

    def _helper(self, target: str, debug_model: Any) -> Any:
        """The model of an untrained target: `debug_model`, or else the configured helper. None: the tuned model."""
        if self._trains(target, debug_model):
            return None
        if debug_model is None and self.config.ajet.helper.model is not None:
            return HelperModel.from_config(self.config)
        return debug_model

    def _client(self, build: Callable[[Connection], Any], agent: str, target: str, debug_model: Any) -> Any:
        """The client that `build` creates for the agent's model. A helper that is a client already is returned
        unchanged."""
        helper = self._helper(target, debug_model)
        if helper is None:
            return build(self._own_connection(agent, target))
        return build(Connection(*_endpoint(helper))) if isinstance(helper, str | HelperModel) else helper

    def _own_connection(self, agent: str, target: str) -> Connection:
        if self._session is not None:
            return Connection.in_process(self._bridge(agent, target), MODEL_PREFIX + agent)
        base_url, api_key, model = self._own_endpoint(agent, target)
        return Connection(base_url, api_key, model, proxied=False)  # a proxy can't reach a gateway nearby

    def _bridge(self, agent: str, target: str) -> LoopBridge:
        assert self._session is not None
        return LoopBridge(Caller(self._session, agent, target), self._loop, self._process)


def _endpoint(helper: str | HelperModel) -> BaseUrlAndKey:
    return (HelperModel(helper) if isinstance(helper, str) else helper).endpoint()
