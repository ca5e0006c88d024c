"""`ajet config show CONF | schema | docs`: the resolved config, the JSON schema, the documentation."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ajet.system.command_line import CommandParser

EPILOG = """\
ajet config show my.yaml                all keys with defaults, secrets masked
ajet config show my.yaml rollout.num_repeat=8
ajet config schema > ajet.schema.json   for completion in an editor
ajet config docs docs/config            the pages about all keys, into a folder
"""


def run(argv: Sequence[str]) -> int:
    """Print the config, the schema or the documentation."""
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.what == "schema":
        from ajet.config.docs import editor_schema

        print(json.dumps(editor_schema(), indent=2, ensure_ascii=False))
    elif arguments.what == "docs":
        from ajet.config.docs import pages

        if arguments.conf is None:
            sys.stdout.write("\n".join(pages().values()))
        else:
            _write(pages(), Path(arguments.conf))
    elif arguments.conf is None:
        parser.error("ajet config show CONF: which file?")
    else:
        print(_resolved(arguments.conf, arguments.overrides, arguments.backbone))
    return 0


def schema(argv: Sequence[str]) -> int:
    """`ajet schema`: what `ajet config schema` prints."""
    CommandParser("ajet schema", description="The JSON schema of configs, for an editor.").parse_args(argv)
    return run(["schema"])


def _parser() -> CommandParser:
    from argparse import RawDescriptionHelpFormatter

    parser = CommandParser("ajet config", epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["show", "schema", "docs"])
    parser.add_argument(
        "conf",
        nargs="?",
        metavar="CONF|FOLDER",
        help="for show: the YAML file; for docs: where to write the pages instead of printing them",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="for show: as in a run")
    parser.add_argument("--backbone", help="for show: print what this backbone is given instead (verl, trinity)")
    return parser


def _write(pages: Mapping[str, str], folder: Path) -> None:
    """Write each page as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


def _resolved(conf: str, overrides: Sequence[str], backbone: str | None) -> str:
    import yaml

    from ajet.backbone.launch import known_backbone
    from ajet.config import load_config
    from ajet.config.interpolation import literal
    from ajet.config.kinds import BACKBONES, load_module
    from ajet.observe.logs import Masker

    chosen = known_backbone(backbone)
    config = load_config(conf, overrides, backbone=chosen, complete=False)
    resolved = config.model_dump(mode="json")
    masker = Masker(resolved)
    if chosen is not None:
        show = getattr(load_module(BACKBONES, chosen), "show_config", None)
        if show is not None:
            return masker.text(show(config).rstrip())
    return yaml.safe_dump(literal(masker.value(resolved)), sort_keys=False, allow_unicode=True, width=120).rstrip()
