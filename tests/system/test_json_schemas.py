"""Schemas that never finish, grow without end or aren't schemas: refused within the limits; nothing else suffers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from ajet.system.json_schemas import (
    MAX_SCHEMA_BYTES,
    PROGRAM,
    SchemaRefused,
    SchemaTooSlow,
    breach,
    check_schema,
    on_loop,
)

pytestmark = pytest.mark.anyio

SLOW_PATTERN = {"type": "string", "pattern": "^(a+)+$"}
PATTERN_VALUE = "a" * 40 + "!"


def branching(depth: int) -> dict[str, Any]:
    """Each definition needs the next one twice."""
    definitions: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(depth)
    }
    return {"$defs": {**definitions, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def test_values_are_checked() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"pattern": "^x"}}}}
    check_schema(schema)
    assert breach(schema, {"a": ["xy"]}) is None
    found = breach(schema, {"a": ["xy", "y"]})
    assert found is not None and found.path == "$.a[1]" and "does not match" in found.message
    assert breach({"type": "integer"}, 10**400) is None


@pytest.mark.parametrize(
    ("schema", "value"),
    [(SLOW_PATTERN, PATTERN_VALUE), ({"patternProperties": {"^(a+)+$": {}}}, {PATTERN_VALUE: 1}), (branching(40), 1)],
    ids=["pattern", "patternProperties", "references"],
)
def test_what_would_never_finish_is_refused(schema: dict[str, Any], value: Any) -> None:
    with pytest.raises(SchemaTooSlow, match="takes"):
        breach(schema, value)
    assert breach({"type": "string"}, "a") is None, "others go on"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"$ref": "http://127.0.0.1:9/x.json"}, "127.0.0.1"),
        ({"$ref": "#"}, "nested too deeply|reference"),
        ({"pattern": "("}, r"\("),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, "at most"),
        ({"x": object()}, "not JSON"),
    ],
    ids=["type", "fetched", "endless", "pattern", "large", "object"],
)
def test_what_is_no_schema_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(SchemaRefused, match=why):
        breach(schema, "x")


async def test_a_service_loop_goes_on_meanwhile() -> None:
    slow = asyncio.ensure_future(on_loop(breach, SLOW_PATTERN, PATTERN_VALUE))
    turns = 0
    while not slow.done():
        turns += 1
        await asyncio.sleep(0.01)
    with pytest.raises(SchemaTooSlow):
        await slow
    assert turns > 10


def test_a_program_with_a_slow_schema_obeys_its_signals() -> None:
    program = (
        "import asyncio, sys\n"
        "from ajet.system.json_schemas import breach, on_loop\n"
        "async def main():\n"
        "    await on_loop(breach, {'type': 'string'}, 'x')\n"
        "    print('ready', flush=True)\n"
        f"    while True: await asyncio.gather(on_loop(breach, {SLOW_PATTERN!r}, {PATTERN_VALUE!r}), "
        "return_exceptions=True)\n"
        "asyncio.run(main())\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(30) != 0
    finally:
        child.kill()
        child.wait()


def test_forked_processes_have_their_own() -> None:
    assert breach({"type": "string"}, "a") is None
    child = os.fork()
    if not child:
        os._exit(0 if breach({"type": "string"}, 1) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert breach({"type": "string"}, "a") is None


def test_its_process_ends_quietly_when_who_asked_is_gone() -> None:
    program = subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    program.stdout.close()
    program.stdin.write(b'{"schema": "{}", "value": 1}\n')
    program.stdin.flush()
    said = program.stderr.read()
    assert (program.wait(60), said) == (0, b"")
    program.stdin.close()
    program.stderr.close()
