"""What a wheel holds besides `ajet/`: the job of `ajet init NAME --example quickstart`, which a clone has where it is,
and the README as a package index can show it."""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

QUICKSTART = "tutorial/example_math_agent/quickstart"
PLACE = "ajet/cli/examples/quickstart"


class ExampleFiles(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            parts = {f"{QUICKSTART}/{name}": f"{PLACE}/{name}" for name in ("cold_start", "data", "workflow.py")}
            build_data["force_include"] |= {"configs/quickstart.yaml": f"{PLACE}/quickstart.yaml", **parts}


class IndexReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_places(text)}


def without_places(text: str) -> str:
    """The README where no file is beside it: without pictures and drawings, with names instead of links to files."""
    parts = re.split(r"^(```.*?^```\n+)", text, flags=re.MULTILINE | re.DOTALL)
    prose = [re.sub(r"!\[[^\]]*\]\([^)]*\)\s*|\s*\[[^\]]+\]\(README[^)]*\)", "", part) for part in parts[::2]]
    prose = [re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", part) for part in prose]
    code = ["" if part.startswith("```mermaid") else part for part in parts[1::2]]
    return "".join(part for pair in zip(prose, [*code, ""], strict=True) for part in pair)
