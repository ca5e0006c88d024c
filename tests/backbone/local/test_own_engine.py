"""The local backbone with engines that have weights of their own: real processes, real models, real sockets.

In vLLM's place stands `torch_vllm_server.py`, a server with vLLM's protocol over the embedded engine;
`test_vllm_real.py` has a short run with the real one.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ajet.backbone import LaunchOptions
from ajet.backbone.local import run
from ajet.backbone.local.weights import LOCK, PREFIX, WeightFolder
from ajet.cli.main import main
from ajet.config.loader import load_config
from ajet.engine.model_source import ModelSource
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.metrics import read_metrics
from ajet.schema.episode import Episode
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import TaskStream
from ajet.trainer.trainer import Updater
from support import SUPPORT
from support.full_disk import files_up_to
from support.torch_vllm_server import told, vllm_python
from support.waiting import wait_until

PYTHON = os.environ.get("AJET_VLLM_PYTHON", "")


def train(folder: Path, workflow: str = "Talker", *dotted: str, engine: str = "vllm") -> tuple[int, Path]:
    """Train the tiny model with the stand-in as vLLM. Returns the exit code and the experiment's folder."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": f"t{i}", "question": f"say {i}"}) + "\n" for i in range(4)))
    yaml = folder / "job.yaml"
    yaml.write_text(f"""
ajet:
  project_name: test
  experiment_name: job
  model: {{path: "tiny:qwen2-0.3m"}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {{training: {{file_path: {tasks}}}, validation: {{file_path: {tasks}}}}}
  data: {{train_batch_size: 2, max_prompt_length: 64, max_response_length: 64}}
  rollout:
    user_workflow: {SUPPORT / "own_engine_workflows.py"}->{workflow}
    engine: {engine}
    num_repeat: 3
    temperature: 1.0
    max_model_len: 128
    max_response_length_in_one_turn: 6
    compute_madness_checklist: []
    vllm: {{python: {vllm_python(folder)}, start_timeout: 1200}}
    weights_folder: {folder / "weights"}
  trainer_common:
    total_training_steps: 3
    save_freq: 1
    test_freq: -1
    keep_checkpoints: 9
    use_kl_loss: false
    optim: {{lr: 1.0e-2}}
""")
    config = load_config(yaml, list(dotted), backbone="local")
    with ExperimentFolder.open(config, exp_dir=folder / "runs", source_yaml=yaml) as experiment:
        code = run(config, experiment, LaunchOptions(quiet=True))
        return code, experiment.path


def episodes_of(experiment: Path) -> list[Episode]:
    return [row.episode for row in EpisodeStore(experiment / "episodes.sqlite").all()]


def logprob_gap(model: Any, episode: Episode, index: int) -> float:
    """The largest difference between what was recorded of a call and a forward pass."""
    tree = episode.tree
    call = tree.calls[index]
    prompt, reply = tree.prompt_ids(index).tolist(), tree.runs[call.run].ids.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1)[range(len(reply)), reply]
    return float((expected - torch.from_numpy(call.logprobs.copy())).abs().max())


def assert_versions_are_exact(experiment: Path, steps: int) -> set[int]:
    """Every completion carries the version of the weights that sampled it. Returns the versions that occurred."""
    source = ModelSource.resolve("tiny:qwen2-0.3m")
    models = [source.model("float32")]
    for step in range(1, steps + 1):
        models.append(ModelSource.resolve(experiment / "checkpoints" / f"step_{step}" / "hf").model("float32"))
    seen = set()
    for episode in episodes_of(experiment):
        for index, call in enumerate(episode.tree.calls):
            ((begin, version),) = call.versions
            seen.add(version)
            gaps = [logprob_gap(model, episode, index) for model in models]
            assert begin == 0 and gaps[version] < 2e-4
            assert all(gap > 2e-3 for other, gap in enumerate(gaps) if other != version), "versions would be alike"
    return seen


def nothing_is_left(folder: Path) -> None:
    for name, body in told(folder):
        if name == "start":
            with pytest.raises(ProcessLookupError):
                os.kill(body["pid"], 0)
    assert not list((folder / "weights").iterdir())


