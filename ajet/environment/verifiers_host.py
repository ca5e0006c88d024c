"""The process that has the package verifiers: plays tasks of one of its environments against an endpoint of ours.

Run as a file by the interpreter that has verifiers; it imports nothing of ours. One JSON object per line: requests on
standard input (`tasks`, `run`, `cancel`), answers on the descriptor in the first argument. What libraries print goes to
standard error. The second argument is the environment's config as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
from typing import Any

LOCAL = {"type": "subprocess"}
"""Where an agent's program runs unless the config says otherwise: verifiers' own default is a paid service."""


def main() -> None:
    """Answer until standard input closes."""
    del sys.path[0]  # this file's folder, whose modules may be named like packages
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints, prints there
    bin_folder = os.path.dirname(sys.executable)
    os.environ["PATH"] = f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"  # for `uv`, if it is installed there
    lock = threading.Lock()

    def tell(**answer: Any) -> None:
        with lock:
            answers.write(json.dumps(answer, default=str) + "\n")
            answers.flush()

    try:
        env = _load(json.loads(sys.argv[2]))
    except BaseException as error:
        tell(id="ready", error=f"{type(error).__name__}: {error}")
        if isinstance(error, ImportError):  # it says itself what is missing
            raise SystemExit(1) from None
        raise
    tell(id="ready")
    asyncio.run(_serve(env, tell))


def _load(config: dict[str, Any]) -> Any:
    """The environment that the config describes."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    plain = resolve_env_config(config)
    for role in agent_config_fields(plain):
        agent = config.setdefault(role, {})
        agent.setdefault("runtime", LOCAL)
    return load_environment(resolve_env_config(config))


async def _serve(env: Any, tell: Any) -> None:
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(requests.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    tasks: dict[int, Any] = {}
    running: dict[str, asyncio.Task[None]] = {}
    async with env.serving():
        while (request := await requests.get()) is not None:
            if request["do"] == "cancel":
                if (task := running.pop(request["of"], None)) is not None:
                    task.cancel()
                continue
            work = _tasks(env, tasks, request) if request["do"] == "tasks" else _play(env, tasks, request)
            running[request["id"]] = asyncio.create_task(_answer(work, request["id"], running, tell))
        for task in running.values():
            task.cancel()


async def _answer(work: Any, number: str, running: dict[str, Any], tell: Any) -> None:
    try:
        tell(id=number, value=await work)
    except Exception as error:  # noqa: BLE001 - code of the environment: it ends only its episode
        tell(id=number, error=f"{type(error).__name__}: {error}")
    finally:
        running.pop(number, None)


async def _tasks(env: Any, known: dict[int, Any], request: dict[str, Any]) -> list[dict[str, Any]]:
    """The first tasks of the environment."""
    found = []
    for index, task in enumerate(itertools.islice(iter(env.taskset), request["limit"])):
        known[index] = task
        data = task.data.model_dump(mode="json")
        prompt = data.get("prompt")
        if isinstance(prompt, list):
            prompt = next((part.get("content") for part in reversed(prompt) if isinstance(part, dict)), "")
        found.append({"index": index, "query": str(prompt or data.get("name") or f"task {index}")})
    return found


async def _play(env: Any, known: dict[int, Any], request: dict[str, Any]) -> dict[str, Any]:
    """One episode: its reward and metrics, or why it has none."""
    import verifiers.v1 as vf

    index = request["index"]
    if index not in known:
        await _tasks(env, known, {"limit": index + 1})
    variable = f"AJET_KEY_{request['id']}"
    os.environ[variable] = request["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        context = vf.ModelContext(model=request["model"], client=client)
        episode = await env.run_episode(known[index], context)
    finally:
        os.environ.pop(variable, None)
    errors = [str(error) for error in episode.errors]
    errors += [str(error) for trace in episode.traces for error in trace.errors]
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    errors += [f"it ended by {trace.stop_condition}" for trace in trained if trace.is_timeout]
    metrics: dict[str, float] = {}
    for trace in trained:
        for name, value in trace.metrics.items():
            if value is not None:
                metrics[str(name)] = float(value)
    return {
        # verifiers scores an agent, too, whose setup took too long
        "began": bool(trained) and all(trace.timing.agent.start for trace in trained),
        "acted": all(trace.ok or trace.timing.finalize.start for trace in trained),
        "errors": errors,
        "rewards": [_reward(trace) for trace in trained] if episode.ok else [],
        "metrics": metrics,
    }


def _reward(trace: Any) -> float | None:
    """None if a part of it is missing: verifiers takes that for 0."""
    return float(trace.reward) if trace.rewards and None not in trace.rewards.values() else None


if __name__ == "__main__":
    main()
