"""`ajet.observe`: where else a run can be watched."""

from __future__ import annotations

from ajet.config.section import Section


class ObserveConfig(Section):
    """`ajet.observe`: what a run tells other programs about itself."""

    otlp_endpoint: str | None = None
    """Collector of OpenTelemetry, such as `http://127.0.0.1:4318`: gets each episode as a trace, with its model calls,
    spans and reward. Headers (a key, say) are taken from the environment's `OTEL_EXPORTER_OTLP_HEADERS`."""
