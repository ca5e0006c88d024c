"""Where benchmark figures go: `benchmarks/results/<name>.json`, with the date and the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The hardware and the versions a figure belongs to."""
    cpu = platform.processor() or "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"cpu": cpu, "cores": os.cpu_count(), **versions}


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures of one benchmark and return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"benchmark": name, "date": datetime.now(UTC).date().isoformat(), "machine": machine(), "figures": figures}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
