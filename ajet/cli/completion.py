"""`ajet completion bash|zsh|fish`: a script with which the shell completes
commands, flags, config keys and run names.

bash, zsh:  source <(ajet completion bash)   in ~/.bashrc; in ~/.zshrc with zsh
fish:       ajet completion fish > ~/.config/fish/completions/ajet.fish
"""

from __future__ import annotations

import io
import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

from ajet.backbone.launch import build_parser
from ajet.cli.main import COMMANDS, function_of
from ajet.system.command_line import CommandParser

NAMES_A_RUN = ("chat", "compare", "diagnose", "export", "report", "serve", "view")
"""Commands that take the names of runs."""
FIXED_WORDS = {
    "completion": ("bash", "zsh", "fish"),
    "config": ("show", "schema", "docs"),
    "env": ("serve",),
    "export": ("weights", "episodes", "prompt"),
    "rubrics": ("make",),
    "store": ("keys",),
    "tasks": ("generate", "check"),
    "vllm": ("serve",),
}

BASH = """\
_ajet_runs() { ls saved_experiments 2>/dev/null; }
_ajet() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words="" value=""
  COMPREPLY=()
  if [ "$cur" = "=" ]; then cur="" value=1  # bash takes the `=` of `--conf=run.yaml` for a word
  elif [ "$prev" = "=" ]; then prev="${COMP_WORDS[COMP_CWORD-2]}" value=1; fi
  case "$prev" in
    --backbone) COMPREPLY=($(compgen -W "@BACKBONES@" -- "$cur")); return ;;
    --conf) COMPREPLY=($(compgen -f -X '!*.y*ml' -- "$cur") $(compgen -d -- "$cur")); return ;;
  esac
  if [ "$value" ]; then return; fi
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@COMMANDS@ @FLAGS@"
  else
    case "$command" in
@CASES@
      *) words="@FLAGS@ @KEYS@" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  case "${COMPREPLY[0]}" in *=) compopt -o nospace 2>/dev/null ;; esac  # a key goes on with its value
}
complete -o default -F _ajet ajet
"""


def run(argv: Sequence[str]) -> int:
    """Print the script."""
    parser = CommandParser("ajet completion", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(argv).shell
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](), end="")
    return 0


def _bash() -> str:
    cases = []
    for name in COMMANDS:
        words = " ".join([*_words_of(name), *(["$(_ajet_runs)"] if name in NAMES_A_RUN else [])])
        cases.append(f'      {name}) words="{words}" ;;')
    replaced = {
        "@BACKBONES@": " ".join(_backbones()),
        "@COMMANDS@": " ".join(COMMANDS),
        "@FLAGS@": " ".join(_flags()),
        "@KEYS@": " ".join(f"{key}=" for key in _keys()),
        "@CASES@": "\n".join(cases),
    }
    script = BASH
    for mark, text in replaced.items():
        script = script.replace(mark, text)
    return script


def _zsh() -> str:
    """zsh runs bash's completions."""
    return "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = ["complete -c ajet -f", "function __ajet_runs; ls saved_experiments 2>/dev/null; end"]
    for name, command in COMMANDS.items():
        lines.append(f"complete -c ajet -n __fish_use_subcommand -a {name} -d {_quoted(command.summary)}")
    for flag in _flags():
        lines.append(f"complete -c ajet -n 'not __fish_seen_subcommand_from {' '.join(COMMANDS)}' -l {flag[2:]}")
    lines.append(f"complete -c ajet -l backbone -x -a {_quoted(' '.join(_backbones()))}")
    lines.append("complete -c ajet -l conf -r -F")
    lines.append(f"complete -c ajet -n '__fish_contains_opt conf' -a {_quoted(' '.join(f'{k}=' for k in _keys()))}")
    for name in COMMANDS:
        here = f"complete -c ajet -n '__fish_seen_subcommand_from {name}'"
        for word in _words_of(name):
            lines.append(f"{here} -l {word[2:]}" if word.startswith("--") else f"{here} -a {word}")
        lines.append(f"{here} -a '(__ajet_runs)'" if name in NAMES_A_RUN else f"{here} -F")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


def _flags() -> list[str]:
    return sorted(flag for action in build_parser()._actions for flag in action.option_strings)


def _backbones() -> list[str]:
    from ajet.config.kinds import BACKBONES

    return list(BACKBONES)


def _keys() -> list[str]:
    """The config keys, as overrides are written."""
    from ajet.config.keys import known_keys

    return [".".join(key.path[1:]) for key in known_keys().values() if key.section is None and key.path[0] == "ajet"]


def _words_of(command: str) -> list[str]:
    """A command's flags and fixed words, as its own help lists them."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), suppress(SystemExit):
        function_of(command)(["--help"])
    flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", said.getvalue())))
    return [*FIXED_WORDS.get(command, ()), *flags]
