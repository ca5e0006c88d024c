"""The child process of `SymbolicCheck`: it compares the two expressions on each line of standard input by math-verify.

An empty question is answered as well, once the library is imported.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

MEMORY = 2 * 1024**3
"""The limit of its address space. The library itself takes less than a tenth of it."""
DIGITS = 12
"""The digits to which values without an exact form are compared. With the library's default of 6, 1.41421356 would
equal the root of 2."""
SPARE_S = 1
"""How long after the time limit the child ends itself, in case its parent has died."""


def same_expression(given: str, expected: str) -> bool | None:
    """Whether two answers in LaTeX are equal. None if it can't be found out."""
    from math_verify import parse, verify

    try:
        sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (expected, given)]
        return bool(verify(*sides, float_rounding=DIGITS, timeout_seconds=None))
    except Exception:  # noqa: BLE001 - a parser and an algebra system: whatever they raise, there is no answer
        return None


def main(limit_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable()
    import math_verify  # noqa: F401

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # the library's own output must not be read as an answer
    os.dup2(silence, 2)
    for line in sys.stdin:
        signal.alarm(int(limit_s) + SPARE_S)
        question = json.loads(line)
        answer = same_expression(question["given"], question["expected"]) if question else None
        signal.alarm(0)
        print(json.dumps({"same": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