@pytest.mark.slow
def test_it_trains_and_every_version_is_exact(tmp_path: Path) -> None:
    code, experiment = train(tmp_path, "Talker", "trainer_common.total_training_steps=2")
    assert code == 0
    assert assert_versions_are_exact(experiment, 2) == {0, 1}
    for step in read_metrics(experiment / "metrics.jsonl"):
        assert step["train/updates"] == 1 and step["train/staleness/max"] == 0
        assert step["loss/sampler_gap_max"] < 1e-3, "the trainer sees what the engine saw"
        assert step["time/sync"] > 0
    named = [body["kwargs"]["weights_path"] for path, body in told(tmp_path) if path == "/collective_rpc"]
    assert len(set(named)) == 2
    nothing_is_left(tmp_path)
    # resumed: the engine gets the checkpoint's weights before anything is sampled
    code, experiment = train(tmp_path, "Talker")
    assert code == 0
    assert assert_versions_are_exact(experiment, 3) == {0, 1, 2}


@pytest.mark.slow
def test_a_killed_server_comes_back_with_the_newest_weights_and_no_episode_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL between two turns of an episode of step 2, and again during the update of step 2."""
    (tmp_path / "order").write_text(str(tmp_path / "told"))
    monkeypatch.setenv("AJET_TEST_KILL", str(tmp_path / "order"))
    update = Updater.update

    def kill_then_update(self: Updater, *arguments: Any, **named: Any) -> dict[str, float]:
        if self.updates == 1:
            os.kill([body["pid"] for name, body in told(tmp_path) if name == "start"][-1], signal.SIGKILL)
        return update(self, *arguments, **named)

    monkeypatch.setattr(Updater, "update", kill_then_update)
    code, experiment = train(tmp_path, "Killer")
    assert code == 0
    assert [name for name, _ in told(tmp_path)].count("start") == 3
    assert assert_versions_are_exact(experiment, 3) == {0, 1, 2}
    for step in read_metrics(experiment / "metrics.jsonl"):
        assert (step["episode/usable"], step["train/incomplete_groups"]) == (6, 0)
    nothing_is_left(tmp_path)


@pytest.mark.slow
def test_the_order_of_calls_on_one_gpu_and_an_adapter_for_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in records what it is told; on a CPU, its sleep does nothing."""
    pytest.importorskip("peft")
    update = Updater.update

    def noted(self: Updater, *arguments: Any, **named: Any) -> dict[str, float]:
        with (tmp_path / "told").open("a") as stream:
            stream.write(json.dumps(["train", {}]) + "\n")
        return update(self, *arguments, **named)

    monkeypatch.setattr(Updater, "update", noted)
    code, experiment = train(
        tmp_path,
        "Talker",
        "rollout.vllm.sleep=true",
        "model.lora.enabled=true",
        "model.lora.rank=4",
        "trainer_common.optim.lr=0.1",
    )
    assert code == 0
    (_, started), *then = told(tmp_path)
    arguments = started["arguments"]
    assert arguments[arguments.index("--max-lora-rank") + 1] == "8"
    assert "--enable-lora" in arguments and "--enable-sleep-mode" in arguments
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    update_of = ["/sleep?level=1", "train", "/wake_up", load]
    assert [name for name, _ in then] == [*update_of, *update_of, unload, *update_of, unload]
    assert [body["lora_name"] for name, body in then if name == load] == ["ajet-1", "ajet-2", "ajet-3"]
    assert assert_versions_are_exact(experiment, 3) == {0, 1, 2}


@pytest.mark.skipif(not PYTHON, reason="AJET_VLLM_PYTHON names no Python with vLLM")
def test_the_real_vllm_trains_and_every_version_is_exact(tmp_path: Path) -> None:
    """`make test-vllm`. The model's output layer shares the embedding's weight, which vLLM packs separately."""
    options = [f"rollout.vllm.python={PYTHON}", "rollout.vllm.start_timeout=900"]
    code, experiment = train(tmp_path, "Talker", *options)
    assert code == 0
    assert assert_versions_are_exact(experiment, 3) == {0, 1, 2}
    for step in read_metrics(experiment / "metrics.jsonl"):
        assert step["loss/sampler_gap_max"] < 1e-3


