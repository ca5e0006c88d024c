"""`ModelCallWatch`: ends a run whose workflow asks another model than the one that is tuned.

A client that the workflow makes itself bypasses the tuner: its calls cost money, and nothing of them is recorded or
trained. If the first episodes show no recorded call, the error names the line that makes such a client.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ajet.backbone.episode_metrics import without_calls
from ajet.schema.episode import Episode
from ajet.schema.errors import NoModelCallError
from ajet.task_runner.workflow_class import load_workflow

if TYPE_CHECKING:
    from ajet.config import Config

ENDPOINT = "api = tuner.as_oai_baseurl_apikey(), and give it api.base_url, api.api_key and api.model"
CLIENTS = {
    "AsyncOpenAI": "tuner.as_raw_openai_sdk_client()",
    "OpenAI": ENDPOINT,
    "ChatOpenAI": "tuner.as_langchain_model()",
    "OpenAIChatModel": "tuner.as_agentscope_model()",
    "AsyncAnthropic": "tuner.as_anthropic_client()",
    "Anthropic": "tuner.as_anthropic_client()",
    **dict.fromkeys(
        ("AsyncAzureOpenAI", "AzureOpenAI", "AzureChatOpenAI", "ChatAnthropic", "OpenAIModel", "OpenAIServerModel",
         "OpenAIProvider", "OpenAIChatCompletionClient", "LiteLLMModel", "LiteLlm", "InferenceClient", "acompletion",
         "litellm.completion"),
        ENDPOINT,
    ),
}  # fmt: skip
"""What user code calls to reach a model, and what to write instead."""
ADDRESSES = ("base_url", "api_base", "openai_api_base", "azure_endpoint", "provider", "endpoint")
"""Arguments that say where the model is. Without one, a client asks a provider."""
ADVICE = (
    "tuner.as_raw_openai_sdk_client(), as_langchain_model() or as_agentscope_model(), or any client with the base_url, "
    "api_key and model of tuner.as_oai_baseurl_apikey(). If the workflow does so already, its calls fail and it hides "
    "their errors: let it raise them"
)
OUTSIDE = "the base_url and api_key that POST /v1/episodes returns"


class ModelCallWatch:
    """One per run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recorded = False

    def look_at(self, when: str, episodes: Sequence[Episode]) -> None:
        """Raise `NoModelCallError` if episodes ended well, and none so far has a recorded model call.

        Where all failed before their first call, the failure is the cause. `when`: the step or validation, as a noun.
        """
        self._recorded |= any(episode.tree.calls or episode.outcomes for episode in episodes)
        silent = sum(map(without_calls, episodes))
        if silent and not self._recorded:
            raise NoModelCallError(
                f"no model call was recorded: {silent} of the {len(episodes)} episodes of {when} ended without an "
                f"error, and none asked the tuned model. Use the tuner's client: {advice(self._config)}"
            )


def advice(config: Config) -> str:
    """The line to change, and what to write instead; which clients there are, if no such line is found."""
    where = config.ajet.task_runner.wrapper_type
    if where == "outside":
        return OUTSIDE
    if where == "remote" or config.ajet.rollout.agent is not None:
        return ADVICE
    found = [client for file in _sources(config) for client in _own_clients(file)]
    if not found:
        return ADVICE
    first = min(found, key=lambda client: client.has_address)
    # in one line: of an error on Ray, the terminal shows the first
    return f"in {first.file}:{first.line}, instead of `{first.source}`, write {first.instead}"


class OwnClient(NamedTuple):
    """A place in the user's code that makes a client."""

    file: Path
    line: int
    source: str
    instead: str
    has_address: bool


def _sources(config: Config) -> list[Path]:
    """The workflow's file, and those of its folder that are imported."""
    workflow = load_workflow(config, config.base_dirs)
    home = getattr(sys.modules.get(workflow.__module__), "__file__", None)
    if home is None:  # made in a notebook
        return []
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    return [Path(home), *sorted(file for file in files if file.parent == Path(home).parent and file != Path(home))]


def _own_clients(file: Path) -> Iterator[OwnClient]:
    if file.suffix != ".py":
        return
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text)
    except (OSError, SyntaxError):  # it was imported, and has been changed since
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called if called in CLIENTS else called.rpartition(".")[2]
        if name not in CLIENTS:
            continue
        # Pydantic AI has a class of the same name, which takes an endpoint
        instead = ENDPOINT if name == "OpenAIChatModel" and "agentscope" not in text else CLIENTS[name]
        has_address = any(keyword.arg in ADDRESSES for keyword in node.keywords)
        yield OwnClient(file, node.lineno, lines[node.lineno - 1].strip(), instead, has_address)
