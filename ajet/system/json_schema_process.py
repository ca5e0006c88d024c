"""The process in which `json_schemas` checks schemas and values. It reads one question from each line of standard
input and writes one answer to each line of standard output, both JSON. It prints nothing else, and ends when its input
ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

CPU_S = 1.0
MEMORY_BYTES = 1 << 30
KEPT = 64
"""How many compiled schemas are kept."""
SHOWN = 500
HOSTILE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error)
"""Errors that jsonschema raises for schemas that its authors didn't expect: they count as the schema's."""


class TooSlow(Exception):
    """The time is up. Not a kind of error that jsonschema catches."""


def answer(question: dict[str, Any], ready: OrderedDict[str, Any]) -> dict[str, Any]:
    text = question["schema"]
    validator = ready.get(text)
    try:
        if validator is None:
            schema = json.loads(text)
            Draft202012Validator.check_schema(schema)
            # an empty registry fetches nothing
            validator = ready[text] = Draft202012Validator(schema, registry=Registry())
            if len(ready) > KEPT:
                ready.popitem(last=False)
        if "value" not in question:
            return {}
        breach = best_match(validator.iter_errors(question["value"]))
    except SchemaError as error:
        return {"not_a_schema": error.message[:SHOWN]}
    except RecursionError:
        return {"not_a_schema": "nested too deeply, or a reference to itself without end"}
    except Unresolvable as error:
        return {"not_a_schema": str(error)[:SHOWN]}
    return {"breach": [breach.json_path[:SHOWN], breach.message[:SHOWN]]} if breach is not None else {}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def time_is_up(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGVTALRM, time_is_up)
    ready: OrderedDict[str, Any] = OrderedDict()
    for line in sys.stdin.buffer:
        try:
            question = json.loads(line)
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
            try:
                said = answer(question, ready)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except TooSlow:
            said = {"too_slow": f"applying it takes more than {CPU_S:g} s"}
        except MemoryError:
            said = {"too_slow": "applying it takes too much memory"}
        except HOSTILE as error:
            said = {"not_a_schema": f"{type(error).__name__}: {error}"[:SHOWN]}
        try:
            sys.stdout.buffer.write(json.dumps(said).encode() + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the asking process was killed
            os._exit(0)  # what is still buffered would be tried, and complained about, once more


if __name__ == "__main__":
    main()