# ---------------------------------------------------------------- overlap


@pytest.mark.slow
def test_episodes_of_the_next_step_are_drawn_while_one_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update waits until the next step's episodes are being drawn: without overlap it would wait for ever.

    The run stops early, after step 2, with episodes of step 3 under way; then it goes on.
    """
    update = Updater.update

    def wait_for_the_next(self: Updater, *arguments: Any, **named: Any) -> dict[str, float]:
        if self.updates < 3:
            wait_until(lambda: (tmp_path / f"began_{self.updates + 2}").exists(), seconds=400)
        return update(self, *arguments, **named)

    monkeypatch.setattr(Updater, "update", wait_for_the_next)
    monkeypatch.setenv("AJET_TEST_BEGAN", str(tmp_path))
    ahead = ["rollout.max_staleness=1", "trainer_common.total_training_steps=4", "trainer_common.test_freq=2"]
    code, experiment = train(tmp_path, "Talker", *ahead, "trainer_common.early_stop.target=0")
    assert code == 0
    assert read_metrics(experiment / "metrics.jsonl")[-1]["step"] == 2
    nothing_is_left(tmp_path)
    assert {row.step for row in EpisodeStore(experiment / "episodes.sqlite").all()} == {1, 2}
    code, experiment = train(tmp_path, "Talker", *ahead)
    assert code == 0
    assert assert_versions_are_exact(experiment, 4) >= {0, 2}
    steps = read_metrics(experiment / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["train/staleness/max"] for step in steps] == [0, 1, 0, 1], "a resumed run begins with its own weights"
    for step in (steps[1], steps[3]):
        assert 0 < step["train/staleness"] <= 1
        assert step["loss/sampler_gap_max"] > 1e-3, "tokens of an earlier version carry that version's probabilities"
        assert step["loss/correction"] != 1.0
        assert step["time/rollout_wait"] >= 0
    drawn: dict[int, list[str]] = {}
    for row in EpisodeStore(experiment / "episodes.sqlite").all():
        if not row.validation:
            drawn.setdefault(row.step, []).append(row.episode.task_id)
    stream = TaskStream([Task(task_id=f"t{index}") for index in range(4)], seed=0, batch_size=2)
    expected = {step: sorted(3 * [task.task_id for task in stream.next_batch()]) for step in range(1, 5)}
    assert {step: sorted(tasks) for step, tasks in drawn.items()} == expected
    nothing_is_left(tmp_path)


# ---------------------------------------------------------------- SGLang


class SglangStandIn(BaseHTTPRequestHandler):
    """As much of SGLang's protocol as the engine uses: replies are made up, what it is told is noted."""

    protocol_version = "HTTP/1.1"
    told: list[tuple[str, list[str]]]
    """For each new weights: the version's folder, and the files in it at that moment."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer: dict[str, Any] = {"success": True}
        if self.path == "/update_weights_from_disk":
            folder = Path(body["model_path"])
            self.told.append((folder.name, [path.name for path in folder.iterdir()]))
        else:
            word = sum(body["input_ids"]) + body["sampling_params"].get("sampling_seed", 0)
            rows = [[-6.0, 60 + word % 97, None], [-6.0, 2, None]]
            answer = {"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": rows}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_sglang_gets_every_version_as_a_folder(tmp_path: Path) -> None:
    SglangStandIn.told = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), SglangStandIn)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"rollout.remote.base_url=http://127.0.0.1:{server.server_address[1]}"
    try:
        code, experiment = train(tmp_path, "Talker", address, "trainer_common.total_training_steps=2", engine="sglang")
    finally:
        server.shutdown()
    assert code == 0
    names, files = zip(*SglangStandIn.told, strict=True)
    assert [name.split("-")[1] for name in names] == ["0", "1", "2"], "first those that the run begins with"
    assert all({"config.json", "model.safetensors"} <= set(each) for each in files)
    assert {call.versions[0][1] for episode in episodes_of(experiment) for call in episode.tree.calls} == {0, 1}
    assert not list((tmp_path / "weights").iterdir())


# ---------------------------------------------------------------- folders


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Any]:
    yaml = tmp_path / "job.yaml"
    yaml.write_text("ajet: {project_name: p, model: {path: 'tiny:qwen2-0.3m'}, rollout: {engine: vllm}}")
    yield load_config(yaml, [f"rollout.weights_folder={tmp_path / 'weights'}"], backbone="local", complete=False)


def test_only_the_version_that_is_served_is_kept(tmp_path: Path, settings: Any) -> None:
    sync = WeightFolder(settings, "cpu")
    first = sync.source(sync.model, 1)
    assert load_file(first / "model.safetensors").keys()
    modes = {stat.S_IMODE(file.stat().st_mode) for file in first.iterdir()}
    assert len(modes) == 1, "another user's server reads weights and config alike"
    sync.served()
    second = sync.source(sync.model, 2)
    assert first.is_dir(), "the engine may have to start again before it has the second"
    sync.served()
    assert second.is_dir() and not first.exists()
    sync.close()
    assert not list((tmp_path / "weights").iterdir())


def test_what_a_killed_run_left_behind_is_removed_and_what_another_uses_is_not(tmp_path: Path, settings: Any) -> None:
    other = WeightFolder(settings, "cpu")
    in_use = other.source(other.model, 1)
    left = tmp_path / "weights" / f"{PREFIX}left"
    left.mkdir()
    (left / LOCK).touch()
    sync = WeightFolder(settings, "cpu")
    assert in_use.is_dir() and not left.exists()
    sync.close(), other.close()


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path, settings: Any) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(ConfigError, match=r"rollout\.weights_folder: .*weights can't be written"):
        WeightFolder(settings, "cpu")


def test_a_folder_without_room_is_named(settings: Any) -> None:
    sync = WeightFolder(settings, "cpu")
    message = r"rollout\.weights_folder: the weights of version 1 could not be written"
    with closing(sync), files_up_to(100_000), pytest.raises(ConfigError, match=message):
        sync.source(sync.model, 1)


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["rollout.vllm.python=/no/such/python"], r"/no/such/python does not exist \(rollout\.vllm\.python\)"),
        (["rollout.vllm.python=/usr/bin/python3"], r"vLLM is not installed for this Python"),
        (["rollout.vllm.devices=[97]"], r"rollout\.vllm\.devices names GPU 97, and "),
        (["trainer_common.gpu=97"], r"trainer_common\.gpu names GPU 97, and "),
    ],
)
def test_what_can_not_start_is_said_in_one_line(tmp_path: Path, wrong: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        train(tmp_path, "Talker", *wrong)
    assert "\n" not in str(caught.value)


def test_a_server_that_dies_at_the_start_is_one_line_with_its_reason(tmp_path: Path) -> None:
    dying = tmp_path / "dying_python"
    dying.write_text("#!/bin/sh\necho 'INFO loading'\necho 'ValueError: no room for the cache'\nexit 1\n")
    dying.chmod(0o755)
    with pytest.raises(UserError, match=r"ValueError: no room for the cache.*vllm-0\.log") as caught:
        train(tmp_path, "Talker", f"rollout.vllm.python={dying}")
    assert "\n" not in str(caught.value)


def test_an_engine_that_can_not_sleep_ends_the_command_with_code_2_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in says what vLLM says on a device whose memory it can't release."""
    awake = tmp_path / "awake_python"
    said = "ValueError: Sleep mode is not supported on current platform."
    awake.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\necho '{said}'\nexit 1\n")
    awake.chmod(0o755)
    sleeps = [f"rollout.vllm.python={awake}", "rollout.vllm.sleep=true"]
    with pytest.raises(
        UserError, match=r"^rollout\.vllm\.sleep: vLLM can't release this device's memory: leave the key"
    ):
        train(tmp_path, "Talker", *sleeps)
    command = ["--conf", str(tmp_path / "job.yaml"), "--exp-dir", str(tmp_path / "again"), "--quiet", *sleeps]
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "rollout.vllm.sleep: vLLM can't release" in error
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
