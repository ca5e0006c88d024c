"""Which agents a span belongs to: those that it, or a span around it, names. Frameworks write the name down in ways of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from ajet.schema.span import Span

NAMES = ("agent.name", "gen_ai.agent.name", "recipient_agent_type", "executor.id")
"""Attributes that hold the name whatever the span is: ours and OpenTelemetry's, and those of AutoGen and of Microsoft's
Agent Framework."""
NAMES_BY_KIND = (
    ("agentops.span.kind", "operation.name"),
    ("traceloop.span.kind", "traceloop.entity.name"),
    ("agentlightning.operation.input.type", "agentlightning.operation.input.name"),
)
"""Attributes that say `agent`, and those that then hold the name."""
OPENINFERENCE_KIND = "openinference.span.kind"
LANGCHAIN = ("langchain.chain.type", "lc_name")


def agent_of(span: Span) -> str:
    """The agent that a span names itself, or ``""``."""
    values = span.attributes
    for name in NAMES:
        if isinstance(value := values.get(name), str) and value:
            return value
    for kind, name in NAMES_BY_KIND:
        if str(values.get(kind)).lower() == "agent" and isinstance(value := values.get(name), str):
            return value
    if values.get(OPENINFERENCE_KIND) == "AGENT":
        return span.name
    for name in LANGCHAIN:
        if span.name.lower().startswith("langchain.chain") and isinstance(value := values.get(name), str):
            return value
    return ""


def agents_around(span: Span, by_id: Mapping[str, Span]) -> list[str]:
    """The agents of a span and of those around it, the innermost first."""
    found: list[str] = []
    seen: set[str] = set()
    here: Span | None = span
    while here is not None and here.span_id not in seen:
        seen.add(here.span_id)
        if name := agent_of(here):
            found.append(name)
        here = by_id.get(here.parent_id or "")
    return found
