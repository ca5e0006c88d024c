"""What a child process of `SymbolicCheck` does: one comparison a line, by math-verify (`same_expression`)."""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

MEMORY = 2 * 1024**3
"""Address space. The library itself takes less than a tenth of it."""
DIGITS = 12
"""To which values are compared that have no exact form; at the library's own 6, 1.41421356 would be the root of 2."""
SPARE_S = 1
"""After the time limit, the child ends itself, should its parent have died meanwhile."""


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
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the library prints is no answer
    import math_verify  # noqa: F401

    _say(answers, {"ready": True})
    for line in sys.stdin:
        signal.alarm(int(limit_s) + SPARE_S)
        question = json.loads(line)
        answer = same_expression(question["given"], question["expected"])
        signal.alarm(0)
        _say(answers, {"same": answer})


def _say(answers: object, message: dict[str, bool | None]) -> None:
    print(json.dumps(message), file=answers, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    main(float(sys.argv[1]))
