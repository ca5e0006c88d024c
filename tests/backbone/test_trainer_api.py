"""`Trainer`: runs from Python programs and notebooks, with the same configuration and errors as the YAML."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet import Task, Trainer, rollout
from ajet.backbone.trainer_api import FinishedRun, RunFailedError, _rows
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.resources import read_prompts
from ajet.schema.user_code import load_symbol

SMALL = {
    "data": {"max_prompt_length": 128, "max_response_length": 64},
    "rollout": {"max_model_len": 256, "max_response_length_in_one_turn": 8, "compute_madness_checklist": []},
    "trainer_common": {"save_freq": 0, "logger": ["file"]},
}
TASKS = [{"question": f"What is {number}+{number}?", "answer": 2 * number} for number in range(4)]
PROGRAM = """
import json, sys
from openai import AsyncOpenAI
from ajet import Trainer, rollout

@rollout
async def solver(task, llm):
    async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key) as client:
        asked = [{{"role": "user", "content": task["question"]}}]
        reply = await client.chat.completions.create(model=llm.model, messages=asked)
    assert set(task) == {{"question", "answer"}}, task
    {body}
    return float(len(reply.choices[0].message.content or "") % 2)

tasks = {tasks}
trainer = Trainer({small}, model="tiny:qwen2", steps={steps}, batch_size=2, num_repeat=2, n_runners=4, quiet=True)
"""


def program(body: str = "", steps: int = 2) -> str:
    return PROGRAM.format(body=body, tasks=TASKS, small=SMALL, steps=steps)


def run_program(folder: Path, text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text)
    command = [sys.executable, "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, **options)


@pytest.mark.slow
def test_a_program_debugs_trains_resumes_and_evaluates(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        program()
        + textwrap.dedent("""
        shown = trainer.dev(solver, tasks, n_tasks=1)
        run = trainer.fit(solver, tasks, val_dataset=tasks[:1])
        try:
            trainer.fit(solver, tasks, val_dataset=tasks[:1])
        except Exception as error:
            again = str(error)
        metrics = trainer.evaluate(solver, tasks[:2])
        print(json.dumps([str(shown.path), str(run.path), len(run.metrics), again, run.weights.is_dir(),
                          metrics["val/episode/count"], "return/mean" in run._repr_html_()]))
        """),
    )
    assert done.returncode == 0, done.stderr
    shown, path, steps, again, weights, validated, html = json.loads(done.stdout.splitlines()[-1])
    assert shown == f"{path}-debug" and path == str(tmp_path / "saved_experiments" / "solver")
    assert "is complete" in again and "Trainer(fresh=True)" in again, "a finished run isn't run twice by accident"
    assert steps == 2 and weights and validated == 2 and html
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_run_cleanly_and_reaches_the_program(tmp_path: Path) -> None:
    body = 'open("began", "a").close()'
    (tmp_path / "program.py").write_text(
        program(body, steps=10_000)
        + "try:\n    trainer.fit(solver, tasks)\nexcept KeyboardInterrupt:\n    print('interrupted, and goes on')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "interrupted, and goes on" in out
    assert '"status": "interrupted"' in (tmp_path / "saved_experiments/solver/events.jsonl").read_text()


@pytest.mark.slow
def test_a_notebook_shows_html_and_runs_a_cell_again(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [program(steps=1).replace(", quiet=True", ", fresh=True"), "run = trainer.fit(solver, tasks)\nrun"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (*cells, cells[1])])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells[1:]:
        html = "".join(output["data"].get("text/html", "") for output in cell.outputs if "data" in output)
        assert "<progress" in html and "return/mean" in html
        assert not any("Traceback" in output.get("text", "") for output in cell.outputs)


@rollout
def from_this_file(task: Any) -> float:
    return 1.0


def config_of(trainer: Trainer, agent: Any = from_this_file, **given: Any) -> Any:
    return trainer._config(agent, given.get("train", TASKS), given.get("val"))


def test_the_configuration_is_the_yamls(tmp_path: Path) -> None:
    yaml = tmp_path / "base.yaml"
    yaml.write_text("ajet:\n  rollout: {num_repeat: 3}\nmine: {x: 1}\n")
    config = config_of(Trainer(yaml, exp_dir=tmp_path, n_runners=5), val=TASKS[:1])
    assert (config.ajet.rollout.num_repeat, config.ajet.rollout.max_env_worker, config.mine.x) == (3, 5, 1)
    assert config.ajet.experiment_name == "base"
    named = config_of(Trainer({"ajet": {"rollout": {"top_p": 0.9}}, "mine": {"x": 2}}, exp_dir=tmp_path))
    assert (named.ajet.rollout.top_p, named.mine.x, named.ajet.experiment_name) == (0.9, 2, "from_this_file")
    assert named.ajet.rollout.user_workflow == f"{Path(__file__).resolve()}->from_this_file"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: Trainer(n_runner=3), "did you mean n_runners"),
        (lambda path: config_of(Trainer({"rollout.num_repeats": 3}, exp_dir=path)), "did you mean"),
        (lambda path: config_of(Trainer(n_runners="many", exp_dir=path)), "max_env_worker"),
        (lambda path: config_of(Trainer(exp_dir=path), train=[]), "train_dataset is empty"),
        (lambda path: config_of(Trainer(exp_dir=path), train="tasks.jsonl"), "train_dataset should be a list"),
        (lambda path: config_of(Trainer(exp_dir=path), train=iter([])), "empty .a generator gives its items only once"),
        (
            lambda path: config_of(Trainer(exp_dir=path), train={"train": []}),
            r"not dict\n    pass a part of it: .*'train'",
        ),
        (lambda path: config_of(Trainer(exp_dir=path), agent=3), "3 is not an agent"),
        (lambda path: config_of(Trainer(exp_dir=path), agent="nothere.py->x"), "no file 'nothere.py'"),
        (lambda path: config_of(Trainer(exp_dir=path), train=[{"a": [object()]}]), r"train_dataset\[0\]\['a'\]\[0\]"),
        (lambda path: config_of(Trainer(exp_dir=path), train=[{"x": 1}, {"x": math.nan}]), r"\[1\]\['x'\] is nan"),
        (lambda path: config_of(Trainer(exp_dir=path), train=[{"x": np.array([1, math.inf])}]), r"\['x'\]\[1\] is inf"),
        (lambda path: Trainer(exp_dir=path).evaluate(from_this_file, []), "^dataset is empty"),
        (lambda path: Trainer(exp_dir=path, model="tiny:qwen2").evaluate(from_this_file, ["\ud83d"]), "surrogate pair"),
        (lambda path: Trainer([{"rollout.top_p": 0.9}]), "a YAML file or a dict of keys, not of type list"),
        (
            lambda path: config_of(Trainer(exp_dir=path), train=None),
            r"^Trainer: ajet.task_reader.jsonl_dataset_file.training.file_path: (?s:.*), or pass a data set$",
        ),
        (lambda path: config_of(Trainer({"rollout.top_p": object()}, exp_dir=path)), "rollout.top_p is of type object"),
        (
            lambda path: Trainer(prompt_template=5),
            "Trainer: prompt_template is a text or a PromptTemplate, not of type int",
        ),
        (lambda path: Trainer(prompt_template={"solver": "{q"}), "Trainer: solver: prompt template: expected '}'"),
    ],
)
def test_mistakes_are_named(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path)


def test_paths_and_numpys_numbers_are_values(tmp_path: Path) -> None:
    keys = {"experiment_dir": tmp_path / "runs", "rollout": {"num_repeat": np.int64(3)}}
    ajet = config_of(Trainer(keys, lr=np.float32(0.5), exp_dir=tmp_path)).ajet
    assert (ajet.rollout.num_repeat, ajet.trainer_common.optim.lr) == (3, 0.5)
    assert ajet.experiment_dir == str(tmp_path / "runs")


def test_texts_are_what_they_are_in_python(tmp_path: Path) -> None:
    trainer = Trainer({"user.text": "😀\x7f"}, prompt_template="😀 ${question}", exp_dir=tmp_path)
    ajet = config_of(trainer).ajet
    assert ajet.user.text == "😀\x7f"
    assert read_prompts(ajet.prompt_tuning.templates).get().template == "😀 ${question}"


@pytest.mark.parametrize("keys", [{"backbone": "verl"}, {"task_runner.wrapper_type": "multi-processing"}])
def test_what_only_the_program_holds_does_not_run_elsewhere(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"other processes\n    put the agent into a file"):
        config_of(Trainer(keys, exp_dir=tmp_path), agent=lambda task: 1.0)


def test_what_a_program_imported_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a second copy of the module, which would be without what the program, or `%autoreload`, has set there."""
    folder = tmp_path / "its_package"
    folder.mkdir()
    (folder / "other.py").write_text("LEVEL = 0.5\n")
    file = folder / "agent.py"
    file.write_text("from its_package.other import LEVEL\nfrom ajet import rollout\n@rollout\ndef solver(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("its_package.agent")
    trainer = Trainer(exp_dir=tmp_path)
    named = config_of(trainer, module.solver).ajet.rollout.user_workflow
    assert named == f"{file}->solver" and load_symbol(named) is module.solver


def test_each_run_imports_a_file_anew(tmp_path: Path) -> None:
    (file := tmp_path / "agent.py").write_text("LEVEL = 0.5\n")
    named = config_of(Trainer(exp_dir=tmp_path), f"{file}->LEVEL").ajet.rollout.user_workflow
    assert load_symbol(named) == 0.5
    file.write_text("LEVEL = 0.75\n")
    assert load_symbol(config_of(Trainer(exp_dir=tmp_path), named).ajet.rollout.user_workflow) == 0.75


def test_agents_of_one_name_run_in_threads_at_a_time(tmp_path: Path) -> None:
    def agent(number: int) -> tuple[str, Any]:
        @rollout
        def solver() -> int:
            return number

        named = config_of(Trainer(exp_dir=tmp_path), solver).ajet.rollout.user_workflow
        both.wait(timeout=60)
        return named, load_symbol(named)()

    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        named = dict(threads.map(agent, range(2)))
    assert sorted(named.values()) == [0, 1] and "ajet_program->solver" in named


@pytest.mark.slow
def test_a_file_that_trains_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(program() + "trainer.fit(solver, tasks)\n")
    done = run_program(
        tmp_path,
        "from ajet import Trainer\n"
        f"Trainer({SMALL}, model='tiny:qwen2', steps=1).fit('agent.py->solver', [{{'question': 'x', 'answer': 1}}])\n",
    )
    assert done.returncode != 0
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr


def test_an_agent_in_a_zip_is_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("zipped_agent.py", "from ajet import rollout\n@rollout\ndef solver(): pass\n")
    monkeypatch.syspath_prepend(tmp_path / "app.zip")
    module = importlib.import_module("zipped_agent")
    assert config_of(Trainer(exp_dir=tmp_path), module.solver).ajet.rollout.user_workflow == "ajet_program->solver"


def test_data_sets_of_every_kind() -> None:
    @dataclasses.dataclass
    class Point:
        x: int

    class Indexed:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"x": (5,)[index]}

    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    rows = [{"x": 5}]
    given: list[Any] = [rows, iter(rows), pandas.DataFrame(rows), datasets.Dataset.from_list(rows), [Point(5)]]
    given += [[{"x": np.int64(5)}], Indexed()]
    for data in given:
        assert [row["metadata"]["x"] for row in _rows(data, "train_dataset")] == [5]
    assert next(_rows(["text"], "d"))["main_query"] == "text"
    assert next(_rows([{"query": "why?", "id": 3}], "d")) | {"metadata": None} == {
        "main_query": "why?",
        "task_id": "3",
        "metadata": None,
    }
    assert next(_rows([Task(main_query="q", task_id="a")], "d"))["task_id"] == "a"


