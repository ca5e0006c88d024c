"""What a workflow's error says to its author: the message in one line, and what to write instead.

An episode's line in the log and on the terminal shows the first line of a message only, so the fix stands there.
"""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import ValidationError

from ajet.schema.errors import address_of, error_chain
from ajet.schema.install import written_for_another_agentscope

CLIENT = "to ask the tuned model, write client = tuner.as_raw_openai_sdk_client()"
LOOP_RUNS = ("asyncio.run() cannot be called from a running event loop", "This event loop is already running")
NO_KEY = ("Missing credentials", "api_key client option must be set", "Could not resolve authentication method")
JSON_VALUES = (type(None), int, float, list, dict)
"""What a cut reply may be parsed to, or a search in it may find, where a whole reply gives something else."""
SHOWN = 80


def message_of(error: BaseException) -> str:
    """The message, with what to change. Of Pydantic's list of problems, the first with its field and reason."""
    said = _of_pydantic(error) if isinstance(error, ValidationError) else str(error) or repr(error)
    fix = fix_for(error)
    if not fix:
        return said
    first, newline, rest = said.partition("\n")
    return f"{first}: {fix}{newline}{rest}"


def fix_for(error: BaseException) -> str:
    """What to write instead, for mistakes that are often made in a workflow. Empty for any other error."""
    if isinstance(error, ValidationError):
        given = [problem["input"] for problem in error.errors(include_url=False)]
        return "write `await` before the call" if any(map(inspect.isawaitable, given)) else ""
    if other := written_for_another_agentscope(error):
        return other
    said = str(error)
    if isinstance(error, RuntimeError) and any(text in said for text in LOOP_RUNS):
        return "write `await …` instead, or make it `def execute` without async"
    refused = type(error).__name__ == "AuthenticationError" and address_of(error).startswith("https:")  # a provider
    return CLIENT if refused or any(text in said for text in NO_KEY) else ""


def is_bug(error: BaseException) -> bool:
    """Whether no reply of the model can have caused this, cut or not: a mistake in the code, or a service that is
    down."""
    if isinstance(error, NameError | ImportError | NotImplementedError) or fix_for(error):
        return True
    if isinstance(error, AttributeError):
        return not isinstance(error.obj, JSON_VALUES)
    return bool(address_of(error)) and any(_is_down(link) for link in error_chain(error) if hasattr(link, "request"))


def _is_down(error: Any) -> bool:
    """Whether a client got no answer, or one that says that the server failed."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500


def _of_pydantic(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False)
    field = ".".join(map(str, (error.title, *first["loc"])))
    more = f" (and {len(others)} more)" if others else ""
    return f"{field}: {first['msg']}, not {first['input']!r:.{SHOWN}}{more}"
