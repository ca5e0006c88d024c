"""Runs Python code written by a model in a sandbox (`ajet.environment.sandboxes`), and returns what it printed.

Where no sandbox can be made, it refuses: model-written code never runs unconfined.
"""

from __future__ import annotations

import asyncio
import threading

from ajet.environment.sandboxes import ExecResult, SandboxSettings, open_sandbox

SECONDS = 5
OUTPUT_CHARACTERS = 2000
SETTINGS = SandboxSettings(memory_mb=512, processes=16, disk_mb=16, exec_seconds=SECONDS, output_bytes=16_000)


def run_python(code: str) -> str:
    """Run a short Python program and return what it prints.

    Args:
        code (str): the program; print what you want to know.
    """
    result = _in_thread(code)
    text = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    if len(text) > OUTPUT_CHARACTERS:
        text = text[:OUTPUT_CHARACTERS] + " …"
    if result.timed_out:
        text += f"\n(stopped after {SECONDS} s)"
    elif result.exit_code:
        text += f"\n(exit code {result.exit_code})"
    return text.strip() or "(no output: print the result)"


def _in_thread(code: str) -> ExecResult:
    """Frameworks call a tool on their event loop, which can't wait for another one: a thread can."""
    answer: list[ExecResult | BaseException] = []

    def work() -> None:
        try:
            answer.append(asyncio.run(_run(code)))
        except BaseException as error:  # noqa: BLE001 - raised below, where the tool was called
            answer.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    (result,) = answer
    if isinstance(result, BaseException):
        raise result
    return result


async def _run(code: str) -> ExecResult:
    async with open_sandbox(SETTINGS) as sandbox:
        await sandbox.write("main.py", code.encode("utf-8", "replace"))
        return await sandbox.exec(["python3", "-I", "main.py"])
