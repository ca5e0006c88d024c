"""`ajet.evaluate`: an agent on tasks with a model, from Python; and what a fingerprint depends on."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ajet
from ajet import Workflow, WorkflowOutput
from ajet.backbone.evaluation import Evaluation, EvaluationCell, fingerprint, model_keys
from ajet.config import make_config
from ajet.engine.remote import RemoteEngine
from ajet.observe.episode_store import EpisodeStore
from ajet.schema.errors import UserError
from ajet.schema.task import Task
from support.http_server import Answer, Server
from support.scripted_helper import reply

SMALL = {
    "data": {"max_prompt_length": 128, "max_response_length": 64},
    "rollout": {"max_model_len": 256, "max_response_length_in_one_turn": 8, "compute_madness_checklist": []},
}
TASKS = [{"id": f"t{n}", "question": str(n), "answer": str(n % 3)} for n in range(6)]


class Asks(Workflow):
    """The answer is the reply."""

    async def execute(self, workflow_task: Any, tuner: Any) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        said = await client.chat.completions.create(model="m", messages=messages)
        return WorkflowOutput(reward=float(said.choices[0].message.content == workflow_task.task.metadata["answer"]))


@pytest.fixture
def hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A model that says back what it is asked: right for the first three tasks."""
    monkeypatch.chdir(tmp_path)

    def handle(_path: str, body: dict[str, Any], _key: str) -> Answer:
        return reply(body["messages"][-1]["content"]) if "messages" in body else (404, {}, {})

    return Server(handle)


def played(server: Server, **more: Any) -> Evaluation:
    return ajet.evaluate(Asks, TASKS, f"echo@{server.url}", config=SMALL, **more)


def test_several_attempts_are_sampled_and_not_added_to_a_greedy_one(tmp_path: Path) -> None:
    def drawn(out: str, repeats: int) -> set[float]:
        model = {"model": "tiny:qwen2-0.3m", "out": tmp_path / out, "config": SMALL}
        folder = ajet.evaluate(Asks, TASKS[:1], repeats=repeats, **model).folder
        assert folder is not None
        recorded = EpisodeStore(folder / "episodes.sqlite").all()
        return {one.episode.tree.calls[0].sampling.temperature for one in recorded}

    assert drawn("several", 2) == {0.9}, "greedy attempts are all alike"
    assert drawn("one", 1) == {0.0}
    with pytest.raises(UserError, match="do_sample: None then, True now"):
        drawn("one", 2)


def test_a_result_is_typed(hosted: Server) -> None:
    found = played(hosted, repeats=2, price=(1.0, 2.0))
    assert found.mean_rewards == {f"t{n}": float(n < 3) for n in range(6)}
    assert found.pass_at[1].value == found.pass_at[2].value == 0.5 and found.pass_at[1].low < 0.5
    assert (found.episodes, found.repeats, found.failures) == (12, 2, {})
    assert (found.prompt_tokens, found.reply_tokens) == (12 * 30, 12 * 10) and found.seconds > 0
    assert found.cost == pytest.approx(12 * (30 + 20) / 1e6) and found.folder is None
    assert found.fingerprint["model"] == f"echo at {hosted.url}" and "code test_evaluation.py" in found.fingerprint
    json.dumps(found.as_json())
    gain = found.gain_over(found)
    assert gain is not None and (gain.value, gain.p) == (0, 1)


def test_the_time_that_a_model_takes_to_load_is_no_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready = RemoteEngine.ready

    async def slow(engine: RemoteEngine) -> None:
        if time.monotonic() < loaded:
            await asyncio.sleep(loaded - time.monotonic())
        await ready(engine)

    monkeypatch.setattr(RemoteEngine, "ready", slow)
    loaded = time.monotonic() + 3.0
    server = Server(lambda _path, body, _key: reply("1") if "messages" in body else (404, {}, {}))
    limited = {**SMALL, "rollout": {**SMALL["rollout"], "episode_timeout": 2.0}}
    found = ajet.evaluate(Asks, TASKS[:2], f"one@{server.url}", config=limited, repeats=1)
    assert found.failures == {}


def test_a_kept_evaluation_is_not_played_again(hosted: Server, tmp_path: Path) -> None:
    first = played(hosted, repeats=1, out=tmp_path / "kept")
    asked = len(hosted.seen)
    again = played(hosted, repeats=1, out=tmp_path / "kept")
    assert len(hosted.seen) == asked and again.rewards == first.rewards and again.folder == first.folder
    assert first.folder is not None and (first.folder / "episodes.sqlite").is_file()
    with pytest.raises(UserError, match=r"rollout\.temperature: 0\.9 then, 0\.2 now"):
        played(hosted, repeats=1, out=tmp_path / "kept", temperature=0.2)


def test_a_folder_whose_disk_had_no_room_for_the_first_episode_is_gone_on_with(hosted: Server, tmp_path: Path) -> None:
    folder = played(hosted, repeats=1, out=tmp_path / "kept").folder
    assert folder is not None
    (folder / "episodes.sqlite").write_bytes(b"")
    assert played(hosted, repeats=1, out=tmp_path / "kept").episodes == len(TASKS)


