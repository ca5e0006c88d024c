"""A program that builds graders of the package py-openjudge and grades answers with them.

Run as a file by the interpreter that has py-openjudge; it imports nothing of ours. One JSON object per line: requests
on standard input (`build`, `grade`, `ping`, `cancel`), answers on the descriptor in the first argument. What libraries
print goes to standard error.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import json
import os
import re
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

Built = dict[str, Any]
UNCONFINED = ("CodeExecutionGrader",)
"""Graders that are refused: they run code that the model wrote."""


def main() -> None:
    """Answer until standard input closes."""
    del sys.path[0]  # this file's folder: its modules could shadow packages
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    os.dup2(2, 1)  # print to standard error

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()

    try:
        importlib.import_module("openjudge")
    except Exception as error:  # noqa: BLE001 - whatever its import raises is why it can't be used
        tell(id="ready", error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    tell(id="ready")
    asyncio.run(_serve(tell))


async def _serve(tell: Any) -> None:
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(requests.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    graders: dict[str, Any] = {}
    running: dict[str, asyncio.Task[None]] = {}
    while (request := await requests.get()) is not None:
        if request["do"] == "cancel":
            if (task := running.pop(request["of"], None)) is not None:
                task.cancel()
            continue
        work = {"build": _build, "grade": _grade, "ping": _ping}[request["do"]](graders, request)
        running[request["id"]] = asyncio.create_task(_answer(work, request["id"], running, tell))
    for task in running.values():
        task.cancel()


async def _answer(work: Any, number: str, running: dict[str, Any], tell: Any) -> None:
    try:
        tell(id=number, value=await work)
    except Exception as error:  # noqa: BLE001 - code of the grader: it fails only its answer
        tell(id=number, error=f"{type(error).__name__}: {error}")
    finally:
        running.pop(number, None)


async def _build(graders: dict[str, Any], request: dict[str, Any]) -> Built:
    """Build a grader under a name. Says which parameters it takes, and which of them it needs."""
    grader_class = _find(request["grader"])
    options = dict(request["options"])
    if "model" not in options and "model" in inspect.signature(grader_class.__init__).parameters:
        if request["model"] is None:
            return {"needs_model": True}
        options["model"] = request["model"]
    grader = grader_class(**options)
    if str(getattr(grader.mode, "value", grader.mode)) != "pointwise":
        raise ValueError("it ranks answers; only graders that score one answer at a time can be used")
    _ask_strictly(grader)
    graders[request["name"]] = grader, asyncio.Semaphore(request["at_once"])
    parameters = [
        each
        for each in inspect.signature(grader._aevaluate).parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    needed = [each.name for each in parameters if each.default is each.empty]
    return {"parameters": [each.name for each in parameters], "needed": needed}


def _find(name: str) -> Any:
    """A grader's class: `module->Class`, or the name of one in `openjudge.graders`."""
    module, arrow, attribute = name.partition("->")
    if not arrow:
        module, attribute = _module_of(name), name.rpartition(".")[2]
    found = getattr(importlib.import_module(module), attribute, None)
    if not inspect.isclass(found) or not hasattr(found, "aevaluate"):
        raise ValueError(f"{module} has no grader {attribute}")
    if any(base.__name__ in UNCONFINED for base in found.__mro__):
        raise ValueError("it runs code that the model wrote, and nothing confines it: test code in `rollout.sandbox`")
    return found


def _module_of(name: str) -> str:
    """The module below `openjudge.graders` that defines a class. Only that one is imported, as some have heavy
    dependencies."""
    import openjudge.graders

    root = Path(openjudge.graders.__path__[0])
    wanted, known = name.rpartition(".")[2], []
    for file in sorted(root.rglob("*.py")):
        for found in re.findall(r"^class (\w+Grader)\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            if found == wanted:
                return ".".join(("openjudge", "graders", *file.relative_to(root).with_suffix("").parts))
            known.append(found)
    near = difflib.get_close_matches(wanted, known, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no grader {wanted!r}.{meant} There are {', '.join(sorted(set(known)))}")


_failed: ContextVar[list[Exception]] = ContextVar("failed")
"""How a grade's last question to the model failed. Many graders catch that, and score it 0."""


def _ask_strictly(grader: Any) -> None:
    """Raise for a model's answer without a score, which the package would count as a score of 0, and keep whatever its
    model raises for `_grade`."""
    model: Any = getattr(grader, "model", None)
    ask = getattr(model, "achat", None)
    if ask is None:
        return

    async def achat(*given: Any, **named: Any) -> Any:
        failed = _failed.get([])
        try:
            said = await ask(*given, **named)
            if (form := named.get("structured_model")) is not None:
                _check_score(said, form)
        except Exception as error:
            failed[:] = [error]
            raise
        failed.clear()
        return said

    model.achat = achat


def _check_score(said: Any, form: Any) -> None:
    parsed = getattr(said, "parsed", {"score": 0})  # without it, the answer comes in pieces
    try:
        if not parsed or "score" in form.model_fields:
            float(parsed["score"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the model's answer holds no score: {str(getattr(said, 'content', said))[:200]!r}") from None


async def _ping(graders: dict[str, Any], request: dict[str, Any]) -> str:
    return "here"


async def _grade(graders: dict[str, Any], request: dict[str, Any]) -> dict[str, Any] | None:
    """Grade one answer: its score and the reason. None: it took too long, from the beginning of its turn."""
    grader, turns = graders[request["name"]]
    failed: list[Exception] = []
    _failed.set(failed)
    async with turns:
        try:
            said = await asyncio.wait_for(grader.aevaluate(**request["inputs"]), request["seconds"])
        except (TimeoutError, asyncio.TimeoutError):  # noqa: UP041 - two errors before Python 3.11
            return None
    if (error := getattr(said, "error", None) or next(iter(failed), None)) is not None:
        raise ValueError(str(error))
    return {"score": said.score, "reason": str(getattr(said, "reason", ""))}


if __name__ == "__main__":
    main()
