"""`AjetTuner`: what a workflow gets. Each face is a real client of its framework, bound to one agent and target."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ajet.gateway.caller import Caller
from ajet.gateway.endpoints import bare_call_id
from ajet.gateway.keys import agent_key
from ajet.gateway.openai_chat import MODEL_PREFIX
from ajet.helper import HelperModel
from ajet.schema.chat import DEFAULT_AGENT, DEFAULT_TARGET
from ajet.schema.errors import FeatureUnavailableError, RewardError
from ajet.session import EpisodeSession
from ajet.tuner.connection import Connection
from ajet.tuner.crossing import Crossing
from ajet.tuner.over_http import post_reward

if TYPE_CHECKING:
    from ajet.context_tracker import ContextTracker
    from ajet.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True)
class BaseUrlAndKey:
    """What any OpenAI-compatible client needs. Also unpacks: `base_url, api_key, model = …`."""

    base_url: str
    api_key: str
    model: str

    def __iter__(self) -> Any:
        return iter((self.base_url, self.api_key, self.model))


class AjetTuner:
    """The model being tuned, for one episode.

    `config` is the loaded configuration: `tuner.config.ajet.rollout.num_repeat`, and the user's own blocks as
    `tuner.config.<block>`.
    """

    def __init__(
        self, session: EpisodeSession, config: Any, loop: asyncio.AbstractEventLoop, gateway: Gateway | None = None
    ) -> None:
        """In the process that runs the episode: `loop` is the service loop, which `session` lives on."""
        self.config = config
        self._session: EpisodeSession | None = session
        self._loop = loop
        self._gateway = gateway
        self._endpoint: BaseUrlAndKey | None = None
        self._trainable_targets: Sequence[str] = session.settings.trainable_targets

    @classmethod
    def remote(
        cls, base_url: str, api_key: str, config: Any, *, trainable_targets: Sequence[str] | None = None
    ) -> AjetTuner:
        """In any other process: everything goes to the episode's gateway. `api_key` is the episode's key."""
        tuner = cls.__new__(cls)
        tuner.config = config
        tuner._session = None
        tuner._gateway = None
        tuner._endpoint = BaseUrlAndKey(base_url, api_key, MODEL_PREFIX + DEFAULT_AGENT)
        tuner._trainable_targets = tuple(trainable_targets or ())
        return tuner

    # ------------------------------------------------------------ faces

    def as_raw_openai_sdk_client(
        self, agent_name: str = DEFAULT_AGENT, target_tag: str = DEFAULT_TARGET, debug_model: Any = None
    ) -> Any:
        """An `openai.AsyncOpenAI` (`client.chat.completions.create(messages=…)`)."""
        connection = self._connection(agent_name, target_tag, debug_model)
        if not isinstance(connection, Connection):
            return connection
        from ajet.tuner.openai_face import openai_client

        return openai_client(connection)

    def as_agentscope_model(
        self,
        agent_name: str = DEFAULT_AGENT,
        target_tag: str = DEFAULT_TARGET,
        debug_model: Any = None,
        *,
        stream: bool = False,
    ) -> Any:
        """A chat model for AgentScope's agents, in the version that is installed (1.0.x or 2.x)."""
        connection = self._connection(agent_name, target_tag, debug_model)
        if not isinstance(connection, Connection):
            return connection
        from ajet.tuner.agentscope_face import agentscope_model

        return agentscope_model(connection, context_size=self.config.ajet.rollout.max_model_len, stream=stream)

    def as_langchain_model(
        self,
        agent_name: str = DEFAULT_AGENT,
        target_tag: str = DEFAULT_TARGET,
        debug_model: Any = None,
        **options: Any,
    ) -> Any:
        """A `langchain_openai.ChatOpenAI`, for LangChain and LangGraph; `options` go to its constructor."""
        connection = self._connection(agent_name, target_tag, debug_model)
        if not isinstance(connection, Connection):
            return connection
        from ajet.tuner.langchain_face import langchain_model

        return langchain_model(connection, options)

    def as_anthropic_client(
        self, agent_name: str = DEFAULT_AGENT, target_tag: str = DEFAULT_TARGET, debug_model: Any = None
    ) -> Any:
        """An `anthropic.AsyncAnthropic` (`client.messages.create(model=…, max_tokens=…, messages=…)`)."""
        if debug_model is not None and not self._trains(target_tag):
            return debug_model  # a helper speaks OpenAI's protocol: here it must be a client of its own
        connection = self._own_connection(agent_name, target_tag)
        from ajet.tuner.anthropic_face import anthropic_client

        return anthropic_client(connection)

    def as_oai_baseurl_apikey(
        self,
        agent_name: str = DEFAULT_AGENT,
        target_tag: str = DEFAULT_TARGET,
        debug_model: str | HelperModel | None = None,
    ) -> BaseUrlAndKey:
        """For any client that speaks OpenAI's protocol, in any language: `.base_url`, `.api_key`, `.model`.
        (Anthropic's protocol is at the same address, without `/v1`.)"""
        helper = self._helper(target_tag, debug_model)
        if helper is not None:
            connection = _helper_connection(helper)
            return BaseUrlAndKey(connection.base_url, connection.api_key, connection.model)
        return self._own_endpoint(agent_name, target_tag)

    def _own_endpoint(self, agent_name: str, target_tag: str) -> BaseUrlAndKey:
        """The tuned model's."""
        if self._endpoint is None:
            assert self._session is not None
            if self._gateway is None:
                raise FeatureUnavailableError("as_oai_baseurl_apikey needs a gateway, and this run has none")
            gateway, session = self._gateway, self._session
            key = self._crossing(agent_name, target_tag).call(lambda: gateway.register(session))
            self._endpoint = BaseUrlAndKey(key.base_url, key.api_key, key.model)
        own_key = agent_key(self._endpoint.api_key, agent_name, target_tag)
        return BaseUrlAndKey(self._endpoint.base_url, own_key, MODEL_PREFIX + agent_name)

    # ------------------------------------------------------------ the rest

    def reward(self, value: float, *, call: str | None = None, agent: str | None = None) -> None:
        """A reward for one call (`call`: a response's id), one agent, or the whole episode."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"a reward must be a finite number, not {value!r:.80}")
        if self._session is None:
            assert self._endpoint is not None
            post_reward(
                self._endpoint.base_url, self._endpoint.api_key, {"reward": value, "call": call, "agent": agent}
            )
            return
        session = self._session
        call_id = bare_call_id(call)
        Crossing(Caller(session), self._loop).call(lambda: session.reward(float(value), call_id, agent))

    def get_context_tracker(self) -> ContextTracker:
        """The episode's tracker: to look at, from the service loop only."""
        if self._session is None:
            raise FeatureUnavailableError("the context tracker lives in the process that runs the episode")
        return self._session.tracker

    def _trains(self, target: str) -> bool:
        return not self._trainable_targets or target in self._trainable_targets

    def _helper(self, target: str, debug_model: Any) -> Any:
        """For a target that isn't trained: `debug_model`, else the configured helper. None: the tuned model."""
        if self._trains(target):
            return None
        if debug_model is None and self.config.ajet.helper.model is not None:
            return HelperModel.from_config(self.config)
        return debug_model

    def _connection(self, agent: str, target: str, debug_model: Any) -> Any:
        """How the agent reaches its model; a helper that is a client is that itself."""
        helper = self._helper(target, debug_model)
        if helper is None:
            return self._own_connection(agent, target)
        return _helper_connection(helper) if isinstance(helper, str | HelperModel) else helper

    def _own_connection(self, agent: str, target: str) -> Connection:
        if self._session is not None:
            return Connection.in_process(self._crossing(agent, target), MODEL_PREFIX + agent)
        base_url, api_key, model = self._own_endpoint(agent, target)
        return Connection(base_url, api_key, model)

    def _crossing(self, agent: str, target: str) -> Crossing:
        assert self._session is not None
        return Crossing(Caller(self._session, agent, target), self._loop)


def _helper_connection(helper: str | HelperModel) -> Connection:
    return Connection(*(HelperModel(helper) if isinstance(helper, str) else helper).endpoint())
