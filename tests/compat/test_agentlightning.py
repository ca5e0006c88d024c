"""Agent-lightning's names, used as its guide and examples use them."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import threading
import time
from functools import wraps
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from openai import AsyncOpenAI

import ajet.compat.agentlightning as agl
from ajet.backbone.trainer_api import Trainer as OurTrainer
from ajet.compat.agentlightning.runner import workflow_of
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.resources import PromptSet
from ajet.schema.task import Task, WorkflowTask
from ajet.store.requests import StoreUnavailableError, UnknownIdError
from ajet.task_runner.tuner import AjetTuner
from ajet.workflow import Workflow
from support.runner_fakes import runner_of

pytestmark = pytest.mark.anyio

MY_FIRST_AGENT = """
from typing import TypedDict
import ajet.compat.agentlightning as agl
from ajet.compat.agentlightning import PromptTemplate, rollout

class SimpleTask(TypedDict):
    question: str
    expected_answer: str

@rollout
def my_agent(task: SimpleTask, prompt_template: PromptTemplate) -> float:
    prompt = prompt_template.format(question=task["question"])
    print(f"处理问题: {prompt}")
    return 1.0 if "hello" in task["question"].lower() else 0.5

if __name__ == "__main__":
    dataset = [SimpleTask(question="Hello, how are you?", expected_answer="I'm fine"),
               SimpleTask(question="What is 2+2?", expected_answer="4")]
    trainer = agl.Trainer()
    trainer.fit(agent=my_agent, train_dataset=dataset)