def test_a_file_of_tasks(hosted: Server, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps({"id": "x", "question": "7", "answer": "7"}) + "\n")
    found = ajet.evaluate(Asks, tmp_path / "mine.jsonl", f"echo@{hosted.url}", config=SMALL, repeats=1)
    assert (found.tasks, found.rewards) == ("mine", {"x": [1.0]})
    with pytest.raises(UserError, match="no such file"):
        ajet.evaluate(Asks, "nowhere.jsonl", "tiny:qwen2")
    with pytest.raises(UserError, match="at least 1"):
        played(hosted, repeats=0)


def test_a_model_that_is_loaded_here_is_not_asked_of_the_server_that_the_config_names(
    hosted: Server, tmp_path: Path
) -> None:
    remote = {"engine": "remote", "remote": {"base_url": hosted.url, "model": "echo"}}
    keys: dict[str, Any] = {**SMALL, "rollout": {**SMALL["rollout"], **remote}}
    file = tmp_path / "remote.yaml"
    file.write_text(json.dumps({"ajet": keys}))
    for config in (keys, file):
        found = ajet.evaluate(Asks, TASKS[:1], "tiny:qwen2-0.3m", config=config, repeats=1)
        assert found.episodes == 1 and found.fingerprint["model"] == "tiny:qwen2-0.3m"
    assert not hosted.seen


def test_a_fingerprint_holds_what_a_result_depends_on() -> None:
    tasks = [Task(main_query="a", task_id="a")]
    plain = fingerprint(make_config({"model.path": "tiny:qwen2"}), tasks)
    for keys in (
        {"rollout.max_env_worker": 3},
        {"rollout.val_kwargs.num_repeat": 9},
        {"trainer_common.total_epochs": 2},
    ):
        assert fingerprint(make_config({"model.path": "tiny:qwen2", **keys}), tasks) == plain
    other = {
        "rollout.top_p": 0.5,
        "rollout.multi_turn.max_steps": 3,
        "task_judge.success_threshold": 0.5,
        "model.path": "tiny:llama",
    }
    for key, value in other.items():
        assert fingerprint(make_config({"model.path": "tiny:qwen2", key: value}), tasks) != plain
    assert fingerprint(make_config({"model.path": "tiny:qwen2"}), [Task(main_query="b", task_id="a")]) != plain


class Picture:
    """Like PIL's: its `repr` has an address."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<Picture {self.name} at {id(self):#x}>"


def test_a_fingerprint_of_tasks_that_json_can_not_hold() -> None:
    config = make_config({"model.path": "tiny:qwen2"})

    def found(**metadata: Any) -> dict[str, str]:
        return fingerprint(config, [Task(main_query="a", task_id="a", metadata=metadata)])

    assert found(image=b"\xff", picture=Picture("cat")) == found(image=b"\xff", picture=Picture("cat"))
    assert found(image=b"\xff") != found(image=b"\xfe")
    assert found(picture=Picture("cat")) != found(picture=Picture("dog"))
    pixels = np.zeros((64, 64))
    before = found(pixels=pixels.copy())
    pixels[32, 32] = 1
    assert found(pixels=pixels) != before, "its repr shows only the edges"
    words = [np.array([word.lower()], dtype=object) for word in ("CAT", "CAT", "DOG")]  # as parquet files are read
    assert found(words=words[0]) == found(words=words[1]) != found(words=words[2])


def test_a_fingerprint_holds_the_modules_of_packages(tmp_path: Path) -> None:
    agent, package = tmp_path / "agent.py", tmp_path / "parts"
    agent.write_text("from parts import search\nimport parts.deep.more\nclass Agent: ...\n")
    (package / "deep").mkdir(parents=True)
    files = [package / name for name in ("search.py", "beside.py", "__init__.py", "deep/__init__.py", "deep/more.py")]
    for file in files:
        file.write_text("from . import beside\n" if file.name == "search.py" else "\n")
    config = make_config({"model.path": "tiny:qwen2", "rollout.user_workflow": f"{agent}->Agent"})
    seen = [fingerprint(config, [])]
    for file in files:
        file.write_text(file.read_text() + "changed = True\n")
        seen.append(fingerprint(config, []))
        assert seen[-1] != seen[-2], file


def test_secrets_are_in_no_fingerprint() -> None:
    keys = {"rollout.remote.api_key": "sk-abcdefghijklmnop", "model.path": "tiny:qwen2"}
    assert "sk-abcdefghijklmnop" not in json.dumps(fingerprint(make_config(keys), []))


def test_models_as_keys() -> None:
    assert model_keys("base", "remote") == {}
    assert model_keys("tiny:llama", "vllm") == {"model.path": "tiny:llama"}
    assert model_keys("some/folder", "remote")["rollout.engine"] == "torch"
    hosted = model_keys("openai/gpt@https://host/v1", "torch")
    assert (hosted["rollout.remote.model"], hosted["rollout.remote.base_url"]) == ("openai/gpt", "https://host/v1")
    for wrong in ("https://host/v1", "gpt@ftp://host", "@https://host/v1"):
        with pytest.raises(UserError, match="NAME@http"):
            model_keys(wrong, "torch")


def test_cells_have_folders_of_their_own(tmp_path: Path) -> None:
    config = make_config({})
    names = [
        EvaluationCell(config, [], 1, model_name=name, out=tmp_path).folder
        for name in ("gpt@https://a/v1", "gpt@https://b/v1", "gpt-https---a-v1", "../../escape", "tiny:qwen2")
    ]
    assert len(set(names)) == 5 and all(name is not None and name.parent == tmp_path for name in names)
