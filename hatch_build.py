"""What a wheel holds besides `ajet/`: the job of `ajet init NAME --example quickstart`. A clone has it where it is."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

QUICKSTART = "tutorial/example_math_agent/quickstart"
PLACE = "ajet/cli/examples/quickstart"


class ExampleFiles(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            parts = {f"{QUICKSTART}/{name}": f"{PLACE}/{name}" for name in ("cold_start", "data", "workflow.py")}
            build_data["force_include"] |= {"configs/quickstart.yaml": f"{PLACE}/quickstart.yaml", **parts}