"""


def test_the_guides_first_agent_runs(tmp_path: Path) -> None:
    (tmp_path / "my_first_agent.py").write_text(MY_FIRST_AGENT)
    done = subprocess.run(
        [sys.executable, "my_first_agent.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "处理问题: Hello, how are you?\n处理问题: What is 2+2?\n"


def test_each_task_once_with_its_reward() -> None:
    store = agl.InMemoryLightningStore()

    @agl.rollout
    async def solver(task: dict[str, Any], prompt_template: agl.PromptTemplate, rollout: agl.AttemptedRollout) -> None:
        assert rollout.input == task
        agl.emit_message(prompt_template.format(q=task["q"]))
        agl.emit_reward(task["q"] / 2)

    template = {"main": agl.PromptTemplate("Say {q}")}
    seen = Seen()
    trainer = agl.Trainer(n_runners=2, store=store, initial_resources=template, hooks=seen)
    ended = trainer.fit(solver, [{"q": 1}, {"q": 2}], val_dataset=[{"q": 3}])
    assert [one.mode for one in ended] == ["train", "train", "val"] and seen.names.count("start") == 3

    async def rewards() -> list[float | None]:
        spans = [await store.query_spans(one.rollout_id) for one in ended]
        assert [(one.name, one.value) for one in agl.get_rewards_from_span(spans[0][-1])] == [("primary", 0.5)]
        return [agl.find_final_reward(one) for one in spans]

    assert asyncio.run(rewards()) == [0.5, 1.0, 1.5]


class Halves(agl.LitAgent[float]):
    def training_rollout(self, task: float, resources: Any, rollout: Any) -> float:
        with agl.operation(name="halve") as operation:
            operation.set_output(task / 2)
        return task / 2

    async def validation_rollout_async(self, task: float, resources: Any, rollout: Any) -> float:
        return -1.0


class Seen(agl.Hook):
    def __init__(self) -> None:
        self.names: list[str] = []

    async def on_rollout_start(self, **given: Any) -> None:
        self.names.append("start")
        raise RuntimeError("a hook's error is logged")

    async def on_rollout_end(self, *, spans: Any, **given: Any) -> None:
        self.names += [span.name.removeprefix("agentlightning.") for span in spans]


async def test_a_runner_steps_with_hooks_and_raises_what_the_agent_raises() -> None:
    class Training(agl.LitAgent[float]):
        training_rollout = Halves.training_rollout

    store, seen = agl.InMemoryLightningStore(), Seen()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    with runner.run_context(agent=Training(), store=store, hooks=[seen], worker_id=3):
        done = await runner.step(1.0, mode="train")
        assert (done.status, done.attempt and done.attempt.worker_id) == ("succeeded", "Worker-3")
        assert seen.names == ["start", "operation", "annotation"]
        with pytest.raises(TypeError):
            await runner.step("text", mode="train")
    failed = (await store.query_rollouts(status_in=["failed"]))[0]
    assert [span.name for span in await store.query_spans(failed.rollout_id)][-1] == "agentlightning.exception"
    with runner.run_context(agent=Halves(), store=store):
        spans = await store.query_spans((await runner.step(1.0)).rollout_id)
        assert agl.find_final_reward(spans) == -1.0, "any coroutine that is overridden makes all modes use them"
    with pytest.raises(RuntimeError, match="run_context"):
        await runner.step(1.0)


def test_sys_exit_is_a_failure_and_runners_go_on() -> None:
    @agl.rollout
    def leaves(task: int) -> float:
        if task == 1:
            sys.exit(0)
        return float(task)

    ended = agl.Trainer(n_runners=1).fit(leaves, [1, 2])
    assert [one.status for one in ended] == ["failed", "succeeded"]


def in_a_loop_of_its_own(function: Any) -> Any:
    @wraps(function)
    def called(**given: Any) -> Any:
        return asyncio.run(function(**given))

    return called


async def test_a_decorator_may_run_an_agents_coroutine_itself() -> None:
    @agl.rollout
    @in_a_loop_of_its_own
    async def halves(task: float) -> float:
        return task / 2

    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    with runner.run_context(agent=halves, store=store):
        spans = await store.query_spans((await runner.step(1.0)).rollout_id)
    assert agl.find_final_reward(spans) == 0.5


@agl.rollout
async def odd(task: str) -> Any:
    match task:
        case "true":
            return True
        case "cancelled":
            raise asyncio.CancelledError
        case "text":
            agl.emit_annotation({"reward": "well done"})
        case "endless":
            await asyncio.sleep(3600)
        case "not finite":
            return [agl.Span(rollout_id="?", attempt_id="?", span_id="x", name="n", attributes={"x": float("nan")})]
    return 0.5


async def test_what_an_agent_returns_or_raises_costs_its_own_attempt_only() -> None:
    store = agl.InMemoryLightningStore()
    queued = [(await store.enqueue_rollout(task)).rollout_id for task in ("cancelled", "not finite", "text", "true")]
    runner = agl.LitAgentRunner(max_rollouts=4)
    with runner.run_context(agent=odd, store=store):
        await runner.iter()
    ended = [await store.get_rollout_by_id(one) for one in queued]
    assert [one and one.attempt and (str(one.status), one.attempt.result) for one in ended] == [
        ("failed", {"error": "UserError: the agent raised asyncio.CancelledError"}),
        ("succeeded", {"reward": None}),
        ("succeeded", {"reward": 0.5}),
        ("succeeded", {"reward": 1.0}),
    ]


def test_a_store_goes_on_under_another_event_loop() -> None:
    store = agl.InMemoryLightningStore()

    async def overdue() -> str:
        rollout = await store.enqueue_rollout(1, config=agl.RolloutConfig(timeout_seconds=0.1))
        assert await store.dequeue_rollout() is not None
        (ended,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=20)
        return str(ended.attempt and ended.attempt.status)

    assert [asyncio.run(overdue()) for _ in range(2)] == ["timeout", "timeout"]
    asyncio.run(store.close())


@pytest.mark.parametrize("ended_by", ["timeout", "cancelled"])
async def test_an_attempt_that_is_over_stops_its_agent(ended_by: str) -> None:
    store = agl.InMemoryLightningStore()
    config = agl.RolloutConfig(timeout_seconds=0.3 if ended_by == "timeout" else None)
    rollout = await store.enqueue_rollout("endless", config=config)
    runner = agl.LitAgentRunner(max_rollouts=1, heartbeat_interval=0.1)
    with runner.run_context(agent=odd, store=store):
        running = asyncio.create_task(runner.iter())
        if ended_by == "cancelled":
            await asyncio.sleep(0.2)
            await store.update_rollout(rollout.rollout_id, status="cancelled")
        await asyncio.wait_for(running, 60)
    (attempt,) = await store.query_attempts(rollout.rollout_id)
    assert (str(attempt.status), attempt.end_time is not None) == (ended_by, True)


async def test_a_plain_function_that_spins_is_interrupted_when_its_attempt_is_over() -> None:
    left = threading.Event()

    @agl.rollout
    def spins(task: int) -> float:
        if task == 1:
            try:
                while True:
                    time.sleep(0.01)
            finally:
                left.set()
        return asyncio.run(asyncio.sleep(0, 1.0))  # a program of its own, with its own loop

    store = agl.InMemoryLightningStore()
    short = agl.RolloutConfig(timeout_seconds=0.2)
    queued = [await store.enqueue_rollout(1, config=short), await store.enqueue_rollout(2)]
    with agl.LitAgentRunner(max_rollouts=2, heartbeat_interval=0.1).run_context(agent=spins, store=store) as runner:
        await asyncio.wait_for(runner.iter(), 60)
    assert left.is_set(), "a runner that has ended leaves no agent behind"
    attempts = [await store.get_latest_attempt(one.rollout_id) for one in queued]
    assert [one and str(one.status) for one in attempts] == ["timeout", "succeeded"]


async def test_spans_arrive_while_the_agent_works_and_heartbeats_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    store = agl.InMemoryLightningStore()

    async def fails(*_: Any, **__: Any) -> None:
        raise StoreUnavailableError("away for a moment")

    @agl.rollout
    async def slow(task: int, rollout: agl.AttemptedRollout) -> float:
        agl.emit_message("begun")
        while not await store.query_spans(rollout.rollout_id):
            await asyncio.sleep(0.02)
        return 1.0

    monkeypatch.setattr(store.ours, "heartbeat", fails)
    with agl.LitAgentRunner[int](heartbeat_interval=0.05).run_context(agent=slow, store=store) as runner:
        done = await asyncio.wait_for(runner.step(1), 60)
    spans = await store.query_spans(done.rollout_id)
    assert [span.name for span in spans] == ["agentlightning.message", "agentlightning.annotation"]


async def test_a_store_is_served_and_used() -> None:
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", 0)
    await server.start()
    client = agl.LightningStoreClient(server.endpoint, server.key)
    sampling = MappingProxyType({"temperature": 0.5})
    resources = {
        "main_llm": agl.LLM("http://x/v1", "m", sampling_parameters=sampling),
        "main": agl.PromptTemplate("{q}"),
    }
    update = await client.add_resources(resources)
    assert (await client.get_latest_resources()) == update
    assert update.resources == resources
    queued = await client.enqueue_rollout({"q": 1}, config=agl.RolloutConfig(max_attempts=2))
    assert queued.resources_id == update.resources_id
    claimed = await client.dequeue_rollout("w")
    assert claimed is not None and claimed.attempt is not None
    assert await client.dequeue_rollout("w") is None
    ids = (claimed.rollout_id, claimed.attempt.attempt_id)
    span = agl.Span(rollout_id=ids[0], attempt_id=ids[1], span_id="1", name="x")
    assert await client.add_span(span) is span and await client.add_span(span) is None
    assert await client.get_next_span_sequence_id(*ids) > 1
    assert (await client.update_attempt(ids[0], "latest", status="succeeded")).status == "succeeded"
    (ended,) = await client.wait_for_rollouts(rollout_ids=[ids[0]], timeout=10)
    assert ended.status == "succeeded"
    assert (await client.update_rollout(ids[0], status="cancelled")).status == "succeeded"
    assert await client.get_rollout_by_id("ro-none") is None
    assert (await client.get_latest_attempt(ids[0])) == ended.attempt
    assert [worker.worker_id for worker in await client.query_workers()] == ["w"]
    await client.close()
    await server.stop()


async def test_many_at_once_and_what_is_missing() -> None:
    async with agl.InMemoryLightningStore() as store:
        await store.add_resources({"main": agl.PromptTemplate("{q}")})
        both = await store.enqueue_many_rollouts([{"input": 1, "mode": "train"}, {"input": 2, "metadata": None}])
        assert [(one.input, one.mode, one.resources_id is not None) for one in both] == [
            (1, "train", True),
            (2, None, True),
        ]
        with pytest.raises(UnknownIdError, match="has no attempt yet"):
            await store.update_attempt(both[0].rollout_id, "latest", status="failed")
        claimed = await store.dequeue_many_rollouts(limit=2, worker_id="w-1")
        references = [(one.rollout_id, one.attempt.attempt_id) for one in claimed if one.attempt]
        assert await store.get_many_span_sequence_ids([*references, references[0]]) == [1, 1, 2]
        assert [one.version for one in await store.query_resources()] == [1]
        assert [one.worker_id for one in await store.query_workers(status_in=["busy"])] == ["w-1"]
        assert await store.query_workers(worker_id_contains="x") == []
        server = agl.LightningStoreServer(store, "127.0.0.1", 0)
        for _ in range(2):  # it may be started again
            await server.start()
            try:
                client = agl.LightningStoreClient(server.endpoint, server.key)
                assert len(await client.query_rollouts()) == 2, "the same store, still open"
                await client.close()
            finally:
                await server.stop()
    with pytest.raises(AttributeError, match="LLMProxy is not here: the gateway"):
        _ = agl.LLMProxy


def test_spans_become_triplets_and_conversations() -> None:
    """A LangGraph-like trace: the node that is trained is the agent around the model call."""

    def span(number: str, parent: str | None, at: float, **attributes: Any) -> agl.Span:
        ids = {"rollout_id": "r", "attempt_id": "a", "span_id": number, "parent_id": parent}
        return agl.Span(**ids, name=number, attributes=attributes, start_time=at, end_time=at + 1)

    def asked(what: str) -> dict[str, str]:
        return {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": what,
                "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": what.upper()}  # fmt: skip

    spans = [
        span("write", "graph", 1, **{"openinference.span.kind": "AGENT"}),
        span("1", "write", 1, **asked("draft")),
        span("check", "graph", 3, **{"traceloop.span.kind": "agent", "traceloop.entity.name": "check_query"}),
        span("2", "check", 3, **asked("verdict")),
        span("reward", None, 6, **{"agentlightning.reward.0.value": 0.5}),
    ]
    triplets = agl.TracerTraceToTriplet()(spans)
    assert [(one.metadata["agent_name"], one.reward) for one in triplets] == [("write", None), ("check_query", 0.5)]
    (written,) = agl.TracerTraceToTriplet(agent_match="^write$").adapt(spans)
    assert written.response["raw_content"] == {"role": "assistant", "content": "DRAFT"}
    assert len(agl.LlmProxyTraceToTriplet().adapt(spans)) == 2
    assert [one["messages"][-1]["content"] for one in agl.TraceToMessages()(spans)] == ["DRAFT", "VERDICT"]
    with pytest.raises(UserError, match="matched by 'first_occurrence' alone"):
        agl.TracerTraceToTriplet(reward_match="first_sibling")
    with pytest.raises(UserError, match="does not override `adapt`"):
        agl.TraceAdapter[int]()(spans)


def test_verls_configuration_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "algorithm": {"adv_estimator": "gae"},
        "data": {"train_batch_size": 32, "truncation": "error", "shuffle": False},
        "actor_rollout_ref": {
            "model": {"path": "tiny:qwen2"},
            "rollout": {"n": 4, "name": "vllm", "gpu_memory_utilization": 0.6},
            "actor": {"ppo_mini_batch_size": 8, "optim": {"lr": 1e-6}, "fsdp_config": {"param_offload": True}},
        },
        "agentlightning": {"port": 9999},
    }
    algorithm = agl.VERL(config, backbone="verl")
    assert "leaves out algorithm.adv_estimator, data.truncation, " in caplog.text
    assert "actor_rollout_ref" not in caplog.text and "agentlightning" in caplog.text
    assert algorithm.keys == {
        "data.train_batch_size": 32,
        "task_reader.shuffle": False,
        "model.path": "tiny:qwen2",
        "rollout.num_repeat": 4,
        "rollout.temperature": 1.0,
        "trainer_common.use_kl_loss": False,
        "+verl.actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "trainer_common.mini_batch_num": 4,
        "trainer_common.optim.lr": 1e-6,
        "trainer_common.fsdp_config.param_offload": True,
    }
    agl.VERL(config, backbone="local")
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" in caplog.text, "nothing reads it there"
    with pytest.raises(ConfigError, match=r"set actor_rollout_ref\.model\.path"):
        agl.VERL({})


def test_apos_arguments_are_ours(tmp_path: Path) -> None:
    client = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="k")
    algorithm = agl.APO(client, val_batch_size=10, gradient_batch_size=4, beam_width=2, branch_factor=2, beam_rounds=2)
    keys = {**algorithm.keys, "model.path": "tiny:qwen2"}
    trainer = OurTrainer(keys, backbone="prompt", prompt_template="Say {q}", exp_dir=tmp_path)
    (tmp_path / "agent.py").write_text("from ajet import rollout\n\n@rollout\ndef solver(task): ...\n")
    tuning = trainer._config(f"{tmp_path}/agent.py->solver", [{"q": 1}], [{"q": 2}]).ajet.prompt_tuning
    assert (tuning.algorithm, tuning.rounds, tuning.apo.beam_width, tuning.apo.score_batch) == ("apo", 2, 2, 10)
    with pytest.raises(ConfigError, match="leave apply_edit_model out"):
        agl.APO(client, gradient_model="a", apply_edit_model="b")


def _verl_trainer(**given: Any) -> agl.Trainer:
    algorithm = agl.VERL({"actor_rollout_ref": {"model": {"path": "tiny:qwen2"}}}, backbone="local")
    return agl.Trainer(algorithm=algorithm, **given)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: agl.Trainer(algoritm=None), "Trainer takes no algoritm"),
        (lambda: agl.Trainer(algorithm=cast(Any, agl.Baseline)), "Baseline'>: pass an object, not a class"),
        (lambda: agl.Trainer(tracer=cast(Any, "OtelTracer")), "'OtelTracer': pass an object"),
        (lambda: agl.Trainer(n_runners=-1), "n_runners=-1: at least one"),
        (lambda: agl.Trainer(max_rollouts=0).fit(odd, ["a"]), r"no tasks: pass train_dataset"),
        (lambda: agl.Trainer().fit(3, [1]), "3 is not an agent"),
        (lambda: agl.Trainer().fit(agl.rollout(lambda task: 1.0)), r"no tasks: pass train_dataset"),
        (lambda: agl.Trainer().fit(agl.rollout(lambda task, prompt_template: 1.0), [{"n": 1}]), "initial_resources="),
        (lambda: agl.llm_rollout(lambda task: 1.0), "has no parameter 'llm'"),
        (lambda: _verl_trainer(hooks=[agl.Hook()]).fit(odd, ["a"]), "hooks would do nothing with VERL"),
        (lambda: _verl_trainer(adapter={"agent_match": "write"}).fit(odd, ["a"]), "adapter.agent_match would do"),
        (lambda: _verl_trainer(max_rollouts=3).fit(odd, ["a"]), "max_rollouts: an algorithm says itself"),
        (lambda: agl.LightningStoreClient("http://127.0.0.1:1"), "no key for"),
    ],
)
def test_what_is_missing_is_said(make: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AJET_STORE_KEY", raising=False)
    with pytest.raises(UserError, match=says):
        make()


def test_an_agent_without_its_resource_fails_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ended = agl.Trainer().fit(agl.rollout(lambda task, llm: 1.0), ["a"])
    assert [one.status for one in ended] == ["failed"]
    assert "there is no LLM among the resources" in caplog.text
    assert "no running event loop" not in caplog.text, "of our own, not of the agent's"


async def test_in_training_a_plain_agent_may_start_a_loop_and_return_what_a_function_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = SimpleNamespace(base_url="http://127.0.0.1/v1", model="m", api_key="k")
    monkeypatch.setattr(AjetTuner, "as_oai_baseurl_apikey", lambda tuner: endpoint)

    class Checks(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            assert (rollout.rollout_id, rollout.attempt.attempt_id, rollout.mode) == ("e", "e", "train")
            assert rollout.input == task and sorted(resources) == ["main_llm", "prompt"]
            return asyncio.run(asyncio.sleep(0, resources["prompt"].format(q=task["main_query"]) == "say hi"))

    prompts = PromptSet({"prompt": agl.PromptTemplate("say {q}")})
    task = WorkflowTask(task=Task(task_id="t", main_query="hi"), task_id="t", episode_uuid="e", prompts=prompts)
    episode = await runner_of(cast(type[Workflow], workflow_of(Checks()))).run(task)
    assert (episode.reward, episode.is_success) == (1.0, True), episode.failure


@pytest.mark.slow
def test_verl_trains_here_where_verl_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import ajet.compat.agentlightning as agl\n"
        "from openai import OpenAI\n\n"
        "class Vowels(agl.LitAgent):\n"
        "    def rollout(self, task, resources, rollout):\n"
        "        llm = resources['main_llm']\n"
        "        with OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key) as client:\n"
        "            messages = [{'role': 'user', 'content': task['question']}]\n"
        "            reply = client.chat.completions.create(model=llm.model, messages=messages)\n"
        "        text = reply.choices[0].message.content or ''\n"
        "        return sum(letter in 'aeiou' for letter in text) / max(1, len(text))\n\n"
        "if __name__ == '__main__':\n"
        "    config = {'data': {'train_batch_size': 2}, 'trainer': {'total_training_steps': 2},\n"
        "              'actor_rollout_ref': {'model': {'path': 'tiny:qwen2'}, 'rollout': {'n': 2}}}\n"
        "    short = {'rollout.max_response_length_in_one_turn': 8, 'rollout.compute_madness_checklist': []}\n"
        "    trainer = agl.Trainer(algorithm=agl.VERL(config, backbone='local'), n_runners=2, config=short)\n"
        "    run = trainer.fit(Vowels(), [{'question': f'Say {n}'} for n in range(4)])\n"
        "    print('steps', len(run.metrics))\n"
    )
    done = subprocess.run(
        [sys.executable, "agent.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "steps 2" in done.stdout


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("adapter", "TraceAdapter TraceToMessages TracerTraceToTriplet LlmProxyTraceToTriplet"),
        ("algorithm", "APO VERL Baseline"),
        ("emitter", "emit_reward emit_message emit_object emit_exception operation find_final_reward"),
        ("litagent", "LitAgent rollout llm_rollout prompt_rollout"),
        ("runner", "LitAgentRunner"),
        ("store", "LightningStore InMemoryLightningStore LightningStoreServer LightningStoreClient"),
        ("tracer", "Tracer AgentOpsTracer OtelTracer"),
        ("trainer", "Trainer"),
        ("types", "Dataset Hook LLM NamedResources PromptTemplate ProxyLLM Rollout RolloutMode Span TaskInput Triplet"),
    ],
)
def test_the_librarys_modules_are_here(module: str, names: str) -> None:
    found = importlib.import_module(f"ajet.compat.agentlightning.{module}")
    for name in names.split():
        assert getattr(found, name) is getattr(agl, name, getattr(found, name))


def test_generic_classes_take_the_type_of_their_tasks() -> None:
    assert agl.LitAgentRunner[str](agl.OtelTracer()).tracer is not None
    assert agl.APO[dict[str, str]] is not None


async def test_what_the_library_refuses_with_a_value_error_is_one_here() -> None:
    def plain(task: int) -> float:
        return 0.0

    for decorate in (agl.llm_rollout, agl.prompt_rollout):
        with pytest.raises(ValueError, match="plain has no parameter"):
            decorate(plain)

    @agl.prompt_rollout
    def prompted(task: int, prompt_template: agl.PromptTemplate) -> float:
        return 0.0

    runs = agl.LitAgentRunner[int]().run_context(agent=prompted, store=agl.InMemoryLightningStore())
    with runs as runner, pytest.raises(ValueError, match="no PromptTemplate among the resources"):
        await runner.step(1)


def test_an_algorithm_of_ones_own_runs_beside_the_runners() -> None:
    @agl.rollout
    async def length(task: str, prompt_template: agl.PromptTemplate) -> float:
        return float(len(prompt_template.format(task=task)))

    @agl.algo
    async def best(*, store: agl.LightningStore) -> str:
        rewards = {}
        for text in ("{task}", "{task}, please"):
            await store.add_resources({"main": agl.PromptTemplate(text)})
            queued = await store.enqueue_rollout("hello", mode="train")
            while not await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=0.01):
                pass
            rewards[text] = agl.find_final_reward(await store.query_spans(queued.rollout_id)) or 0.0
        return max(rewards, key=rewards.__getitem__)

    assert agl.Trainer(n_workers=2, algorithm=best).fit(length) == "{task}, please"
    with pytest.raises(TypeError, match="best doesn't take it"):
        agl.Trainer(algorithm=best).fit(length, ["hello"])
    with pytest.raises(ValueError, match="takes 'llm_proxy'; an algorithm may take store"):

        @agl.algo
        async def other(llm_proxy: Any) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda: agl.OtelTracer(instrument_managed=True),
        lambda: agl.LitAgentRunner(heartbeat_launch_mode="thread"),
        lambda: agl.InMemoryLightningStore(thread_safe=True),
        lambda: agl.LightningStoreClient("http://127.0.0.1:1", "k", retry_delays=(1, 2)),
        lambda: agl.TracerTraceToTriplet(repair_hierarchy=False),
        lambda: agl.Trainer(strategy="shm"),
        lambda: agl.Trainer(llm_proxy=object()),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_by_name(make: Any) -> None:
    with pytest.raises(
        (TypeError, UserError),
        match=r"instrument_managed|heartbeat_launch_mode|thread_safe|retry_delays|repair_hierarchy|strategy|llm_proxy",
    ):
        make()