def test_a_run_without_metrics_has_a_page_too(tmp_path: Path) -> None:
    assert str(tmp_path) in FinishedRun(tmp_path)._repr_html_()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"rollout.num_repat": 3},
            r"Trainer \(rollout.num_repat=3\): ajet.rollout.num_repat: unknown key\n.*num_repeat",
        ),
        ({"rollut": {"num_repeat": 3}}, r"Trainer: rollut.num_repeat=3: unknown key"),
        ({"rollout.num_repeat": "x"}, r"Trainer \(rollout.num_repeat=x\): .*'x' is not allowed"),
    ],
)
def test_a_wrong_key_was_given_to_the_trainer(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(keys, exp_dir=tmp_path).fit("agent.py->solver", [{"question": 1}])


@pytest.mark.slow
def test_a_run_that_fails_carries_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    @rollout
    async def broken(task: dict[str, Any]) -> float:
        return float(task["no such field"])

    settings = SMALL | {"trainer_common": SMALL["trainer_common"] | {"total_training_steps": 1}}
    with pytest.raises(RunFailedError) as raised:
        Trainer(settings, quiet=True).fit(broken, TASKS)
    assert raised.value.reason.startswith("nothing was trained")
    assert "KeyError: 'no such field'" in raised.value.reason and "test_trainer_api.py" in raised.value.reason
    assert raised.value.folder.is_dir()
    assert str(copy.copy(raised.value)) == str(raised.value)
    assert not any("ajet" in type(one).__module__ for one in logging.getLogger().handlers), "for its own basicConfig"
    assert "val/return/mean" not in Trainer(settings).evaluate(broken, TASKS[:2])
    assert "2 of 2 episodes failed: " in caplog.text and "KeyError: 'no such field'" in caplog.text
